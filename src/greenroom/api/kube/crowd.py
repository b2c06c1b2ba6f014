"""How many watches there may be: each holds a connection for as long as it lasts, and all else needs some, too. Pure.

Whoever opens watches without end is told to wait, by its own bound before everybody's; others go on.
"""

from __future__ import annotations

from typing import Final

from greenroom.api.kube.status import too_many_requests

EACH: Final = 1536
"""Watches of one caller in one process, of all kinds together."""
ALL: Final = 3072
"""Watches in one process: three quarters of the connections that it has (`wire.guarded`)."""
AGAIN: Final = 5.0
"""Seconds after which one more may be tried."""


class Crowd:
    """Counts the watches of each caller."""

    def __init__(self, each: int = EACH, everyone: int = ALL) -> None:
        self._each = each
        self._all = everyone
        self._counts: dict[str, int] = {}
        self._sum = 0

    def enter(self, who: str) -> None:
        """One more watch, to be ended by `leave`. Raises 429."""
        if self._counts.get(who, 0) >= self._each:
            raise too_many_requests(
                f"you have {self._each} watches open already, which is what one caller may have; close some",
                AGAIN,
            )
        if self._sum >= self._all:
            raise too_many_requests("too many watches are open; try again later", AGAIN)
        self._counts[who] = self._counts.get(who, 0) + 1
        self._sum += 1

    def leave(self, who: str) -> None:
        """A watch has ended."""
        self._sum -= 1
        self._counts[who] -= 1
        if not self._counts[who]:
            del self._counts[who]
