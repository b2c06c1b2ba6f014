"""What the stock should hold: pure, so that tests can try every state. `stock` carries out what it says.

For each golden there are *places* (all of a VM but its process) and *waiting* QEMUs (all of a VM but its state).
Both are made only when nothing better is to be done with the CPUs and there is room in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Kind = Literal["place", "waiting"]


class Wants(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for: so many of each kind for each golden, and so many in all."""

    places: int
    waiting: int
    most: int


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What there is for one golden. What is being made counts apart."""

    golden: str
    places: int = 0
    waiting: int = 0
    making_places: int = 0
    making_waiting: int = 0


class Step(msgspec.Struct, frozen=True):
    """Make one more of a kind for a golden, or drop one that is ready."""

    do: Literal["make", "drop"]
    kind: Kind
    golden: str


def targets(levels: Sequence[Level], wants: Wants) -> list[tuple[int, int]]:
    """Places and waiting QEMUs that each golden should have. `levels` begin with the golden used last.

    Whatever was not used for longest goes without when all of it is more than `wants.most`.
    """
    found, left = [], wants.most
    for _ in levels:
        waiting = min(wants.waiting, left)
        places = min(wants.places, left - waiting)
        left -= waiting + places
        found.append((places, waiting))
    return found


def plan(levels: Sequence[Level], wants: Wants, *, room: bool, restoring: int, hands: int) -> list[Step]:
    """The next steps.

    `room` says whether the host has memory to spare: without, waiting QEMUs are dropped and nothing is made.
    While VMs are restored (`restoring`) nothing is made. At most `hands` are made at the same time.
    """
    steps: list[Step] = []
    idle = room and restoring == 0
    hands -= sum(level.making_places + level.making_waiting for level in levels)
    for level, (places, waiting) in zip(levels, targets(levels, wants), strict=True):
        keep = waiting if room else 0
        steps += [Step("drop", "waiting", level.golden)] * max(0, level.waiting - keep)
        steps += [Step("drop", "place", level.golden)] * max(0, level.places - places)
        missing_waiting = max(0, waiting - level.waiting - level.making_waiting)
        missing_places = max(0, places - level.places - level.making_places)
        if idle:
            made = min(hands, missing_waiting)
            steps += [Step("make", "waiting", level.golden)] * made
            hands -= max(0, made)
            made = min(hands, missing_places)
            steps += [Step("make", "place", level.golden)] * made
            hands -= max(0, made)
    return steps
