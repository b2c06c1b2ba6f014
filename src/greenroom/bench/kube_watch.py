"""How soon a watcher sees what has happened: ten of them to every event, and a thousand at 200 events a second.

`seen`: sandboxes are created and deleted one after the other through one api; five watchers follow that api and five
another replica, and each event's time is from just before the request was sent until a watcher had read it. Now and
then nothing happens for a while before: an api that gathers events must still send the first of them at once. `crowd`:
an annotation of some sandboxes is changed at a set rate through the replica while 1,000 watchers of the other look on
(`kube_watchers`): nothing may be lost, by the marks in the bytes that each received.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.api.kube.kinds import SANDBOX
from greenroom.bench import kube_client
from greenroom.bench.kube_client import Kube, now
from greenroom.bench.kube_watchers import ANNOTATION, WatchersResult, WatchersSpec, mark, share_of
from greenroom.bench.kube_world import Shape, World
from greenroom.bench.processes import started
from greenroom.bench.report import TAIL_COLUMNS, Meter, Table, Target, cell, reason, tail_cells
from greenroom.bench.summaries import Sample, Summary, divide, rate, summarise
from greenroom.errors import GreenroomError, NodeUnavailable
from greenroom.wire.tasks import spawn, stop

Op = Literal["create", "delete"]
WATCHERS = 10
ROUNDS = 100
"""Sandboxes that are created and deleted."""
PAUSED_EVERY = 5
"""Of the rounds, each so-manieth comes after a pause."""
PAUSE = 1.0
"""Seconds; longer than anybody gathers events."""
SEEN_DEADLINE = 20.0
P99_LIMIT = 50.0
COALESCED = 20.0
"""Milliseconds for which events may be gathered; not the first after a pause."""

CROWD = 1000
RATE = 200.0
"""Events a second."""
SECONDS = 10.0
LANES = 8
"""Sandboxes whose annotation is changed, by turns; each has its own numbers."""
PROCESSES = 2
DECODING = 10
DRAIN_DEADLINE = 60.0
"""Seconds after the last change for all to have come."""


class SeenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One event at one watcher."""

    op: Op
    replica: int
    """Of the api that this watcher follows; the requests went to 0."""
    paused: bool
    """Nothing had happened for a while before."""
    ms: float | None = None
    error: str = ""


class CrowdFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The thousand."""

    watchers: int
    sent: int
    """Changes that were made."""
    failed: int
    """Changes that the api refused."""
    rate: float
    """That was aimed at, a second."""
    achieved: float | None
    expected: int
    """Marks that should have come, over all watchers."""
    came: int
    lost: int
    doubled: int
    broken: int
    disordered: int
    decoded: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    each_read: float | None
    """Marks that come in one read, on average."""
    mb_per_s: float | None
    histogram: dict[int, int]


class WatchFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Both, in milliseconds."""

    runtime: Literal["simulated"] = "simulated"
    shape: Shape
    watchers: int
    answered_ms: Summary
    """Of the creates and deletes themselves."""
    seen_ms: Summary
    paused_ms: Summary
    """The first event after a pause."""
    by_op: dict[str, Summary]
    by_replica: dict[str, Summary]
    rows: list[SeenRow]
    crowd: CrowdFigures


async def measure(directory: Path, quick: bool, meter: Meter) -> WatchFigures:
    """A world with two apis, the ten watchers, the thousand."""
    shape = Shape(nodes=2, per_process=2, apis=2)
    rounds, pause = (4, 0.2) if quick else (ROUNDS, PAUSE)
    meter.begin(rounds)
    meter.say(f"watch: starting {shape.text()}, 2 apis")
    async with World(directory, shape) as world:
        meter.say(f"watch: {WATCHERS} watchers, {rounds} sandboxes created and deleted")
        rows, answered = await _seen(world, rounds, pause, meter)
        crowd = await _crowd(world, directory, quick, meter)
    return put_together(shape, rows, answered, crowd)


class _Eyes:
    """One watcher of the ten: when it first read of each event."""

    def __init__(self, kube: Kube, replica: int) -> None:
        self._kube = kube
        self.replica = replica
        self._expected: dict[tuple[bytes, bytes], asyncio.Future[float]] = {}
        self._task: asyncio.Task[None] | None = None
        self._problem: GreenroomError | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[_Eyes]:
        """Watch for the length of a block, from now on."""
        metadata = (await self._kube.objects(SANDBOX, "?limit=1")).get("metadata", {})
        query = f"&resourceVersion={metadata.get('resourceVersion', '')}"
        self._task = spawn(self._read(query), "a watcher")
        try:
            yield self
        finally:
            await stop(self._task)

    async def _read(self, query: str) -> None:
        try:
            async with contextlib.aclosing(self._kube.watch(SANDBOX, query)) as arriving:
                async for lines in arriving:
                    at = now()
                    for line in lines:
                        for key, future in list(self._expected.items()):
                            kind, name = key
                            if kind in line[:40] and name in line and not future.done():
                                future.set_result(at)
        except GreenroomError as error:
            self._problem = error
            for future in self._expected.values():
                if not future.done():
                    future.set_exception(error)

    async def see(self, op: Op, name: str) -> float:
        """When the event was read. Raises NodeUnavailable."""
        if self._problem is not None:
            raise self._problem
        key = (b'"ADDED"' if op == "create" else b'"DELETED"', f'"{name}"'.encode())
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._expected[key] = future
        try:
            async with asyncio.timeout(SEEN_DEADLINE):
                return await future
        except TimeoutError:
            raise NodeUnavailable(f"the {op} was not seen within {SEEN_DEADLINE:.0f} s") from None
        finally:
            del self._expected[key]


async def _seen(world: World, rounds: int, pause: float, meter: Meter) -> tuple[list[SeenRow], list[Sample]]:
    rows: list[SeenRow] = []
    answered: list[Sample] = []
    # Rounds must not fall into step with whatever gathers events.
    pauses = random.Random(1)  # noqa: S311
    async with contextlib.AsyncExitStack() as stack:
        kubes = [await stack.enter_async_context(world.client(api)) for api in range(world.shape.apis)]
        for kube in kubes:
            # What is measured is not the first of its kind in any process.
            await kube.create(SANDBOX, kube_client.sandbox("first", "base"))
            await kube.delete(SANDBOX, "first")
        eyes = [
            await stack.enter_async_context(_Eyes(kubes[n % len(kubes)], n % len(kubes)).open())
            for n in range(WATCHERS)
        ]
        for number in range(rounds):
            name = f"w{number}-{secrets.token_hex(3)}"
            for op in ("create", "delete"):
                paused = number % PAUSED_EVERY == 0
                await asyncio.sleep(pause if paused else pauses.uniform(0.0, 0.05))
                found, sample = await _one(kubes[0], eyes, op, name, paused)
                rows += found
                answered.append(sample)
            meter.advance()
    return rows, answered


async def _one(
    kube: Kube, eyes: list[_Eyes], op: Op, name: str, paused: bool
) -> tuple[list[SeenRow], Sample]:
    """One request, and when each watcher had read of it."""
    seeing = [spawn(each.see(op, name), "an event") for each in eyes]
    await asyncio.sleep(0)
    begun = now()
    try:
        if op == "create":
            await kube.create(SANDBOX, kube_client.sandbox(name, "base"))
        else:
            await kube.delete(SANDBOX, name)
    except GreenroomError as error:
        await stop(*seeing)
        return [], Sample(None, reason(error))
    answered = Sample((now() - begun) * 1000)
    rows: list[SeenRow] = []
    for each, found in zip(eyes, await asyncio.gather(*seeing, return_exceptions=True), strict=True):
        row = SeenRow(op=op, replica=each.replica, paused=paused)
        if isinstance(found, BaseException):
            problem = found if isinstance(found, Exception) else RuntimeError(type(found).__name__)
            rows.append(msgspec.structs.replace(row, error=reason(problem)))
        else:
            rows.append(msgspec.structs.replace(row, ms=(found - begun) * 1000))
    return rows, answered


async def _crowd(world: World, directory: Path, quick: bool, meter: Meter) -> CrowdFigures:
    count, lanes, speed, seconds = (6, 2, 20.0, 1.0) if quick else (CROWD, LANES, RATE, SECONDS)
    marks = int(speed * seconds / lanes)
    meter.say(f"watch: {count} watchers at {speed:g} events a second")
    async with world.client() as kube, world.client(1) as other, contextlib.AsyncExitStack() as stack:
        names = [f"lane{lane}-{secrets.token_hex(3)}" for lane in range(lanes)]
        for name in names:
            await other.create(SANDBOX, kube_client.sandbox(name, "base"))
        version = (await kube.objects(SANDBOX, "?limit=1")).get("metadata", {}).get("resourceVersion", "")
        target = f"{kube.path(SANDBOX)}?watch=true&timeoutSeconds=3600&resourceVersion={version}"
        places: list[Path] = []
        for process in range(PROCESSES):
            place = directory / f"watchers-{process}.result"
            spec = WatchersSpec(
                url=kube.url,
                target=target,
                headers=kube.headers,
                count=count // PROCESSES,
                decoding=(2 if quick else DECODING) // PROCESSES,
                lanes=lanes,
                marks=marks,
                result=str(place),
            )
            name = f"watchers-{process}"
            await stack.enter_async_context(started(name, "greenroom.bench.kube_watchers", spec, directory))
            places.append(place)
        begun = time.monotonic()
        sent = await asyncio.gather(
            *(_lane(other, name, lane, lanes, marks, speed, begun) for lane, name in enumerate(names))
        )
        took = time.monotonic() - begun
        await _written(places)
    found = [msgspec.json.decode(place.read_bytes(), type=WatchersResult) for place in places]
    # Watchers that were told to end before all had come have written what they had.
    return crowd_of(found, speed, took, lanes * marks, lanes * marks - sum(sent))


async def _lane(kube: Kube, name: str, lane: int, lanes: int, marks: int, speed: float, begun: float) -> int:
    """Change one sandbox so often; returns how many changes were made."""
    made = 0
    for number in range(1, marks + 1):
        due = begun + ((number - 1) * lanes + lane) / speed
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        patch = {"metadata": {"annotations": {ANNOTATION: mark(lane, number)}}}
        with contextlib.suppress(GreenroomError):
            await kube.merge(SANDBOX, name, patch)
            made += 1
    return made


async def _written(places: list[Path]) -> None:
    """Wait until all have told, or for as long as that may take."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_DEADLINE):
            while not all(place.exists() for place in places):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def crowd_of(
    found: list[WatchersResult], speed: float, seconds: float, sent: int, failed: int
) -> CrowdFigures:
    """The figures over all processes of watchers."""
    counts: Counter[int] = Counter()
    for each in found:
        counts.update(each.histogram)
    watchers = sum(each.watchers for each in found)
    came = sum(each.marks for each in found)
    return CrowdFigures(
        watchers=watchers,
        sent=sent,
        failed=failed,
        rate=speed,
        achieved=rate(sent - failed, seconds),
        expected=(sent - failed) * watchers,
        came=came,
        # A change that was refused is nothing that could have come.
        lost=max(0, sum(each.lost for each in found) - failed * watchers),
        doubled=sum(each.doubled for each in found),
        broken=sum(each.broken for each in found),
        disordered=sum(each.disordered for each in found),
        decoded=sum(each.decoded for each in found),
        p50_ms=share_of(counts, 0.5),
        p99_ms=share_of(counts, 0.99),
        max_ms=share_of(counts, 1.0),
        each_read=divide(came, sum(each.pieces for each in found)),
        mb_per_s=divide(sum(each.bytes for each in found) / 1e6, seconds),
        histogram=dict(counts),
    )


def put_together(
    shape: Shape, rows: list[SeenRow], answered: list[Sample], crowd: CrowdFigures
) -> WatchFigures:
    """The figures over all rows."""

    def over(mine: list[SeenRow]) -> Summary:
        return summarise(Sample(row.ms, row.error) for row in mine)

    replicas = sorted({row.replica for row in rows})
    return WatchFigures(
        shape=shape,
        watchers=WATCHERS,
        answered_ms=summarise(answered),
        seen_ms=over(rows),
        paused_ms=over([row for row in rows if row.paused]),
        by_op={op: over([row for row in rows if row.op == op]) for op in ("create", "delete")},
        by_replica={str(each): over([row for row in rows if row.replica == each]) for each in replicas},
        rows=rows,
        crowd=crowd,
    )


def targets(figures: WatchFigures) -> list[Target]:
    """What was aimed at."""
    crowd = figures.crowd
    what = f"{crowd.watchers} watchers at {crowd.rate:g} events/s"
    return [
        Target(
            name=f"create or delete seen by {figures.watchers} watchers, p99",
            value=figures.seen_ms.p99,
            limit=P99_LIMIT,
            unit=" ms",
        ),
        Target(
            name="first event after a pause seen, p50",
            value=figures.paused_ms.p50,
            limit=COALESCED,
            unit=" ms",
        ),
        Target(name=f"{what}: lost", value=float(crowd.lost), limit=0, unit=""),
        Target(
            name=f"{what}: doubled or out of order",
            value=float(crowd.doubled + crowd.disordered),
            limit=0,
            unit="",
        ),
        Target(name=f"{what}: streams cut off", value=float(crowd.broken), limit=0, unit=""),
        Target(
            name=f"{what}: events/s achieved",
            value=crowd.achieved,
            limit=round(0.95 * crowd.rate, 1),
            unit="/s",
            at_least=True,
        ),
    ]


def tables(figures: WatchFigures) -> list[Table]:
    """For people."""
    crowd = figures.crowd
    rows = [
        ("the request is answered", figures.answered_ms),
        ("seen by a watcher", figures.seen_ms),
        *((f"  {op}", found) for op, found in figures.by_op.items()),
        *((f"  through api {replica}", found) for replica, found in figures.by_replica.items()),
        ("  first after a pause", figures.paused_ms),
    ]
    return [
        Table(
            f"Creates and deletes seen by {figures.watchers} watchers on {figures.shape.apis} apis, simulated VMs, ms",
            ["until", *TAIL_COLUMNS],
            [[what, *tail_cells(found)] for what, found in rows],
        ),
        Table(
            f"{crowd.watchers} watchers of one api, {crowd.rate:g} events a second aimed at, made through another",
            ["events/s", "marks expected", "came", "lost", "doubled", "cut off", "decoded"],
            [
                [
                    cell(crowd.achieved),
                    *map(
                        str,
                        (crowd.expected, crowd.came, crowd.lost, crowd.doubled, crowd.broken, crowd.decoded),
                    ),
                ]
            ],
        ),
        Table(
            "From the change's request to each of them, ms",
            ["p50", "p99", "max", "events a read", "MB/s in all"],
            [
                [
                    *map(cell, (crowd.p50_ms, crowd.p99_ms, crowd.max_ms)),
                    cell(crowd.each_read),
                    cell(crowd.mb_per_s),
                ]
            ],
        ),
    ]


def failures(figures: WatchFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [("creates and deletes", figures.answered_ms), ("events", figures.seen_ms)]
