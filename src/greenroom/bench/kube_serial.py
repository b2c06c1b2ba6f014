"""A claim after the other, from its request until a watcher has seen it ready; and how fast a pool fills.

Two nodes hold a warm pool of 40. Each of 40 claims is sent when the one before was seen ready; refill goes on beside
them. The baseline of each is a bare round trip through as many processes (`kube_bare.hops`), the two in turns. The pool
is filled from nothing at a set rate; no platform could do that faster than its nodes make members (*fluid time*).
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.bench import kube_bare
from greenroom.bench.kube_traffic import ClaimRow, Tenant, served_once, warm_count
from greenroom.bench.kube_world import Shape, World, cpu_ms_each, cpu_table
from greenroom.bench.report import TAIL_COLUMNS, Meter, Table, Target, cell, tail_cells
from greenroom.bench.rounds import turns
from greenroom.bench.summaries import Sample, Summary, divide, summarise

CLAIMS = 40
RATE = 50.0
"""Members a second that each node makes."""
NODES = 2
P50_LIMIT, P99_LIMIT = 5.0, 20.0
FILL_GRACE = 0.5
"""Seconds that filling may take longer than the fluid time."""


class SerialFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen, in milliseconds."""

    runtime: Literal["simulated"] = "simulated"
    shape: Shape
    pool: int
    rate: float
    fill_s: float
    fluid_s: float
    """`pool` over the members that all nodes make in a second."""
    answered_ms: Summary
    ready_ms: Summary
    """Until a watcher has seen it ready."""
    bare_ms: Summary
    """The baseline."""
    to_bare: float | None
    cpu_ms: dict[str, float]
    """CPU time of each claim, by what used it, refill included; `client` makes and sees the claims and the baseline."""
    warm: int
    once: int
    """Claims with a sandbox that no other has."""
    rows: list[ClaimRow]
    bare: list[float | None]


async def measure(directory: Path, quick: bool, meter: Meter) -> SerialFigures:
    """A world, a pool, the claims. Raises RuntimeFailure when the pool does not fill."""
    count = 4 if quick else CLAIMS
    shape = Shape(nodes=NODES, rate=RATE)
    meter.begin(count)
    meter.say(f"claims one by one: starting {shape.text()}")
    async with (
        World(directory, shape) as world,
        kube_bare.hops(directory) as url,
        Tenant(world.client()) as tenant,
    ):
        # One pool before, so that what is measured is not the first of its kind in any process.
        await tenant.declare("first", 2)
        await tenant.claim("first", "first")
        meter.say(f"claims one by one: filling a pool of {count}")
        fill_s = await tenant.declare("warm", count)
        bare = kube_bare.connecting(url)
        rows: list[ClaimRow] = []
        trips: list[Sample] = []
        meter.say(f"claims one by one: {count}")
        cpu = world.cpu_seconds()
        for number in range(count):
            for side in turns(("claim", "bare"), number):
                if side == "claim":
                    rows.append(await tenant.claim(f"c{number}-{secrets.token_hex(2)}", "warm"))
                else:
                    trips.append(await kube_bare.trip(bare))
            meter.advance()
        cpu = cpu_ms_each(cpu, world.cpu_seconds(), count)
        bare.close()
        rows = await tenant.told(rows)
        await tenant.clear()
    return put_together(shape, count, fill_s, cpu, rows, trips)


def put_together(
    shape: Shape,
    pool: int,
    fill_s: float,
    cpu_ms: dict[str, float],
    rows: list[ClaimRow],
    trips: list[Sample],
) -> SerialFigures:
    """The figures over all rows."""
    ready = summarise(Sample(row.ready_ms, row.error) for row in rows)
    bare = summarise(trips)
    return SerialFigures(
        shape=shape,
        pool=pool,
        rate=shape.rate,
        fill_s=fill_s,
        fluid_s=pool / (shape.rate * shape.nodes),
        answered_ms=summarise(Sample(row.answered_ms, row.error) for row in rows),
        ready_ms=ready,
        bare_ms=bare,
        to_bare=divide(ready.p50, bare.p50),
        cpu_ms=cpu_ms,
        warm=warm_count(rows),
        once=served_once(rows),
        rows=rows,
        bare=[trip.value for trip in trips],
    )


def targets(figures: SerialFigures) -> list[Target]:
    """What was aimed at."""
    count = figures.ready_ms.attempts
    return [
        Target(
            name="claim → Ready seen by a watch, serial, p50",
            value=figures.ready_ms.p50,
            limit=P50_LIMIT,
            unit=" ms",
        ),
        Target(
            name="claim → Ready seen by a watch, serial, p99",
            value=figures.ready_ms.p99,
            limit=P99_LIMIT,
            unit=" ms",
        ),
        Target(
            name=f"of {count} serial claims, warm",
            value=float(figures.warm),
            limit=count,
            unit="",
            at_least=True,
        ),
        Target(
            name=f"a pool of {figures.pool} is filled",
            value=figures.fill_s,
            limit=figures.fluid_s + FILL_GRACE,
            unit=" s",
        ),
    ]


def tables(figures: SerialFigures) -> list[Table]:
    """For people."""
    return [
        Table(
            f"Claims one after the other, pool of {figures.pool} on {figures.shape.nodes} nodes, simulated VMs, ms",
            ["until", *TAIL_COLUMNS],
            [
                ["the create is answered", *tail_cells(figures.answered_ms)],
                ["a watch has shown it Ready", *tail_cells(figures.ready_ms)],
                ["baseline: bare HTTP through as many hops", *tail_cells(figures.bare_ms)],
            ],
        ),
        Table(
            "Their outcome",
            ["claims", "warm", "with a sandbox of their own", "Ready over the baseline, p50"],
            [
                [
                    str(figures.ready_ms.attempts),
                    str(figures.warm),
                    str(figures.once),
                    cell(figures.to_bare),
                ]
            ],
        ),
        cpu_table(figures.cpu_ms),
        Table(
            f"Filling the pool at {figures.rate:g} members/s and node, seconds",
            ["pool", "declared → status says full", "fluid time"],
            [[str(figures.pool), cell(figures.fill_s), cell(figures.fluid_s)]],
        ),
    ]


def failures(figures: SerialFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [("serial claims", figures.ready_ms), ("bare round trips", figures.bare_ms)]
