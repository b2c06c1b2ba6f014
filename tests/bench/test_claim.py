"""The claim benchmark against scripted roles: rounds alternate, failures count, the pool is put back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from greenroom.bench import claim
from greenroom.bench.claim import ClaimPlan, ClaimReport
from greenroom.errors import GreenroomError, NodeUnavailable, PoolDry, SetupError
from greenroom.runtime.engine import EngineInfo
from greenroom.wire.ids import new_node_code, new_sandbox_id
from greenroom.wire.messages import (
    MasterStatus,
    NodeInfo,
    NodeStatus,
    PoolSpec,
    PoolStatus,
    Sandbox,
    SandboxList,
)
from greenroom.wire.tasks import spawn
from tests.bench.results import SIZE, Quiet

CODE = new_node_code()
IDS = [new_sandbox_id(CODE) for _ in range(20)]


class World:
    """Master, node and entry in one: a pool whose members appear at once, sandboxes that exist by name only."""

    def __init__(self, target: int = 2) -> None:
        self.spec = PoolSpec(template="base", size=SIZE, target=target)
        self.declared = [target]
        self.sandboxes: dict[str, Sandbox] = {}
        self.made = 0
        self.engine = "qemu"
        self.killed = 0
        self.refuse: dict[int, GreenroomError] = {}
        self.statuses: dict[int, int] = {}
        self.creating = asyncio.Event()
        self.hold: asyncio.Event | None = None
        self.refuse_declaring = 0

    # What the operator may call.
    async def call(
        self, method: str, url: str, kind: Any, body: Any = None, *, deadline: float = 10.0
    ) -> Any:
        match method, url.partition("/v1/")[2].split("/"):
            case "GET", ["status"] if kind is MasterStatus:
                node = NodeInfo(status=self.status(), live=True, last_seen=0.0)
                return MasterStatus(nodes=[node], pools=[self.spec], templates=[])
            case "GET", ["status"]:
                return self.status()
            case "PUT", ["pools"]:
                if self.refuse_declaring and body.target:
                    self.refuse_declaring -= 1
                    raise NodeUnavailable("the master is away")
                self.declared.append(body.target)
                return body
            case "GET", ["sandboxes"]:
                return SandboxList(list(self.sandboxes.values()))
            case "GET", ["sandboxes", sandbox_id]:
                return self.sandboxes[sandbox_id]
            case "DELETE", ["sandboxes", sandbox_id]:
                del self.sandboxes[sandbox_id]
                return None
        raise AssertionError((method, url))

    def status(self) -> NodeStatus:
        target = self.declared[-1]
        pool = PoolStatus(template="base", size="small", target=target, warm=target, starting=0, waiting=0)
        return NodeStatus(
            name="node-0", code=CODE, api_url="http://node", relay_host="", relay_port=0,
            engine=self.engine, accelerator="none", pools=[pool],
        )  # fmt: skip

    # What a client may call.
    async def create_once(self, template: str, ttl: int, metadata: dict[str, str]) -> str:
        number, self.made = self.made, self.made + 1
        self.creating.set()
        if self.hold is not None:
            await self.hold.wait()
        if number in self.refuse:
            raise self.refuse[number]
        sandbox_id = IDS[number]
        self.sandboxes[sandbox_id] = Sandbox(
            sandbox_id=sandbox_id, template=template, size=SIZE, state="running", started_at=0.0,
            ends_at=float(ttl), node="node-0", metadata=metadata,
            claim_ms=dict.fromkeys(claim.STAGES, float(number)), clock_offset_ms=-1.5, clock_error_ms=0.5,
        )  # fmt: skip
        return sandbox_id

    async def command(self, sandbox_id: str, line: str) -> int:
        assert line == "true"
        assert sandbox_id in self.sandboxes
        return self.statuses.get(IDS.index(sandbox_id), 0)

    async def kill(self, sandbox_id: str) -> bool:
        self.killed += 1
        return self.sandboxes.pop(sandbox_id, None) is not None

    async def run(self, plan: ClaimPlan, meter: Quiet | None = None) -> ClaimReport:
        async def engine_of(node: NodeStatus) -> EngineInfo:
            return EngineInfo(engine=node.engine, accelerator="none", version="1", reason="asked for")

        return await claim.run(self, self, "http://master", engine_of, plan, meter or Quiet())  # type: ignore[arg-type]


async def test_rounds_alternate_and_the_pool_is_as_before() -> None:
    world, meter = World(target=3), Quiet()
    report = await world.run(ClaimPlan(template="base", count=5, rounds=2), meter)
    assert [(row.round, row.supply) for row in report.claims] == (
        [(1, "warm")] * 3 + [(1, "on_demand")] * 3 + [(2, "on_demand")] * 2 + [(2, "warm")] * 2
    )
    assert world.declared == [3, 3, 0, 0, 3, 3]
    assert (report.pool_target, report.pool_warm, report.failed) == (3, "paused", 0)
    assert meter.total == meter.advanced == 10
    assert not world.sandboxes
    assert world.killed == 11
    warm, dry = report.summaries
    assert warm.create_ms.n == dry.create_ms.n == warm.node_ms["total"].n == 5
    assert warm.clock_offset_ms.p50 == -1.5
    assert warm.clock_distance_ms.p50 == 1.5
    assert len(report.usable_ratio.rounds) == 2
    assert all(
        table.rows and len(row) == len(table.columns) for table in claim.tables(report) for row in table.rows
    )


async def test_failures_are_rows_with_a_step_and_a_reason() -> None:
    world = World()
    world.refuse = {1: PoolDry("no base sandbox came free in time")}
    world.statuses = {2: 1}
    report = await world.run(ClaimPlan(template="base", count=3, rounds=1))
    assert report.failed == 2
    errors = Counter(row.error.partition(":")[0] for row in report.claims)
    assert errors == {"create": 1, "command": 1, "": 4}
    warm = report.summaries[0]
    assert (warm.create_ms.attempts, warm.create_ms.failed, warm.usable_ms.failed) == (3, 1, 2)
    assert not world.sandboxes
    counted = dict(claim.failures(report))
    assert (counted["warm"].failed, counted["on demand"].failed) == (2, 0)


async def test_an_interruption_in_a_create_leaves_nothing() -> None:
    world = World()
    world.hold = asyncio.Event()
    task = spawn(world.run(ClaimPlan(template="base", count=3, rounds=1)), "bench")
    await world.creating.wait()
    task.cancel()
    world.hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.made == 1
    assert not world.sandboxes
    assert world.declared[-1] == world.spec.target


async def test_the_pool_is_put_back_by_a_master_that_was_away() -> None:
    world = World()
    plan = ClaimPlan(template="base", count=1, rounds=1)
    original = world.call

    async def call(method: str, url: str, kind: Any, body: Any = None, **rest: Any) -> Any:
        if method == "PUT" and not body.target:
            world.refuse_declaring = 1
        return await original(method, url, kind, body, **rest)

    world.call = call  # type: ignore[method-assign]
    report = await world.run(plan)
    assert report.failed == 0
    assert world.declared[-1] == world.spec.target


async def test_without_a_pool_there_is_nothing_to_measure() -> None:
    world = World(target=0)
    with pytest.raises(SetupError, match="greenroom up --warm"):
        await world.run(ClaimPlan(template="base", count=1, rounds=1))
    assert world.made == 0


async def test_an_engine_without_vms_is_not_measured() -> None:
    world = World()
    world.engine = "simulated"
    with pytest.raises(SetupError, match="simulated"):
        await world.run(ClaimPlan(template="base", count=1, rounds=1))
    assert world.made == 0


def test_the_claims_of_all_rounds_are_as_many_as_asked_for() -> None:
    for count in range(1, 30):
        for rounds in range(1, count + 1):
            plan = ClaimPlan(template="base", count=count, rounds=rounds)
            shares = [plan.share(number) for number in range(1, rounds + 1)]
            assert sum(shares) == count
            assert max(shares) - min(shares) <= 1
