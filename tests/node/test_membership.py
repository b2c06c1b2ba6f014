"""What a node does with its master's answers."""

from __future__ import annotations

import asyncio
from typing import Any

from greenroom.node.membership import Membership
from greenroom.wire.messages import NodeStatus, PoolSpec, Registered, Size
from greenroom.wire.tasks import spawn, stop
from tests.support.waiting import until

POOL = PoolSpec(template="base", size=Size("small", 1, 512, 4096), target=2)


class Master:
    """A test double for the client: gives a share to a node that stays and none to one that drains."""

    def __init__(self) -> None:
        self.answers = 0

    async def call(
        self, _method: str, _url: str, _kind: Any, status: NodeStatus, **_options: Any
    ) -> Registered:
        self.answers += 1
        return Registered([] if status.draining else [POOL])


async def test_a_node_that_leaves_keeps_its_members_for_its_next_run() -> None:
    applied: list[list[PoolSpec]] = []
    draining = False

    def status() -> NodeStatus:
        return NodeStatus(
            name="n",
            code="aaaa",
            api_url="",
            relay_host="",
            relay_port=1,
            engine="simulated",
            draining=draining,
        )

    async def apply(pools: list[PoolSpec]) -> None:
        applied.append(pools)

    master = Master()
    membership = Membership(master, ["http://master"], status, apply, 0.001)  # type: ignore[arg-type]
    await membership.register()
    beating = spawn(membership.run(), "heartbeats")
    draining = True
    seen = master.answers
    await until(lambda: master.answers > seen + 3)
    await stop(beating)
    assert applied == [[POOL]]


async def test_an_answer_that_was_on_its_way_when_the_node_began_to_leave_counts_for_nothing() -> None:
    applied: list[list[PoolSpec]] = []
    draining = False
    going = asyncio.Event()

    def status() -> NodeStatus:
        return NodeStatus(
            name="n",
            code="aaaa",
            api_url="",
            relay_host="",
            relay_port=1,
            engine="simulated",
            draining=draining,
        )

    class Slow(Master):
        async def call(self, *arguments: Any, **options: Any) -> Registered:
            await going.wait()
            return Registered([])

    async def apply(pools: list[PoolSpec]) -> None:
        applied.append(pools)

    membership = Membership(Slow(), ["http://master"], status, apply, 0.001)  # type: ignore[arg-type]
    registering = spawn(membership.register(), "register")
    await asyncio.sleep(0)
    draining = True
    going.set()
    await registering
    assert applied == []


async def test_what_another_call_has_told_meanwhile_is_put_right_by_the_next_answer() -> None:
    """A list that was taken between heartbeats is not the one that the master wants any more, though it has said so."""
    has: list[PoolSpec] = []

    def status() -> NodeStatus:
        return NodeStatus(name="n", code="aaaa", api_url="", relay_host="", relay_port=1, engine="simulated")

    async def apply(pools: list[PoolSpec]) -> None:
        has[:] = pools

    membership = Membership(Master(), ["http://master"], status, apply, 0.001, lambda: has)  # type: ignore[arg-type]
    await membership.register()
    assert has == [POOL]
    beating = spawn(membership.run(), "heartbeats")
    has.clear()
    await until(lambda: has == [POOL])
    await stop(beating)
