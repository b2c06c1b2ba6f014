"""How often something may happen: a token bucket. Pure; the caller brings the time."""

from __future__ import annotations


class Bucket:
    """`rate` a second on average; up to `burst` at once after a time of rest."""

    __slots__ = ("_at", "_left", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = burst
        self._left = burst
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Whether it may happen once more at `now` (seconds of a clock that does not go back)."""
        if self._at is not None:
            self._left = min(self.burst, self._left + max(0.0, now - self._at) * self.rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
