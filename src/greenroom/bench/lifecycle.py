"""Pausing, resuming, snapshots and forks of a VM with memory of its own, beside a bare script of the same steps.

In each round either side has one VM, which grows: random bytes are written to its tmpfs, and a snapshot is taken at
each size, which shows how the parent's stop grows with dirty memory. At the last size the other steps follow: a VM is
started from the snapshot, children stay paused while their memory is read, the VM is forked, paused and resumed. The
sides (`lifecycle_node`, `lifecycle_bare`) take turns at every single step and change places from one to the next; each
step that brings a VM back ends by looking whether it has its parent's memory, outside of what is timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import psutil

from greenroom.bench.lanes import unbroken
from greenroom.bench.lifecycle_bare import Bare, script
from greenroom.bench.lifecycle_node import Node
from greenroom.bench.lifecycle_sides import SIDES, STEPS, Held, Side, SideName, Step, Took
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
    medium_of,
    ratio_cells,
    reason,
    summary_cells,
    target_table,
)
from greenroom.bench.rounds import ratio, turns
from greenroom.bench.summaries import Ratio, Sample, Summary, summarise
from greenroom.config import RoleSpec
from greenroom.errors import GreenroomError, SetupError
from greenroom.wire.messages import Size

RATIO_LIMIT = 1.3
STOP_LIMIT = 100.0
STOP_MIB = 16
"""Dirty memory up to which the parent's stop should keep to STOP_LIMIT."""
CHILD_LIMIT = 30.0
VM_MIB = 192
"""Asked of the host for each VM that may be alive, beside what it writes."""
SETTLE = 0.3
"""Seconds between two steps: namespaces and mappings of the last one are still being freed when it has ended."""
BROUGHT_BACK: tuple[Step, ...] = ("start", "fork", "resume")
"""Steps that end with an answer of a guest."""
PAUSE_STAGES = ("stop", "state", "scan", "read", "freeze", "cont")
WORDS: dict[Step, str] = {
    "snapshot": "snapshot",
    "start": "start from a snapshot",
    "fork": "fork",
    "pause": "pause",
    "resume": "resume",
}


class LifecyclePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    template: str
    size: Size
    rounds: int
    dirty_mib: int
    """Written in the guest by the time of every step but the first snapshots."""
    forks: int
    """Children of a fork."""

    @property
    def sizes(self) -> list[int]:
        """MiB written at each of the snapshots: a sixteenth, a quarter, all."""
        return sorted({max(1, self.dirty_mib // 16), max(1, self.dirty_mib // 4), self.dirty_mib})

    @property
    def children(self) -> int:
        """Paused children whose memory is read: two are needed to see what one more takes."""
        return max(2, self.forks)

    def check(self) -> None:
        """Raise SetupError for what this machine or user cannot do."""
        if os.geteuid() != 0:
            raise SetupError("this benchmark makes real VMs and network namespaces; run it as root")
        # One side's children at a time, beside a VM of each and the node's pool and stock.
        needed = (self.children + 6) * (VM_MIB + self.dirty_mib)
        available = psutil.virtual_memory().available >> 20
        if needed > available:
            raise SetupError(
                f"{self.children} children may need {needed} MiB in all and {available} MiB are available; "
                "choose fewer --forks"
            )


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one side; without `took` it failed, for the reason `error`."""

    round: int
    side: SideName
    step: Step
    dirty_mib: int
    took: Took | None = None
    error: str = ""


class HeldRow(msgspec.Struct, frozen=True, kw_only=True):
    """What children of one snapshot held."""

    round: int
    side: SideName
    held: Held | None = None
    error: str = ""


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one side with one amount written, all rounds together; milliseconds and MiB."""

    side: SideName
    step: Step
    dirty_mib: int
    ms: Summary
    answer_ms: Summary
    """Empty for a step after which no guest answers, as are the others where there is nothing of the kind."""
    stop_ms: Summary
    ram_mib: Summary
    stages_ms: dict[str, float | None]
    """Medians; Greenroom's alone."""


class StepRatio(msgspec.Struct, frozen=True, kw_only=True):
    """Greenroom over bare."""

    step: Step
    dirty_mib: int
    until: Literal["first answer", "end of the call"]
    ratio: Ratio


class HeldSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Children of one side, MiB of PSS."""

    side: SideName
    children: int
    first_mib: Summary
    further_mib: Summary
    """Of each one more that is paused and has not run."""
    answered_mib: Summary
    """Mean of all, after each had answered once."""


class LifecycleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen."""

    benchmark: Literal["lifecycle"] = "lifecycle"
    conditions: Conditions
    plan: LifecyclePlan
    summaries: list[StepSummary]
    ratios: list[StepRatio]
    children: list[HeldSummary]
    failed: int
    steps: list[StepRow]
    held: list[HeldRow]
    targets: list[Target] = []
    tables: list[Table] = []
    notes: list[str] = []


class Records:
    """The rows as they come."""

    def __init__(self) -> None:
        self.steps: list[StepRow] = []
        self.held: list[HeldRow] = []


async def run(spec: RoleSpec, plan: LifecyclePlan, meter: Meter) -> LifecycleReport:
    """Measure as planned, with `spec` naming a directory that nothing else uses.

    However it ends, nothing that was made is left on the host. Raises SetupError for what the machine lacks and
    RuntimeFailure when a VM to begin with could not be had or something could not be removed.
    """
    plan.check()
    records, path = Records(), script()
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(Node(spec, plan.template, plan.size, meter))
        conditions = await asyncio.to_thread(gather_conditions, node.engine, plan.template, plan.size)
        conditions = msgspec.structs.replace(conditions, medium=medium_of(spec.home))
        sides: list[Side] = [node]
        if path is not None:
            own = msgspec.structs.replace(spec, state_dir=f"{spec.state_dir}/bare")
            bare = Bare(path, own, plan.size, plan.children, meter)
            sides.append(await stack.enter_async_context(bare))
        await measure(sides, plan, records, meter)
    return summarise_run(finish(conditions), plan, records)


async def measure(sides: Sequence[Side], plan: LifecyclePlan, records: Records, meter: Meter) -> None:
    """All rounds. A step that fails is a row like any other; raises GreenroomError where nothing could follow."""
    meter.begin(plan.rounds * len(sides) * (len(plan.sizes) + len(STEPS)))
    for number in range(1, plan.rounds + 1):
        meter.say(f"round {number} of {plan.rounds}")
        try:
            await _round(sides, plan, records, number, meter)
        finally:
            for side in sides:
                await unbroken(side.end(), f"end of {side.name}")


async def _round(
    sides: Sequence[Side], plan: LifecyclePlan, records: Records, number: int, meter: Meter
) -> None:
    for side in sides:
        await unbroken(side.begin(), f"begin of {side.name}")
    written, turn = 0, number
    for size in plan.sizes:
        for side in turns(sides, turn):
            await unbroken(side.grow(size - written), f"growth of {side.name}")
        written = size
        for side in turns(sides, turn):
            await _step(side, "snapshot", plan, records, number, size, meter)
        turn += 1
    for step in STEPS[1:]:
        if step == "fork":
            for side in turns(sides, turn):
                records.held.append(await _held(side, plan, number))
                meter.advance()
        for side in turns(sides, turn):
            await _step(side, step, plan, records, number, written, meter)
        turn += 1


async def _step(
    side: Side, step: Step, plan: LifecyclePlan, records: Records, number: int, written: int, meter: Meter
) -> None:
    row = StepRow(round=number, side=side.name, step=step, dirty_mib=written)
    if step == "resume" and any(
        (entry.round, entry.side, entry.step) == (number, side.name, "pause") and entry.error
        for entry in records.steps
    ):
        records.steps.append(msgspec.structs.replace(row, error="it had not been paused"))
        return
    calls = {
        "snapshot": side.snapshot,
        "start": side.start,
        "fork": lambda: side.fork(plan.forks),
        "pause": side.pause,
        "resume": side.resume,
    }
    try:
        found = await unbroken(calls[step](), f"{step} of {side.name}")
        row = msgspec.structs.replace(row, took=found)
    except (GreenroomError, OSError) as error:
        row = msgspec.structs.replace(row, error=reason(error))
    records.steps.append(row)
    meter.advance()
    await side.rest()
    await asyncio.sleep(SETTLE)


async def _held(side: Side, plan: LifecyclePlan, number: int) -> HeldRow:
    row = HeldRow(round=number, side=side.name)
    try:
        held = await unbroken(side.held(plan.children), f"children of {side.name}")
        row = msgspec.structs.replace(row, held=held)
    except (GreenroomError, OSError) as error:
        row = msgspec.structs.replace(row, error=reason(error))
    await side.rest()
    await asyncio.sleep(SETTLE)
    return row


def summarise_run(conditions: Conditions, plan: LifecyclePlan, records: Records) -> LifecycleReport:
    """The report over all rows."""
    points: list[tuple[Step, int]] = [("snapshot", size) for size in plan.sizes]
    points += [(step, plan.dirty_mib) for step in STEPS[1:]]
    seen = [side for side in SIDES if any(row.side == side for row in records.steps)]
    report = LifecycleReport(
        conditions=conditions,
        plan=plan,
        summaries=[_summary(records, side, step, size) for step, size in points for side in seen],
        ratios=[entry for step, size in points for entry in _ratios(records, step, size)],
        children=[_children(records, side, plan.children) for side in seen],
        failed=sum(row.took is None for row in records.steps) + sum(row.held is None for row in records.held),
        steps=records.steps,
        held=records.held,
    )
    replace = msgspec.structs.replace
    report = replace(report, targets=targets(report), notes=notes(report))
    return replace(report, tables=tables(report))


def _rows(records: Records, side: SideName, step: Step, size: int) -> list[StepRow]:
    return [row for row in records.steps if (row.side, row.step, row.dirty_mib) == (side, step, size)]


def _sample(row: StepRow, name: str) -> Sample:
    return Sample(None if row.took is None else getattr(row.took, name), row.error or "it was not told")


def _there(rows: Sequence[StepRow], name: str) -> Summary:
    """Of those that have such a figure, since not every step has each."""
    found = [_sample(row, name) for row in rows]
    return summarise(sample for sample in found if sample.value is not None)


def _summary(records: Records, side: SideName, step: Step, size: int) -> StepSummary:
    rows = _rows(records, side, step, size)
    stages = {name: None for row in rows if row.took is not None for name in row.took.stages}
    return StepSummary(
        side=side,
        step=step,
        dirty_mib=size,
        ms=summarise(_sample(row, "ms") for row in rows),
        answer_ms=_there(rows, "answer_ms"),
        stop_ms=_there(rows, "stop_ms"),
        ram_mib=_there(rows, "ram_mib"),
        stages_ms={
            name: summarise(
                Sample(row.took.stages.get(name, 0.0)) for row in rows if row.took is not None
            ).p50
            for name in stages
        },
    )


def _ratios(records: Records, step: Step, size: int) -> list[StepRatio]:
    ours, bare = _rows(records, "greenroom", step, size), _rows(records, "bare", step, size)
    if not bare:
        return []
    made = []
    if step in BROUGHT_BACK:
        found = ratio(ours, bare, lambda row: _sample(row, "answer_ms"))
        made.append(StepRatio(step=step, dirty_mib=size, until="first answer", ratio=found))
    found = ratio(ours, bare, lambda row: _sample(row, "ms"))
    return [*made, StepRatio(step=step, dirty_mib=size, until="end of the call", ratio=found)]


def _children(records: Records, side: SideName, children: int) -> HeldSummary:
    rows = [row for row in records.held if row.side == side]

    def summary(figure: Callable[[Held], float | None]) -> Summary:
        return summarise(
            Sample(None if row.held is None else figure(row.held), row.error or "there was one child")
            for row in rows
        )

    return HeldSummary(
        side=side,
        children=children,
        first_mib=summary(lambda held: held.first_mib),
        further_mib=summary(lambda held: held.further_mib),
        answered_mib=summary(lambda held: held.answered_mib / held.children),
    )


def targets(report: LifecycleReport) -> list[Target]:
    """What is aimed at. Where a guest answers, its first answer counts, as it does for the script."""
    made = []
    for step in STEPS:
        until = "first answer" if step in BROUGHT_BACK else "end of the call"
        found = next(
            (
                entry.ratio.overall
                for entry in report.ratios
                if (entry.step, entry.until, entry.dirty_mib) == (step, until, report.plan.dirty_mib)
            ),
            None,
        )
        to = " to the first answer" if step in BROUGHT_BACK else ""
        name = f"lifecycle: {WORDS[step]}{to}, over the bare script"
        made.append(Target(name=name, value=found, limit=RATIO_LIMIT, unit=""))
    small = [
        entry
        for entry in report.summaries
        if (entry.side, entry.step) == ("greenroom", "snapshot") and entry.dirty_mib <= STOP_MIB
    ]
    stop = max(small, key=lambda entry: entry.dirty_mib).stop_ms.p50 if small else None
    made.append(
        Target(
            name=f"lifecycle: the parent's stop with up to {STOP_MIB} MB written, p50",
            value=stop,
            limit=STOP_LIMIT,
            unit=" ms",
        )
    )
    further = next((entry.further_mib.p50 for entry in report.children if entry.side == "greenroom"), None)
    made.append(
        Target(
            name="lifecycle: PSS of each further paused child", value=further, limit=CHILD_LIMIT, unit=" MiB"
        )
    )
    return made


def tables(report: LifecycleReport) -> list[Table]:
    """For people."""
    plan = report.plan
    last = [entry for entry in report.summaries if entry.dirty_mib == plan.dirty_mib]
    figures: list[tuple[StepSummary, str, Summary]] = []
    for entry in last:
        if entry.step in BROUGHT_BACK:
            figures.append((entry, "first answer", entry.answer_ms))
        if entry.step not in BROUGHT_BACK or entry.side == "greenroom":
            figures.append((entry, "end of the call", entry.ms))
    return [
        Table(
            f"Steps with {plan.dirty_mib} MiB written in the guest, ms",
            ["step", "until", "side", *SUMMARY_COLUMNS],
            [
                [_words(entry.step, plan), until, entry.side, *summary_cells(summary)]
                for entry, until, summary in figures
            ],
        ),
        Table(
            "Greenroom over the bare script",
            ["step", "until", *RATIO_COLUMNS],
            [
                [_words(entry.step, plan), entry.until, *ratio_cells(entry.ratio)]
                for entry in report.ratios
                if entry.dirty_mib == plan.dirty_mib
            ],
        ),
        _growth(report),
        Table(
            "Where Greenroom's time goes: stages of 1 ms and more, p50, ms",
            ["step", "stage", "ms"],
            [
                [_words(entry.step, plan), name, cell(ms)]
                for entry in last
                for name, ms in entry.stages_ms.items()
                if ms is not None and ms >= 1
            ],
        ),
        Table(
            "Memory of children of one snapshot, PSS, MiB, p50",
            ["side", "children", "the first, paused", "each further, paused", "each, after its first answer"],
            [
                [
                    entry.side,
                    str(entry.children),
                    *(cell(s.p50) for s in (entry.first_mib, entry.further_mib, entry.answered_mib)),
                ]
                for entry in report.children
            ],
        ),
        target_table(report.targets),
    ]


def _growth(report: LifecycleReport) -> Table:
    """How a snapshot grows with what was written."""
    rows = []
    for size in report.plan.sizes:
        of = {
            entry.side: entry
            for entry in report.summaries
            if (entry.step, entry.dirty_mib) == ("snapshot", size)
        }
        ours, bare = of.get("greenroom"), of.get("bare")
        if ours is None:
            continue
        to_bare = next(
            (e.ratio.overall for e in report.ratios if (e.step, e.dirty_mib) == ("snapshot", size)), None
        )
        rows.append(
            [
                str(size),
                cell(ours.ram_mib.p50),
                cell(ours.stop_ms.p50),
                cell(ours.stop_ms.max),
                *(cell(ours.stages_ms.get(f"capture: {name}")) for name in PAUSE_STAGES),
                cell(ours.ms.p50),
                cell(None if bare is None else bare.ms.p50),
                cell(to_bare),
            ]
        )
    columns = ["MiB written", "MiB saved", "parent stopped, p50", "max", *PAUSE_STAGES]
    return Table(
        "A snapshot by dirty memory, ms", [*columns, "whole snapshot, p50", "bare script", "over it"], rows
    )


def _words(step: Step, plan: LifecyclePlan) -> str:
    return f"fork into {plan.forks}" if step == "fork" else WORDS[step]


def notes(report: LifecycleReport) -> list[str]:
    """What was done, for people."""
    plan = report.plan
    made = [
        f"{plan.rounds} rounds of one VM for each side, turn by turn; {plan.dirty_mib} MiB of random bytes in "
        "the guest's tmpfs, which a VM has beside the pages that its system changed",
        "Greenroom's side is a node without HTTP: the end of a call is with measured clock and journal; the first "
        "answer of a guest is that to its identity, on both sides",
    ]
    if not report.ratios:
        made.append("not run from a checkout: no bare script to compare with")
    return made


def failures(report: LifecycleReport) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    made = [
        (f"{entry.step}, {entry.side}, {entry.dirty_mib} MiB written", entry.ms) for entry in report.summaries
    ]
    return [*made, *((f"children, {entry.side}", entry.first_mib) for entry in report.children)]
