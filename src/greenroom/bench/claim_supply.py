"""How long does a client wait for a sandbox, and how much of that does the warm pool save?

Claims go one after the other through a running platform's entry: create, the result of the command `true`,
kill. Rounds alternate between a full pool (`warm`) and one kept empty (`on_demand`, where each claim waits for
a restore), and change places, so that both meet the same machine. Before each claim the pool is at rest: refill
and clean-up of the one before are over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import msgspec

from greenroom.bench.claim_pool import Tenant
from greenroom.bench.report import (
    RATIO_COLUMNS,
    SUMMARY_COLUMNS,
    Meter,
    Table,
    cell,
    ratio_cells,
    reason,
    summary_cells,
)
from greenroom.bench.rounds import ratio, share, turns
from greenroom.bench.summaries import Ratio, Sample, Summary, summarise
from greenroom.errors import GreenroomError, RuntimeFailure

Supply = Literal["warm", "on_demand"]

STAGES = ("queue", "turn", "start", "identity", "total")
"""What a node measures of a claim (`Sandbox.claim_ms`), in order; `total` is all of it."""


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """One claim as the client saw it and, from `node_ms` on, as the node did. Empty from the failed step on."""

    supply: Supply
    round: int
    number: int
    at: float
    """Seconds since the run began."""
    create_ms: float | None = None
    command_ms: float | None = None
    """From the command's request, sent right after create's answer, to its exit status."""
    usable_ms: float | None = None
    """From the create request to that exit status."""
    kill_ms: float | None = None
    node_ms: dict[str, float] = {}
    clock_offset_ms: float | None = None
    """Guest clock minus host clock at the hand-over."""
    clock_error_ms: float | None = None
    """Half the round trip in which that was measured."""
    error: str = ""
    """Which step failed and why."""


class ClaimSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One supply, all rounds together, in milliseconds."""

    supply: Supply
    create_ms: Summary
    command_ms: Summary
    usable_ms: Summary
    kill_ms: Summary
    node_ms: dict[str, Summary]
    clock_offset_ms: Summary
    clock_distance_ms: Summary
    """The offset without its sign."""
    clock_error_ms: Summary


class SupplyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Both supplies. Ratios are on-demand over warm: how often longer one waits without a pool."""

    summaries: list[ClaimSummary]
    create_ratio: Ratio
    usable_ratio: Ratio
    claims: list[ClaimRow]


async def one(tenant: Tenant, row: ClaimRow) -> ClaimRow:
    """Create, use and kill one sandbox. A step that fails is the last; the sandbox is killed all the same."""
    replace = msgspec.structs.replace
    step, sandbox_id = "create", ""
    try:
        begun = time.perf_counter()
        sandbox_id = await tenant.create()
        created = time.perf_counter()
        row = replace(row, create_ms=(created - begun) * 1000)
        step = "command"
        status = await tenant.platform.command(sandbox_id, "true")
        ended = time.perf_counter()
        if status != 0:
            raise RuntimeFailure(f"`true` ended with status {status}")
        row = replace(row, command_ms=(ended - created) * 1000, usable_ms=(ended - begun) * 1000)
        step = "ask the node"
        seen = await tenant.pool.sandbox(sandbox_id)
        row = replace(
            row,
            node_ms=seen.claim_ms,
            clock_offset_ms=seen.clock_offset_ms,
            clock_error_ms=seen.clock_error_ms,
        )
        step = "kill"
        begun = time.perf_counter()
        await tenant.platform.kill(sandbox_id)
        return replace(row, kill_ms=(time.perf_counter() - begun) * 1000)
    except (GreenroomError, OSError) as error:
        row = replace(row, error=f"{step}: {reason(error)}")
    if sandbox_id:
        await tenant.end(sandbox_id)
    return row


async def measure(tenant: Tenant, count: int, rounds: int, meter: Meter) -> SupplyFigures:
    """`count` claims of each supply over `rounds` rounds. Raises RuntimeFailure when the pool does not come to rest."""
    pool = tenant.pool
    rows: list[ClaimRow] = []
    targets: dict[Supply, int] = {"warm": pool.spec.target, "on_demand": 0}
    meter.begin(2 * count)
    began = time.perf_counter()
    for number in range(1, rounds + 1):
        for supply in turns(list(targets), number):
            meter.say(f"round {number} of {rounds}, {supply.replace('_', ' ')}")
            await pool.declare(targets[supply])
            for index in range(share(count, rounds, number)):
                await pool.at_rest(targets[supply])
                at = time.perf_counter() - began
                rows.append(await one(tenant, ClaimRow(supply=supply, round=number, number=index, at=at)))
                meter.advance()
    return summarise_run(rows)


def summarise_run(rows: list[ClaimRow]) -> SupplyFigures:
    """The figures over all rows."""
    return SupplyFigures(
        summaries=[_summary(rows, "warm"), _summary(rows, "on_demand")],
        create_ratio=_ratio(rows, lambda row: row.create_ms),
        usable_ratio=_ratio(rows, lambda row: row.usable_ms),
        claims=rows,
    )


def _sample(row: ClaimRow, value: float | None) -> Sample:
    return Sample(value, row.error or "the node did not tell")


def _summary(rows: list[ClaimRow], supply: Supply) -> ClaimSummary:
    mine = [row for row in rows if row.supply == supply]

    def over(value: Callable[[ClaimRow], float | None]) -> Summary:
        return summarise(_sample(row, value(row)) for row in mine)

    def distance(row: ClaimRow) -> float | None:
        return None if row.clock_offset_ms is None else abs(row.clock_offset_ms)

    return ClaimSummary(
        supply=supply,
        create_ms=over(lambda row: row.create_ms),
        command_ms=over(lambda row: row.command_ms),
        usable_ms=over(lambda row: row.usable_ms),
        kill_ms=over(lambda row: row.kill_ms),
        node_ms={name: summarise(_sample(row, row.node_ms.get(name)) for row in mine) for name in STAGES},
        clock_offset_ms=over(lambda row: row.clock_offset_ms),
        clock_distance_ms=over(distance),
        clock_error_ms=over(lambda row: row.clock_error_ms),
    )


def _ratio(rows: list[ClaimRow], value: Callable[[ClaimRow], float | None]) -> Ratio:
    of = {supply: [row for row in rows if row.supply == supply] for supply in ("warm", "on_demand")}
    return ratio(of["on_demand"], of["warm"], lambda row: _sample(row, value(row)))


def tables(figures: SupplyFigures) -> list[Table]:
    """For people."""
    steps = [
        ("create", "create_ms"),
        ("`true` after it", "command_ms"),
        ("both: until usable", "usable_ms"),
        ("kill", "kill_ms"),
    ]
    clocks = [
        ("offset", "clock_offset_ms"),
        ("without sign", "clock_distance_ms"),
        ("uncertainty ±", "clock_error_ms"),
    ]
    names = [(entry, entry.supply.replace("_", " ")) for entry in figures.summaries]
    return [
        Table(
            "Claims one after the other, as the client sees them, ms",
            ["step", "supply", *SUMMARY_COLUMNS],
            [
                [step, supply, *summary_cells(getattr(entry, field))]
                for step, field in steps
                for entry, supply in names
            ],
        ),
        Table(
            "The node's own stages, p50 (p95), ms",
            ["supply", *STAGES],
            [
                [
                    supply,
                    *(
                        f"{cell(entry.node_ms[name].p50)} ({cell(entry.node_ms[name].p95)})"
                        for name in STAGES
                    ),
                ]
                for entry, supply in names
            ],
        ),
        Table(
            "What the warm pool saves: on demand over warm",
            ["time", *RATIO_COLUMNS],
            [
                ["create", *ratio_cells(figures.create_ratio)],
                ["until usable", *ratio_cells(figures.usable_ratio)],
            ],
        ),
        Table(
            "Guest clock minus host clock at the hand-over, ms",
            ["", "supply", *SUMMARY_COLUMNS],
            [
                [what, supply, *summary_cells(getattr(entry, field))]
                for what, field in clocks
                for entry, supply in names
            ],
        ),
    ]


def failures(figures: SupplyFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [
        (
            entry.supply.replace("_", " "),
            summarise(
                Sample(None, row.error) if row.error else Sample(0.0)
                for row in figures.claims
                if row.supply == entry.supply
            ),
        )
        for entry in figures.summaries
    ]
