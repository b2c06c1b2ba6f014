"""Keeping a command's output: the log of ``outputs``, and the file it spills into.

Between ``outputs`` (pure) and ``processes``. The file has no name, mode 0600 and belongs to the agent's
user; it vanishes with its last descriptor, whatever happens to the agent. Writing and reading it is done on
the file pool, so that a slow disk makes this command wait and nobody else.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from .outputs import Budget, LostOutputError, OutputLog, Piece, Spill
from .tasks import spawn
from .workers import Workers

BLOCK = 32 * 1024
"""Bytes of one output event at most."""

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Output of one name, and the offset of its first byte."""

    offset: int
    name: str
    data: bytes

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + len(self.data)


class Recorder:
    """One command's output. ``on_room`` is called when :attr:`blocked` may have ended."""

    def __init__(
        self, workers: Workers, budget: Budget, directory: str, on_room: Callable[[], None], *, lossless: bool
    ) -> None:
        self.log = OutputLog(budget, lossless=lossless)
        self._workers = workers
        self._directory = directory
        self._on_room = on_room
        self._descriptor: int | None = None
        self._jobs = 0
        self._writing = False
        self._discarded = False

    @property
    def blocked(self) -> bool:
        """Whether the pipes should not be read for now."""
        return self.log.blocked

    def record(self, name: str, data: bytes) -> None:
        """Keep some output."""
        if not self._discarded:
            self.log.append(name, data)
            self._spill()

    def acknowledge(self, offset: int) -> None:
        """A reader holds everything before this offset."""
        self.log.acknowledge(offset)
        self._spill()
        self._on_room()

    async def read(self, offset: int) -> Chunk | None:
        """The output from an offset on, at most a block; None when there is no more yet.

        Raises :class:`LostOutputError`.
        """
        piece = self.log.locate(offset, BLOCK)
        if piece is None:
            return None
        data = piece.data
        if data is None:
            loaded: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._jobs += 1
            spawn(self._load(piece, loaded))
            try:
                data = await loaded
            except OSError as error:
                _log.error("kept output cannot be read: %s", error.strerror)
                raise LostOutputError(self.log.end) from None
            # Its slot may have been given to newer output meanwhile.
            if offset < self.log.start or len(data) < piece.length:
                raise LostOutputError(self.log.start)
        return Chunk(offset, piece.name, data)

    def discard(self) -> None:
        """Forget all output. Idempotent."""
        if not self._discarded:
            self._discarded = True
            self.log.discard()
            self._jobs += 1
            self._job_done()

    def _spill(self) -> None:
        if not self._writing and (spill := self.log.next_spill()) is not None:
            self._writing = True
            spawn(self._write(spill))

    async def _load(self, piece: Piece, loaded: asyncio.Future[bytes]) -> None:
        # A task of its own: a reader that is cancelled must not have the descriptor closed under the thread.
        try:
            data = await self._workers.files(self._pread, piece.length, piece.position)
        except OSError as error:
            if not loaded.done():
                loaded.set_exception(error)
        else:
            if not loaded.done():
                loaded.set_result(data)
        finally:
            self._job_done()

    async def _write(self, first: Spill) -> None:
        spill: Spill | None = first
        self._jobs += 1
        try:
            while spill is not None:
                try:
                    await self._workers.files(self._pwrite, spill)
                except OSError as error:
                    _log.warning("output cannot be kept on disk: %s", error.strerror)
                    self.log.spilled(False)
                else:
                    self.log.spilled(True)
                spill = None if self._discarded else self.log.next_spill()
        finally:
            self._writing = False
            self._job_done()
        self._on_room()

    def _job_done(self) -> None:
        self._jobs -= 1
        if self._discarded and not self._jobs and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _pwrite(self, spill: Spill) -> None:
        if self._descriptor is None:
            self._descriptor = _open_nameless(self._directory)
        view, position = memoryview(spill.data), spill.position
        while view:
            written = os.pwrite(self._descriptor, view, position)
            view, position = view[written:], position + written

    def _pread(self, length: int, position: int) -> bytes:
        if self._descriptor is None:
            return b""
        return os.pread(self._descriptor, length, position)


def _open_nameless(directory: str) -> int:
    os.makedirs(directory, 0o700, exist_ok=True)
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    descriptor, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    return descriptor
