"""The only place where the agent starts tasks: none is lost, and neither is its error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)
_running: set[asyncio.Task[Any]] = set()


def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a coroutine beside the caller; an exception it raises is logged, never swallowed."""
    task = asyncio.get_running_loop().create_task(coroutine)
    # The loop keeps only weak references, so a task nobody holds could vanish half-way.
    _running.add(task)
    task.add_done_callback(_finished)
    return task


def running() -> int:
    """How many tasks are under way."""
    return len(_running)


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task failed", exc_info=error)
