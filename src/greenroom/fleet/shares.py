"""A number split into whole parts by weight: members over nodes, and over the pools that share them. Pure.

Largest remainder: each gets the whole part of its quota, and what is left over goes to the largest remainders. Equals
have equal remainders, so ties are broken by a hash of what is split and of who gets it (rendezvous). That keeps a split
stable, because one that comes or goes does not reshuffle the others' order, and spreads the left-over members of many
small pools over the fleet instead of always burdening the first node.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping


def split(target: int, weights: Mapping[str, int], salt: str = "") -> dict[str, int]:
    """Split `target` (0 or more) over names by weight (each 0 or more); `salt` names what is split.

    The shares add up to `target`, and each is its exact quota rounded down or up. With no weight above 0
    every share is 0. The result depends on nothing but the arguments, not even on the order of `weights`.
    """
    total = sum(weights.values())
    if total == 0:
        return dict.fromkeys(weights, 0)
    shares: dict[str, int] = {}
    remainders: dict[str, int] = {}
    for name, weight in weights.items():
        shares[name], remainders[name] = divmod(target * weight, total)
    left = target - sum(shares.values())
    for name in sorted(weights, key=lambda name: (-remainders[name], _rank(salt, name)))[:left]:
        shares[name] += 1
    return shares


@functools.lru_cache(maxsize=1 << 16)
def _rank(salt: str, name: str) -> bytes:
    return hashlib.blake2b(f"{salt}\0{name}".encode(), digest_size=8).digest()
