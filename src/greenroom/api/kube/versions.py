"""Versions of the Kubernetes dialect: decimal numbers that grow with every change that one api process shows.

    resourceVersion = number * 1,000,000 + revision % 1,000,000
    number          = microseconds since 1970 (or the last one plus one) * 4,096 + tag

The number orders what a process shows: changes of statuses too, which nobody writes anywhere. The tag is drawn when
the process starts, so a version of another process, or of an earlier run, is known for what it is: no watch and no
page can go on from it (410). The revision is that of the record below (a node's journal, the store), which every
replica knows; a write is a conflict when the revision that it names is another one, whatever else has happened.
Pure, but for the clock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

REVISIONS: Final = 1_000_000
"""What a version holds of a revision: its last six digits."""
TAG_BITS: Final = 12
LONGEST: Final = 30
"""Digits of a version; one of the year 2200 has 26."""


class Clock:
    """Gives the versions of one process. `tag` and `now` (Unix seconds) are for tests."""

    def __init__(self, tag: int | None = None, now: Callable[[], float] = time.time) -> None:
        self.tag = secrets.randbelow(1 << TAG_BITS) if tag is None else tag
        self._now = now
        self._last = 0

    def __repr__(self) -> str:
        return f"<Clock tag={self.tag} last={self._last}>"

    def next(self, revision: int = 0) -> int:
        """A version above all before it, of an object with this revision."""
        self._last = max(self._last + 1, int(self._now() * 1e6))
        return ((self._last << TAG_BITS) | self.tag) * REVISIONS + revision % REVISIONS

    def foreign(self, version: int) -> bool:
        """Whether a version is of another process. 0 is nobody's, and any will do for it."""
        return version != 0 and (version // REVISIONS) & ((1 << TAG_BITS) - 1) != self.tag


def revision_of(version: str | int) -> int:
    """The last six digits of the revision of what has this version; of a text that is no version, -1."""
    if isinstance(version, str):
        if not version.isascii() or not version.isdigit() or len(version) > LONGEST:
            return -1
        return int(version[-6:])
    return version % REVISIONS
