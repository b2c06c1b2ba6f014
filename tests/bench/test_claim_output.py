"""Create to first output on three sides: rows of failures, VMs that are always ended, ratios, tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from greenroom.bench import claim_boot, claim_output
from greenroom.bench.claim_boot import BootRow
from greenroom.bench.claim_direct import HandOver
from greenroom.bench.claim_output import OutputRow
from greenroom.errors import RuntimeFailure
from greenroom.runtime.simulated import SimulatedRuntime, SimulatedVm
from greenroom.wire.messages import PoolSpec
from tests.bench.results import SIZE, Quiet


class Engine:
    """Stands in for `Direct`: its VMs exist by name only, so whatever is asked of a guest fails."""

    def __init__(self) -> None:
        self.runtime = SimulatedRuntime()
        self.made: list[SimulatedVm] = []
        self.stopped: list[SimulatedVm] = []
        self.cold_fails = False

    async def paused(self) -> SimulatedVm:
        self.made.append(SimulatedVm(f"vm-{len(self.made)}", "base", SIZE, "golden"))
        return self.made[-1]

    async def stop(self, vm: SimulatedVm) -> None:
        vm.ended.set()
        self.stopped.append(vm)

    async def booted_ms(self) -> float:
        if self.cold_fails:
            raise RuntimeFailure("the guest agent did not answer")
        return 6000.0

    async def restored_ms(self) -> float:
        return 200.0


class Tenant:
    """Stands in for the platform's side: `word` is what every command puts out, or None for what it was told to."""

    def __init__(self, word: bytes | None = None) -> None:
        self.word = word
        self.ended: list[str] = []
        self.spec = PoolSpec(template="base", size=SIZE, target=2)
        self.pool = self.platform = self

    async def at_rest(self, target: int) -> None:
        assert target == 2

    async def create(self) -> str:
        return "i1"

    async def first_output(self, sandbox_id: str, line: str) -> bytes:
        return self.word if self.word is not None else line.removeprefix("echo ").encode() + b"\n"

    async def sandbox(self, sandbox_id: str) -> Any:
        return SimpleNamespace(claim_ms={"start": 2.0, "identity": 250.0, "total": 255.0})

    async def end(self, sandbox_id: str) -> None:
        self.ended.append(sandbox_id)


async def one(tenant: Tenant, engine: Engine, side: claim_output.Side) -> OutputRow:
    return await claim_output.one(tenant, engine, side, 1)  # type: ignore[arg-type]


async def test_the_platforms_side_is_ended_and_tells_its_stages() -> None:
    tenant = Tenant()
    row = await one(tenant, Engine(), "platform")
    assert row.output_ms is not None
    assert row.create_ms is not None
    assert row.output_ms >= row.create_ms
    assert row.node_ms["identity"] == 250.0
    assert tenant.ended == ["i1"]


async def test_other_output_than_was_asked_for_is_a_failure() -> None:
    tenant = Tenant(b"something else\n")
    row = await one(tenant, Engine(), "platform")
    assert row.output_ms is None
    assert "something else" in row.error
    assert tenant.ended == ["i1"]


async def test_a_vm_that_dies_is_a_row_and_is_cleared_away() -> None:
    engine = Engine()

    class Dead(SimulatedVm):
        async def connect(self, port: int, deadline: float = 10.0) -> Any:
            self.ended.set()
            raise ConnectionResetError("gone")

    async def paused() -> SimulatedVm:
        engine.made.append(Dead("vm-dead", "base", SIZE, "golden"))
        return engine.made[-1]

    engine.paused = paused  # type: ignore[method-assign]
    for side in claim_output.SIDES[1:]:
        row = await one(Tenant(), engine, side)
        assert row.output_ms is None
        assert "ended before" in row.error
    assert engine.stopped == engine.made
    assert len(engine.made) == 2


def test_ratios_compare_the_platform_with_both_others() -> None:
    stages = HandOver(resume_ms=1.0, first_answer_ms=200.0, identity_ms=190.0, clock_ms=30.0)
    found = claim_output.summarise_run(
        [
            OutputRow(side="platform", round=1, output_ms=600.0, create_ms=300.0, node_ms={"start": 2.0}),
            OutputRow(side="bare", round=1, output_ms=400.0, hand_over=HandOver(resume_ms=1.0)),
            OutputRow(side="introduced", round=1, output_ms=500.0, hand_over=stages),
            OutputRow(side="introduced", round=1, error="no answer"),
        ]
    )
    assert found.to_bare.overall == 1.5
    assert found.to_introduced.overall == 1.2
    assert found.stages_ms["clock_ms"].p50 == 30.0
    assert found.stages_ms["clock_ms"].failed == 1
    assert found.node_ms["start"].p50 == 2.0
    assert claim_output.targets(found)[0].verdict == "missed"
    assert {name: summary.failed for name, summary in claim_output.failures(found)} == {
        "first output, platform": 0, "first output, bare": 0, "first output, introduced": 1,
    }  # fmt: skip
    for table in claim_output.tables(found):
        assert all(len(row) == len(table.columns) for row in table.rows)


async def test_boots_and_restores_take_turns_and_failures_count() -> None:
    engine, meter = Engine(), Quiet()
    found = await claim_boot.measure(engine, 2, meter)  # type: ignore[arg-type]
    assert meter.total == meter.advanced == 4
    assert found.ratio.overall == 30.0
    assert meter.said == ["cold boot 1 of 2", "restore 1 of 2", "restore 2 of 2", "cold boot 2 of 2"]
    engine.cold_fails = True
    failed = await claim_boot.measure(engine, 1, meter)  # type: ignore[arg-type]
    assert failed.rows == [BootRow(round=1, restore_ms=200.0, boot_error="the guest agent did not answer")]
    assert failed.ratio.overall is None
    assert dict(claim_boot.failures(failed))["cold boot"].failed == 1
    for table in claim_boot.tables(failed):
        assert all(len(row) == len(table.columns) for row in table.rows)
