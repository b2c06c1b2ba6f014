"""What a restore saves: the same machine booted from nothing, beside a VM restored from its golden snapshot.

Both count from nothing, with namespace, cgroup and process made inside the measured time, to the agent's first
answer; they take turns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from greenroom.bench.claim_direct import Direct
from greenroom.bench.report import (
    RATIO_COLUMNS,
    SUMMARY_COLUMNS,
    Meter,
    Table,
    ratio_cells,
    reason,
    summary_cells,
)
from greenroom.bench.rounds import by_round, turns
from greenroom.bench.summaries import Ratio, Sample, Summary, compare, summarise
from greenroom.errors import GreenroomError


class BootRow(msgspec.Struct, frozen=True, kw_only=True):
    """One boot and one restore."""

    round: int
    boot_ms: float | None = None
    restore_ms: float | None = None
    boot_error: str = ""
    restore_error: str = ""


class BootFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Both ways to a VM that answers."""

    boot_ms: Summary
    restore_ms: Summary
    ratio: Ratio
    """Boot over restore."""
    rows: list[BootRow]


async def measure(direct: Direct, count: int, meter: Meter) -> BootFigures:
    """`count` of each. Raises nothing but what is no answer of the engine."""
    meter.begin(2 * count)
    rows: list[BootRow] = []
    for number in range(1, count + 1):
        row = BootRow(round=number)
        sides: list[tuple[str, Callable[[], Awaitable[float]]]] = [
            ("boot", direct.booted_ms),
            ("restore", direct.restored_ms),
        ]
        for name, work in turns(sides, number):
            meter.say(
                f"cold {name} {number} of {count}" if name == "boot" else f"restore {number} of {count}"
            )
            changes: dict[str, object]
            try:
                changes = {f"{name}_ms": await work()}
            except (GreenroomError, OSError) as error:
                changes = {f"{name}_error": reason(error)}
            row = msgspec.structs.replace(row, **changes)
            meter.advance()
        rows.append(row)
    return summarise_run(rows)


def summarise_run(rows: list[BootRow]) -> BootFigures:
    """The figures over all rows."""

    def boot(row: BootRow) -> Sample:
        return Sample(row.boot_ms, row.boot_error)

    def restore(row: BootRow) -> Sample:
        return Sample(row.restore_ms, row.restore_error)

    return BootFigures(
        boot_ms=summarise(map(boot, rows)),
        restore_ms=summarise(map(restore, rows)),
        ratio=compare(by_round(rows, boot), by_round(rows, restore)),
        rows=rows,
    )


def tables(figures: BootFigures) -> list[Table]:
    """For people."""
    return [
        Table(
            "From nothing to the agent's first answer, ms",
            ["", *SUMMARY_COLUMNS],
            [
                ["cold boot", *summary_cells(figures.boot_ms)],
                ["restore from the golden", *summary_cells(figures.restore_ms)],
            ],
        ),
        Table("Cold boot over restore", RATIO_COLUMNS, [ratio_cells(figures.ratio)]),
    ]


def failures(figures: BootFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [("cold boot", figures.boot_ms), ("restore", figures.restore_ms)]
