"""Claims on their way: what they hold, and until when; and what an owner has besides."""

from __future__ import annotations

from greenroom.fleet.usage import NOTHING, Amount, Usage
from greenroom.fleet.view import View
from greenroom.master.inflight import InFlight
from greenroom.wire.changes import Beat, Gone, Put, Whole
from greenroom.wire.messages import Listed, Size

STREAM = "aaaa-1"
ONE = Amount(1, 2, 1024)
SANDBOX = Listed(
    sandbox_id="iaaaa" + "0" * 15,
    template="base",
    size=Size("medium", 2, 1024, 4096),
    state="running",
    started_at=0.0,
    ends_at=9.0,
    node="node",
    owner="ns",
    name="box",
)


class World:
    def __init__(self) -> None:
        self.view = View()
        self.view.join("aaaa", "node", 0.0)
        self.view.apply("aaaa", Whole(stream=STREAM, seq=0, sandboxes=[]), 0.0)
        self.view.apply("aaaa", Beat(stream=STREAM, seq=0, head=0), 0.0)
        self.usage = Usage(self.view)
        self.flying = InFlight(self.view, 25.0)
        self.seq = 0

    def put(self, **changes: object) -> None:
        self.seq += 1
        fields = {name: getattr(SANDBOX, name) for name in SANDBOX.__struct_fields__}
        put = Put(stream=STREAM, seq=self.seq, sandbox=Listed(**fields | changes))
        assert self.view.apply("aaaa", put, 0.0)

    def gone(self) -> None:
        self.seq += 1
        gone = Gone(stream=STREAM, seq=self.seq, sandbox_id=SANDBOX.sandbox_id)
        assert self.view.apply("aaaa", gone, 0.0)

    def all(self) -> Amount:
        return self.usage.of("ns").plus(self.flying.reserved.of("ns"))


def test_what_a_claim_takes_is_counted_once_from_its_beginning_to_its_end() -> None:
    world = World()
    ticket = world.flying.begin("ns", "box", ONE)
    assert world.all() == ONE
    assert world.flying.named("ns", "box") is ticket
    world.flying.answered(ticket, SANDBOX.sandbox_id, 0.0)
    assert world.all() == ONE
    world.put()
    assert (world.usage.of("ns"), world.flying.reserved.of("ns")) == (ONE, NOTHING)
    assert world.flying.named("ns", "box") is None
    assert world.flying.statistics() == {"names": 0, "unseen": 0}
    world.put(state="paused")
    assert world.usage.of("ns") == ONE
    world.put(state="ended")
    assert world.usage.of("ns") == NOTHING
    world.gone()
    assert len(world.usage) == 0


def test_a_claim_that_the_view_has_shown_already() -> None:
    world = World()
    ticket = world.flying.begin("ns", "box", ONE)
    world.put()
    world.flying.answered(ticket, SANDBOX.sandbox_id, 0.0)
    assert world.all() == ONE
    assert world.flying.named("ns", "box") is None


def test_a_claim_that_fails_gives_all_back() -> None:
    world = World()
    ticket = world.flying.begin("ns", "box", ONE)
    world.flying.failed(ticket)
    world.flying.failed(ticket)
    assert world.all() == NOTHING
    assert world.flying.named("ns", "box") is None


def test_one_that_is_never_shown_is_dropped_in_time() -> None:
    world = World()
    ticket = world.flying.begin("ns", "box", ONE)
    world.flying.answered(ticket, SANDBOX.sandbox_id, 10.0)
    world.flying.expire(34.9)
    assert world.all() == ONE
    world.flying.expire(35.0)
    assert world.all() == NOTHING
    assert world.flying.named("ns", "box") is None


def test_one_whose_answer_was_lost_holds_its_name_for_as_long_as_it_may_exist() -> None:
    world = World()
    lost = world.flying.begin("ns", "box", ONE)
    world.flying.lost(lost, 0.0, 60.0)
    other = world.flying.begin("ns", "", ONE)
    world.flying.answered(other, SANDBOX.sandbox_id, 1.0)
    world.flying.expire(30.0)
    assert world.all() == ONE
    assert lost.unknown
    assert world.flying.named("ns", "box") is lost
    world.flying.expire(85.0)
    assert world.flying.named("ns", "box") is None


def test_once_the_view_has_the_name_it_is_who_knows() -> None:
    world = World()
    ticket = world.flying.begin("ns", "box", ONE)
    world.flying.told(ticket)
    assert world.flying.named("ns", "box") is ticket
    world.put(sandbox_id="iaaaa" + "1" * 15)
    world.flying.told(ticket)
    assert world.flying.named("ns", "box") is None


def test_usage_begins_with_what_is_there() -> None:
    world = World()
    world.put()
    assert Usage(world.view).of("ns") == ONE
