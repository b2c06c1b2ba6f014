"""The pools' driver on a fleet that is simulated as simply as it can be: nodes keep what they are told, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from greenroom.api.kube.stored.driving import Driven
from greenroom.api.kube.stored.poolstatus import Count, parted
from greenroom.fleet.warmpools import Autoscaling
from greenroom.master.declared import DeclaredPool
from greenroom.master.driver import BARRED_FOR, FAILING_FOR, Decision, Driver
from greenroom.master.rollout import floor_of
from greenroom.wire.messages import DrivenPools, NodeStatus, PoolCounts, PoolName, PoolSpec, PoolStatus, Size

SMALL = Size("small", 1, 512, 4096)
K1, K2, K3 = (PoolName(name, "small") for name in ("one", "two", "three"))
MEMBER_MIB = 64
"""An eighth of the size's memory."""


class Node:
    """What a node has: members that are ready, by pool, made one at a time."""

    def __init__(self, name: str, room_mib: int | None = None, rate: float | None = None) -> None:
        self.name = name
        self.memory = room_mib
        self.rate = rate
        self.targets: dict[PoolName, int] = {}
        self.warm: dict[PoolName, int] = {}
        self.broken: set[PoolName] = set()
        self.made: dict[PoolName, int] = {}

    def tell(self, specs: list[PoolSpec]) -> None:
        self.targets = {PoolName(spec.template, spec.size.name): spec.target for spec in specs}
        for key in self.warm:
            self.warm[key] = min(self.warm[key], self.targets.get(key, 0))

    def make(self, key: PoolName) -> bool:
        if key in self.broken or self.warm.get(key, 0) >= self.targets.get(key, 0):
            return False
        self.warm[key] = self.warm.get(key, 0) + 1
        self.made[key] = self.made.get(key, 0) + 1
        return True

    def status(self) -> NodeStatus:
        held = sum(self.warm.values()) * MEMBER_MIB
        pools = [
            PoolStatus(
                template=key.template,
                size=key.size,
                target=self.targets.get(key, 0),
                warm=self.warm.get(key, 0),
                starting=0,
                waiting=0,
                failing=key in self.broken,
                reason="it does not boot" if key in self.broken else "",
                refill_rate=self.rate,
                make_seconds=None if self.rate is None else 1 / self.rate,
            )
            for key in {**self.targets, **self.warm}
        ]
        return NodeStatus(
            name=self.name,
            code=self.name,
            api_url="http://h",
            relay_host="h",
            relay_port=1,
            engine="qemu",
            pools=pools,
            room_mib=None if self.memory is None else max(0, self.memory - held),
        )

    def counts(self) -> list[PoolCounts]:
        return [
            PoolCounts(template=key.template, size=key.size, target=target, warm=warm, starting=0, waiting=0)
            for key, warm in self.warm.items()
            for target in [self.targets.get(key, 0)]
        ]


class Fleet:
    """Nodes and their driver. `calls` are the lists that nodes were told."""

    def __init__(self, *nodes: Node) -> None:
        self.driver = Driver()
        self.nodes = {node.name: node for node in nodes}
        self.told: dict[str, list[PoolSpec]] = {}
        self.calls: list[str] = []
        self.now = 0.0
        self.decision = Decision({}, [], 0, None)
        self.beat()

    def beat(self) -> None:
        """Every node sends a heartbeat, and its counts."""
        self.driver.follow(self.nodes)
        for node in self.nodes.values():
            self.driver.heard(node.status(), self.now)
            self.driver.counted(node.name, node.counts())

    def decide(self) -> None:
        self.driver.follow(self.nodes)
        self.decision = self.driver.decide(self.now)
        for name, specs in self.decision.lists.items():
            if self.told.get(name, []) != specs:
                self.calls.append(name)
                self.told[name] = specs
                self.nodes[name].tell(specs)

    def settle(self) -> None:
        """Until nothing changes any more."""
        for _ in range(300):
            self.beat()
            self.decide()
            made = [node.make(key) for node in self.nodes.values() for key in node.targets]
            if not any(made):
                seen = list(self.calls)
                self.beat()
                self.decide()
                if self.calls == seen:
                    return
        raise AssertionError("the fleet does not settle")

    def targets(self, key: PoolName) -> dict[str, int]:
        return {name: node.targets[key] for name, node in self.nodes.items() if node.targets.get(key)}

    def asked(self, key: PoolName) -> int:
        return sum(self.targets(key).values())

    def ready(self, *keys: PoolName) -> int:
        return sum(node.warm.get(key, 0) for node in self.nodes.values() for key in keys)


def spec(key: PoolName = K1, target: int = 4) -> PoolSpec:
    return PoolSpec(template=key.template, size=SMALL, target=target)


def pool(replicas: int, key: PoolName | None = K1, name: str = "pool", **fields: Any) -> DeclaredPool:
    return DeclaredPool(namespace="ns", name=name, replicas=replicas, key=key, size=SMALL, **fields)


def test_targets_are_split_and_only_nodes_whose_list_changes_are_told() -> None:
    fleet = Fleet(Node("a"), Node("b"), Node("c"))
    fleet.driver.declare([spec(K1, 6)], [])
    fleet.settle()
    assert fleet.targets(K1) == {"a": 2, "b": 2, "c": 2}
    assert fleet.calls == ["a", "b", "c"]
    fleet.driver.declare([spec(K1, 7)], [])
    fleet.settle()
    assert len(fleet.calls) == 4
    fleet.settle()
    assert len(fleet.calls) == 4


def test_two_pools_of_one_key_add_up_with_a_pool_of_greenrooms_own() -> None:
    fleet = Fleet(Node("a"))
    fleet.driver.declare([spec(K1, 3)], [pool(4, name="x"), pool(5, name="y")])
    fleet.settle()
    assert fleet.asked(K1) == 12
    assert [driven.desired for driven in fleet.decision.driven] == [4, 5]


def test_how_members_wait_is_as_declared() -> None:
    fleet = Fleet(Node("a"))
    running = PoolSpec(template="one", size=SMALL, target=1, warm="running")
    fleet.driver.declare([running], [pool(1), pool(1, K2, "other")])
    fleet.settle()
    assert [(each.template, each.target, each.warm) for each in fleet.told["a"]] == [
        ("one", 2, "running"),
        ("two", 1, "paused"),
    ]


def test_a_split_follows_measured_speed_and_stays_when_that_changes_a_little() -> None:
    fast, slow = Node("a", rate=30.0), Node("b", rate=10.0)
    fleet = Fleet(fast, slow)
    fleet.driver.declare([spec(K1, 100)], [])
    fleet.settle()
    share = fleet.targets(K1)
    assert share["a"] > 1.5 * share["b"]
    calls = len(fleet.calls)
    fast.rate, slow.rate = 28.0, 11.0
    fleet.settle()
    assert (fleet.targets(K1), len(fleet.calls)) == (share, calls)
    fast.rate, slow.rate = 10.0, 30.0
    fleet.settle()
    assert fleet.targets(K1)["b"] > fleet.targets(K1)["a"]


def test_what_fits_on_no_node_is_told() -> None:
    fleet = Fleet(Node("a", room_mib=3 * MEMBER_MIB), Node("b", room_mib=5 * MEMBER_MIB))
    fleet.driver.declare([], [pool(6, name="first"), pool(4, name="second")])
    fleet.settle()
    assert fleet.targets(K1) == {"a": 3, "b": 5}
    assert fleet.decision.unplaced == 2
    first, second = fleet.decision.driven
    assert (first.unplaced, first.problem) == (0, "")
    assert second.unplaced == 2
    assert second.problem.startswith("2 members fit on no node; add nodes")


def test_without_any_node_all_is_unplaced() -> None:
    fleet = Fleet()
    fleet.driver.declare([], [pool(3)])
    fleet.decide()
    [driven] = fleet.decision.driven
    assert (driven.unplaced, driven.problem) == (3, "no node is there to keep members; start one")


def test_a_pool_without_a_template_says_so_and_keeps_what_it_had() -> None:
    fleet = Fleet(Node("a"))
    fleet.driver.declare([], [pool(3)])
    fleet.settle()
    fleet.driver.declare([], [pool(3, None, problem="there is no SandboxTemplate 't'")])
    fleet.settle()
    [driven] = fleet.decision.driven
    assert driven.problem == "there is no SandboxTemplate 't'"
    assert fleet.ready(K1) == 3
    fleet.driver.declare([], [])
    fleet.settle()
    assert fleet.ready(K1) == 0
    assert fleet.decision.driven == []


def test_a_node_that_fails_keeps_its_share_for_a_while_and_nothing_is_made_in_excess() -> None:
    bad, good = Node("a"), Node("b")
    bad.broken = {K1}
    fleet = Fleet(bad, good)
    fleet.driver.declare([], [pool(8)])
    fleet.settle()
    assert fleet.targets(K1) == {"a": 4, "b": 4}
    assert "node a: it does not boot" in fleet.decision.driven[0].problem
    fleet.now += FAILING_FOR - 1
    fleet.settle()
    assert fleet.targets(K1) == {"a": 4, "b": 4}
    fleet.now += 1
    fleet.settle()
    assert fleet.targets(K1) == {"b": 8}
    assert fleet.decision.wake is not None
    bad.broken = set()
    fleet.now += BARRED_FOR
    fleet.settle()
    assert fleet.targets(K1) == {"a": 4, "b": 4}


def test_where_every_node_fails_nothing_is_moved() -> None:
    nodes = [Node("a"), Node("b")]
    for node in nodes:
        node.broken = {K1}
    fleet = Fleet(*nodes)
    fleet.driver.declare([], [pool(8)])
    fleet.settle()
    fleet.now += FAILING_FOR
    fleet.settle()
    assert fleet.targets(K1) == {"a": 4, "b": 4}


def test_a_new_driver_finds_members_where_they_are() -> None:
    nodes = [Node("a"), Node("b"), Node("c")]
    first = Fleet(*nodes)
    first.driver.declare([spec(K1, 9)], [])
    first.settle()
    nodes[0].tell([spec(K1, 5)])
    nodes[1].tell([spec(K1, 4)])
    nodes[2].tell([])
    driver = Driver()
    driver.declare([spec(K1, 9)], [])
    driver.follow("abc")
    # It has heard of none, then of one: what that one has stays, the others' share is not known yet.
    driver.decide(0.0)
    driver.heard(nodes[0].status(), 0.0)
    assert [each.target for each in driver.decide(0.0).lists["a"]] == [5]
    driver.heard(nodes[1].status(), 0.0)
    assert [each.target for each in driver.decide(0.0).lists["b"]] == [4]
    driver.heard(nodes[2].status(), 0.0)
    # Now all are known, and it is fair to share.
    assert {name: [each.target for each in told] for name, told in driver.decide(0.0).lists.items()} == {
        "a": [3],
        "b": [3],
        "c": [3],
    }


def test_old_members_stay_until_they_are_claimed() -> None:
    a, b = Node("a"), Node("b")
    fleet = Fleet(a, b)
    fleet.driver.declare([], [pool(10)])
    fleet.settle()
    fleet.driver.declare([], [pool(10, K2)])
    fleet.settle()
    assert (fleet.ready(K1), fleet.ready(K2)) == (10, 0)
    [driven] = fleet.decision.driven
    assert (driven.key, driven.old_keys) == (K2, [K1])
    a.warm[K1] -= 2
    fleet.settle()
    assert (fleet.ready(K1), fleet.asked(K1), fleet.ready(K2)) == (8, 8, 2)
    # Back again before all are gone: what is left of the first is the pool's once more.
    fleet.driver.declare([], [pool(10, K1)])
    fleet.settle()
    assert (fleet.ready(K1), fleet.ready(K2)) == (8, 2)
    for node in (a, b):
        node.warm[K2] = 0
    fleet.settle()
    assert (fleet.ready(K1), fleet.asked(K2)) == (10, 0)
    assert fleet.decision.driven[0].old_keys == []


def test_what_is_wanted_of_each_kind_is_told() -> None:
    node = Node("a")
    fleet = Fleet(node)
    fleet.driver.declare([spec(K2, 4)], [pool(3, name="x"), pool(2, name="y")])
    fleet.settle()
    fleet.driver.declare([spec(K2, 4)], [pool(3, name="x"), pool(2, K2, name="y")])
    node.warm[K1] -= 1
    fleet.settle()
    x, y = fleet.decision.driven
    assert (x.old_keys, x.targets, x.desired) == ([], [3], 3)
    assert (y.old_keys, y.targets, y.desired) == ([K1], [1, 1], 2)
    assert (fleet.asked(K1), fleet.asked(K2)) == (4, 5)


def test_the_maximum_holds_whatever_the_replicas_are() -> None:
    fleet = Fleet(Node("a"))
    fleet.driver.declare([], [pool(3, autoscaling=Autoscaling(max_replicas=1))])
    fleet.settle()
    assert fleet.asked(K1) == 1
    assert fleet.decision.driven[0].desired == 1


def test_two_pools_that_leave_one_template_do_not_count_its_members_twice() -> None:
    node = Node("a")
    fleet = Fleet(node)
    fleet.driver.declare([], [pool(10, name="x"), pool(10, name="y")])
    fleet.settle()
    fleet.driver.declare([], [pool(10, K2, "x"), pool(10, K2, "y")])
    node.warm[K1] = 15
    fleet.settle()
    assert (fleet.asked(K1), fleet.ready(K1), fleet.ready(K2)) == (15, 15, 5)


def test_a_broken_new_template_leaves_the_floor_of_the_old_one() -> None:
    node = Node("a")
    node.broken = {K2}
    fleet = Fleet(node)
    fleet.driver.declare([], [pool(10, recreate=True)])
    fleet.settle()
    fleet.driver.declare([], [pool(10, K2, recreate=True)])
    fleet.settle()
    assert (fleet.ready(K1), fleet.ready(K2)) == (8, 0)
    node.warm[K1] = 3
    fleet.settle()
    assert fleet.ready(K1) == 8
    node.broken = set()
    fleet.settle()
    assert (fleet.ready(K1), fleet.ready(K2)) == (0, 10)


def test_a_scaled_pool_follows_the_claims_and_has_a_floor() -> None:
    node = Node("a", rate=2.0)
    fleet = Fleet(node)
    bounds = Autoscaling(max_replicas=20)
    fleet.driver.declare([], [pool(2, autoscaling=bounds)])
    fleet.settle()
    assert fleet.asked(K1) == 2
    assert fleet.decision.wake == fleet.now + 1.0
    for _ in range(60):
        fleet.now += 0.1
        fleet.driver.arrived(K1, fleet.now)
    fleet.beat()
    fleet.decide()
    assert 2 < fleet.asked(K1) <= 20
    most = fleet.asked(K1)
    fleet.now += 30
    fleet.decide()
    fleet.now += 30
    fleet.decide()
    assert fleet.asked(K1) == most
    for _ in range(20):
        fleet.now += 60
        fleet.decide()
    assert fleet.asked(K1) == 2


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.integers(1, 30),
    nodes=st.integers(1, 4),
    room=st.none() | st.integers(0, 40),
    order=st.lists(st.integers(0, 7), min_size=1, max_size=60),
)
def test_recreating_a_pool_never_has_fewer_than_the_floor_ready(
    replicas: int, nodes: int, room: int | None, order: list[int]
) -> None:
    """Members are made in any order, and what nodes tell comes at any time."""
    fleet = Fleet(
        *(Node(f"n{number}", None if room is None else room * MEMBER_MIB) for number in range(nodes))
    )
    fleet.driver.declare([], [pool(replicas, recreate=True)])
    fleet.settle()
    before = fleet.ready(K1)
    floor = min(floor_of(replicas), before)
    fleet.driver.declare([], [pool(replicas, K2, recreate=True)])
    names = list(fleet.nodes)
    for step in order:
        node = fleet.nodes[names[step % nodes]]
        if step % 2:
            node.make(K2)
        elif step > 3:
            fleet.driver.heard(node.status(), fleet.now)
        else:
            fleet.driver.counted(node.name, node.counts())
        fleet.decide()
        assert fleet.ready(K1, K2) >= floor
    fleet.settle()
    assert fleet.ready(K1, K2) >= floor
    if room is None:
        assert (fleet.ready(K1), fleet.ready(K2)) == (0, replicas)


class AnyFleet(RuleBasedStateMachine):
    """Nodes come, go, are claimed from; pools are declared and change. Once it settles, all is as it should be."""

    names = st.sampled_from(["a", "b", "c", "d"])
    keys = st.sampled_from([K1, K2, K3])
    pool_names = st.sampled_from(["x", "y"])

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.specs: dict[PoolName, PoolSpec] = {}
        self.pools: dict[str, DeclaredPool] = {}

    @rule(name=names, rate=st.none() | st.floats(0.5, 50.0))
    def node_comes(self, name: str, rate: float | None) -> None:
        if name not in self.fleet.nodes:
            self.fleet.nodes[name] = Node(name, rate=rate)
            self.fleet.told.pop(name, None)

    @rule(name=names)
    def node_goes(self, name: str) -> None:
        self.fleet.nodes.pop(name, None)
        self.fleet.told.pop(name, None)
        self.fleet.driver.follow(self.fleet.nodes)

    @rule(key=keys, wanted=st.integers(0, 20))
    def pool_of_our_own(self, key: PoolName, wanted: int) -> None:
        self.specs[key] = spec(key, wanted)
        self.fleet.driver.declare(self.specs.values(), self.pools.values())

    @rule(name=pool_names, key=keys, replicas=st.integers(0, 20), recreate=st.booleans())
    def warm_pool(self, name: str, key: PoolName, replicas: int, recreate: bool) -> None:
        self.pools[name] = pool(replicas, key, name, recreate=recreate)
        self.fleet.driver.declare(self.specs.values(), self.pools.values())

    @rule(name=pool_names)
    def warm_pool_goes(self, name: str) -> None:
        self.pools.pop(name, None)
        self.fleet.driver.declare(self.specs.values(), self.pools.values())

    @rule(name=names, key=keys)
    def claimed(self, name: str, key: PoolName) -> None:
        node = self.fleet.nodes.get(name)
        if node is not None and node.warm.get(key):
            node.warm[key] -= 1

    @rule(name=names, key=keys)
    def made(self, name: str, key: PoolName) -> None:
        if (node := self.fleet.nodes.get(name)) is not None:
            node.make(key)

    @rule()
    def decides(self) -> None:
        self.fleet.beat()
        self.fleet.decide()
        self.shown()

    def shown(self) -> dict[str, int]:
        """Ready members of each pool as its status has them: together with those of Greenroom's own they are all there
        are of the keys that are wanted, and no pool has more than it asked for where no key has."""
        driven = Driven(lambda: None)
        driven.learn(DrivenPools(1, self.fleet.decision.driven))
        targets = {("ns", name): driven.targets(("ns", name)) for name in self.pools}
        declared = {key: each.target for key, each in self.specs.items() if each.target}
        parts = parted(targets, declared, lambda key: Count(self.fleet.ready(key)))
        shared = {key for each in targets.values() for key in each}
        there = sum(self.fleet.ready(key) for key in shared)
        alone = sum(self.fleet.ready(key) for key in shared if key not in declared)
        assert alone <= sum(part.warm for part in parts.values()) <= there
        wanted = {key: sum(each.get(key, 0) for each in targets.values()) for key in shared}
        if all(self.fleet.ready(key) <= wanted[key] + declared.get(key, 0) for key in shared):
            for (namespace, name), part in parts.items():
                assert part.warm <= sum(targets[namespace, name].values())
        return {name: part.warm for (_, name), part in parts.items()}

    @precondition(lambda self: self.fleet.nodes)
    @rule()
    def settles(self) -> None:
        self.fleet.settle()
        wanted = sum(each.target for each in self.specs.values())
        wanted += sum(each.replicas for each in self.pools.values())
        asked = sum(self.fleet.asked(key) for key in (K1, K2, K3))
        assert asked == wanted
        assert self.fleet.ready(K1, K2, K3) == wanted
        assert self.shown() == {name: each.replicas for name, each in self.pools.items()}
        for each in self.fleet.decision.driven:
            assert each.unplaced == 0
            assert each.key not in each.old_keys
        calls = len(self.fleet.calls)
        self.fleet.settle()
        assert len(self.fleet.calls) == calls

    @invariant()
    def nothing_is_negative(self) -> None:
        for specs in self.fleet.decision.lists.values():
            assert all(each.target > 0 for each in specs)


TestAnyFleet = AnyFleet.TestCase
TestAnyFleet.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    ("replicas", "floor"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (10, 8), (100, 75), (2500, 1875)]
)
def test_a_floor_is_three_quarters_rounded_up(replicas: int, floor: int) -> None:
    assert floor_of(replicas) == floor
