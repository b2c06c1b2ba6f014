"""What every node is to keep warm, worked out from all that is known: a pure state machine.

In go what is declared (pools of Greenroom's own, SandboxWarmPools), which nodes may be given members, what each tells
of itself in its heartbeats and of its pools in its stream, and the claims that come. Out comes, with `decide`, the
complete list of targets of each node, and what became of each SandboxWarmPool. `driving` is the shell around it.

How a number of members finds its nodes:

* Wants for one pool add up, whoever declared them. `rollout` says what is wanted of members of an older template, and
  `autoscaling` how many members are wanted at all, where that is asked for.
* They are split by weight: how quickly a node makes members (as measured) and how much memory it has for them. Nodes
  that have not been measured count as the others on average. None is given more than its memory holds.
* What lies somewhere stays there, unless it is far from a fair split (`shares.resettle`). After a start of the master,
  a node's own targets are what lay there before; nothing is moved about until every node has told its own.
* A node on which members do not become ready keeps its share, and goes on trying, for `FAILING_FOR`; then others get
  it for `BARRED_FOR`. What is asked for in all stays the same, so nothing is made in excess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from greenroom.fleet.shares import split
from greenroom.fleet.warmpools import bounds
from greenroom.master.autoscaling import ArrivalRate, Scale
from greenroom.master.declared import DeclaredPool
from greenroom.master.rollout import Rollout
from greenroom.master.shares import resettle
from greenroom.wire.messages import DrivenPool, NodeStatus, PoolCounts, PoolName, PoolSpec, PoolStatus, Size

FAILING_FOR = 60.0
"""Seconds for which a node may fail to make a pool's members before others get its share."""
BARRED_FOR = 300.0
"""Seconds after which it may try again."""
PART_OF_MEMORY = 8
"""A waiting member takes this part of its size's memory, as long as nobody has measured it: one that was restored
shares its golden's, and has written little of its own."""
LEAST_MIB = 16
"""MiB that any member takes."""
_UNIT = 1000
"""Weight of an average node."""
_LIGHTEST, _HEAVIEST = 100, 10_000
_LOOK_EVERY = 1.0
"""Seconds between decisions while a pool follows its claims."""


class Node:
    """What is known of one node that may be given members."""

    __slots__ = ("barred", "counts", "failing", "heard", "placed", "pools", "room_mib")

    def __init__(self) -> None:
        self.heard = False
        """It has told of itself since it came."""
        self.room_mib: int | None = None
        self.pools: dict[PoolName, PoolStatus] = {}
        """As its last heartbeat told."""
        self.counts: dict[PoolName, PoolCounts] = {}
        """As its stream tells."""
        self.placed: dict[PoolName, int] = {}
        """Targets it was given; before it was given any, those it says it has."""
        self.failing: dict[PoolName, float] = {}
        """Since when members of a pool do not become ready here."""
        self.barred: dict[PoolName, float] = {}
        """Until when a pool's members are made elsewhere."""

    def ready(self, key: PoolName) -> int:
        """Members that wait here."""
        if (counts := self.counts.get(key)) is not None:
            return counts.warm
        status = self.pools.get(key)
        return 0 if status is None else status.warm

    def budget_mib(self, sizes: Mapping[PoolName, Size]) -> int | None:
        """Memory for members, with what those take that are there; None where they take nothing."""
        if self.room_mib is None:
            return None
        held = sum(
            (pool.warm + pool.starting) * self.member_mib(key, sizes.get(key))
            for key, pool in self.pools.items()
        )
        return self.room_mib + held

    def member_mib(self, key: PoolName, size: Size | None) -> int:
        """Memory that one member takes here."""
        status = self.pools.get(key)
        if status is not None and status.member_mib is not None:
            return max(1, status.member_mib)
        return LEAST_MIB if size is None else max(LEAST_MIB, size.memory_mib // PART_OF_MEMORY)


class Decision(NamedTuple):
    """What is to be asked of nodes, by name, and what became of each SandboxWarmPool."""

    lists: dict[str, list[PoolSpec]]
    driven: list[DrivenPool]
    unplaced: int
    wake: float | None
    """When to decide again though nothing has happened; None where that changes nothing."""


class _Want(NamedTuple):
    """A declared pool and how many members it is to have now."""

    pool: DeclaredPool
    desired: int


class Driver:
    """See the module. Times are seconds of any one clock that never goes back."""

    def __init__(self, warm: Literal["paused", "running"] = "paused") -> None:
        self._warm = warm
        """How members of SandboxWarmPools wait."""
        self.nodes: dict[str, Node] = {}
        self._specs: dict[PoolName, PoolSpec] = {}
        self._pools: dict[tuple[str, str], DeclaredPool] = {}
        self._rollouts: dict[tuple[str, str], Rollout] = {}
        self._scales: dict[tuple[str, str], Scale] = {}
        self._desired: dict[tuple[str, str], int] = {}
        self._rates: dict[PoolName, ArrivalRate] = {}
        self._sizes: dict[PoolName, Size] = {}
        """Of every pool that is wanted, or was."""
        self._rolling: set[PoolName] = set()
        """Pools whose numbers of ready members decide something."""

    def __repr__(self) -> str:
        return f"<Driver nodes={len(self.nodes)} pools={len(self._specs)}+{len(self._pools)}>"

    # What happens

    def declare(self, specs: Iterable[PoolSpec], pools: Iterable[DeclaredPool]) -> None:
        """All that is declared now."""
        self._specs = {PoolName(spec.template, spec.size.name): spec for spec in specs if spec.target > 0}
        self._pools = {(pool.namespace, pool.name): pool for pool in pools}
        for pool in self._pools.values():
            if pool.key is not None and pool.size is not None:
                self._sizes[pool.key] = pool.size
        for key, spec in self._specs.items():
            self._sizes[key] = spec.size
        for part in (self._rollouts, self._scales, self._desired):
            for place in [place for place in part if place not in self._pools]:
                del part[place]
        scaled = {pool.key for pool in self._pools.values() if pool.autoscaling is not None}
        self._rates = {key: rate for key, rate in self._rates.items() if key in scaled}

    def follow(self, names: Iterable[str]) -> None:
        """The nodes that may be given members now."""
        wanted = dict.fromkeys(names)
        for name in [name for name in self.nodes if name not in wanted]:
            del self.nodes[name]
        for name in wanted:
            if name not in self.nodes:
                self.nodes[name] = Node()

    def heard(self, status: NodeStatus, now: float) -> bool:
        """A node tells of itself. True where that is reason to decide anew at once."""
        node = self.nodes.get(status.name)
        if node is None:
            return False
        first, node.heard = not node.heard, True
        failing = {key for key, pool in node.pools.items() if pool.failing}
        node.room_mib = status.room_mib
        node.pools = {PoolName(pool.template, pool.size): pool for pool in status.pools}
        if first:
            node.placed = {key: pool.target for key, pool in node.pools.items() if pool.target > 0}
        for key, pool in node.pools.items():
            if not (pool.failing and pool.warm < pool.target):
                node.failing.pop(key, None)
            elif now - node.failing.setdefault(key, now) >= FAILING_FOR:
                del node.failing[key]
                node.barred[key] = now + BARRED_FOR
        return first or failing != {key for key, pool in node.pools.items() if pool.failing}

    def counted(self, name: str, counts: Iterable[PoolCounts]) -> bool:
        """A node's stream tells of its pools. True where that is reason to decide anew."""
        node = self.nodes.get(name)
        if node is None:
            return False
        matters = False
        for pool in counts:
            key = PoolName(pool.template, pool.size)
            before = node.counts.get(key)
            if before is not pool:
                node.counts[key] = pool
                matters |= key in self._rolling and (before is None or before.warm != pool.warm)
        return matters

    def arrived(self, key: PoolName, now: float) -> None:
        """A claim has come for a pool."""
        rate = self._rates.get(key)
        if rate is not None:
            rate.arrived(now)

    # What follows from it

    def decide(self, now: float) -> Decision:
        """What is to be asked of each node, all that is known taken together."""
        wants = [_Want(pool, self._desire(place, pool, now)) for place, pool in self._pools.items()]
        current, old, recreated = self._roll(wants)
        keys = sorted(current.keys() | old.keys(), key=lambda key: (key.template, key.size))
        budgets = {name: node.budget_mib(self._sizes) for name, node in self.nodes.items()}
        placed: dict[str, dict[PoolName, int]] = {name: {} for name in self.nodes}
        # What is there already takes its memory whatever else is wanted; each pool's own is given back in its turn.
        kept = [key for key in keys if key not in current]
        later = [key for key in keys if key in current]
        for key in kept:
            there = sum(node.ready(key) for node in self.nodes.values())
            self._put(placed, key, self._shrunk(key, old[key] if key in recreated else min(old[key], there)))
        free = {
            name: None if budget is None else budget - self._held(name, placed[name], later)
            for name, budget in budgets.items()
        }
        memory = _relative(budgets)
        missing: dict[PoolName, int] = {}
        for key in later:
            total = current[key] + old.get(key, 0)
            shares = self._shares(key, total, free, memory, now)
            self._put(placed, key, shares)
            missing[key] = total - sum(shares.values())
        for name, node in self.nodes.items():
            if node.heard:
                node.placed = placed[name]
            # What one has that was not heard is only guessed, and no reason to take anything from others later.
        return Decision(
            lists={name: self._list(targets) for name, targets in placed.items()},
            driven=self._driven(wants, dict(missing)),
            unplaced=sum(missing.values()),
            wake=self._wake(now),
        )

    def _desire(self, place: tuple[str, str], pool: DeclaredPool, now: float) -> int:
        least, most = bounds(pool.replicas, pool.autoscaling)
        if pool.autoscaling is None or pool.key is None:
            self._scales.pop(place, None)
            return least
        rate = self._rates.get(pool.key)
        if rate is None:
            rate = self._rates[pool.key] = ArrivalRate(now)
        scale = self._scales.setdefault(place, Scale())
        return scale.want(rate.rate(now), self._make_seconds(pool.key), least, most, now)

    def _make_seconds(self, key: PoolName) -> float | None:
        """What making one member takes, on average over the nodes that have measured it."""
        told = (node.pools.get(key) for node in self.nodes.values())
        lengths = [pool.make_seconds for pool in told if pool is not None and pool.make_seconds is not None]
        return sum(lengths) / len(lengths) if lengths else None

    def _roll(self, wants: list[_Want]) -> tuple[dict[PoolName, int], dict[PoolName, int], set[PoolName]]:
        """Members wanted of each pool, those kept of older templates, and which of these are made anew to a floor."""
        for pool, desired in wants:
            place = (pool.namespace, pool.name)
            rollout = self._rollouts.setdefault(place, Rollout())
            if pool.key is not None:
                rollout.turn_to(pool.key, self._desired.get(place, desired))
            self._desired[place] = desired
        claimed = {key: spec.target for key, spec in self._specs.items()}
        """Members that are some pool's, of those that are ready."""
        for pool, desired in wants:
            key = self._rollouts[pool.namespace, pool.name].key
            if key is not None:
                claimed[key] = claimed.get(key, 0) + desired
        current = {key: spec.target for key, spec in self._specs.items()}
        old: dict[PoolName, int] = {}
        recreated: set[PoolName] = set()
        self._rolling = set()
        there: dict[PoolName, int] = {}
        for pool, desired in wants:
            rollout = self._rollouts[pool.namespace, pool.name]

            def ready(key: PoolName, own: int = desired, newest: PoolName | None = rollout.key) -> int:
                if key not in there:
                    there[key] = sum(node.ready(key) for node in self.nodes.values())
                return max(0, there[key] - claimed.get(key, 0) + (own if key == newest else 0))

            wanted, kept = rollout.targets(desired, pool.recreate, ready)
            if rollout.key is not None:
                current[rollout.key] = current.get(rollout.key, 0) + wanted
            for key, target in kept.items():
                old[key] = old.get(key, 0) + target
                claimed[key] = claimed.get(key, 0) + target
                if pool.recreate:
                    recreated.add(key)
            if kept and rollout.key is not None:
                self._rolling |= {rollout.key, *kept}
        return current, old, recreated

    @staticmethod
    def _put(placed: dict[str, dict[PoolName, int]], key: PoolName, shares: Mapping[str, int]) -> None:
        for name, share in shares.items():
            if share > 0:
                placed[name][key] = share

    def _shrunk(self, key: PoolName, total: int) -> dict[str, int]:
        """What is left to each node of members that are only kept: first those go that are not ready."""
        targets = {name: node.placed.get(key, 0) for name, node in self.nodes.items()}
        for spare in (
            {name: max(0, target - self.nodes[name].ready(key)) for name, target in targets.items()},
            targets,
        ):
            excess = sum(targets.values()) - total
            if excess > 0:
                for name, less in split(min(excess, sum(spare.values())), dict(spare), str(key)).items():
                    targets[name] -= less
        return targets

    def _held(self, name: str, targets: Mapping[PoolName, int], later: Iterable[PoolName]) -> int:
        """MiB that some targets take on a node, with what it has ready of other pools."""
        node = self.nodes[name]
        held = sum(share * self._mib(node, key) for key, share in targets.items())
        return held + sum(self._owned(node, key) for key in later)

    def _mib(self, node: Node, key: PoolName) -> int:
        return node.member_mib(key, self._sizes.get(key))

    def _owned(self, node: Node, key: PoolName) -> int:
        """MiB of the members of a pool that a node has ready, and is to have."""
        members = min(node.placed.get(key, 0), node.ready(key))
        return members * self._mib(node, key) if members else 0

    def _shares(
        self,
        key: PoolName,
        total: int,
        free: dict[str, int | None],
        memory: Mapping[str, float],
        now: float,
    ) -> dict[str, int]:
        """Each node's share of a pool. `free` is the memory that is left for it, and is less by it afterwards."""
        most: dict[str, int | None] = dict.fromkeys(free)
        for name, room in free.items():
            if room is not None:
                node = self.nodes[name]
                free[name] = room = room + self._owned(node, key)
                most[name] = max(0, room // self._mib(node, key))
        before = {name: node.placed.get(key, 0) for name, node in self.nodes.items()}
        may_move = all(node.heard for node in self.nodes.values())
        weights = self._weights(key, memory, now)
        shares = resettle(total, weights, most, before, f"{key.template}/{key.size}", may_move=may_move)
        for name, room in free.items():
            if room is not None and shares[name]:
                free[name] = room - shares[name] * self._mib(self.nodes[name], key)
        return shares

    def _weights(self, key: PoolName, memory: Mapping[str, float], now: float) -> dict[str, int]:
        rates: dict[str, float | None] = {}
        barred = set()
        for name, node in self.nodes.items():
            status = node.pools.get(key)
            rates[name] = None if status is None else status.refill_rate
            if key in node.barred:
                if node.barred[key] > now:
                    barred.add(name)
                else:
                    del node.barred[key]
        speed = _relative(rates)
        weights = {}
        for name in self.nodes:
            weight = round(_UNIT * math.sqrt(speed[name] * memory[name]))
            weights[name] = min(_HEAVIEST, max(_LIGHTEST, weight))
        if len(barred) < len(weights):
            for name in barred:
                weights[name] = 0
        return weights

    def list_of(self, name: str) -> list[PoolSpec]:
        """The targets that a node has, as far as they are declared."""
        node = self.nodes.get(name)
        return [] if node is None else self._list(node.placed)

    def _list(self, targets: Mapping[PoolName, int]) -> list[PoolSpec]:
        specs = []
        for key, target in sorted(targets.items(), key=lambda item: (item[0].template, item[0].size)):
            size = self._sizes.get(key)
            if size is not None and target > 0:
                declared = self._specs.get(key)
                warm = self._warm if declared is None else declared.warm
                specs.append(PoolSpec(template=key.template, size=size, target=target, warm=warm))
        return specs

    def _driven(self, wants: list[_Want], missing: dict[PoolName, int]) -> list[DrivenPool]:
        driven = []
        for pool, desired in reversed(wants):
            rollout = self._rollouts[pool.namespace, pool.name]
            key, unplaced = rollout.key, 0
            if key is not None and missing.get(key, 0) > 0:
                # Of those who share what there is, the last go short.
                unplaced = min(missing[key], rollout.wanted)
                missing[key] -= unplaced
            driven.append(
                DrivenPool(
                    namespace=pool.namespace,
                    name=pool.name,
                    key=key,
                    size=None if key is None else self._sizes.get(key),
                    old_keys=list(rollout.old),
                    targets=[*rollout.old.values(), *([] if key is None else [rollout.wanted])],
                    desired=desired,
                    unplaced=unplaced,
                    problem=pool.problem or self._problem(key, unplaced),
                    observed_generation=pool.generation,
                )
            )
        return driven[::-1]

    def _problem(self, key: PoolName | None, unplaced: int) -> str:
        if unplaced and not self.nodes:
            return "no node is there to keep members; start one"
        if unplaced:
            return (
                f"{unplaced} members fit on no node; add nodes or memory, end sandboxes that are not needed, "
                "or ask for fewer"
            )
        for name, node in sorted(self.nodes.items()):
            status = None if key is None else node.pools.get(key)
            if status is not None and status.failing:
                return f"members do not become ready on node {name}: {status.reason or 'see its log'}"
        return ""

    def _wake(self, now: float) -> float | None:
        due = [until for node in self.nodes.values() for until in node.barred.values()]
        if self._scales:
            due.append(now + _LOOK_EVERY)
        return min(due, default=None)


def _relative(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Each against the mean of those that are known; one that is not is taken for average."""
    known = [number for number in numbers.values() if number is not None]
    mean = sum(known) / len(known) if known else 0.0
    if mean <= 0:
        return dict.fromkeys(numbers, 1.0)
    return {name: 1.0 if number is None else number / mean for name, number in numbers.items()}
