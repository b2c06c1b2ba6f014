"""Which node is warm: the highest stock first, even shares, and the same as a search through all would find."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.fleet.warm import WarmIndex

BASE = ("base", "small")


def index(**stock: int) -> WarmIndex:
    made = WarmIndex()
    for node, warm in stock.items():
        made.admit(node, True)
        made.told(node, BASE, warm)
    return made


def test_the_highest_stock_goes_first() -> None:
    made = index(a=1, b=3, c=2)
    assert [made.pick(BASE) for _ in range(7)] == ["b", "c", "b", "a", "c", "b", None]


def test_nobody_is_warm_for_an_unknown_pool() -> None:
    assert index(a=1).pick(("other", "small")) is None


def test_one_that_refused_is_avoided() -> None:
    made = index(a=3, b=2, c=1)
    assert made.pick(BASE, avoid=["a"]) == "b"
    assert made.pick(BASE, avoid=["a", "b"]) == "c"
    assert made.pick(BASE, avoid=["a", "b", "c"]) is None


def test_a_claim_is_taken_off_until_it_is_settled() -> None:
    made = index(a=1)
    assert made.pick(BASE) == "a"
    assert made.pick(BASE) is None
    # What it tells now may be from before the claim.
    made.told("a", BASE, 2)
    assert made.left("a", BASE) == 1
    made.settle("a", BASE)
    assert made.left("a", BASE) == 2
    made.settle("a", BASE)
    assert made.left("a", BASE) == 2, "settled once, it is settled"


def test_a_node_that_leaves_is_not_picked_and_may_come_back() -> None:
    made = index(a=2, b=1)
    made.admit("a", False)
    assert made.pick(BASE) == "b"
    assert made.pick(BASE) is None
    made.told("a", BASE, 5)
    assert made.pick(BASE) is None
    made.admit("a", True)
    assert made.left("a", BASE) == 5
    assert made.pick(BASE) == "a"


def test_what_is_forgotten_is_gone() -> None:
    made = index(a=2, b=1)
    made.forget("a")
    assert made.pick(BASE) == "b"
    made.forget("b")
    made.settle("b", BASE)
    assert made.statistics() == {"nodes": 0, "admitted": 2, "pools": 0, "entries": 0}


@given(
    nodes=st.integers(1, 40),
    stock=st.integers(1, 30),
    share=st.floats(0.0, 1.0),
)
def test_a_burst_on_equal_stock_is_spread(nodes: int, stock: int, share: float) -> None:
    made = index(**{f"n{number}": stock for number in range(nodes)})
    claims = round(share * nodes * stock)
    got: dict[str, int] = {}
    for _ in range(claims):
        node = made.pick(BASE)
        assert node is not None, "there was stock left"
        got[node] = got.get(node, 0) + 1
    mean = claims / nodes
    assert max(got.values(), default=0) <= max(math.ceil(mean), 1.2 * mean)


@pytest.mark.parametrize("lag", [0, 1, 5, 100])
def test_a_burst_is_spread_while_nodes_tell_of_earlier_claims(lag: int) -> None:
    """What nodes tell comes late by `lag` claims, and each claim is settled when it is told of."""
    made = index(a=50, b=50, c=50)
    told = {"a": 50, "b": 50, "c": 50}
    under_way: list[str] = []
    got = {"a": 0, "b": 0, "c": 0}
    for _ in range(150):
        node = made.pick(BASE)
        assert node is not None
        got[node] += 1
        under_way.append(node)
        if len(under_way) > lag:
            done = under_way.pop(0)
            told[done] -= 1
            made.told(done, BASE, told[done])
            made.settle(done, BASE)
    assert got == {"a": 50, "b": 50, "c": 50}


class AgreesWithASearch(RuleBasedStateMachine):
    """A naive index that looks at every node each time."""

    nodes = st.sampled_from("abcde")
    pools = st.sampled_from([BASE, ("base", "large"), ("other", "small")])

    def __init__(self) -> None:
        super().__init__()
        self.index = WarmIndex()
        self.told_: dict[tuple[str, tuple[str, str]], int] = {}
        self.sent: dict[tuple[str, tuple[str, str]], int] = {}
        self.admitted: set[str] = set()

    def left(self, node: str, pool: tuple[str, str]) -> int:
        return self.told_.get((node, pool), 0) - self.sent.get((node, pool), 0)

    @rule(node=nodes, may=st.booleans())
    def admit(self, node: str, may: bool) -> None:
        self.index.admit(node, may)
        (self.admitted.add if may else self.admitted.discard)(node)

    @rule(node=nodes, pool=pools, warm=st.integers(0, 4))
    def told(self, node: str, pool: tuple[str, str], warm: int) -> None:
        self.index.told(node, pool, warm)
        self.told_[node, pool] = warm

    @rule(node=nodes)
    def forget(self, node: str) -> None:
        self.index.forget(node)
        self.told_ = {key: warm for key, warm in self.told_.items() if key[0] != node}

    @rule(pool=pools, avoid=st.sets(nodes, max_size=3))
    def pick(self, pool: tuple[str, str], avoid: set[str]) -> None:
        candidates = {node: self.left(node, pool) for node in self.admitted - avoid}
        best = max(candidates.values(), default=0)
        node = self.index.pick(pool, avoid)
        if best <= 0:
            assert node is None
            return
        assert node is not None
        assert candidates[node] == best
        self.sent[node, pool] = self.sent.get((node, pool), 0) + 1

    @rule(node=nodes, pool=pools)
    def send(self, node: str, pool: tuple[str, str]) -> None:
        self.index.send(node, pool)
        self.sent[node, pool] = self.sent.get((node, pool), 0) + 1

    @rule(node=nodes, pool=pools)
    def settle(self, node: str, pool: tuple[str, str]) -> None:
        self.index.settle(node, pool)
        self.sent[node, pool] = max(0, self.sent.get((node, pool), 0) - 1)

    @invariant()
    def stock_agrees(self) -> None:
        for node, pool in self.told_:
            assert self.index.left(node, pool) == max(0, self.left(node, pool))
        assert self.index.statistics()["entries"] == len(self.told_)
        for (node, pool), sent in self.sent.items():
            assert self.index.sent(node, pool) == sent
        for pool in {pool for _, pool in self.told_}:
            keepers = {node for node, told in self.told_ if told == pool} & self.admitted
            assert set(self.index.keepers(pool)) == keepers

    @invariant()
    def levels_are_bounded(self) -> None:
        for stock in self.index._stocks.values():
            assert sorted(-left for left in stock.heap) == sorted(stock.levels)
            assert len(stock.heap) <= 5


TestAgreesWithASearch = AgreesWithASearch.TestCase
