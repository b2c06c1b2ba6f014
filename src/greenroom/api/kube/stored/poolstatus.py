"""The status of warm pools, computed from what nodes tell. Pure.

Nodes count members by key: template and size. Pools of one key (SandboxWarmPools of any namespace, and the one that was
declared by `greenroom pools`) have their members together; each is shown its part in proportion to what it asks for,
by largest remainders, so that the parts add up to what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from greenroom.api.kube.objects import Object, rfc3339
from greenroom.api.kube.stored.pools import selector_of
from greenroom.fleet.view import View

Pair = tuple[str, str]


class Count(msgspec.Struct, frozen=True):
    """Members that wait, and those that are being made."""

    warm: int = 0
    starting: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.warm + other.warm, self.starting + other.starting)

    def __sub__(self, other: Count) -> Count:
        return Count(self.warm - other.warm, self.starting - other.starting)


NOTHING = Count()


class Totals:
    """Members by key over all nodes that are read. A node that is not read has none that could be claimed."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._of_node: dict[str, dict[Pair, Count]] = {}
        self._total: dict[Pair, Count] = {}
        for code in view.nodes():
            self.learn(code)

    def learn(self, code: str) -> bool:
        """Look at a node again; whether that changed anything."""
        node = self._view.node(code)
        before = self._of_node.pop(code, {})
        after: dict[Pair, Count] = {}
        if node is not None and node.since is None:
            after = self._of_node[code] = {
                pair: Count(pool.warm, pool.starting) for pair, pool in node.pools.items()
            }
        if before == after:
            return False
        for pair in before.keys() | after.keys():
            total = self._total.get(pair, NOTHING) - before.get(pair, NOTHING) + after.get(pair, NOTHING)
            if total == NOTHING:
                self._total.pop(pair, None)
            else:
                self._total[pair] = total
        return True

    def of(self, pair: Pair) -> Count:
        """Members of a key."""
        return self._total.get(pair, NOTHING)


def shares(weights: Sequence[int], amount: int) -> list[int]:
    """`amount` in parts proportional to `weights`, by largest remainders; the sum is exact.

    With no weight at all everybody counts the same. The earlier gets more where remainders are equal.
    """
    if not weights:
        return []
    total = sum(weights)
    if total == 0:
        weights, total = [1] * len(weights), len(weights)
    parts = [amount * weight // total for weight in weights]
    order = sorted(range(len(weights)), key=lambda place: (-(amount * weights[place] % total), place))
    for place in order[: amount - sum(parts)]:
        parts[place] += 1
    return parts


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool is shown, and what is said of it."""

    count: Count = NOTHING
    desired: int = 0
    reason: str = ""
    """Why it can have no members, in one word."""
    problem: str = ""
    unplaced: int | None = None
    """Members for which no node has room; None where that is not known."""
    why: str = ""
    """What the leader says of that."""


def status_of(document: Object, part: Part, before: Object | None, now: datetime) -> Object:
    """The status of a pool; `before` is the one that it had, for the times of its conditions."""
    metadata = document["metadata"]
    generation = metadata.get("generation") or 1
    ready, wanted = part.count.warm, part.desired
    if part.reason:
        states = [
            ("Ready", False, part.reason, part.problem),
            ("Progressing", False, part.reason, part.problem),
        ]
    elif ready >= wanted:
        complete = f"{ready} of {wanted} are ready"
        settled = ready == wanted and part.count.starting == 0
        states = [
            ("Ready", True, "Filled", complete),
            ("Progressing", not settled, "Filled" if settled else "Settling", complete),
        ]
    else:
        filling = f"{ready} of {wanted} are ready, {part.count.starting} are being made"
        states = [("Ready", False, "Filling", filling), ("Progressing", True, "Filling", filling)]
    if part.unplaced is not None:
        some = part.unplaced > 0
        text = f"no node has room for {part.unplaced} of them" if some else "all of them have a node"
        if some and part.why:
            text = f"{text}: {part.why}"
        states.append(("Unplaced", some, "NoRoom" if some else "Placed", text))
    return {
        "replicas": ready + part.count.starting,
        "readyReplicas": ready,
        "selector": selector_of(metadata.get("name", "")),
        "observedGeneration": generation,
        "conditions": [_condition(*state, generation, before, now) for state in states],
    }


def _condition(
    kind: str, holds: bool, reason: str, message: str, generation: int, before: Object | None, now: datetime
) -> Object:
    state = "True" if holds else "False"
    since = rfc3339(now)
    for each in (before or {}).get("conditions") or []:
        if each.get("type") == kind and each.get("status") == state:
            since = each.get("lastTransitionTime", since)
    return {
        "type": kind,
        "status": state,
        "observedGeneration": generation,
        "lastTransitionTime": since,
        "reason": reason,
        "message": message,
    }
