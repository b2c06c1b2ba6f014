"""The claim benchmark's parts on a platform, against scripted roles: rounds alternate, failures count, the pool is put
back."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenroom.bench import claim, claim_supply
from greenroom.bench.claim import ClaimPlan, PlatformFigures
from greenroom.bench.claim_supply import SupplyFigures
from greenroom.config import RoleSpec
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
IDS = [new_sandbox_id(CODE) for _ in range(40)]


def plan_of(count: int, rounds: int, *parts: claim.Part, pattern_pool: int = 5) -> ClaimPlan:
    return ClaimPlan(
        template="base", parts=list(parts or ("supply",)), claims=1, count=count, rounds=rounds, pattern_count=3,
        pattern_pool=pattern_pool, every_ms=1.0, boots=1,
    )  # fmt: skip


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
            claim_ms=dict.fromkeys(claim_supply.STAGES, float(number)), clock_offset_ms=-1.5, clock_error_ms=0.5,
        )  # fmt: skip
        return sandbox_id

    async def command(self, sandbox_id: str, line: str) -> int:
        assert line == "true"
        assert sandbox_id in self.sandboxes
        return self.statuses.get(IDS.index(sandbox_id), 0)

    async def first_output(self, sandbox_id: str, line: str) -> bytes:
        assert sandbox_id in self.sandboxes
        return line.removeprefix("echo ").encode() + b"\n"

    async def kill(self, sandbox_id: str) -> bool:
        self.killed += 1
        return self.sandboxes.pop(sandbox_id, None) is not None

    async def run(self, plan: ClaimPlan, meter: Quiet | None = None) -> PlatformFigures:
        async def engine_of(node: NodeStatus) -> EngineInfo:
            return EngineInfo(engine=node.engine, accelerator="none", version="1", reason="asked for")

        nowhere = RoleSpec(role="node", replica=0, state_dir="/nonexistent", cache_dir="/nonexistent")
        return await claim.measure_platform(
            self,
            self,
            "http://master",
            engine_of,
            plan,
            nowhere,
            meter or Quiet(),  # type: ignore[arg-type]
        )

    async def supply(self, plan: ClaimPlan, meter: Quiet | None = None) -> SupplyFigures:
        found = (await self.run(plan, meter)).supply
        assert found is not None
        return found


async def test_rounds_alternate_and_the_pool_is_as_before() -> None:
    world, meter = World(target=3), Quiet()
    found = await world.run(plan_of(5, 2), meter)
    assert (found.pool_target, found.pool_warm, found.nodes) == (3, "paused", 1)
    assert (found.output, found.patterns, found.boot) == (None, None, None)
    report = found.supply
    assert report is not None
    assert [(row.round, row.supply) for row in report.claims] == (
        [(1, "warm")] * 3 + [(1, "on_demand")] * 3 + [(2, "on_demand")] * 2 + [(2, "warm")] * 2
    )
    assert world.declared == [3, 3, 0, 0, 3, 3]
    assert not any(row.error for row in report.claims)
    assert meter.total == meter.advanced == 10
    assert not world.sandboxes
    assert world.killed == 11
    warm, dry = report.summaries
    assert warm.create_ms.n == dry.create_ms.n == warm.node_ms["total"].n == 5
    assert warm.clock_offset_ms.p50 == -1.5
    assert warm.clock_distance_ms.p50 == 1.5
    assert len(report.usable_ratio.rounds) == 2
    assert all(
        table.rows and len(row) == len(table.columns)
        for table in claim_supply.tables(report)
        for row in table.rows
    )


async def test_patterns_get_a_pool_of_their_own_and_leave_nothing() -> None:
    world, meter = World(target=2), Quiet()
    found = (await world.run(plan_of(1, 1, "patterns", pattern_pool=7), meter)).patterns
    assert found is not None
    assert world.declared == [2, 7, 2]
    assert [(entry.pattern, entry.success) for entry in found.summaries] == [
        ("sequential", 1.0), ("staggered", 1.0), ("burst", 1.0),
    ]  # fmt: skip
    assert meter.total == meter.advanced == 9
    assert not world.sandboxes
    assert world.made == 1 + 9


async def test_a_report_has_every_part_that_was_measured(tmp_path: Path) -> None:
    world = World()
    world.refuse = {2: PoolDry("no base sandbox came free in time")}
    plan = plan_of(2, 1, "supply", "patterns")
    found = await world.run(plan)
    conditions = claim.conditions_of(plan, found, SIZE, tmp_path)
    assert conditions.medium
    report = claim.put_together(conditions, plan, None, None, found)
    assert report.failed == 1
    assert [name for name, summary in claim.failures(report) if summary.failed] == ["warm"]
    assert {"Creates in patterns, pool of 5, ms", "Their outcomes"} < {table.title for table in report.tables}
    assert report.targets == []
    assert "from one client" in claim.notes(report)[0]
    assert msgspec.json.decode(msgspec.json.encode(report), type=claim.ClaimReport) == report


def test_without_a_platform_the_conditions_say_that_nothing_ran(tmp_path: Path) -> None:
    conditions = claim.conditions_of(plan_of(1, 1, "engine"), None, SIZE, tmp_path)
    assert (conditions.engine, conditions.accelerator) == ("simulated", "none")


async def test_failures_are_rows_with_a_step_and_a_reason() -> None:
    world = World()
    world.refuse = {1: PoolDry("no base sandbox came free in time")}
    world.statuses = {2: 1}
    report = await world.supply(plan_of(3, 1))
    assert sum(bool(row.error) for row in report.claims) == 2
    errors = Counter(row.error.partition(":")[0] for row in report.claims)
    assert errors == {"create": 1, "command": 1, "": 4}
    warm = report.summaries[0]
    assert (warm.create_ms.attempts, warm.create_ms.failed, warm.usable_ms.failed) == (3, 1, 2)
    assert not world.sandboxes
    counted = dict(claim_supply.failures(report))
    assert (counted["warm"].failed, counted["on demand"].failed) == (2, 0)


async def test_an_interruption_in_a_create_leaves_nothing() -> None:
    world = World()
    world.hold = asyncio.Event()
    task = spawn(world.run(plan_of(3, 1)), "bench")
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
    original = world.call

    async def call(method: str, url: str, kind: Any, body: Any = None, **rest: Any) -> Any:
        if method == "PUT" and not body.target:
            world.refuse_declaring = 1
        return await original(method, url, kind, body, **rest)

    world.call = call  # type: ignore[method-assign]
    report = await world.supply(plan_of(1, 1))
    assert not any(row.error for row in report.claims)
    assert world.declared[-1] == world.spec.target


async def test_without_a_pool_there_is_nothing_to_measure() -> None:
    world = World(target=0)
    with pytest.raises(SetupError, match="greenroom up --warm"):
        await world.run(plan_of(1, 1))
    assert world.made == 0


async def test_an_engine_without_vms_is_not_measured() -> None:
    world = World()
    world.engine = "simulated"
    with pytest.raises(SetupError, match="simulated"):
        await world.run(plan_of(1, 1))
    assert world.made == 0
