"""How a pool's target is split over the nodes that can take it. Pure: numbers in, numbers out.

Largest remainder: each node gets the whole part of its quota, and the members left over go to the largest
remainders. Equal nodes have equal remainders, so ties are broken by a hash of pool and node (rendezvous).
That keeps the split stable, because a node that comes or goes does not reshuffle the others' order, and
spreads the left-over members of many small pools over the fleet instead of always burdening the first node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from greenroom.wire.messages import PoolSpec


def split(target: int, weights: Mapping[str, int], salt: str = "") -> dict[str, int]:
    """Split `target` (0 or more) over the nodes by weight (each 0 or more); `salt` names what is split.

    The shares add up to `target`, and each is its exact quota rounded down or up. With no weight above 0
    every share is 0. The result depends on nothing but the arguments, not even on the order of `weights`.
    """
    total = sum(weights.values())
    if total == 0:
        return dict.fromkeys(weights, 0)
    shares: dict[str, int] = {}
    remainders: dict[str, Fraction] = {}
    for name, weight in weights.items():
        quota = Fraction(target * weight, total)
        shares[name] = quota.numerator // quota.denominator
        remainders[name] = quota - shares[name]
    left = target - sum(shares.values())
    for name in sorted(weights, key=lambda name: (-remainders[name], _rank(salt, name)))[:left]:
        shares[name] += 1
    return shares


def shares_of(node: str, pools: Sequence[PoolSpec], nodes: Sequence[str]) -> list[PoolSpec]:
    """The share of every pool that `node` gets when `nodes` (itself among them, or not) divide the pools.

    Pools of which it gets nothing are left out.
    """
    weights = dict.fromkeys(nodes, 1)
    mine: list[PoolSpec] = []
    for pool in pools:
        share = split(pool.target, weights, f"{pool.template}/{pool.size.name}").get(node, 0)
        if share > 0:
            mine.append(msgspec.structs.replace(pool, target=share))
    return mine


def _rank(salt: str, name: str) -> bytes:
    return hashlib.blake2b(f"{salt}\0{name}".encode(), digest_size=8).digest()
