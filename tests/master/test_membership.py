"""The node table and its clock: who is alive, what raises the revision, who is woken."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.errors import KeyConflict
from greenroom.master.membership import Membership, record_of, status_of
from greenroom.master.watching import NodeWatch
from greenroom.wire.messages import NodeStatus, PoolStatus
from greenroom.wire.tasks import spawn, stop

LEASE = 6.0


def status(name: str = "n0", code: str = "", **changes: object) -> NodeStatus:
    fields = {
        "name": name,
        "code": code or (name + "aaaa")[:4],
        "api_url": f"http://{name}",
        "relay_host": name,
        "relay_port": 1,
        "engine": "qemu",
    }
    return NodeStatus(**fields | changes)


def test_a_node_comes_dies_and_returns():
    table = Membership(LEASE, first_revision=10)
    assert table.register(status(), 0.0, 100.0) is True
    assert table.heartbeat(status(), 5.0, 105.0) is False
    assert table.next_expiry() == 11.0
    assert table.expire(10.9) is False
    assert table.expire(11.0) is True
    assert table.expire(12.0) is False
    [info] = table.nodes().nodes
    assert (info.live, info.last_seen, table.next_expiry()) == (False, 105.0, None)
    assert table.placeable() == []
    assert table.heartbeat(status(), 13.0, 113.0) is True
    assert table.nodes().revision == 13


def test_counts_change_nothing_that_others_wait_for():
    table = Membership(LEASE)
    table.register(status(), 0.0, 0.0)
    pool = PoolStatus(template="base", size="small", target=1, warm=1, starting=0, waiting=0)
    assert table.heartbeat(status(pools=[pool], sandboxes=7, paused=3, snapshots=2), 1.0, 1.0) is False
    assert table.get("n0").status.sandboxes == 7


@pytest.mark.parametrize("change", [{"api_url": "http://new"}, {"relay_port": 2}, {"draining": True}])
def test_what_others_route_by_raises_the_revision(change):
    table = Membership(LEASE)
    table.register(status(), 0.0, 0.0)
    assert table.heartbeat(status(**change), 1.0, 1.0) is True


def test_a_draining_node_is_alive_but_gets_nothing_new():
    table = Membership(LEASE)
    table.register(status(draining=True), 0.0, 0.0)
    assert table.placeable() == []
    assert [node.name for node in table.live()] == ["n0"]


def test_an_unknown_node_must_register():
    table = Membership(LEASE)
    assert table.heartbeat(status(), 0.0, 0.0) is None
    table.register(status(), 0.0, 0.0)
    assert table.heartbeat(status(code="bbbb"), 0.0, 0.0) is None
    assert table.register(status(code="bbbb"), 0.0, 0.0) is True


def test_a_code_belongs_to_one_node():
    table = Membership(LEASE)
    table.register(status(), 0.0, 0.0)
    with pytest.raises(KeyConflict, match="n0"):
        table.register(status("n1", code=status().code), 0.0, 0.0)
    assert table.get("n1") is None


def test_restored_nodes_count_as_alive_for_one_lease():
    table = Membership(LEASE)
    known = record_of(status(), 50.0)
    assert table.restore([known], 0.0) is True
    assert table.restore([known], 1.0) is False
    assert table.placeable() == [status_of(known)]
    assert table.expire(LEASE) is True
    assert table.nodes().nodes[0].last_seen == 50.0


class MembershipMachine(RuleBasedStateMachine):
    """Any order of events: the revision never falls, and rises exactly when what others route by changes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Membership(LEASE, first_revision=1)
        self.now = 0.0
        self.seen = (1, self.visible())

    def visible(self) -> list[object]:
        rows = []
        for info in self.table.nodes().nodes:
            routed = msgspec.structs.replace(info.status, pools=[], sandboxes=0)
            rows.append((routed, info.live))
        return rows

    @rule(number=st.integers(0, 2), port=st.integers(1, 2), sandboxes=st.integers(0, 3))
    def registers(self, number: int, port: int, sandboxes: int) -> None:
        self.table.register(status(f"n{number}", relay_port=port, sandboxes=sandboxes), self.now, self.now)

    @rule(number=st.integers(0, 2), port=st.integers(1, 2), draining=st.booleans())
    def beats(self, number: int, port: int, draining: bool) -> None:
        self.table.heartbeat(status(f"n{number}", relay_port=port, draining=draining), self.now, self.now)

    @rule(seconds=st.floats(0.0, 2 * LEASE))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)

    @rule(number=st.integers(0, 2))
    def is_removed(self, number: int) -> None:
        self.table.remove(f"n{number}")

    @invariant()
    def revision_tells_the_truth(self) -> None:
        revision, rows = self.table.revision, self.visible()
        assert revision >= self.seen[0]
        if rows != self.seen[1]:
            assert revision > self.seen[0]
        elif revision > self.seen[0]:
            raise AssertionError("the revision rose although nothing changed")
        self.seen = (revision, rows)

    @invariant()
    def no_live_node_is_overdue(self) -> None:
        due = self.table.next_expiry()
        assert due is None or due > self.now


TestMembershipMachine = MembershipMachine.TestCase


async def test_who_waits_is_woken_by_a_change():
    table = Membership(LEASE, first_revision=5)
    watch = NodeWatch(table)
    waiting = spawn(watch.newer(5, 30.0), "waiting")
    await asyncio.sleep(0)
    assert not waiting.done()
    table.register(status(), time.monotonic(), 0.0)
    watch.changed()
    assert (await waiting).revision == 6


async def test_another_masters_revision_is_answered_at_once():
    watch = NodeWatch(Membership(LEASE, first_revision=5))
    assert (await watch.newer(9_999, 30.0)).revision == 5
    assert (await watch.newer(0, 30.0)).revision == 5


async def test_the_wait_ends_by_itself():
    watch = NodeWatch(Membership(LEASE, first_revision=5))
    assert (await watch.newer(5, 0.01)).revision == 5


async def test_a_leaving_master_answers_everyone():
    watch = NodeWatch(Membership(LEASE, first_revision=5))
    waiting = spawn(watch.newer(5, 30.0), "waiting")
    await asyncio.sleep(0)
    watch.close()
    assert (await waiting).nodes == []
    assert (await watch.newer(5, 30.0)).nodes == []


async def test_a_lease_ends_by_timer():
    table = Membership(0.05)
    watch = NodeWatch(table)
    running = spawn(watch.run(), "leases")
    await asyncio.sleep(0)
    table.register(status(), time.monotonic(), 0.0)
    watch.changed()
    listed = await watch.newer(table.revision, 30.0)
    assert [info.live for info in listed.nodes] == [False]
    await stop(running)
