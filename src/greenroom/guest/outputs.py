"""What a command has written, addressable by offset: a bounded log in memory and on disk; pure.

Below ``recording``, which does the I/O this module asks for. One sequence holds the bytes of all outputs of
a command in the order in which they were read, and an offset counts bytes of that sequence from its start.
The newest bytes lie in memory. When they are more than the memory's share, the oldest segment of them is
spilled into a slot of a file; when the file may not grow any more, the oldest segment there gives way and
its slot is used again. So the log always holds a suffix of the sequence, and :attr:`OutputLog.start` tells
where it begins.

A *lossless* log gives up nothing that has not been acknowledged. It says :attr:`OutputLog.blocked` instead,
and whoever reads the pipes stops.

Which output a byte came from is kept as *runs*, stretches of one name. A command that alternates between its
outputs byte by byte would need more memory for runs than for output, so their number is bounded as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SEGMENT = 256 * 1024
"""Bytes spilled at a time, and the size of a slot."""

MAX_RUNS = 16384
_SLACK = 4 * SEGMENT


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of output kept: of one command and of all together, in memory and on disk."""

    memory: int = 1024 * 1024
    disk: int = 64 * 1024 * 1024
    memory_total: int = 32 * 1024 * 1024
    disk_total: int = 256 * 1024 * 1024


class Budget:
    """What all logs hold together. ``relieve`` frees the output of some ended command, or answers False."""

    __slots__ = ("limits", "memory", "relieve", "slots")

    def __init__(self, limits: Limits, relieve: Callable[[], bool] = lambda: False) -> None:
        self.limits = limits
        self.relieve = relieve
        self.memory = 0
        self.slots = 0

    def add_memory(self, size: int) -> None:
        """More bytes lie in memory (or fewer, below zero)."""
        self.memory += size
        while self.memory > self.limits.memory_total and self.relieve():
            pass

    def take_slot(self) -> bool:
        """Claim a segment of disk, unless there is none left."""
        while (self.slots + 1) * SEGMENT > self.limits.disk_total:
            if not self.relieve():
                return False
        self.slots += 1
        return True


@dataclass(frozen=True, slots=True)
class Spill:
    """Write these bytes at this position of the file, then call :meth:`OutputLog.spilled`."""

    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Output of one name from ``offset`` on: its bytes, or where in the file ``length`` of them lie."""

    offset: int
    name: str
    data: bytes | None
    position: int = 0
    length: int = 0


class LostOutputError(Exception):
    """The offset lies before the first one kept; ``start`` is that one."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


class OutputLog:
    """See the module. Offsets and sizes are bytes."""

    __slots__ = (
        *("_budget", "_disk_works", "_free", "_limits", "_memory", "_memory_start", "_run_names"),
        *("_run_offsets", "_segments", "_slots", "_spilling", "acknowledged", "end", "lossless", "start"),
    )

    def __init__(self, budget: Budget, *, lossless: bool = False) -> None:
        self._budget = budget
        self._limits = budget.limits
        self._memory = bytearray()
        self._memory_start = 0
        self._segments: deque[tuple[int, int]] = deque()
        self._free: list[int] = []
        self._slots = 0
        self._spilling: int | None = None
        self._disk_works = True
        self._run_offsets: list[int] = []
        self._run_names: list[str] = []
        self.lossless = lossless
        self.start = 0
        """The first offset kept."""
        self.end = 0
        """The offset of the next byte."""
        self.acknowledged = 0
        """Readers have said that they hold everything before this offset."""

    def __repr__(self) -> str:
        return f"<OutputLog {self.start}..{self.end}, {len(self._memory)} in memory>"

    @property
    def blocked(self) -> bool:
        """Whether nothing more should be appended for now."""
        if len(self._memory) >= self._memory_limit + _SLACK:
            return True
        return self.lossless and len(self._run_offsets) >= MAX_RUNS

    @property
    def _memory_limit(self) -> int:
        crowded = self._budget.memory > self._limits.memory_total
        return min(SEGMENT, self._limits.memory) if crowded else self._limits.memory

    def append(self, name: str, data: bytes) -> None:
        """More output; afterwards the caller asks for :meth:`next_spill`."""
        if not self._run_names or self._run_names[-1] != name:
            self._run_offsets.append(self.end)
            self._run_names.append(name)
            if len(self._run_offsets) > MAX_RUNS and not self.lossless:
                self._drop_to(self._run_offsets[1])
        self._memory += data
        self.end += len(data)
        self._budget.add_memory(len(data))

    def acknowledge(self, offset: int) -> None:
        """Everything before this offset may go. Offsets beyond the end count as the end."""
        self.acknowledged = max(self.acknowledged, min(offset, self.end))
        if self.lossless and len(self._run_offsets) >= MAX_RUNS:
            self._drop_to(self.acknowledged)

    def next_spill(self) -> Spill | None:
        """What to write to the file now, if anything; one at a time."""
        while self._spilling is None and len(self._memory) >= self._memory_limit + SEGMENT:
            slot = self._take_slot()
            if slot is not None:
                self._spilling = slot
                return Spill(slot * SEGMENT, bytes(self._memory[:SEGMENT]))
            if not self._drop_oldest():
                return None
        return None

    def spilled(self, ok: bool) -> None:
        """The last spill was written, or could not be: then the disk is not tried again."""
        slot, self._spilling = self._spilling, None
        if slot is None:
            return
        if ok and self._memory_start + SEGMENT > self.start:
            self._segments.append((self._memory_start, slot))
            self._trim_memory(SEGMENT)
        else:
            self._disk_works = self._disk_works and ok
            self._free.append(slot)
        self._drop_to(self.start)

    def locate(self, offset: int, limit: int) -> Piece | None:
        """Up to ``limit`` bytes from ``offset`` on; None at the end.

        Raises :class:`LostOutputError`. What lies in the file may be overwritten once :attr:`start` has moved
        beyond it, so a reader looks at that again after it has read.
        """
        if offset < self.start:
            raise LostOutputError(self.start)
        if offset >= self.end:
            return None
        run = bisect_right(self._run_offsets, offset) - 1
        run_end = self._run_offsets[run + 1] if run + 1 < len(self._run_offsets) else self.end
        length = min(limit, run_end - offset)
        name = self._run_names[run]
        if offset >= self._memory_start:
            at = offset - self._memory_start
            return Piece(offset, name, bytes(self._memory[at : at + length]))
        begin, slot = self._segments[(offset - self._segments[0][0]) // SEGMENT]
        length = min(length, begin + SEGMENT - offset)
        return Piece(offset, name, None, slot * SEGMENT + offset - begin, length)

    def discard(self) -> None:
        """Give everything up, now and for good."""
        self.start = self.end
        self._segments.clear()
        self._run_offsets.clear()
        self._run_names.clear()
        self._budget.slots -= self._slots
        self._slots = 0
        self._disk_works = False
        self._spilling = None
        self._trim_memory(len(self._memory))

    def statistics(self) -> dict[str, int]:
        """Bytes held in memory and on disk."""
        return {"memory": len(self._memory), "disk": len(self._segments) * SEGMENT}

    def _take_slot(self) -> int | None:
        if self._disk_works:
            if self._free:
                return self._free.pop()
            if (self._slots + 1) * SEGMENT <= self._limits.disk and self._budget.take_slot():
                self._slots += 1
                return self._slots - 1
            if self._segments and self._drop_oldest() and self._free:
                return self._free.pop()
        return None

    def _drop_oldest(self) -> bool:
        """Give up the oldest segment, wherever it lies; False when it must be kept."""
        begin = self._segments[0][0] if self._segments else self._memory_start
        target = begin + SEGMENT
        if self.lossless:
            if self._segments and target > self.acknowledged:
                return False
            target = min(target, self.acknowledged)
        if target <= self.start:
            return False
        self._drop_to(target)
        return True

    def _drop_to(self, offset: int) -> None:
        self.start = max(self.start, offset)
        while self._segments and self._segments[0][0] + SEGMENT <= self.start:
            self._free.append(self._segments.popleft()[1])
        # While a spill is under way its bytes stay, as it decides where the memory begins afterwards.
        if self._spilling is None and self.start > self._memory_start:
            self._trim_memory(self.start - self._memory_start)
        gone = bisect_right(self._run_offsets, self.start) - 1
        if gone > 0:
            del self._run_offsets[:gone]
            del self._run_names[:gone]

    def _trim_memory(self, size: int) -> None:
        del self._memory[:size]
        self._memory_start += size
        self._budget.add_memory(-size)
