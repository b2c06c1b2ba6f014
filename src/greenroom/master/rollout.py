"""A warm pool whose template changes: what is kept of the old members while new ones are made. Pure.

`OnReplenish`: old members stay until they are claimed; each one that goes makes room for a new one. `Recreate`: new
ones are made at once, and old ones go as these become ready, never so many that fewer than a floor of three quarters
are left. Nothing old is made anew but up to that floor, which holds also where the new template turns out not to work.

Numbers here are of the whole fleet; which node's members they are is for `driver` to say.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from greenroom.wire.messages import PoolName

FLOOR = Fraction(3, 4)
"""Of a pool's replicas, ready at any time during `Recreate`, rounded up."""
MOST_OLD = 8
"""Templates of which a pool keeps members at once, the newest ones; those of older ones go."""


def floor_of(replicas: int) -> int:
    """Members that must be ready while a pool is recreated."""
    return -int(-FLOOR * replicas // 1)


class Rollout:
    """One pool's keys: the one it is to be filled with, and those that it still has members of."""

    def __init__(self) -> None:
        self.key: PoolName | None = None
        self.old: dict[PoolName, int] = {}
        """Targets of what came before, the oldest first; they only fall."""
        self.wanted = 0
        """Target of the key, as `targets` last said."""

    def __repr__(self) -> str:
        return f"<Rollout {self.key} old={self.old}>"

    def turn_to(self, key: PoolName, wanted: int) -> None:
        """The pool's template says `key` from now on; `wanted` members of the one before it were asked for."""
        if key == self.key:
            return
        if self.key is not None and wanted > 0:
            self.old[self.key] = wanted
        self.old.pop(key, None)
        self.key = key
        while len(self.old) > MOST_OLD:
            del self.old[next(iter(self.old))]

    def targets(
        self, replicas: int, recreate: bool, ready: Callable[[PoolName], int]
    ) -> tuple[int, dict[PoolName, int]]:
        """Members wanted of the key, and of the old ones. `ready` tells how many are, of those that are this pool's."""
        if self.key is None:
            self.wanted = 0
            return 0, {}
        if recreate:
            self._recreate(max(0, floor_of(replicas) - ready(self.key)), ready)
            self.wanted = replicas
        else:
            self._replenish(replicas, ready)
            self.wanted = max(0, replicas - sum(self.old.values()))
        self.old = {key: target for key, target in self.old.items() if target > 0}
        return self.wanted, dict(self.old)

    def _replenish(self, replicas: int, ready: Callable[[PoolName], int]) -> None:
        left = replicas
        for key in reversed(self.old):
            self.old[key] = min(self.old[key], ready(key), left)
            left -= self.old[key]

    def _recreate(self, needed: int, ready: Callable[[PoolName], int]) -> None:
        before, left = dict(self.old), needed
        for key in reversed(before):
            # Those that are ready first, whichever template they are of.
            self.old[key] = min(before[key], ready(key), left)
            left -= self.old[key]
        for key in reversed(before):
            more = min(before[key] - self.old[key], left)
            self.old[key] += more
            left -= more
