"""How a pool's target is split over the nodes that can take it. Pure: numbers in, numbers out.

What each node is due comes by largest remainder (`fleet.shares`), as far as it can take it.

A split that is there already is kept as it is while it is good enough (`resettle`): members that are moved are
destroyed and made again, which costs more than a node that has a few more than is its due.
"""

from __future__ import annotations

from collections.abc import Mapping

from greenroom.fleet.shares import split

BAND = 5
"""A node's share may be off by less than one member, or by a fifth of what is its due, before members are moved."""


def allocate(
    target: int, weights: Mapping[str, int], most: Mapping[str, int | None], salt: str = ""
) -> dict[str, int]:
    """Split `target` by weight, none getting more than `most` says of it (None: as many as one likes).

    The shares add up to `target`, or to all that fits.
    """
    shares = dict.fromkeys(weights, 0)
    rest, open_ = target, {name: weight for name, weight in weights.items() if weight > 0}
    while rest > 0 and open_:
        given = split(rest, open_, salt)
        full = []
        for name, share in given.items():
            bound = most.get(name)
            if bound is not None and share > bound:
                full.append(name)
        if not full:
            for name, share in given.items():
                shares[name] = share
            return shares
        # Those that cannot take their share take what they can, and the others divide what is left.
        for name in full:
            shares[name] = max(0, most[name] or 0)
            rest -= shares[name]
            del open_[name]
    return shares


def resettle(
    target: int,
    weights: Mapping[str, int],
    most: Mapping[str, int | None],
    before: Mapping[str, int],
    salt: str = "",
    *,
    may_move: bool = True,
) -> dict[str, int]:
    """As `allocate`, but what `before` had stays where it is unless it has to go, or is far from its due.

    Where `before` comes to too few or too many, only the difference is made up, towards what `allocate` says.
    Without `may_move` nothing is moved for the sake of balance alone.
    """
    due = allocate(target, weights, most, salt)
    kept = {name: min(before.get(name, 0), _bound(most, name)) for name in weights if weights[name] > 0}
    kept = {name: kept.get(name, 0) for name in weights}
    missing = sum(due.values()) - sum(kept.values())
    if missing:
        sign = 1 if missing > 0 else -1
        room = {name: max(0, sign * (due[name] - kept[name])) for name in weights}
        for name, share in split(abs(missing), room, salt).items():
            kept[name] += sign * share
    return due if may_move and _unfair(kept, due, weights) else kept


def _bound(most: Mapping[str, int | None], name: str) -> int:
    bound = most.get(name)
    return 1 << 62 if bound is None else max(0, bound)


def _unfair(kept: Mapping[str, int], due: Mapping[str, int], weights: Mapping[str, int]) -> bool:
    """Whether some node is far from its due, and it would help: one that has too many would, with one fewer, still
    have no less for its weight than one that has too few would have with one more."""
    off = {name: share - due[name] for name, share in kept.items() if share != due[name]}
    if not any(BAND * abs(by) > due[name] for name, by in off.items()):
        return False
    richest = max(((kept[name] - 1) / weights[name] for name, by in off.items() if by > 0), default=0.0)
    poorest = min(((kept[name] + 1) / weights[name] for name, by in off.items() if by < 0), default=0.0)
    return richest >= poorest
