"""From the create call to a command's first output: through the whole platform, and without any of it.

`platform` is what a client sees: a create through proxy and api that takes a warm member, then `echo` in the new
sandbox through proxy and relay. `bare` is the least that it could be: `cont` for a paused VM of the same golden and
the same command asked of its agent in its namespace. `introduced` is that with the identity and the clock that a
sandbox must have before anybody uses it; so the step from `bare` to `introduced` is the hand-over, and the step from
there to `platform` is api, master, node, proxy and relay. The three take turns, one VM at a time on a machine at
rest; restoring is never part of it. What a hand-over consists of is seen on `introduced`.
"""

from __future__ import annotations

import secrets
import time
from typing import Literal

import msgspec

from greenroom.bench.claim_direct import Direct, HandOver, first_output, hand_over, resume
from greenroom.bench.claim_pool import Tenant
from greenroom.bench.report import (
    RATIO_COLUMNS,
    SUMMARY_COLUMNS,
    Meter,
    Table,
    Target,
    ratio_cells,
    reason,
    summary_cells,
)
from greenroom.bench.rounds import ratio, share, turns
from greenroom.bench.summaries import Ratio, Sample, Summary, summarise
from greenroom.errors import GreenroomError, RuntimeFailure
from greenroom.runtime.engine import Vm

Side = Literal["platform", "bare", "introduced"]
SIDES: list[Side] = ["platform", "bare", "introduced"]
RATIO_LIMIT = 1.2
STAGES = ("resume_ms", "first_answer_ms", "identity_ms", "clock_ms")


class OutputRow(msgspec.Struct, frozen=True, kw_only=True):
    """One VM from its request, or its `cont`, to the command's first output."""

    side: Side
    round: int
    output_ms: float | None = None
    create_ms: float | None = None
    """Of `platform`: the part until create's answer."""
    node_ms: dict[str, float] = {}
    """Of `platform`: what the node tells of this claim (`Sandbox.claim_ms`)."""
    hand_over: HandOver | None = None
    """Of the other two: its stages."""
    error: str = ""


class OutputFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All three sides."""

    output_ms: dict[Side, Summary]
    create_ms: Summary
    stages_ms: dict[str, Summary]
    """The hand-over's stages, on `introduced`."""
    node_ms: dict[str, Summary]
    """The same claims' hand-over as the node tells it, on `platform`: `start` is the resume, `identity` the rest."""
    to_bare: Ratio
    """Platform over bare."""
    to_introduced: Ratio
    """Platform over introduced."""
    rows: list[OutputRow]


async def measure(tenant: Tenant, direct: Direct, count: int, rounds: int, meter: Meter) -> OutputFigures:
    """`count` VMs of each side. Raises RuntimeFailure when the pool does not come to rest or no VM can be restored."""
    rows: list[OutputRow] = []
    await tenant.pool.declare(tenant.pool.spec.target)
    for side in SIDES:  # uncounted, to bring code into memory
        await one(tenant, direct, side, 0)
    meter.begin(len(SIDES) * count)
    for number in range(1, rounds + 1):
        meter.say(f"round {number} of {rounds}: from create, or cont, to a command's first output")
        for index in range(share(count, rounds, number)):
            for side in turns(SIDES, number + index):
                rows.append(await one(tenant, direct, side, number))
                meter.advance()
    return summarise_run(rows)


async def one(tenant: Tenant, direct: Direct, side: Side, number: int) -> OutputRow:
    """One VM of one side, with the pool at rest."""
    row = OutputRow(side=side, round=number)
    await tenant.pool.at_rest(tenant.pool.spec.target)
    if side == "platform":
        return await _through_platform(tenant, row)
    vm = await direct.paused()
    try:
        return await _beside(direct, vm, row)
    except (GreenroomError, OSError) as error:
        return msgspec.structs.replace(row, error=reason(error))
    finally:
        await direct.stop(vm)


async def _through_platform(tenant: Tenant, row: OutputRow) -> OutputRow:
    word, sandbox_id = _word(), ""
    try:
        begun = time.perf_counter()
        sandbox_id = await tenant.create()
        created = time.perf_counter()
        output = await tenant.platform.first_output(sandbox_id, f"echo {word}")
        ended = time.perf_counter()
        if output != f"{word}\n".encode():
            raise RuntimeFailure(f"`echo {word}` put out {output[:80]!r}")
        seen = await tenant.pool.sandbox(sandbox_id)
        row = msgspec.structs.replace(
            row,
            output_ms=(ended - begun) * 1000,
            create_ms=(created - begun) * 1000,
            node_ms=seen.claim_ms,
        )
    except (GreenroomError, OSError) as error:
        row = msgspec.structs.replace(row, error=reason(error))
    finally:
        if sandbox_id:
            await tenant.end(sandbox_id)
    return row


async def _beside(direct: Direct, vm: Vm, row: OutputRow) -> OutputRow:
    word, token = _word(), ""
    begun = time.perf_counter()
    if row.side == "introduced":
        stages, token = await hand_over(direct, vm)
    else:
        stages = await resume(direct, vm)
    await first_output(vm, word, token)
    took = (time.perf_counter() - begun) * 1000
    return msgspec.structs.replace(row, output_ms=took, hand_over=stages)


def _word() -> str:
    return f"ready-{secrets.token_hex(6)}"


def summarise_run(rows: list[OutputRow]) -> OutputFigures:
    """The figures over all rows."""
    of = {side: [row for row in rows if row.side == side] for side in SIDES}

    def stage(row: OutputRow, name: str) -> Sample:
        return Sample(None if row.hand_over is None else getattr(row.hand_over, name), row.error)

    def output(row: OutputRow) -> Sample:
        return Sample(row.output_ms, row.error)

    return OutputFigures(
        output_ms={side: summarise(map(output, mine)) for side, mine in of.items()},
        create_ms=summarise(Sample(row.create_ms, row.error) for row in of["platform"]),
        stages_ms={name: summarise(stage(row, name) for row in of["introduced"]) for name in STAGES},
        node_ms={
            name: summarise(Sample(row.node_ms.get(name), row.error) for row in of["platform"])
            for name in ("start", "identity", "total")
        },
        to_bare=ratio(of["platform"], of["bare"], output),
        to_introduced=ratio(of["platform"], of["introduced"], output),
        rows=rows,
    )


def tables(figures: OutputFigures) -> list[Table]:
    """For people."""
    names = {
        "platform": "create, command: through api and proxy",
        "introduced": "cont, identity, clock, command: in the namespace",
        "bare": "cont, command: in the namespace",
    }
    return [
        Table(
            "To a command's first output, ms",
            ["", *SUMMARY_COLUMNS],
            [
                *([names[side], *summary_cells(figures.output_ms[side])] for side in SIDES),
                ["create alone", *summary_cells(figures.create_ms)],
            ],
        ),
        Table(
            "Through the platform, over",
            ["", *RATIO_COLUMNS],
            [
                ["cont, command", *ratio_cells(figures.to_bare)],
                ["cont, identity, clock, command", *ratio_cells(figures.to_introduced)],
            ],
        ),
        Table(
            "The hand-over apart, ms",
            ["stage", *SUMMARY_COLUMNS],
            [
                *(
                    [name.removesuffix("_ms").replace("_", " "), *summary_cells(figures.stages_ms[name])]
                    for name in STAGES
                ),
                *(
                    [f"{text}, of a claim", *summary_cells(figures.node_ms[name])]
                    for name, text in (("start", "resume"), ("identity", "identity and clock"))
                ),
            ],
        ),
    ]


def targets(figures: OutputFigures) -> list[Target]:
    """What is aimed at."""
    name = "create to first output over cont to first output"
    return [Target(name=name, value=figures.to_bare.overall, limit=RATIO_LIMIT, unit="")]


def failures(figures: OutputFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [(f"first output, {side}", summary) for side, summary in figures.output_ms.items()]
