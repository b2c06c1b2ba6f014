"""When those who watch are woken: the first change after a pause at once, and then all of them together, at intervals.

A thousand watchers at two hundred changes a second would be 200,000 small writes; woken together every `EVERY`
seconds they are a quarter of that, and all who want the same changes in the same form are sent the same bytes. Few
watchers cost little, so they wait less: as long as it takes to write to all of them, about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Final
from weakref import WeakKeyDictionary

from greenroom.api.kube.watching import Cache

EVERY: Final = 0.02
"""Seconds between two times that watchers are woken while changes keep coming, at most."""
EACH: Final = 20e-6
"""Seconds that writing to one watcher takes, about."""
CHUNK_BYTES: Final = 32 << 20
"""Bytes of them."""
CHUNKS: Final = 256
"""Pieces of a stream that are kept until they are woken again, for others who want the same."""


class Pulse:
    """Wakes the watchers of one cache. All in one event loop."""

    def __init__(self, every: float = EVERY, each: float = EACH) -> None:
        self._every = every
        self._each = each
        self._pause = 0.0
        self._woken: dict[asyncio.Event, None] = {}
        self._last = float("-inf")
        self._set = False
        self._chunks: dict[Hashable, bytes] = {}
        self._kept = 0

    def wake(self, news: asyncio.Event) -> None:
        """Set an event, now or within the interval."""
        self._woken[news] = None
        if self._set:
            return
        self._set = True
        loop = asyncio.get_running_loop()
        due = self._last + self._pause
        if loop.time() >= due:
            loop.call_soon(self._beat)
        else:
            loop.call_at(due, self._beat)

    def _beat(self) -> None:
        self._set = False
        self._last = asyncio.get_running_loop().time()
        self._chunks.clear()
        self._kept = 0
        woken, self._woken = self._woken, {}
        self._pause = min(self._every, self._each * len(woken))
        for news in woken:
            news.set()

    def chunk(self, key: Hashable) -> bytes | None:
        """What somebody else was sent for the same changes since they were woken."""
        return self._chunks.get(key)

    def keep(self, key: Hashable, chunk: bytes) -> bytes:
        """Keep it for others."""
        if len(self._chunks) < CHUNKS and self._kept + len(chunk) <= CHUNK_BYTES:
            self._chunks[key] = chunk
            self._kept += len(chunk)
        return chunk


_pulses: WeakKeyDictionary[Cache, Pulse] = WeakKeyDictionary()


def pulse_of(cache: Cache) -> Pulse:
    """The one that wakes a cache's watchers."""
    if (found := _pulses.get(cache)) is None:
        found = _pulses[cache] = Pulse()
    return found
