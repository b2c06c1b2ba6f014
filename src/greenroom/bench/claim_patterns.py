"""Creates in the patterns that clients make: one after the other, one every so often, all at once.

`sequential` is a closed loop: the next create is sent when the one before is answered. `staggered` is an open one:
a create is due every so often whatever became of those before, and its latency counts from when it was due, so a
platform that falls behind cannot hide it. `burst` sends all at once. Before each pattern the pool is full; the
sandboxes stay alive to its end, so what the platform makes anew meanwhile is in competition with what it serves.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec

from greenroom.bench.claim_pool import Tenant
from greenroom.bench.report import TAIL_COLUMNS, Meter, Table, cell, reason, tail_cells
from greenroom.bench.summaries import Sample, Summary, rate, summarise
from greenroom.errors import (
    GreenroomError,
    InternalError,
    NodeUnavailable,
    OutcomeUnknown,
    PermanentError,
    RuntimeFailure,
)
from greenroom.wire.tasks import spawn, stop

Pattern = Literal["sequential", "staggered", "burst"]
Outcome = Literal["ok", "rejected", "failed", "unknown"]
"""`rejected` asks to be tried again, or says what is wrong with the request; `failed` is the platform's fault;
`unknown` is no answer."""
PATTERNS: tuple[Pattern, ...] = ("sequential", "staggered", "burst")
OUTCOMES: tuple[Outcome, ...] = ("ok", "rejected", "failed", "unknown")


class PatternRow(msgspec.Struct, frozen=True, kw_only=True):
    """One create. Seconds are since the pattern began."""

    pattern: Pattern
    number: int
    due_s: float
    """When it was to be sent."""
    sent_s: float
    outcome: Outcome
    ms: float | None = None
    """From when it was due to its answer."""
    error: str = ""


class PatternSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One pattern."""

    pattern: Pattern
    success: float
    """Share of the creates that gave a sandbox, 0 to 1."""
    outcomes: dict[Outcome, int]
    create_ms: Summary
    seconds: float
    """From the first create to the last answer."""
    per_second: float | None
    """Sandboxes given in that time."""


class PatternFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All patterns."""

    pool: int
    every_ms: float
    """Between two creates of `staggered`."""
    summaries: list[PatternSummary]
    rows: list[PatternRow]


def outcome_of(error: Exception) -> Outcome:
    """The class of a create's failure."""
    if isinstance(error, OutcomeUnknown):
        return "unknown"
    if isinstance(error, NodeUnavailable) and error.__cause__ is not None:
        return "unknown"  # no answer came; without a cause it is the platform's own answer
    if isinstance(error, InternalError | RuntimeFailure) or not isinstance(error, GreenroomError):
        return "failed"
    return "failed" if type(error) is PermanentError else "rejected"


async def measure(tenant: Tenant, count: int, pool: int, every_ms: float, meter: Meter) -> PatternFigures:
    """`count` creates in each pattern, on a pool of `pool` members. Raises RuntimeFailure when it is never full."""
    rows: list[PatternRow] = []
    meter.begin(len(PATTERNS) * count)
    await tenant.pool.declare(pool)
    for pattern in PATTERNS:
        meter.say(f"{pattern}: filling a pool of {pool}")
        await tenant.pool.at_rest(pool)
        meter.say(f"{pattern}: {count} creates")
        rows += await _run(tenant, pattern, count, every_ms / 1000, meter)
    return summarise_run(rows, pool, every_ms)


async def _run(tenant: Tenant, pattern: Pattern, count: int, every: float, meter: Meter) -> list[PatternRow]:
    """One pattern and the end of its sandboxes."""
    made: list[str] = []
    began = time.perf_counter()

    async def one(number: int, due: float) -> PatternRow:
        sent = time.perf_counter() - began
        row = PatternRow(pattern=pattern, number=number, due_s=due, sent_s=sent, outcome="ok")
        try:
            made.append(await tenant.create())
            return msgspec.structs.replace(row, ms=(time.perf_counter() - began - due) * 1000)
        except (GreenroomError, OSError) as error:
            return msgspec.structs.replace(row, outcome=outcome_of(error), error=reason(error))
        finally:
            meter.advance()

    tasks: list[asyncio.Task[PatternRow]] = []
    try:
        if pattern == "sequential":
            rows = [await one(number, time.perf_counter() - began) for number in range(count)]
        else:
            for number in range(count):
                due = number * every if pattern == "staggered" else 0.0
                if (left := due - (time.perf_counter() - began)) > 0:
                    await asyncio.sleep(left)
                tasks.append(spawn(one(number, due), f"{pattern} {number}"))
            rows = list(await asyncio.gather(*tasks))
    finally:
        # A create that is cancelled is brought to its end all the same; the tenant finds what it made.
        await stop(*tasks)
    for sandbox_id in made:
        await tenant.end(sandbox_id)
    return rows


def summarise_run(rows: list[PatternRow], pool: int, every_ms: float) -> PatternFigures:
    """The figures over all rows."""
    return PatternFigures(
        pool=pool,
        every_ms=every_ms,
        summaries=[
            _summary(pattern, mine)
            for pattern in PATTERNS
            if (mine := [row for row in rows if row.pattern == pattern])
        ],
        rows=rows,
    )


def _summary(pattern: Pattern, rows: list[PatternRow]) -> PatternSummary:
    outcomes: dict[Outcome, int] = {name: sum(row.outcome == name for row in rows) for name in OUTCOMES}
    ends = [row.due_s + row.ms / 1000 for row in rows if row.ms is not None]
    seconds = max(ends, default=0.0) - min(row.sent_s for row in rows)
    return PatternSummary(
        pattern=pattern,
        success=outcomes["ok"] / len(rows),
        outcomes=outcomes,
        create_ms=summarise(Sample(row.ms, row.error) for row in rows),
        seconds=max(0.0, seconds),
        per_second=rate(outcomes["ok"], seconds),
    )


def tables(figures: PatternFigures) -> list[Table]:
    """For people."""
    every = f"one every {figures.every_ms:g} ms"
    texts = {"sequential": "one after the other", "staggered": every, "burst": "all at once"}
    return [
        Table(
            f"Creates in patterns, pool of {figures.pool}, ms",
            ["pattern", "", *TAIL_COLUMNS, "success", "ok/s"],
            [
                [
                    entry.pattern,
                    texts[entry.pattern],
                    *tail_cells(entry.create_ms),
                    f"{entry.success:.0%}",
                    cell(entry.per_second),
                ]
                for entry in figures.summaries
            ],
        ),
        Table(
            "Their outcomes",
            ["pattern", *OUTCOMES],
            [
                [entry.pattern, *(str(entry.outcomes[name]) for name in OUTCOMES)]
                for entry in figures.summaries
            ],
        ),
    ]


def failures(figures: PatternFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [(entry.pattern, entry.create_ms) for entry in figures.summaries]
