"""When each sandbox ends: a heap with lazy deletion, so that moving a deadline costs O(log n)."""

from __future__ import annotations

import heapq


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

    def drop(self, name: str) -> None:
        """`name` needs no deadline any more."""
        self._current.pop(name, None)

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
