"""What sandboxes cost the store: nothing. 10,000 are created and deleted while somebody counts its writes.

The store is looked at from outside, by a connection of its own to the SQLite file: how often `data_version` has moved
(another connection has committed), how many frames the write-ahead log has got, and what is in each table. A moment
without any request comes first, in which only heartbeats could write. The `seed` shape is the one that the predecessor
published: 3,000 sandboxes on 3 nodes, 5 pools, 3 namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from greenroom.api.kube.kinds import SANDBOX
from greenroom.bench import kube_client
from greenroom.bench.kube_client import Kube, now
from greenroom.bench.kube_traffic import ClaimRow, Silent, Tenant, burst
from greenroom.bench.kube_world import OWNER, Shape, World
from greenroom.bench.report import Meter, Table, Target, cell, reason
from greenroom.bench.summaries import Sample, Summary, summarise
from greenroom.errors import GreenroomError
from greenroom.wire.tasks import spawn, stop

ShapeName = Literal["many", "seed"]
PARALLEL = 20
LOOK = 0.02
"""Seconds between two looks at the store."""
REST = 5.0
"""Seconds in which only heartbeats could write."""
AT_A_TIME = 500
"""Sandboxes that there are at the same time in `many`; those of `seed` are all there together."""
CONSTANT = 2
"""Rows that a store has of its own: the base template, and the counter of versions."""


class StorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is made."""

    name: ShapeName
    sandboxes: int
    at_a_time: int
    pools: int
    shape: Shape
    rest_s: float = REST


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What was written in some time."""

    seconds: float
    commits: int
    """Looks that found another connection to have committed since the one before."""
    frames: int
    """Pages that came to the write-ahead log."""
    heartbeats: int
    """That were due in this time, over all nodes."""


class StoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One plan, carried out."""

    runtime: Literal["simulated"] = "simulated"
    plan: StorePlan
    resting: Written
    working: Written
    created_ms: Summary
    deleted_ms: Summary
    created: int
    deleted: int
    rows: dict[str, int]
    """By table, what the store had while all sandboxes were there."""
    accounted: dict[str, int]
    """What a store with these pools, nodes, templates and keys should have."""

    @property
    def objects(self) -> int:
        """All rows together."""
        return sum(self.rows.values())


class Observer:
    """Counts what others write to a SQLite file. Use as an async context manager; needs nothing but to read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection
        self._looking: asyncio.Task[None] | None = None
        self._version = 0
        self._frames = 0
        self._wal: tuple[bytes, int] = (b"", 0)
        self.commits = 0
        self.frames = 0

    async def __aenter__(self) -> Observer:
        self._db = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, isolation_level=None)
        self._version = self._data_version()
        self._wal = self._log()
        self._looking = spawn(self._look_on(), "looking at the store")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await stop(self._looking)
        self._db.close()

    def look(self) -> None:
        """Count what has come since the last look."""
        version = self._data_version()
        self.commits += version - self._version
        self._version = version
        before, self._wal = self._wal, self._log()
        if self._wal[0] == before[0]:
            self.frames += self._wal[1] - before[1]
        else:
            # The log was begun anew: what was in the old one beyond the last look is in `commits` all the same.
            self.frames += self._wal[1]

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self.look()

    def _data_version(self) -> int:
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def _log(self) -> tuple[bytes, int]:
        """Salt and number of frames of the write-ahead log (sqlite.org/fileformat2, "The Write-Ahead Log")."""
        path = Path(f"{self._path}-wal")
        try:
            with path.open("rb") as stream:
                head = stream.read(32)
            size = path.stat().st_size
        except OSError:
            return b"", 0
        if len(head) < 32:
            return b"", 0
        page = struct.unpack(">I", head[8:12])[0]
        return head[16:24], max(0, size - 32) // (page + 24)

    def rows(self) -> dict[str, int]:
        """Rows by table."""
        names = self._db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        return {
            name: int(self._db.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0])  # noqa: S608
            for (name,) in sorted(names)
        }


def plan_of(name: ShapeName, quick: bool) -> StorePlan:
    """The plan of this name; quick ones are small."""
    owners = (OWNER, "second", "third") if name == "seed" else (OWNER,)
    count, at_a_time = (3000, 3000) if name == "seed" else (10_000, AT_A_TIME)
    nodes = 3 if name == "seed" else 10
    shape = Shape(nodes=nodes, per_process=5, owners=owners)
    plan = StorePlan(
        name=name, sandboxes=count, at_a_time=at_a_time, pools=5 if name == "seed" else 1, shape=shape
    )
    if not quick:
        return plan
    small = msgspec.structs.replace(shape, nodes=min(3, nodes), heartbeat=0.1)
    return msgspec.structs.replace(plan, sandboxes=12, at_a_time=6, shape=small, rest_s=0.5)


async def measure(directory: Path, quick: bool, meter: Meter, name: ShapeName) -> StoreFigures:
    """A world, its pools, a rest, the sandboxes."""
    plan = plan_of(name, quick)
    meter.begin(plan.sandboxes)
    meter.say(f"store: starting {plan.shape.text()}")
    async with World(directory, plan.shape) as world, contextlib.AsyncExitStack() as stack:
        tenants = [await stack.enter_async_context(_tenant(world, owner)) for owner in plan.shape.owners]
        for number in range(plan.pools):
            await tenants[number % len(tenants)].declare(f"pool-{number}", 4 if quick else 40)
        # Creates that find nothing of their own owner yet may write what is written once.
        for tenant in tenants:
            await tenant.sandbox("first")
            await tenant.clear()
        async with Observer(world.state / "store.db") as observer:
            meter.say(f"store: {plan.rest_s:g} s of rest")
            resting = await _resting(observer, plan)
            meter.say(f"store: {plan.sandboxes} sandboxes created and deleted")
            run = _Run([tenant.kube for tenant in tenants], observer, plan, meter)
            working = await run.whole()
    return StoreFigures(
        plan=plan,
        resting=resting,
        working=working,
        created_ms=summarise(Sample(row.answered_ms, row.error) for row in run.created),
        deleted_ms=summarise(Sample(row.answered_ms, row.error) for row in run.deleted),
        created=sum(not row.error for row in run.created),
        deleted=sum(not row.error for row in run.deleted),
        rows=run.rows,
        accounted={
            "pools": plan.pools,
            "templates": plan.pools,
            "nodes": plan.shape.nodes,
            "keys": len(plan.shape.owners),
            "rules and quotas": 0,
            "constant": CONSTANT,
        },
    )


@contextlib.asynccontextmanager
async def _tenant(world: World, owner: str) -> AsyncIterator[Tenant]:
    async with Tenant(world.client(owner=owner), claims=False) as tenant:
        yield tenant


async def _resting(observer: Observer, plan: StorePlan) -> Written:
    begun, commits, frames = now(), observer.commits, observer.frames
    await asyncio.sleep(plan.rest_s)
    observer.look()
    return _written(plan, now() - begun, observer.commits - commits, observer.frames - frames)


def _written(plan: StorePlan, seconds: float, commits: int, frames: int) -> Written:
    beats = int(seconds / plan.shape.heartbeat) * plan.shape.nodes
    return Written(seconds=seconds, commits=commits, frames=frames, heartbeats=beats)


class _Run:
    """The sandboxes, in batches: all of one are there before they are deleted again."""

    def __init__(self, kubes: list[Kube], observer: Observer, plan: StorePlan, meter: Meter) -> None:
        self._kubes = kubes
        self._observer = observer
        self._plan = plan
        self._meter = meter
        self._of: dict[str, Kube] = {}
        self.created: list[ClaimRow] = []
        self.deleted: list[ClaimRow] = []
        self.rows: dict[str, int] = {}

    async def whole(self) -> Written:
        """Make and end all of them; what was written meanwhile."""
        observer, plan = self._observer, self._plan
        begun, commits, frames = now(), observer.commits, observer.frames
        mark = secrets.token_hex(3)
        names = [f"o{number}-{mark}" for number in range(plan.sandboxes)]
        for number, name in enumerate(names):
            self._of[name] = self._kubes[number % len(self._kubes)]
        for first in range(0, len(names), plan.at_a_time):
            batch = names[first : first + plan.at_a_time]
            self.created += await burst(batch, PARALLEL, self._create, self._meter)
            if not self.rows:
                self.rows = observer.rows()
            made = [row.name for row in self.created[-len(batch) :] if not row.error]
            self.deleted += await burst(made, PARALLEL, self._delete, Silent())
        observer.look()
        return _written(plan, now() - begun, observer.commits - commits, observer.frames - frames)

    async def _create(self, name: str) -> ClaimRow:
        begun = now()
        try:
            await self._of[name].create(SANDBOX, kube_client.sandbox(name, "base"))
        except (GreenroomError, OSError) as error:
            return ClaimRow(name=name, error=reason(error))
        return ClaimRow(name=name, answered_ms=(now() - begun) * 1000)

    async def _delete(self, name: str) -> ClaimRow:
        begun = now()
        try:
            await self._of[name].delete(SANDBOX, name)
        except (GreenroomError, OSError) as error:
            return ClaimRow(name=name, error=reason(error))
        return ClaimRow(name=name, answered_ms=(now() - begun) * 1000)


def targets(figures: StoreFigures) -> list[Target]:
    """What was aimed at."""
    plan = figures.plan
    what = f"store for {plan.sandboxes} sandboxes"
    return [
        Target(
            name=f"{what}: writes while they were made and ended",
            value=float(max(figures.working.commits, figures.working.frames)),
            limit=0,
            unit="",
        ),
        Target(
            name=f"{what}: writes of {figures.resting.heartbeats} heartbeats",
            value=float(max(figures.resting.commits, figures.resting.frames)),
            limit=0,
            unit="",
        ),
        Target(
            name=f"{what}: objects",
            value=float(figures.objects),
            limit=sum(figures.accounted.values()),
            unit="",
        ),
    ]


def tables(figures: StoreFigures) -> list[Table]:
    """For people."""
    plan = figures.plan
    namespaces = "1 namespace" if len(plan.shape.owners) == 1 else f"{len(plan.shape.owners)} namespaces"
    pools = "1 pool" if plan.pools == 1 else f"{plan.pools} pools"
    return [
        Table(
            f"{plan.sandboxes} Sandboxes on {plan.shape.nodes} nodes, {pools}, {namespaces}, simulated VMs: writes",
            ["time", "seconds", "heartbeats", "creates", "deletes", "commits", "pages"],
            [
                _row("nothing asked", figures.resting, 0, 0),
                _row("created and deleted", figures.working, figures.created, figures.deleted),
            ],
        ),
        Table(
            "What the store held while they were there",
            ["", *figures.rows, "together", "accounted for"],
            [
                [
                    "rows",
                    *(str(count) for count in figures.rows.values()),
                    str(figures.objects),
                    str(sum(figures.accounted.values())),
                ]
            ],
        ),
    ]


def _row(what: str, written: Written, created: int, deleted: int) -> list[str]:
    counts = (written.heartbeats, created, deleted, written.commits, written.frames)
    return [what, cell(written.seconds), *map(str, counts)]


def failures(figures: StoreFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    name = figures.plan.name
    return [(f"store, {name}: creates", figures.created_ms), (f"store, {name}: deletes", figures.deleted_ms)]
