"""Bursts: many claims at once on several nodes. Is each served, once, warm, and do the nodes share them?

`spread`: 100 Sandboxes created directly over 26 nodes that have 5 warm members each. `burst`: 200 claims, 20 at a time,
on two nodes with 150 each. `drained`: the same on a pool of 40, which is empty after the first fifth; from then on a
claim waits for a member, and with 20 clients in a closed loop none should wait longer than the time in which the nodes
together make 20, one queue over both. A claim that falls back to a member of its own would show as `cold`. The baseline
is as many bare round trips through as many processes (`kube_bare.hops`), as many at a time, right before and after.
"""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.bench import kube_bare
from greenroom.bench.kube_client import now
from greenroom.bench.kube_traffic import ClaimRow, Tenant, burst, served_once, warm_count
from greenroom.bench.kube_world import Shape, World, cpu_ms_each, cpu_table, spread_limit, stock_of
from greenroom.bench.report import TAIL_COLUMNS, Meter, Table, Target, cell, tail_cells
from greenroom.bench.summaries import Sample, Summary, divide, rate, summarise

Kind = Literal["spread", "burst", "drained"]
PARALLEL = 20
"""Clients at a time."""
P50_LIMIT, P95_LIMIT = 40.0, 100.0
QUEUE_FACTOR = 1.2
"""Of the time in which all nodes together make as many members as there are clients."""


class BurstPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One burst."""

    kind: Kind
    claims: int
    parallel: int
    pool: int
    shape: Shape
    directly: bool = False
    """Sandboxes are created instead of claims."""


class BurstFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One burst as it was seen, in milliseconds."""

    runtime: Literal["simulated"] = "simulated"
    plan: BurstPlan
    answered_ms: Summary
    ready_ms: Summary
    bare_ms: Summary
    """The baseline."""
    seconds: float
    """From the first request to the last that was seen ready."""
    per_second: float | None
    warm: int
    once: int
    nodes: dict[str, int]
    """Claims by node."""
    most: int
    """That one node has."""
    most_allowed: float
    cpu_ms: dict[str, float]
    """CPU time of each claim, by what used it; `client` makes and sees the claims."""
    stock: list[int]
    """By node, the warm members that there were before."""
    held: int
    """Sandboxes that the nodes themselves had afterwards: as many as there were claims, or some were doubled."""
    rows: list[ClaimRow]


def plan_of(kind: Kind, quick: bool) -> BurstPlan:
    """The burst of this kind; quick ones are small."""
    if kind == "spread":
        nodes, each, claims = (3, 4, 9) if quick else (26, 5, 100)
        # Slow refill, so that whatever is warm was so before; without variation, so that nodes that are alike are
        # taken for alike and get the same stock.
        shape = Shape(nodes=nodes, per_process=13, rate=5.0, variation=0.0)
        return BurstPlan(
            kind=kind, claims=claims, parallel=PARALLEL, pool=nodes * each, shape=shape, directly=True
        )
    claims, parallel = (12, 4) if quick else (200, PARALLEL)
    pool = claims // 5 if kind == "drained" else claims * 3 // 2
    shape = Shape(nodes=2, per_process=1, rate=50.0)
    return BurstPlan(kind=kind, claims=claims, parallel=parallel, pool=pool, shape=shape)


async def measure(directory: Path, quick: bool, meter: Meter, kind: Kind) -> BurstFigures:
    """A world, a full pool, the burst."""
    plan = plan_of(kind, quick)
    meter.begin(plan.claims)
    meter.say(f"{kind}: starting {plan.shape.text()}")
    async with (
        World(directory, plan.shape) as world,
        Tenant(world.client()) as tenant,
        kube_bare.hops(directory) as url,
    ):
        meter.say(f"{kind}: filling a pool of {plan.pool}")
        await tenant.declare("burst", plan.pool)
        if not plan.directly:
            # What is measured is not the first of its kind in any process.
            await tenant.claim("first", "burst")
            await tenant.clear()
            await tenant.full("burst", plan.pool)
        stock = stock_of(await world.statuses())
        what = "sandboxes" if plan.directly else "claims"
        meter.say(f"{kind}: {plan.claims} {what}, {plan.parallel} at a time")
        names = [f"b{number}-{secrets.token_hex(3)}" for number in range(plan.claims)]
        make = tenant.sandbox if plan.directly else lambda name: tenant.claim(name, "burst")
        bare = await kube_bare.trips(url, plan.claims // 2, plan.parallel)
        cpu, begun = world.cpu_seconds(), now()
        rows = await burst(names, plan.parallel, make, meter)
        seconds = now() - begun
        cpu = cpu_ms_each(cpu, world.cpu_seconds(), plan.claims)
        bare += await kube_bare.trips(url, plan.claims - len(bare), plan.parallel)
        rows = await tenant.told(rows)
        held = sum(len(found.sandboxes) for found in (await world.sandboxes()).values())
        await tenant.clear()
    return put_together(plan, rows, bare, seconds, cpu, stock, held)


def put_together(
    plan: BurstPlan,
    rows: list[ClaimRow],
    bare: list[Sample],
    seconds: float,
    cpu_ms: dict[str, float],
    stock: list[int],
    held: int,
) -> BurstFigures:
    """The figures over all rows."""
    nodes = Counter(row.node for row in rows if row.node)
    ready = summarise(Sample(row.ready_ms, row.error) for row in rows)
    counts = [*nodes.values(), *([0] * (plan.shape.nodes - len(nodes)))]
    return BurstFigures(
        plan=plan,
        answered_ms=summarise(Sample(row.answered_ms, row.error) for row in rows),
        ready_ms=ready,
        bare_ms=summarise(bare),
        seconds=seconds,
        per_second=rate(ready.n, seconds),
        warm=warm_count(rows),
        once=served_once(rows),
        nodes=dict(sorted(nodes.items())),
        most=max(counts),
        most_allowed=spread_limit(counts),
        cpu_ms=cpu_ms,
        stock=stock,
        held=held,
        rows=rows,
    )


def queue_limit_ms(plan: BurstPlan) -> float:
    """What a claim on a drained pool may take: 1.2 × clients over the members made in a second."""
    return QUEUE_FACTOR * plan.parallel / (plan.shape.rate * plan.shape.nodes) * 1000


def targets(figures: BurstFigures) -> list[Target]:
    """What was aimed at."""
    plan, ready = figures.plan, figures.ready_ms
    count = plan.claims
    what = {
        "spread": f"{count} Sandboxes over {plan.shape.nodes} nodes",
        "burst": f"{count} claims, {plan.parallel} at a time",
        "drained": f"{count} claims on a pool of {plan.pool}",
    }[plan.kind]
    made = [Target(name=f"{what}: warm", value=float(figures.warm), limit=count, unit="", at_least=True)]
    if plan.kind == "spread":
        made.append(
            Target(
                name=f"{what}: stock of the fullest over the emptiest",
                value=divide(max(figures.stock), min(figures.stock)),
                limit=1.0,
                unit="",
            )
        )
        made.append(
            Target(
                name=f"{what}: most on one node",
                value=float(figures.most),
                limit=round(figures.most_allowed, 2),
                unit="",
            )
        )
    once = float(min(figures.once, count - abs(figures.held - count)))
    made.append(Target(name=f"{what}: served once", value=once, limit=count, unit="", at_least=True))
    if plan.kind == "burst":
        made.append(Target(name=f"{what}: p50", value=ready.p50, limit=P50_LIMIT, unit=" ms"))
        made.append(Target(name=f"{what}: p95", value=ready.p95, limit=P95_LIMIT, unit=" ms"))
    if plan.kind == "drained":
        made.append(Target(name=f"{what}: p95", value=ready.p95, limit=queue_limit_ms(plan), unit=" ms"))
    return made


def tables(figures: BurstFigures) -> list[Table]:
    """For people."""
    plan = figures.plan
    what = "Sandboxes" if plan.directly else "claims"
    speed = f"r = {plan.shape.rate:g}/s a node, variation {plan.shape.variation:g}"
    return [
        Table(
            f"{plan.claims} {what}, {plan.parallel} at a time, pool of {plan.pool} on {plan.shape.nodes} nodes "
            f"({speed}), simulated VMs, ms",
            ["until", *TAIL_COLUMNS],
            [
                ["the create is answered", *tail_cells(figures.answered_ms)],
                ["a watch has shown it Ready", *tail_cells(figures.ready_ms)],
                ["baseline: bare HTTP through as many hops", *tail_cells(figures.bare_ms)],
            ],
        ),
        Table(
            "Who served them",
            [
                "warm",
                "with a sandbox of their own",
                "sandboxes on the nodes",
                "stock before",
                "most on one node",
                "may be",
                "per s",
            ],
            [
                [
                    str(figures.warm),
                    str(figures.once),
                    str(figures.held),
                    f"{min(figures.stock)} to {max(figures.stock)} a node",
                    str(figures.most),
                    cell(figures.most_allowed),
                    cell(figures.per_second),
                ]
            ],
        ),
        cpu_table(figures.cpu_ms),
    ]


def failures(figures: BurstFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [(figures.plan.kind, figures.ready_ms), (f"{figures.plan.kind}, baseline", figures.bare_ms)]
