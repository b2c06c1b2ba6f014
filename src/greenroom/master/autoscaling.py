"""How many members a pool needs for the claims that come: pure.

Little's law with a reserve: while one member is being made, `rate` × `seconds to make it` claims arrive, and twice as
many members bridge that. The rate is an exponentially weighted mean over bins of a second or more: it follows a rise
quickly, and falls with a time constant of a minute, so that the pause between two bursts does not empty the pool.
"""

from __future__ import annotations

import math

ALPHA = 0.3
"""Weight of the newest bin, while the rate rises."""
BIN = 1.0
"""Seconds of one bin, at least."""
DECAY = 60.0
"""Seconds in which the rate falls to 37 % when nothing comes."""
RESERVE = 2.0
"""Members for each claim that arrives while one is being made."""
PATIENCE = 60.0
"""Seconds for which fewer must be enough before the pool shrinks."""


class ArrivalRate:
    """Claims a second. Times are seconds of any one clock that never goes back."""

    def __init__(self, now: float) -> None:
        self._rate = 0.0
        self._begun = now
        self._count = 0

    def arrived(self, now: float) -> None:
        """A claim has come."""
        self._close(now)
        self._count += 1

    def rate(self, now: float) -> float:
        """How many came a second, lately."""
        self._close(now)
        return self._rate

    def _close(self, now: float) -> None:
        length = now - self._begun
        if length < BIN:
            return
        sample = self._count / length
        if sample > self._rate:
            self._rate += ALPHA * (sample - self._rate)
        else:
            self._rate = max(sample, self._rate * math.exp(-length / DECAY))
        self._begun, self._count = now, 0


class Scale:
    """How large one pool is to be: grows at once, shrinks once less has been enough for `PATIENCE`."""

    def __init__(self) -> None:
        self.size: int | None = None
        self._below_since: float | None = None
        self._peak = 0

    def want(self, rate: float, make_seconds: float | None, least: int, most: int, now: float) -> int:
        """Members wanted for claims that come at `rate`, of which each takes `make_seconds` to make (None: not known,
        then as few as may be, but one where claims come: making that tells)."""
        needed = int(rate > 0) if make_seconds is None else math.ceil(rate * make_seconds * RESERVE)
        wanted = max(least, min(most, needed))
        if self.size is None or wanted >= self.size or not least <= self.size <= most:
            grown = wanted if self.size is None else max(wanted, min(most, max(least, self.size)))
            self.size, self._below_since = grown, None
            return grown
        if self._below_since is None:
            self._below_since, self._peak = now, wanted
        self._peak = max(self._peak, wanted)
        if now - self._below_since >= PATIENCE:
            self.size, self._below_since = self._peak, None
        return self.size
