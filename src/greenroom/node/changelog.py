"""What has changed on this node, for those who follow it: pure, and bounded in number and in bytes.

It is told at the places where a sandbox's record or a pool's numbers change, and keeps two things: what there is now,
and the last changes as they are sent. A follower that was away for no longer than these last gets what it missed;
any other gets all there is (`whole`). Lines are encoded once, however many follow.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from greenroom.wire.changes import PART, Counted, Frame, Gone, Held, HeldName, Position, Put, Whole, line_of
from greenroom.wire.messages import Listed, PoolCounts, listed

KEEP = 4096
"""Changes that are kept."""
KEEP_BYTES = 16 << 20
"""Bytes that the kept ones may have together; a single larger one is kept alone."""
BATCH = 256
"""Changes that are given at once."""


class ChangeLog:
    """See the module. `on_change` is called after each change, and must not do more than to wake somebody; with False
    after one that can wait for others, so that they are sent together: numbers, and names that are held."""

    def __init__(
        self, code: str, *, keep: int = KEEP, keep_bytes: int = KEEP_BYTES, part: int = PART
    ) -> None:
        self._stream = f"{code}-{secrets.token_hex(6)}"
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._part = part
        self._sandboxes: dict[str, Listed] = {}
        self._held: dict[str, HeldName] = {}
        self._pools: dict[tuple[str, str], PoolCounts] = {}
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._seq = 0
        self.on_change: Callable[[bool], None] = _nobody

    def __repr__(self) -> str:
        return f"<ChangeLog {self.position} sandboxes={len(self._sandboxes)} kept={len(self._lines)}>"

    @property
    def position(self) -> Position:
        """Behind the last change there was."""
        return Position(self._stream, self._seq)

    @property
    def sandboxes(self) -> dict[str, Listed]:
        """What is shown now, by id. Not to be changed."""
        return self._sandboxes

    @property
    def held(self) -> dict[str, HeldName]:
        """Names of sandboxes that are not shown yet, by id. Not to be changed."""
        return self._held

    def statistics(self) -> dict[str, int]:
        """Changes there were, and how many of them and of how many bytes are kept."""
        return {"changes": self._seq, "kept": len(self._lines), "bytes": self._bytes}

    def put(self, sandbox: Listed) -> None:
        """A sandbox is there, or has changed. What must not be told is left out here."""
        told = listed(sandbox)
        if self._sandboxes.get(told.sandbox_id) == told:
            return
        self._sandboxes[told.sandbox_id] = told
        self._held.pop(told.sandbox_id, None)
        self._seq += 1
        self._append(Put(stream=self._stream, seq=self._seq, sandbox=told))

    def drop(self, sandbox_id: str) -> None:
        """A sandbox has ended, or nothing came of it and its name is free; one that is not there is no news."""
        shown, held = self._sandboxes.pop(sandbox_id, None), self._held.pop(sandbox_id, None)
        if shown is not None or held is not None:
            self._seq += 1
            self._append(Gone(stream=self._stream, seq=self._seq, sandbox_id=sandbox_id))

    def hold(self, name: HeldName) -> None:
        """A name is taken by a sandbox that is not shown yet; of one that is, it is no news."""
        if name.sandbox_id not in self._sandboxes and self._held.get(name.sandbox_id) != name:
            self._held[name.sandbox_id] = name
            self._seq += 1
            self._append(Held(stream=self._stream, seq=self._seq, name=name), soon=False)

    def count(self, pool: PoolCounts) -> None:
        """A pool's numbers."""
        key = (pool.template, pool.size)
        if self._pools.get(key) != pool:
            self._pools[key] = pool
            self._seq += 1
            self._append(Counted(stream=self._stream, seq=self._seq, pool=pool), soon=False)

    def _append(self, frame: Frame, *, soon: bool = True) -> None:
        line = line_of(frame)
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > self._keep or (self._bytes > self._keep_bytes and len(self._lines) > 1):
            self._bytes -= len(self._lines.popleft())
        self.on_change(soon)

    def covers(self, position: Position) -> bool:
        """Whether a follower that stands there can go on from there."""
        return position.stream == self._stream and self._seq - len(self._lines) <= position.seq <= self._seq

    def since(self, seq: int, most: int = BATCH) -> tuple[bytes, int] | None:
        """The lines of the changes after `seq`, `most` at once, and the number of the last of them.

        None when some of them are no longer kept.
        """
        first = self._seq - len(self._lines)
        if not first <= seq <= self._seq:
            return None
        last = min(self._seq, seq + most)
        return b"".join(self._lines[number - first] for number in range(seq, last)), last

    def whole(self) -> tuple[int, Iterator[bytes]]:
        """All there is now as lines, made as they are taken, and the number they stand for."""
        # Copied: what changes while parts are on their way belongs to the changes that follow.
        there: list[Listed | HeldName] = [*self._sandboxes.values(), *self._held.values()]
        return self._seq, self._parts(self._seq, there, list(self._pools.values()))

    def _parts(self, seq: int, there: list[Listed | HeldName], pools: list[PoolCounts]) -> Iterator[bytes]:
        sandboxes: list[Listed] = []
        held: list[HeldName] = []
        size = number = 0
        for each in there:
            length = len(msgspec.json.encode(each))
            if size and size + length > self._part:
                part = Whole(
                    stream=self._stream, seq=seq, part=number, sandboxes=sandboxes, held=held, more=True
                )
                yield line_of(part)
                sandboxes, held, size, number = [], [], 0, number + 1
            if isinstance(each, HeldName):
                held.append(each)
            else:
                sandboxes.append(each)
            size += length
        last = Whole(stream=self._stream, seq=seq, part=number, sandboxes=sandboxes, held=held, pools=pools)
        yield line_of(last)


def _nobody(_soon: bool) -> None:
    """Before anybody follows."""
