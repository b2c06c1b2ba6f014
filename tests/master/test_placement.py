"""Which node a claim goes to: warm ones first and evenly, else the shortest queue, as nodes tell it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.fleet.view import View
from greenroom.fleet.warm import WarmIndex
from greenroom.master.membership import Membership
from greenroom.master.placement import Candidate, Placement, choose
from greenroom.wire.changes import Beat, Counted, Whole
from greenroom.wire.messages import NodeStatus, PoolCounts, PoolStatus

POOL = ("base", "small")
counts = st.integers(0, 50)
candidates = st.lists(
    st.builds(
        Candidate,
        name=st.text("abcdef", min_size=1, max_size=6),
        code=st.just("aaaa"),
        keeps_pool=st.booleans(),
        warm=counts,
        starting=counts,
        waiting=counts,
        sandboxes=counts,
    ),
    unique_by=lambda candidate: candidate.name,
    max_size=8,
)


class Fleet:
    """Nodes `n0`, `n1`, … whose codes are `n0aa`, …; all of them are followed unless `seen` is False."""

    def __init__(self) -> None:
        self.warm = WarmIndex()
        self.view = View(self.warm)
        self.membership = Membership(60.0)
        self.placement = Placement(self.view, self.warm, self.membership)
        self.seqs: dict[str, int] = {}

    def node(self, name: str, *, seen: bool = True, **fields: Any) -> None:
        code = (name + "aaaa")[:4]
        told = PoolStatus(**{"starting": 0, "waiting": 0, **pool(**fields)})
        status = NodeStatus(
            name=name,
            code=code,
            api_url="http://h",
            relay_host="h",
            relay_port=1,
            engine="qemu",
            pools=[told],
        )
        self.membership.register(status, 0.0, 0.0)
        self.view.join(code, name, 0.0)
        self.warm.admit(code, True)
        if seen:
            whole = Whole(stream=f"{code}-x", seq=0, sandboxes=[], pools=[])
            assert self.view.apply(code, whole, 0.0)
            assert self.view.apply(code, Beat(stream=f"{code}-x", seq=0, head=0), 0.0)
            self.seqs[name] = 0
            self.tell(name, **fields)

    def tell(self, name: str, **fields: Any) -> None:
        self.seqs[name] += 1
        code = (name + "aaaa")[:4]
        frame = Counted(stream=f"{code}-x", seq=self.seqs[name], pool=PoolCounts(**pool(**fields)))
        assert self.view.apply(code, frame, 0.0)

    def choose(self, *tried: str, **options: Any) -> str | None:
        node = self.placement.choose(POOL, [(name + "aaaa")[:4] for name in tried], **options)
        return None if node is None else node.name


def pool(warm: int = 0, target: int = 4, starting: int = 0, waiting: int = 0) -> dict[str, Any]:
    return {
        "template": "base",
        "size": "small",
        "target": target,
        "warm": warm,
        "starting": starting,
        "waiting": waiting,
    }


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@given(candidates, st.randoms())
def test_the_choice_is_the_best_and_does_not_depend_on_order(nodes, random):
    best = choose(nodes)
    shuffled = list(nodes)
    random.shuffle(shuffled)
    assert choose(shuffled) == best
    if not nodes:
        assert best is None
        return
    assert best.warm == max(node.warm for node in nodes)
    rivals = [node for node in nodes if node.warm == best.warm]
    assert best.keeps_pool == any(node.keeps_pool for node in rivals)
    peers = [node for node in rivals if node.keeps_pool == best.keeps_pool]
    assert best.waiting - best.starting == min(node.waiting - node.starting for node in peers)


@given(nodes=st.integers(1, 30), stock=st.integers(1, 20), share=st.floats(0.0, 1.0))
def test_a_burst_on_equal_stock_is_spread(nodes: int, stock: int, share: float) -> None:
    fleet = Fleet()
    for number in range(nodes):
        fleet.node(f"n{number}", warm=stock)
    claims = round(share * nodes * stock)
    got: dict[str | None, int] = {}
    for _ in range(claims):
        name = fleet.choose()
        got[name] = got.get(name, 0) + 1
    mean = claims / nodes
    assert None not in got
    assert max(got.values(), default=0) <= max(math.ceil(mean), 1.2 * mean)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_every_warm_member_is_taken_once(warm: list[int]) -> None:
    fleet = Fleet()
    for number, count in enumerate(warm):
        fleet.node(f"n{number}", warm=count)
    taken = {f"n{number}": 0 for number in range(len(warm))}
    for _ in range(sum(warm)):
        name = fleet.choose()
        assert name is not None
        taken[name] += 1
    assert list(taken.values()) == warm
    assert fleet.choose(warm_only=True) is None
    assert fleet.choose() is not None


def test_the_shortest_queue_when_all_are_dry(fleet: Fleet) -> None:
    fleet.node("n0", waiting=3)
    fleet.node("n1", waiting=1)
    # Those that are sent join the queue, whether the node has told of them or not.
    assert [fleet.choose() for _ in range(4)] == ["n1", "n1", "n1", "n0"]
    fleet.tell("n1", waiting=4)
    assert fleet.choose() == "n0"
    for _ in range(3):
        fleet.placement.settle("n1aa", POOL)
    fleet.tell("n1", waiting=0)
    assert fleet.choose() == "n1"


def test_a_queue_is_shorter_for_what_is_starting(fleet: Fleet) -> None:
    fleet.node("n0", waiting=3, starting=3)
    fleet.node("n1", waiting=1)
    assert fleet.choose() == "n0"


def test_a_node_without_the_pool_only_when_no_other_is_left(fleet: Fleet) -> None:
    fleet.node("n0", target=0)
    fleet.node("n1", waiting=9)
    assert fleet.choose() == "n1"
    assert fleet.choose("n1") == "n0"
    assert fleet.choose("n0", "n1") is None


def test_one_that_requires_a_warm_member_gets_none_from_a_node_without_the_pool(fleet: Fleet) -> None:
    fleet.node("n0", target=0)
    assert fleet.choose(policy="require") is None
    fleet.node("n1", waiting=9)
    assert fleet.choose(policy="require") == "n1"


def test_one_that_wants_no_warm_member_goes_where_there_is_least(fleet: Fleet) -> None:
    fleet.node("n0", warm=3)
    fleet.node("n1")
    assert [fleet.choose(policy="never") for _ in range(2)] == ["n0", "n0"]


def test_a_node_that_is_not_seen_counts_as_its_heartbeat_told(fleet: Fleet) -> None:
    fleet.node("n0", seen=False, warm=2)
    fleet.node("n1")
    assert [fleet.choose(warm_only=True) for _ in range(3)] == ["n0", "n0", None]
    fleet.node("n2", warm=1)
    assert fleet.choose() == "n2"


def test_a_node_that_has_died_is_not_chosen(fleet: Fleet) -> None:
    fleet.node("n0", warm=2)
    fleet.membership.expire(100.0)
    assert fleet.choose() is None
    assert fleet.warm.left("n0aa", POOL) == 2
