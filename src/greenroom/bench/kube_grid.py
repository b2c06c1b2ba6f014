"""Claims by the size of the pool and the number of clients: the table that is to be flat in the pool's size.

For each pool so many clients at a time claim until a count is reached, on nodes that make members at once, so that what
is seen is the platform's own work and not a wait for refill. Pools change places with every number of clients.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.bench.kube_client import now
from greenroom.bench.kube_traffic import ClaimRow, Silent, Tenant, burst, served_once, warm_count
from greenroom.bench.kube_world import Shape, World
from greenroom.bench.report import TAIL_COLUMNS, Meter, Table, Target, cell, tail_cells
from greenroom.bench.rounds import turns
from greenroom.bench.summaries import Sample, Summary, divide, rate, summarise

POOLS = (10, 200, 2300)
QUICK_POOLS = (4, 12)
PARALLEL = (1, 5, 20)
QUICK_PARALLEL = (1, 3)
CLAIMS = 100
"""Of each pool and number of clients."""
NODES = 4
FLAT_LIMIT = 1.5
"""Of the largest pool's median over the smallest's; what is linear in the pool would be 230."""


class GridCell(msgspec.Struct, frozen=True, kw_only=True):
    """One pool with one number of clients, in milliseconds."""

    pool: int
    parallel: int
    ready_ms: Summary
    answered_ms: Summary
    warm: int
    once: int
    per_second: float | None
    values: list[float]
    """Every claim's time until a watch had shown it ready."""


class GridFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    runtime: Literal["simulated"] = "simulated"
    shape: Shape
    cells: list[GridCell]
    flatness: dict[str, float | None]
    """By number of clients, the largest pool's median over the smallest's."""


async def measure(directory: Path, quick: bool, meter: Meter) -> GridFigures:
    """A world, and every combination in it."""
    pools = QUICK_POOLS if quick else POOLS
    lanes = QUICK_PARALLEL if quick else PARALLEL
    count = 6 if quick else CLAIMS
    shape = Shape(nodes=2 if quick else NODES, per_process=2)
    meter.begin(len(pools) * len(lanes) * count)
    meter.say(f"pools × clients: starting {shape.text()}")
    cells: list[GridCell] = []
    async with World(directory, shape) as world, Tenant(world.client()) as tenant:
        # Connections and caches that the first ones would pay for.
        await tenant.declare("grid", pools[0])
        await _one(tenant, pools[0], lanes[-1], lanes[-1], Silent())
        await tenant.clear()
        for number, parallel in enumerate(lanes):
            for pool in turns(pools, number):
                meter.say(f"pools × clients: pool of {pool}, {parallel} clients")
                await tenant.declare("grid", pool)
                cells.append(await _one(tenant, pool, parallel, count, meter))
                await tenant.clear()
    cells.sort(key=lambda entry: (entry.pool, entry.parallel))
    return GridFigures(shape=shape, cells=cells, flatness=flatness(cells))


async def _one(tenant: Tenant, pool: int, parallel: int, count: int, meter: Meter) -> GridCell:
    names = [f"g{number}-{secrets.token_hex(3)}" for number in range(count)]
    begun = now()
    rows = await burst(names, parallel, lambda name: tenant.claim(name, "grid"), meter)
    seconds = now() - begun
    return cell_of(pool, parallel, await tenant.told(rows), seconds)


def cell_of(pool: int, parallel: int, rows: list[ClaimRow], seconds: float) -> GridCell:
    """The figures over one combination's rows."""
    ready = summarise(Sample(row.ready_ms, row.error) for row in rows)
    return GridCell(
        pool=pool,
        parallel=parallel,
        ready_ms=ready,
        answered_ms=summarise(Sample(row.answered_ms, row.error) for row in rows),
        warm=warm_count(rows),
        once=served_once(rows),
        per_second=rate(ready.n, seconds),
        values=[row.ready_ms for row in rows if row.ready_ms is not None],
    )


def flatness(cells: list[GridCell]) -> dict[str, float | None]:
    """By number of clients, the largest pool's median over the smallest's."""
    made: dict[str, float | None] = {}
    for parallel in sorted({entry.parallel for entry in cells}):
        mine = sorted((entry for entry in cells if entry.parallel == parallel), key=lambda entry: entry.pool)
        made[str(parallel)] = divide(mine[-1].ready_ms.p50, mine[0].ready_ms.p50)
    return made


def targets(figures: GridFigures) -> list[Target]:
    """What was aimed at."""
    return [
        Target(
            name=f"claims of {parallel} clients: largest pool over smallest, p50",
            value=ratio,
            limit=FLAT_LIMIT,
            unit="",
        )
        for parallel, ratio in figures.flatness.items()
    ]


def tables(figures: GridFigures) -> list[Table]:
    """For people."""
    return [
        Table(
            f"Claim → Ready seen by a watch, {figures.shape.nodes} nodes, simulated VMs, ms",
            ["pool", "clients", *TAIL_COLUMNS, "warm", "claims/s"],
            [
                [
                    str(entry.pool),
                    str(entry.parallel),
                    *tail_cells(entry.ready_ms),
                    str(entry.warm),
                    cell(entry.per_second),
                ]
                for entry in figures.cells
            ],
        ),
        Table(
            "The largest pool's median over the smallest's",
            ["clients", "ratio"],
            [[parallel, cell(ratio)] for parallel, ratio in figures.flatness.items()],
        ),
    ]


def failures(figures: GridFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [(f"pool of {entry.pool}, {entry.parallel} clients", entry.ready_ms) for entry in figures.cells]
