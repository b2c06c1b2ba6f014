"""Whether one more sandbox is within its owner's quotas. Pure.

A quota is a Kubernetes `ResourceQuota` of the namespace that is the owner's; where there are several, all of them hold.
Every sandbox counts, whichever dialect makes it, forks too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from greenroom.errors import QuotaExceeded
from greenroom.fleet.usage import Amount
from greenroom.wire.podsizes import MIB

COUNT = "count/sandboxes.agents.x-k8s.io"
CPU = "requests.cpu"
MEMORY = "requests.memory"


class Quota(msgspec.Struct, frozen=True):
    """What one quota allows; of what is not named there may be any amount. Memory in bytes."""

    name: str
    hard: Mapping[str, Fraction]


def check(quotas: Sequence[Quota], used: Amount, asked: Amount) -> None:
    """Raise QuotaExceeded if `asked` is too much on top of `used`, in the words that Kubernetes has for it."""
    has, wants = _amounts(used), _amounts(asked)
    for quota in quotas:
        over = [key for key, limit in quota.hard.items() if key in has and has[key] + wants[key] > limit]
        if over:
            raise QuotaExceeded(
                f"exceeded quota: {quota.name}, "
                f"requested: {_told(over, wants)}, used: {_told(over, has)}, limited: {_told(over, quota.hard)}"
            )


def _amounts(amount: Amount) -> dict[str, Fraction]:
    return {
        COUNT: Fraction(amount.sandboxes),
        CPU: Fraction(amount.cpus),
        MEMORY: Fraction(amount.memory_mib * MIB),
    }


def _told(keys: Sequence[str], amounts: Mapping[str, Fraction]) -> str:
    return ",".join(f"{key}={_quantity(key, amounts[key])}" for key in keys)


def _quantity(key: str, amount: Fraction) -> str:
    if key == MEMORY:
        for suffix, unit in (("Gi", 1024 * MIB), ("Mi", MIB), ("Ki", 1024)):
            if amount and amount % unit == 0:
                return f"{amount // unit}{suffix}"
        return str(-(-amount // 1))
    return str(amount) if amount.denominator == 1 else f"{-(-amount * 1000 // 1)}m"
