"""The status of warm pools, computed from what nodes tell. Pure.

Nodes count members by key: template and size. Pools of one key (SandboxWarmPools of any namespace, and the one that was
declared without Kubernetes) have their members together; each is shown its part in proportion to what is wanted of this
key for it, by largest remainders, so that the parts add up to what there is. While its template changes, a pool has
members of several keys, and is shown all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

import msgspec

from greenroom.api.kube.objects import Key, Object, rfc3339
from greenroom.api.kube.stored.pools import selector_of
from greenroom.fleet.shares import split
from greenroom.fleet.view import View
from greenroom.wire.messages import PoolName


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
        self._of_node: dict[str, dict[PoolName, Count]] = {}
        self._total: dict[PoolName, Count] = {}
        for code in view.nodes():
            self.learn(code)

    def learn(self, code: str) -> bool:
        """Look at a node again; whether that changed anything."""
        node = self._view.node(code)
        before = self._of_node.pop(code, {})
        after: dict[PoolName, Count] = {}
        if node is not None and node.since is None:
            after = self._of_node[code] = {
                PoolName(*pair): Count(pool.warm, pool.starting) for pair, pool in node.pools.items()
            }
        if before == after:
            return False
        for name in before.keys() | after.keys():
            total = self._total.get(name, NOTHING) - before.get(name, NOTHING) + after.get(name, NOTHING)
            if total == NOTHING:
                self._total.pop(name, None)
            else:
                self._total[name] = total
        return True

    def of(self, name: PoolName) -> Count:
        """Members of a key."""
        return self._total.get(name, NOTHING)


def parted(
    pools: Mapping[Key, Mapping[PoolName, int]],
    declared: Mapping[PoolName, int],
    of: Callable[[PoolName], Count],
) -> dict[Key, Count]:
    """Each pool's part of the members there are. `pools` have the targets of their keys, `declared` are those that were
    declared without Kubernetes. Where nothing is wanted of a key any more, all that have it have equal parts."""
    sharing: dict[PoolName, dict[Key, int]] = {}
    for key, targets in pools.items():
        for name, target in targets.items():
            sharing.setdefault(name, {})[key] = target
    found = dict.fromkeys(pools, NOTHING)
    for name, those in sharing.items():
        total = of(name)
        if total == NOTHING:
            continue
        weights = {"/".join(key): target for key, target in those.items()}
        if other := declared.get(name, 0):
            weights[""] = other
        if not any(weights.values()):
            weights = dict.fromkeys(weights, 1)
        salt = f"{name.template}/{name.size}"
        warm, starting = split(total.warm, weights, salt), split(total.starting, weights, salt)
        for key in those:
            found[key] += Count(warm["/".join(key)], starting["/".join(key)])
    return found


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool is shown, and what is said of it."""

    count: Count = NOTHING
    """Members of any template that it has had."""
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
        if ready > wanted:
            complete = f"{ready} are ready, {wanted} are wanted"
        settled = ready == wanted and part.count.starting == 0
        states = [
            ("Ready", True, "Filled", complete),
            ("Progressing", not settled, "Filled" if settled else "Settling", complete),
        ]
    else:
        filling = f"{ready} of {wanted} are ready, {part.count.starting} are being made"
        states = [("Ready", False, "Filling", filling), ("Progressing", True, "Filling", filling)]
    # Of members that cannot be made at all, nobody asks whether there is room for them.
    if part.unplaced is not None and not part.reason:
        some = part.unplaced > 0
        text = f"no node has room for {part.unplaced} of them" if some else "all of them have a node"
        if some and part.why:
            text = f"{text}: {part.why}"
        states.append(("Unplaced", some, "NoRoom" if some else "Placed", text))
    return {
        "replicas": ready + part.count.starting,
        "readyReplicas": ready,
        "desiredReplicas": wanted,
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
