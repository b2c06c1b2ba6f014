"""How fast and how small are restored VMs, and what does the fence around them cost?

Greenroom's engine and bare QEMU (`bare`) restore from one golden, in one process, in batches that alternate and
change places from round to round, so that neither side always meets the warmer machine. All VMs of a batch stay
paused until its end, when their memory is read; of Greenroom's, a few are then started to their agent's first
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, Literal, TypeVar

import msgspec
import psutil

from greenroom.bench import supply
from greenroom.bench.bare import Bare, BareVm
from greenroom.bench.lanes import in_lanes, unbroken
from greenroom.bench.report import (
    RATIO_COLUMNS,
    SUMMARY_COLUMNS,
    Conditions,
    Meter,
    Table,
    Target,
    cell,
    finish,
    gather_conditions,
    ratio_cells,
    reason,
    summary_cells,
)
from greenroom.bench.rounds import ratio, turns
from greenroom.bench.stages import Memory, StagedRuntime, Stages, memory_of
from greenroom.bench.summaries import Ratio, Sample, Summary, rate, summarise
from greenroom.bench.supply import Figures, without_stock
from greenroom.config import RoleSpec
from greenroom.errors import GreenroomError, RuntimeFailure, SetupError
from greenroom.runtime import golden as goldens
from greenroom.runtime import guestclient
from greenroom.runtime.engine import Vm
from greenroom.wire.messages import Size

V = TypeVar("V")
Side = Literal["greenroom", "bare"]

SETTLE = 1.0
"""Seconds between batches: namespaces and mappings of the last one are still being freed when it has ended."""
ANSWER_DEADLINE = 60.0
"""Seconds for a started guest's agent to answer."""
MEMORY_PER_VM_MIB = 96
"""Asked of the host for each VM of a batch, three times what a paused one took when this was written."""


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: in each round, a batch of `count` VMs for each side and each of `parallel`."""

    template: str
    size: Size
    count: int
    parallel: list[int]
    """Restores at the same time."""
    rounds: int
    starts: int
    """VMs of each of Greenroom's batches that are started afterwards, one after the other."""
    held: int | None = None
    """VMs alive while their memory is read, by default twice `count`; 0 leaves that out."""
    held_memory_mib: int = 256
    """Memory of each of these guests."""

    def check(self) -> None:
        """Raise SetupError for what this machine or user cannot do."""
        if os.geteuid() != 0:
            raise SetupError("this benchmark makes real VMs and network namespaces; run it as root")
        available, needed = psutil.virtual_memory().available >> 20, self.count * MEMORY_PER_VM_MIB
        if needed > available:
            raise SetupError(
                f"{self.count} VMs at once may need {needed} MiB and {available} MiB are available; "
                "choose a smaller --count"
            )


class RestoreRow(msgspec.Struct, frozen=True, kw_only=True):
    """One restore. `at` is seconds since the run began; without `stages` it failed, for the reason `error`."""

    side: Side
    parallel: int
    round: int
    number: int
    at: float
    stages: Stages | None = None
    memory: Memory | None = None
    """Of the paused VM, with all others of its batch alive."""
    error: str = ""


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One batch: `restored` VMs were paused `seconds` after the first was begun."""

    side: Side
    parallel: int
    round: int
    restored: int
    failed: int
    seconds: float


class StartRow(msgspec.Struct, frozen=True, kw_only=True):
    """One paused VM of Greenroom's that was let run until its agent answered `GET /health`."""

    round: int
    parallel: int
    answer_ms: float | None = None
    memory: Memory | None = None
    """Right after that answer."""
    error: str = ""


class RestoreSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One side at one parallelism, all rounds together. Times in milliseconds, memory in MiB."""

    side: Side
    parallel: int
    total_ms: Summary
    prepare_ms: Summary
    process_ms: Summary
    load_ms: Summary
    per_second: Summary
    """Paused VMs a second; one sample a batch."""
    pss_mib: Summary
    private_mib: Summary
    pss_mean_mib: float | None
    private_mean_mib: float | None


class FenceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Greenroom over bare QEMU at one parallelism: above 1 the time of a restore, below 1 the rate."""

    parallel: int
    time: Ratio
    rate: Ratio


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen."""

    benchmark: Literal["restore"] = "restore"
    conditions: Conditions
    plan: RestorePlan
    golden_ram_bytes: int
    golden_state_bytes: int
    summaries: list[RestoreSummary]
    fence: list[FenceCost]
    answer_ms: Summary
    """From `cont` of a restored VM to its agent's first answer."""
    answered_pss_mib: Summary
    failed: int
    restores: list[RestoreRow]
    batches: list[BatchRow]
    starts: list[StartRow]
    supply: Figures | None = None
    """Rates against the bare loop, memory by restore mode, a cold boot."""


class Records:
    """The rows as they come."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.restores: list[RestoreRow] = []
        self.batches: list[BatchRow] = []
        self.starts: list[StartRow] = []


class Contender(Generic[V]):
    """One side: how it restores a VM, which process that is, and how it ends it."""

    def __init__(
        self,
        side: Side,
        restore: Callable[[], Awaitable[tuple[V, Stages]]],
        pid: Callable[[V], int | None],
        stop: Callable[[V], Awaitable[None]],
        then: Callable[[list[V], int, int], Awaitable[None]] | None = None,
    ) -> None:
        self.side = side
        self._restore = restore
        self._pid = pid
        self._stop = stop
        self._then = then

    async def warm_up(self) -> None:
        """One VM that does not count: it brings files into the page cache and code into this process."""
        vm, _ = await unbroken(self._timed(), "warm-up")
        await unbroken(self._end([vm]), "warm-up's end")

    async def _timed(self) -> tuple[V, Stages]:
        return await self._restore()

    async def _end(self, alive: Iterable[V]) -> None:
        for vm in alive:
            await self._stop(vm)

    async def batch(self, records: Records, count: int, parallel: int, number: int, meter: Meter) -> None:
        """Restore `count` VMs, read their memory, do what comes then, end them all."""
        alive: dict[int, V] = {}
        rows: dict[int, RestoreRow] = {}

        async def one(index: int) -> None:
            row = RestoreRow(
                side=self.side,
                parallel=parallel,
                round=number,
                number=index,
                at=time.perf_counter() - records.began,
            )
            try:
                alive[index], stages = await unbroken(self._timed(), f"restore {index}")
                rows[index] = msgspec.structs.replace(row, stages=stages)
            except (GreenroomError, OSError) as error:
                rows[index] = msgspec.structs.replace(row, error=reason(error))
            meter.advance()

        began = time.perf_counter()
        await in_lanes(count, parallel, one, self.side)
        seconds = time.perf_counter() - began
        for index, vm in alive.items():
            pid = self._pid(vm)
            if pid is not None:
                with contextlib.suppress(OSError):  # a VM that died meanwhile is not a paused one
                    rows[index] = msgspec.structs.replace(rows[index], memory=memory_of(pid))
        records.restores += [rows[index] for index in sorted(rows)]
        records.batches.append(
            BatchRow(
                side=self.side,
                parallel=parallel,
                round=number,
                restored=len(alive),
                failed=count - len(alive),
                seconds=seconds,
            )
        )
        if self._then is not None:
            await self._then(list(alive.values()), parallel, number)
        await unbroken(self._end(alive.values()), f"end of {self.side}")
        await asyncio.sleep(SETTLE)


async def run(spec: RoleSpec, plan: RestorePlan, meter: Meter) -> RestoreReport:
    """Measure as planned, with `spec` naming a state directory that nothing else uses.

    At the end, also of an interrupted or failed run, nothing that was made is left on the host. Raises
    SetupError for what the machine lacks and RuntimeFailure when something could not be removed.
    """
    plan.check()
    spec = without_stock(spec)
    runtime = StagedRuntime(spec)
    try:
        report = await _measure(runtime, spec, plan, meter)
    finally:
        await unbroken(runtime.close(), "close the engine")
    left = {kind: count for kind, count in runtime.left().items() if count}
    if left:
        raise RuntimeFailure(f"the benchmark could not remove all it had made: {left}")
    return report


async def _measure(runtime: StagedRuntime, spec: RoleSpec, plan: RestorePlan, meter: Meter) -> RestoreReport:
    def progress(step: str, _done: float | None) -> None:
        meter.say(step)

    engine = await unbroken(runtime.describe(), "probe")
    golden = await unbroken(runtime.snapshot_golden(plan.template, plan.size, progress), "golden")
    conditions = await asyncio.to_thread(gather_conditions, engine, plan.template, plan.size)
    records = Records()

    async def start_some(alive: list[Vm], parallel: int, number: int) -> None:
        for vm in alive[: plan.starts]:
            records.starts.append(await _start(runtime, vm, parallel, number))

    bare = Bare(
        directory=spec.home / "bare",
        netns=f"gr-{runtime.tag}-bare",
        loaded=runtime.loaded(golden),
        blank=goldens.blank_overlay(spec.cache, plan.size.disk_mib),
        deadline=spec.config.vm.qmp_deadline,
    )
    async with bare:
        fenced_side = Contender[Vm](
            "greenroom",
            lambda: runtime.restore_staged(golden),
            lambda vm: vm.describe().pid,
            runtime.stop,
            start_some,
        )
        bare_side = Contender[BareVm]("bare", bare.restore, lambda vm: vm.pid, bare.stop)
        meter.say("one uncounted VM for each side")
        await fenced_side.warm_up()
        await bare_side.warm_up()
        meter.begin(2 * plan.count * len(plan.parallel) * plan.rounds)
        records.began = time.perf_counter()
        for number in range(1, plan.rounds + 1):
            for parallel in plan.parallel:
                for batch in turns([fenced_side.batch, bare_side.batch], number):
                    meter.say(f"round {number} of {plan.rounds}, {parallel} at a time")
                    await batch(records, plan.count, parallel, number, meter)
    held = 2 * plan.count if plan.held is None else plan.held
    figures = await supply.measure(
        runtime,
        golden,
        spec,
        plan.template,
        count=plan.count,
        rounds=plan.rounds,
        held=held,
        held_memory_mib=plan.held_memory_mib,
        meter=meter,
    )
    report = summarise_run(finish(conditions), plan, records, golden.ram_bytes, golden.state_bytes)
    return msgspec.structs.replace(report, supply=figures)


async def _start(runtime: StagedRuntime, vm: Vm, parallel: int, number: int) -> StartRow:
    """Start one VM and wait for its agent."""
    began = time.perf_counter()
    try:
        await runtime.start(vm)
        await guestclient.wait_ready(vm, ANSWER_DEADLINE)
        answer = (time.perf_counter() - began) * 1000
        pid = vm.describe().pid
        memory = memory_of(pid) if pid is not None else None
    except (GreenroomError, OSError) as error:
        return StartRow(round=number, parallel=parallel, error=reason(error))
    return StartRow(round=number, parallel=parallel, answer_ms=answer, memory=memory)


def summarise_run(
    conditions: Conditions, plan: RestorePlan, records: Records, ram_bytes: int, state_bytes: int
) -> RestoreReport:
    """The report over all rows."""
    return RestoreReport(
        conditions=conditions,
        plan=plan,
        golden_ram_bytes=ram_bytes,
        golden_state_bytes=state_bytes,
        summaries=[_summary(records, side, parallel) for parallel in plan.parallel for side in _SIDES],
        fence=[_fence(records, parallel) for parallel in plan.parallel],
        answer_ms=summarise(Sample(row.answer_ms, row.error) for row in records.starts),
        answered_pss_mib=summarise(
            Sample(row.memory.pss_mib) for row in records.starts if row.memory is not None
        ),
        failed=sum(row.stages is None for row in records.restores)
        + sum(row.answer_ms is None for row in records.starts),
        restores=records.restores,
        batches=records.batches,
        starts=records.starts,
    )


_SIDES: tuple[Side, Side] = ("greenroom", "bare")
_NOT_SEEN = "the border of this stage was not seen"


def _summary(records: Records, side: Side, parallel: int) -> RestoreSummary:
    rows = [row for row in records.restores if (row.side, row.parallel) == (side, parallel)]
    batches = [row for row in records.batches if (row.side, row.parallel) == (side, parallel)]
    memories = [row.memory for row in rows if row.memory is not None]

    def stage(name: str) -> Summary:
        return summarise(
            Sample(None if row.stages is None else getattr(row.stages, name), row.error or _NOT_SEEN)
            for row in rows
        )

    return RestoreSummary(
        side=side,
        parallel=parallel,
        total_ms=stage("total_ms"),
        prepare_ms=stage("prepare_ms"),
        process_ms=stage("process_ms"),
        load_ms=stage("load_ms"),
        per_second=summarise(map(_rate_sample, batches)),
        pss_mib=summarise(Sample(memory.pss_mib) for memory in memories),
        private_mib=summarise(Sample(memory.private_mib) for memory in memories),
        pss_mean_mib=_mean([memory.pss_mib for memory in memories]),
        private_mean_mib=_mean([memory.private_mib for memory in memories]),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate_sample(row: BatchRow) -> Sample:
    if not row.restored:
        return Sample(None, "no VM of the batch was restored")
    return Sample(rate(row.restored, row.seconds), "the batch took no time")


def _fence(records: Records, parallel: int) -> FenceCost:
    def restores(side: Side) -> list[RestoreRow]:
        return [row for row in records.restores if (row.side, row.parallel) == (side, parallel)]

    def batches(side: Side) -> list[BatchRow]:
        return [row for row in records.batches if (row.side, row.parallel) == (side, parallel)]

    def total(row: RestoreRow) -> Sample:
        return Sample(None if row.stages is None else row.stages.total_ms, row.error)

    return FenceCost(
        parallel=parallel,
        time=ratio(restores("greenroom"), restores("bare"), total),
        rate=ratio(batches("greenroom"), batches("bare"), _rate_sample),
    )


def tables(report: RestoreReport) -> list[Table]:
    """The report for people."""
    names = ("total_ms", "prepare_ms", "process_ms", "load_ms")
    return [
        Table(
            "Restore: from the call to a paused VM, ms",
            ["at a time", "side", *SUMMARY_COLUMNS, "VM/s", "PSS MiB", "private MiB"],
            [
                [
                    str(entry.parallel),
                    entry.side,
                    *summary_cells(entry.total_ms),
                    cell(entry.per_second.p50),
                    cell(entry.pss_mean_mib),
                    cell(entry.private_mean_mib),
                ]
                for entry in report.summaries
            ],
        ),
        Table(
            "Its stages, p50, ms",
            ["at a time", "side", "whole", "slot, fence, overlay", "process to QMP", "state"],
            [
                [str(entry.parallel), entry.side, *(cell(getattr(entry, name).p50) for name in names)]
                for entry in report.summaries
            ],
        ),
        Table(
            "What the fence costs: Greenroom over bare QEMU",
            [
                "at a time",
                *(f"time: {name}" for name in RATIO_COLUMNS),
                *(f"rate: {n}" for n in RATIO_COLUMNS),
            ],
            [[str(cost.parallel), *ratio_cells(cost.time), *ratio_cells(cost.rate)] for cost in report.fence],
        ),
        Table(
            "Then started, to the agent's first answer, ms",
            [*SUMMARY_COLUMNS, "PSS MiB p50"],
            [[*summary_cells(report.answer_ms), cell(report.answered_pss_mib.p50)]],
        ),
        *([] if report.supply is None else supply.tables(report.supply)),
    ]


def targets(report: RestoreReport) -> list[Target]:
    """What was aimed at."""
    return [] if report.supply is None else supply.targets(report.supply)


def notes(report: RestoreReport) -> list[str]:
    """What was asked for, and the golden, for people."""
    plan = report.plan
    return [
        f"{plan.rounds} rounds; in each, for each side, batches of {plan.count} VMs that stay until the last "
        "is paused",
        f"golden: {report.golden_ram_bytes >> 20} MiB of RAM shared by all, "
        f"{report.golden_state_bytes / 1024:.0f} KiB of state loaded by each",
        *([] if report.supply is None else report.supply.notes),
    ]


def failures(report: RestoreReport) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    restores = [(f"{entry.side}, {entry.parallel} at a time", entry.total_ms) for entry in report.summaries]
    return [*restores, ("first answer", report.answer_ms)]
