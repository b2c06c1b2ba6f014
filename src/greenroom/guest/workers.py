"""Threads for what blocks: one small pool for files, another for starting processes.

Two pools, because a file operation stuck on a slow disk must not keep a command from starting. The threads
exist from the start, so that the memory snapshot of a warm guest contains them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

FILE_THREADS = 4
SPAWN_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """The pools, and how to await a job in them."""

    def __init__(self, files: int = FILE_THREADS, spawning: int = SPAWN_THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._files = _started_pool("files", files)
        self._spawning = _started_pool("spawning", spawning)

    async def files(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job that touches the disk."""
        return await self._loop.run_in_executor(self._files, lambda: job(*args, **kwargs))

    async def spawning(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job that starts a process."""
        return await self._loop.run_in_executor(self._spawning, lambda: job(*args, **kwargs))

    def close(self) -> None:
        """Let the threads end; jobs not yet begun are dropped."""
        self._files.shutdown(wait=False, cancel_futures=True)
        self._spawning.shutdown(wait=False, cancel_futures=True)


def _started_pool(name: str, threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    # The executor starts a thread per job while none is idle; jobs that wait for each other start them all.
    barrier = threading.Barrier(threads)
    for job in [pool.submit(barrier.wait, 30) for _ in range(threads)]:
        job.result()
    return pool
