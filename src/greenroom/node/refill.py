"""How the node's refill budget is shared: one member for each pool in turn, so that none starves another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def allot(wants: Mapping[K, int], budget: int, after: K | None = None) -> list[K]:
    """The pools that may start a member now, in order; a pool comes up once for each member.

    `wants` tells how many each could use, `budget` how many may start in all. The round begins behind `after`,
    the pool that was served last, so that many calls with a budget of one are fair as well.
    """
    names = list(wants)
    if after in wants:
        place = names.index(after) + 1  # type: ignore[arg-type]
        names = names[place:] + names[:place]
    left = dict(wants)
    granted: list[K] = []
    while len(granted) < budget:
        served = False
        for name in names:
            if left[name] > 0 and len(granted) < budget:
                left[name] -= 1
                granted.append(name)
                served = True
        if not served:
            break
    return granted
