"""From 2,500 to nothing: a warm pool by its `scale`, and as many Sandbox objects by deletecollection.

Clean means: the watch has shown every object go, lists are empty, no node has a member or a sandbox left, and none of
the objects that had a finalizer is stuck: their deletion is seen, the finalizer is taken away as its owner would, and
they are gone. A name that was in use can be used again.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.api.kube.kinds import SANDBOX
from greenroom.bench import kube_client
from greenroom.bench.kube_client import Object, name_of, now
from greenroom.bench.kube_traffic import ClaimRow, Tenant, burst
from greenroom.bench.kube_world import Shape, World
from greenroom.bench.report import Meter, Table, Target, cell, reason
from greenroom.bench.summaries import Sample, Summary, summarise
from greenroom.errors import GreenroomError
from greenroom.wire.messages import NodeStatus

COUNT = 2500
NODES = 5
FINALIZED = 50
"""Of the objects, those with a finalizer."""
FINALIZER = "bench.greenroom.dev/hold"
PARALLEL = 20
DEADLINE = 120.0
"""Seconds for all to be gone."""


class ScaleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    runtime: Literal["simulated"] = "simulated"
    shape: Shape
    count: int
    filled_s: float
    """Seconds from the pool's declaration to its status saying that it is full."""
    emptied_s: float
    """Seconds from `scale` to 0 until its status says so."""
    members_left: int
    """On the nodes, in their own words, warm or being made."""
    created_ms: Summary
    created_s: float
    deleted_s: float
    """Seconds from the deletecollection until a watch has shown the last object go."""
    finalized: int
    seen_deleting: int
    """Of the finalized, those whose deletion was seen while the finalizer was there."""
    stuck: int
    """Of the finalized, those that were still there at the deadline."""
    objects_left: int
    sandboxes_left: int
    """On the nodes."""
    name_again: bool
    """A name of one that is gone could be used again."""
    problems: list[str]


async def measure(directory: Path, quick: bool, meter: Meter) -> ScaleFigures:
    """A world, up and down twice."""
    count, finalized = (20, 3) if quick else (COUNT, FINALIZED)
    shape = Shape(nodes=2 if quick else NODES, per_process=3)
    meter.begin(count)
    meter.say(f"scale: starting {shape.text()}")
    async with World(directory, shape) as world, Tenant(world.client(), claims=False) as tenant:
        meter.say(f"scale: a pool of 0 → {count} → 0")
        filled_s = await tenant.declare("scale", count)
        emptied_s = await tenant.declare("scale", 0)
        members_left = _members(await world.statuses())
        # A quarter is enough for creates to be quick; what is measured is the end.
        await tenant.declare("scale", max(1, count // 4))
        run = _Run(tenant, count, finalized, meter)
        await run.up()
        await run.down()
        await tenant.declare("scale", 0)
        name_again = await run.again()
        await tenant.clear()
        left = await tenant.kube.objects(SANDBOX)
        held = sum(len(found.sandboxes) for found in (await world.sandboxes()).values())
    return ScaleFigures(
        shape=shape,
        count=count,
        filled_s=filled_s,
        emptied_s=emptied_s,
        members_left=members_left,
        created_ms=summarise(Sample(row.answered_ms, row.error) for row in run.rows),
        created_s=run.created_s,
        deleted_s=run.deleted_s,
        finalized=finalized,
        seen_deleting=len(run.seen),
        stuck=run.stuck,
        objects_left=len(left.get("items", [])),
        sandboxes_left=held,
        name_again=name_again,
        problems=run.problems,
    )


def _members(statuses: list[NodeStatus]) -> int:
    return sum(pool.warm + pool.starting for status in statuses for pool in status.pools)


class _Run:
    """The objects' way up and down."""

    def __init__(self, tenant: Tenant, count: int, finalized: int, meter: Meter) -> None:
        self._tenant = tenant
        self._meter = meter
        mark = secrets.token_hex(3)
        self._names = [f"s{number}-{mark}" for number in range(count)]
        self._held = set(self._names[:: max(1, count // finalized)][:finalized])
        self.rows: list[ClaimRow] = []
        self.created_s = 0.0
        self.deleted_s = 0.0
        self.seen: set[str] = set()
        self.stuck = 0
        self.problems: list[str] = []

    async def up(self) -> None:
        """Create all."""
        self._meter.say(f"scale: creating {len(self._names)} sandboxes")
        begun = now()
        self.rows = await burst(self._names, PARALLEL, self._create, self._meter)
        self.created_s = now() - begun

    async def _create(self, name: str) -> ClaimRow:
        more = {"finalizers": [FINALIZER]} if name in self._held else {}
        begun = now()
        try:
            await self._tenant.kube.create(SANDBOX, kube_client.sandbox(name, "base", **more))
        except (GreenroomError, OSError) as error:
            return ClaimRow(name=name, error=reason(error))
        return ClaimRow(name=name, answered_ms=(now() - begun) * 1000)

    async def down(self) -> None:
        """Delete all at once; take the finalizers away as their deletion is seen."""
        self._meter.say(f"scale: deleting {len(self._names)} sandboxes")
        watched = self._tenant.sandboxes
        made = [row.name for row in self.rows if not row.error]
        begun = now()
        await self._tenant.kube.delete_all(SANDBOX)
        for name in sorted(self._held & set(made)):
            try:
                await watched.until(name, _deleting, DEADLINE)
                self.seen.add(name)
                gone = watched.expect(name, lambda obj: obj is None)
                await self._tenant.kube.merge(SANDBOX, name, {"metadata": {"finalizers": None}})
                await gone
            except GreenroomError as error:
                self.problems.append(f"{name}: {reason(error)}")
        last = begun
        for name in made:
            try:
                last = max(last, await watched.until(name, lambda obj: obj is None, DEADLINE))
            except GreenroomError as error:
                self.problems.append(f"{name}: {reason(error)}")
                break
        self.deleted_s = last - begun
        left = {name_of(obj) for obj in (await self._tenant.kube.objects(SANDBOX)).get("items", [])}
        self.stuck = len(left & self._held)

    async def again(self) -> bool:
        """Whether one of the names can be used again."""
        row = await self._create(self._names[-1])
        if row.error:
            self.problems.append(f"{row.name} again: {row.error}")
        return not row.error


def _deleting(obj: Object | None) -> bool:
    return obj is None or bool(obj.get("metadata", {}).get("deletionTimestamp"))


def clean(figures: ScaleFigures) -> bool:
    """Whether nothing was left, nothing was stuck and nothing failed."""
    left = figures.members_left + figures.objects_left + figures.sandboxes_left + figures.stuck
    return left == 0 and figures.name_again and not figures.problems and not figures.created_ms.failed


def targets(figures: ScaleFigures) -> list[Target]:
    """What was aimed at."""
    what = f"scale {figures.count} → 0"
    left = figures.members_left + figures.objects_left + figures.sandboxes_left
    return [
        Target(name=f"{what}: left behind", value=float(left), limit=0, unit=""),
        Target(name=f"{what}: stuck finalizers", value=float(figures.stuck), limit=0, unit=""),
        Target(name=f"{what}: clean", value=float(clean(figures)), limit=1, unit="", at_least=True),
    ]


def tables(figures: ScaleFigures) -> list[Table]:
    """For people."""
    return [
        Table(
            f"Up and down, {figures.shape.nodes} nodes, simulated VMs",
            ["what", "count", "up, s", "down, s", "left"],
            [
                [
                    "warm pool, by scale",
                    str(figures.count),
                    cell(figures.filled_s),
                    cell(figures.emptied_s),
                    str(figures.members_left),
                ],
                [
                    "Sandboxes, by deletecollection",
                    str(figures.created_ms.n),
                    cell(figures.created_s),
                    cell(figures.deleted_s),
                    str(figures.objects_left + figures.sandboxes_left),
                ],
            ],
        ),
        Table(
            "Finalizers",
            ["objects with one", "seen while deleting", "stuck", "name used again"],
            [
                [
                    str(figures.finalized),
                    str(figures.seen_deleting),
                    str(figures.stuck),
                    "yes" if figures.name_again else "no",
                ]
            ],
        ),
    ]


def failures(figures: ScaleFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    made = [("sandboxes to be deleted", figures.created_ms)]
    if figures.problems:
        made.append(("deletions", summarise(Sample(None, problem) for problem in figures.problems)))
    return made
