"""The pool's state machine: playbooks for what people rely on, then any order of events at all."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from greenroom.node.pool import (
    ClaimArrived,
    ClaimLeft,
    Destroy,
    HandOver,
    MemberEnded,
    MemberFailed,
    MemberReady,
    MemberStarted,
    Pool,
    Refuse,
    SetTarget,
    Tick,
)


def pool(target: int = 2, queue_length: int = 3) -> Pool:
    made = Pool(queue_length=queue_length, backoff_first=1.0, backoff_last=8.0)
    made.handle(SetTarget(target))
    return made


def warm(made: Pool, *members: str) -> Pool:
    for member in members:
        made.handle(MemberStarted())
        made.handle(MemberReady(member))
    return made


def test_an_empty_pool_wants_its_target() -> None:
    assert pool(target=2).wanted(0.0) == 2


def test_members_on_their_way_count() -> None:
    made = pool(target=2)
    made.handle(MemberStarted())
    assert made.wanted(0.0) == 1


def test_a_claim_takes_the_oldest_warm_member_at_once() -> None:
    made = warm(pool(), "a", "b")
    assert made.handle(ClaimArrived("c1", 10.0)) == [HandOver("c1", "a")]
    assert made.wanted(0.0) == 1


def test_claims_on_a_dry_pool_are_served_in_the_order_they_came() -> None:
    made = pool(target=0)
    assert made.handle(ClaimArrived("first", 10.0)) == []
    assert made.handle(ClaimArrived("second", 10.0)) == []
    assert made.wanted(0.0) == 2
    made.handle(MemberStarted())
    made.handle(MemberStarted())
    assert made.handle(MemberReady("a")) == [HandOver("first", "a")]
    assert made.handle(MemberReady("b")) == [HandOver("second", "b")]


def test_for_one_that_wants_declared_stock_alone_nothing_is_made() -> None:
    made = pool(target=0)
    assert made.handle(ClaimArrived("patient", 10.0, demands=False)) == []
    assert made.wanted(0.0) == 0
    made.handle(ClaimArrived("demanding", 10.0))
    assert made.wanted(0.0) == 1
    made.handle(SetTarget(2))
    assert made.wanted(0.0) == 3
    made.handle(MemberStarted())
    assert made.handle(MemberReady("a")) == [HandOver("patient", "a")], "first come, first served"
    assert made.wanted(0.0) == 3
    made.handle(ClaimArrived("another", 5.0, demands=False))
    made.handle(Tick(5.0))
    made.handle(ClaimArrived("leaves", 9.0, demands=False))
    made.handle(ClaimLeft("leaves"))
    assert made.wanted(5.0) == 3


def test_a_full_queue_refuses_at_once() -> None:
    made = pool(target=0, queue_length=1)
    made.handle(ClaimArrived("first", 10.0))
    assert made.handle(ClaimArrived("second", 10.0)) == [Refuse("second", full=True)]


def test_a_claim_past_its_deadline_is_refused_and_the_rest_wait_on() -> None:
    made = pool(target=0)
    made.handle(ClaimArrived("short", 5.0))
    made.handle(ClaimArrived("long", 9.0))
    assert made.next_deadline() == 5.0
    assert made.handle(Tick(5.0)) == [Refuse("short", full=False)]
    assert list(made.waiting) == ["long"]


def test_a_claim_that_left_is_not_served() -> None:
    made = pool(target=1)
    made.handle(ClaimArrived("gone", 5.0))
    made.handle(ClaimLeft("gone"))
    made.handle(MemberStarted())
    assert made.handle(MemberReady("a")) == []
    assert list(made.warm) == ["a"]


def test_failures_hold_refill_back_for_longer_and_longer_and_one_member_tries_the_way() -> None:
    made = pool(target=4)
    for expected in (1.0, 2.0, 4.0, 8.0, 8.0):
        made.handle(MemberStarted())
        made.handle(MemberFailed("no room", now=100.0))
        assert made.held_until == 100.0 + expected
        assert made.wanted(100.0) == 0
        assert made.wanted(100.0 + expected) == 1
    made.handle(MemberStarted())
    made.handle(MemberReady("a"))
    assert made.wanted(100.0) == 3
    assert made.failed == 5


def test_a_warm_member_that_ends_is_counted_and_replaced_later() -> None:
    made = warm(pool(target=1), "a")
    made.handle(MemberEnded("a", now=50.0))
    assert (made.failed, made.wanted(50.0), made.wanted(51.0)) == (1, 0, 1)


def test_a_member_that_was_handed_over_is_no_longer_the_pools_business() -> None:
    made = warm(pool(target=1), "a")
    made.handle(ClaimArrived("c", 5.0))
    made.handle(MemberEnded("a", now=50.0))
    assert made.failed == 0


def test_a_smaller_target_destroys_the_youngest_first() -> None:
    made = warm(pool(target=3), "a", "b", "c")
    assert made.handle(SetTarget(1)) == [Destroy("c"), Destroy("b")]


class AnyOrder(RuleBasedStateMachine):
    """No order of events loses a claim or a member, serves one twice, or overfills the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(queue_length=4, backoff_first=0.5, backoff_last=4.0)
        self.now = 0.0
        self.count = 0
        self.open_claims: list[str] = []
        self.patient: set[str] = set()
        self.members: set[str] = set()
        self.started = 0
        self.served: set[str] = set()

    def carry_out(self, instructions: list) -> None:
        for instruction in instructions:
            match instruction:
                case HandOver(claim, member):
                    assert claim == self.open_claims[0], "claims are served in order"
                    self.open_claims.remove(claim)
                    assert member in self.members, "a member is given away once"
                    self.members.remove(member)
                    assert claim not in self.served
                    self.served.add(claim)
                case Refuse(claim, _):
                    self.open_claims.remove(claim)
                case Destroy(member):
                    assert member in self.members
                    self.members.remove(member)

    def fresh(self, what: str) -> str:
        self.count += 1
        return f"{what}{self.count}"

    @rule(size=st.integers(0, 5))
    def set_target(self, size: int) -> None:
        self.carry_out(self.pool.handle(SetTarget(size)))

    @precondition(lambda self: self.pool.wanted(self.now) > 0)
    @rule()
    def start_what_is_wanted(self) -> None:
        for _ in range(self.pool.wanted(self.now)):
            self.pool.handle(MemberStarted())
            self.started += 1

    @precondition(lambda self: self.started > 0)
    @rule()
    def member_ready(self) -> None:
        self.started -= 1
        name = self.fresh("m")
        self.members.add(name)
        self.carry_out(self.pool.handle(MemberReady(name)))

    @precondition(lambda self: self.started > 0)
    @rule()
    def member_failed(self) -> None:
        self.started -= 1
        self.carry_out(self.pool.handle(MemberFailed("x", self.now)))

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def member_ended(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.members)))
        self.members.remove(name)
        self.carry_out(self.pool.handle(MemberEnded(name, self.now)))

    @rule(patience=st.floats(0.1, 5), demands=st.booleans())
    def claim(self, patience: float, demands: bool) -> None:
        name = self.fresh("c")
        if not demands:
            self.patient.add(name)
        self.open_claims.append(name)
        foretold = self.pool.next_member()
        made = self.pool.handle(ClaimArrived(name, self.now + patience, demands))
        given = [each.member for each in made if isinstance(each, HandOver)]
        assert given == ([] if foretold is None else [foretold])
        self.carry_out(made)

    @precondition(lambda self: self.open_claims)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.open_claims))
        self.open_claims.remove(name)
        self.carry_out(self.pool.handle(ClaimLeft(name)))

    @rule(step=st.floats(0.01, 3))
    def time_passes(self, step: float) -> None:
        self.now += step
        self.carry_out(self.pool.handle(Tick(self.now)))

    @invariant()
    def books_agree(self) -> None:
        assert set(self.pool.warm) == self.members
        assert list(self.pool.waiting) == self.open_claims
        assert self.pool.starting == self.started
        assert len(self.pool.waiting) <= 4

    @invariant()
    def nobody_waits_beside_a_warm_member(self) -> None:
        assert not (self.pool.warm and self.pool.waiting)

    @invariant()
    def never_more_warm_than_the_target(self) -> None:
        assert len(self.pool.warm) <= self.pool.target

    @invariant()
    def refill_is_bounded_by_what_is_missing(self) -> None:
        demanding = [claim for claim in self.open_claims if claim not in self.patient]
        missing = self.pool.target + len(demanding) - len(self.members) - self.started
        assert self.pool.wanted(self.now) <= max(0, missing)


TestAnyOrder = AnyOrder.TestCase
