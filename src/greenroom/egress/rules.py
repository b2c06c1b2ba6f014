"""Judging: may this sandbox reach this address, this name, keep this connection? Pure.

Ranges that are always denied come first, whatever else is said; then `allowOut` wins over `denyOut`, and that over
the default. A name can only allow. It never makes the address that the guest dialled trustworthy: who is let through
by a name is connected to where that name leads, and that address is judged as well (`may_stay`), so that neither a
forged name nor a name that leads inwards (DNS rebinding) gains anything.
"""

from __future__ import annotations

import enum
from ipaddress import IPv4Address

from greenroom.wire.network import Rules


class Verdict(enum.Enum):
    """What becomes of a connection by its address alone."""

    ALLOW = "allow"
    DENY = "deny"
    ASK = "only its name can allow it"


def judge(rules: Rules, address: IPv4Address) -> Verdict:
    """The verdict on a connection to `address`."""
    if address in rules.denied:
        return Verdict.DENY
    if address in rules.allow:
        return Verdict.ALLOW
    if not rules.restricted and address not in rules.deny:
        return Verdict.ALLOW
    return Verdict.ASK if rules.named else Verdict.DENY


def may_stay(rules: Rules, address: IPv4Address, name: str | None) -> bool:
    """Whether a connection to `address`, which was let through by `name` if there is one, is allowed by `rules`."""
    match judge(rules, address):
        case Verdict.ALLOW:
            return True
        case Verdict.DENY:
            return False
        case Verdict.ASK:
            return name is not None and rules.allows_name(name)


def may_resolve(rules: Rules, name: str) -> bool:
    """Whether the sandbox gets an answer for `name`.

    With no way out there is no DNS either: questions are a way out themselves. For the same reason only allowed
    names are answered where all else is denied.
    """
    if rules.closed:
        return False
    if not rules.restricted:
        return True
    return rules.dns_servers != () and rules.allows_name(name)
