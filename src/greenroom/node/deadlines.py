"""When each sandbox ends: a heap with lazy deletion, so that moving a deadline costs O(log n).

What lies in the heap and counts no more goes when its time has come, or when there is more of it than of the rest: the
time of a sandbox that has no end of its own is a hundred years off.
"""

from __future__ import annotations

import heapq

_LEAST = 64
"""Entries below which nothing is cleared away."""


class Deadlines:
    """Pure; times are Unix seconds, because a deadline outlives the process."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._current: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._current)

    def set(self, name: str, when: float) -> None:
        """Let `name` end at `when`, whatever was set before."""
        self._current[name] = when
        heapq.heappush(self._heap, (when, name))
        self._clear_away()

    def drop(self, name: str) -> None:
        """`name` needs no deadline any more."""
        self._current.pop(name, None)
        self._clear_away()

    def _clear_away(self) -> None:
        if len(self._heap) > _LEAST + 2 * len(self._current):
            self._heap = [(when, name) for name, when in self._current.items()]
            heapq.heapify(self._heap)

    @property
    def kept(self) -> int:
        """Entries in the heap, those that count no more among them."""
        return len(self._heap)

    def due(self, now: float) -> list[str]:
        """Names whose time has come, earliest first; they are dropped."""
        names: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            when, name = heapq.heappop(self._heap)
            if self._current.get(name) == when:
                del self._current[name]
                names.append(name)
        return names

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap and self._current.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
