"""The way into a command: its stdin pipe, or the near end of its terminal.

Below ``processes``; ``commands`` writes here. Writes go in whole and in order and wait for a full pipe; how
much may wait is bounded.
"""

from __future__ import annotations

import asyncio
import os

from .errors import AgentError

MAX_PENDING_STDIN = 16 * 1024 * 1024


class StandardInput:
    """The writing end, or None where the command was started without one.

    ``kind`` is the word of the contract for what it takes: ``stdin``, or ``pty`` for a terminal.
    """

    def __init__(self, descriptor: int | None, kind: str = "stdin") -> None:
        self.kind = kind
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._pending = 0
        self._space: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        """Returns when the pipe has taken everything. Raises :class:`AgentError` when it cannot."""
        if self._descriptor is None:
            raise AgentError("internal", "stdin of this process is closed or was not enabled")
        if self._pending + len(data) > MAX_PENDING_STDIN:
            raise AgentError("resource_exhausted", "the process does not read its stdin; too much is waiting")
        self._pending += len(data)
        try:
            async with self._lock:
                view = memoryview(data)
                while view:
                    view = view[await self._write_some(view) :]
        finally:
            self._pending -= len(data)

    async def close(self) -> None:
        """Close after what is being written; closing twice is fine."""
        async with self._lock:
            self.close_now()

    def close_now(self) -> None:
        """Close at once; whoever waits for room is told that the pipe is gone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._loop.remove_writer(descriptor)
            os.close(descriptor)
        self._wake()

    async def _write_some(self, view: memoryview) -> int:
        while self._descriptor is not None:
            try:
                return os.write(self._descriptor, view)
            except BlockingIOError:
                await self._wait_for_space(self._descriptor)
            except OSError:
                self.close_now()  # EPIPE: nobody will ever read it
        raise AgentError("internal", "the process has closed its stdin")

    async def _wait_for_space(self, descriptor: int) -> None:
        self._space = self._loop.create_future()
        self._loop.add_writer(descriptor, self._wake)
        try:
            await self._space
        finally:
            self._space = None
            if self._descriptor == descriptor:
                self._loop.remove_writer(descriptor)

    def _wake(self) -> None:
        if self._space is not None and not self._space.done():
            self._space.set_result(None)
