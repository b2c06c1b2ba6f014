"""What the way to a running sandbox costs: entry, proxy and relay, beside the same agent asked in its namespace.

The client is the same (`channels`), and so are the bytes but for the headers that name the sandbox. To the platform it
keeps its connection, as SDKs do; behind that the relay connects to the guest for each request (`node.relay_heads` says
why), so `direct` does that too, and `kept` shows what it would be without. They are asked one right after the other, in
an order that changes from one time to the next, so the guest is as warm and the machine as busy for all. `GET /health`
is the least that an agent answers, `Process.List` a call of the SDK's, `echo` in a login shell a whole command, to the
end of its stream. A large file is fetched by the first two in turn. It is sparse: a guest's disk is slower than its
network and would be measured instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.bench.channels import Channel, ended_of
from greenroom.bench.report import (
    RATIO_COLUMNS,
    SUMMARY_COLUMNS,
    TAIL_COLUMNS,
    Conditions,
    Meter,
    Table,
    Target,
    cell,
    ratio_cells,
    reason,
    summary_cells,
    tail_cells,
    target_table,
)
from greenroom.bench.rounds import ratio, turns
from greenroom.bench.summaries import Ratio, Sample, Summary, summarise
from greenroom.errors import GreenroomError, NodeUnavailable, RuntimeFailure
from greenroom.runtime import namespaces
from greenroom.runtime.guestclient import AGENT_PORT

Way = Literal["platform", "direct", "kept"]
WAYS: tuple[Way, Way, Way] = ("platform", "direct", "kept")
FETCHED: tuple[Way, Way] = ("platform", "direct")
WORDS: dict[Way, str] = {
    "platform": "through the platform",
    "direct": "direct",
    "kept": "direct, on a connection that is kept",
}
Kind = Literal["health", "list", "echo"]
KINDS: dict[Kind, str] = {
    "health": "GET /health",
    "list": "Process.List",
    "echo": "`echo` in a login shell",
}
ROUND = 100
"""Of each kind in a round, over which differences are told."""
WARM_UP = 20
"""Of each kind that do not count."""
ADDED_LIMIT = 1.5
"""Milliseconds that the way may add to a small request."""
RATE_LIMIT = 0.7
"""Of the direct rate that a large file should reach through the platform."""
FETCH_DEADLINE = 900.0
FILE = "/tmp/greenroom-bench-file"  # noqa: S108 (in the guest)


class ExecutionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    template: str
    count: int
    """Of `GET /health`, and of `Process.List`, by each way."""
    echoes: int
    file_mib: int
    fetches: int
    """Of the file, by each way."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request by every way, in milliseconds."""

    kind: Kind
    round: int
    platform_ms: float | None = None
    direct_ms: float | None = None
    kept_ms: float | None = None
    error: str = ""


class FetchRow(msgspec.Struct, frozen=True, kw_only=True):
    """The file fetched once, and how long that took from the request to its last byte."""

    way: Way
    round: int
    seconds: float | None = None
    error: str = ""


class KindFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request by every way."""

    kind: Kind
    platform_ms: Summary
    direct_ms: Summary
    kept_ms: Summary
    added_ms: float | None
    """Difference of the medians of the first two."""
    added_rounds: list[float | None]
    """The same within each round: how far they lie apart is how much a single one is worth here."""


class FetchFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The large file by both ways."""

    mib: int
    platform_mib_s: Summary
    direct_mib_s: Summary
    time: Ratio
    """Through the platform over direct."""


class ExecutionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen."""

    benchmark: Literal["exec"] = "exec"
    conditions: Conditions
    plan: ExecutionPlan
    kinds: list[KindFigures]
    fetch: FetchFigures
    failed: int
    requests: list[RequestRow]
    fetches: list[FetchRow]
    targets: list[Target] = []
    tables: list[Table] = []
    notes: list[str] = []


class Records:
    """The rows as they come."""

    def __init__(self) -> None:
        self.requests: list[RequestRow] = []
        self.fetches: list[FetchRow] = []


def vm_of(journals: Iterable[Path], sandbox_id: str) -> str:
    """The VM in which a sandbox runs, by the journals of this machine's nodes. Raises NodeUnavailable."""
    for path in journals:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as db:
                row = db.execute(
                    "SELECT vm FROM claims WHERE sandbox_id=? AND state='running'", (sandbox_id,)
                ).fetchone()
        except sqlite3.DatabaseError as error:
            raise NodeUnavailable(f"the journal {path} cannot be read: {error}") from error
        if row is not None and row[0]:
            return str(row[0])
    raise NodeUnavailable(f"no node of this machine has the sandbox {sandbox_id}")


class Inside:
    """Makes sockets inside a VM's namespace. Use as a context manager. Raises NodeUnavailable when it is gone."""

    def __init__(self, vm: str) -> None:
        try:
            self._handle = namespaces.open_handle(vm)
        except OSError as error:
            raise NodeUnavailable(f"the namespace of {vm} cannot be opened: {error.strerror}") from error

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._handle)

    async def connect(self) -> object:
        """A connection to the agent. Raises OSError."""
        sock = namespaces.open_socket(self._handle)
        try:
            namespaces.reset_on_close(sock)
            await asyncio.get_running_loop().sock_connect(sock, (namespaces.GUEST_ADDRESS, AGENT_PORT))
        except BaseException:
            sock.close()
            raise
        return sock


async def measure(ways: dict[Way, Channel], plan: ExecutionPlan, records: Records, meter: Meter) -> None:
    """All of the plan. Raises RuntimeFailure when the file cannot be made; other failures are rows."""
    counts: list[tuple[Kind, int]] = [("health", plan.count), ("list", plan.count), ("echo", plan.echoes)]
    meter.begin(sum(count for _, count in counts) + 2 * plan.fetches)
    for kind, count in counts:
        meter.say(f"{count} of {KINDS[kind]} by each way")
        for index in range(min(WARM_UP, count)):
            await _ask(ways, kind, 0, index)
        for index in range(count):
            records.requests.append(await _ask(ways, kind, 1 + index // ROUND, index))
            meter.advance()
    if not plan.fetches:
        return
    await ways["direct"].run(f"truncate -s {plan.file_mib}M {FILE} && head -c 4096 {FILE} | wc -c")
    for number in range(1, plan.fetches + 1):
        meter.say(f"a file of {plan.file_mib} MiB, round {number} of {plan.fetches}")
        for way in turns(FETCHED, number):
            records.fetches.append(await _fetch(ways[way], way, number, plan.file_mib))
            meter.advance()


async def _ask(ways: dict[Way, Channel], kind: Kind, number: int, index: int) -> RequestRow:
    """One request by every way."""
    found: dict[Way, float] = {}
    try:
        for way in turns(WAYS, index):
            found[way] = await _one(ways[way], kind)
    except (GreenroomError, OSError) as error:
        return RequestRow(kind=kind, round=number, error=reason(error))
    return RequestRow(
        kind=kind,
        round=number,
        platform_ms=found["platform"],
        direct_ms=found["direct"],
        kept_ms=found["kept"],
    )


async def _one(channel: Channel, kind: Kind) -> float:
    """Milliseconds of one request. Raises RuntimeFailure when its answer is not what it should be."""
    word = ""
    if kind == "health":
        request = channel.request("GET", "/health")
    elif kind == "list":
        request = channel.request("POST", "/process.Process/List", b"{}")
    else:
        word = f"word-{secrets.token_hex(6)}"
        request = channel.command(f"echo {word}")
    began = time.perf_counter()
    answer = await channel.ask(request)
    took = (time.perf_counter() - began) * 1000
    if not 200 <= answer.status < 300:
        raise RuntimeFailure(f"{KINDS[kind]} was answered {answer.status}")
    if word and (ended := ended_of(answer.body)) != (0, f"{word}\n".encode()):
        raise RuntimeFailure(f"`echo {word}` ended with {ended.status} and {ended.output[:80]!r}")
    return took


async def _fetch(channel: Channel, way: Way, number: int, mib: int) -> FetchRow:
    """The whole file once, thrown away as it comes."""
    seen = 0

    def take(piece: bytes) -> None:
        nonlocal seen
        seen += len(piece)

    request = channel.request("GET", f"/files?path={FILE}")
    try:
        began = time.perf_counter()
        status = await channel.read(request, take, FETCH_DEADLINE)
        seconds = time.perf_counter() - began
        if status != 200 or seen != mib << 20:
            raise RuntimeFailure(f"the file was answered {status} and {seen} of {mib << 20} bytes")
    except (GreenroomError, OSError) as error:
        return FetchRow(way=way, round=number, error=reason(error))
    return FetchRow(way=way, round=number, seconds=seconds)


def summarise_run(conditions: Conditions, plan: ExecutionPlan, records: Records) -> ExecutionReport:
    """The report over all rows."""
    report = ExecutionReport(
        conditions=conditions,
        plan=plan,
        kinds=[_figures(kind, [row for row in records.requests if row.kind == kind]) for kind in KINDS],
        fetch=_fetched(plan, records.fetches),
        failed=sum(bool(row.error) for row in records.requests)
        + sum(bool(row.error) for row in records.fetches),
        requests=records.requests,
        fetches=records.fetches,
        notes=[
            f"{plan.count} of each small request and {plan.echoes} of `echo` by each way, a sparse file of "
            f"{plan.file_mib} MiB fetched {plan.fetches} times; one client that asks one thing at a time",
            "the platform connects to the guest for each request, and so does what stands as direct beside it",
        ],
    )
    report = msgspec.structs.replace(report, targets=targets(report))
    return msgspec.structs.replace(report, tables=tables(report))


def _figures(kind: Kind, rows: Sequence[RequestRow]) -> KindFigures:
    def by(way: Way, some: Sequence[RequestRow]) -> Summary:
        return summarise(Sample(getattr(row, f"{way}_ms"), row.error) for row in some)

    def added(some: Sequence[RequestRow]) -> float | None:
        platform, direct = by("platform", some).p50, by("direct", some).p50
        return None if platform is None or direct is None else platform - direct

    numbers = sorted({row.round for row in rows})
    return KindFigures(
        kind=kind,
        platform_ms=by("platform", rows),
        direct_ms=by("direct", rows),
        kept_ms=by("kept", rows),
        added_ms=added(rows),
        added_rounds=[added([row for row in rows if row.round == number]) for number in numbers],
    )


def _fetched(plan: ExecutionPlan, rows: Sequence[FetchRow]) -> FetchFigures:
    def of(way: Way) -> list[FetchRow]:
        return [row for row in rows if row.way == way]

    def speed(row: FetchRow) -> Sample:
        return Sample(plan.file_mib / row.seconds if row.seconds else None, row.error)

    return FetchFigures(
        mib=plan.file_mib,
        platform_mib_s=summarise(map(speed, of("platform"))),
        direct_mib_s=summarise(map(speed, of("direct"))),
        time=ratio(of("platform"), of("direct"), lambda row: Sample(row.seconds, row.error)),
    )


def targets(report: ExecutionReport) -> list[Target]:
    """What is aimed at."""
    made = [
        Target(
            name=f"exec: added to {KINDS[entry.kind]} by proxy and relay",
            value=entry.added_ms,
            limit=ADDED_LIMIT,
            unit=" ms",
        )
        for entry in report.kinds
        if entry.kind != "echo"
    ]
    name = f"exec: time of a file through the platform over direct ({RATE_LIMIT} of the rate)"
    limit = round(1 / RATE_LIMIT, 2)
    return [*made, Target(name=name, value=report.fetch.time.overall, limit=limit, unit="")]


def tables(report: ExecutionReport) -> list[Table]:
    """For people."""
    fetch = report.fetch
    return [
        Table(
            "One request, ms",
            ["request", "way", *TAIL_COLUMNS],
            [
                [KINDS[entry.kind], WORDS[way], *tail_cells(summary)]
                for entry in report.kinds
                for way, summary in zip(
                    WAYS, (entry.platform_ms, entry.direct_ms, entry.kept_ms), strict=True
                )
            ],
        ),
        Table(
            "What the platform's way adds to direct: difference of medians, ms",
            ["request", "added", "of rounds from"],
            [[KINDS[entry.kind], cell(entry.added_ms), _range(entry.added_rounds)] for entry in report.kinds],
        ),
        Table(
            f"A file of {fetch.mib} MiB, MiB/s",
            ["way", *SUMMARY_COLUMNS],
            [
                [WORDS["platform"], *summary_cells(fetch.platform_mib_s)],
                [WORDS["direct"], *summary_cells(fetch.direct_mib_s)],
            ],
        ),
        Table("Its time through the platform over direct", RATIO_COLUMNS, [ratio_cells(fetch.time)]),
        target_table(report.targets),
    ]


def _range(rounds: Sequence[float | None]) -> str:
    known = [value for value in rounds if value is not None]
    return f"{cell(min(known))} to {cell(max(known))}" if known else cell(None)


def failures(report: ExecutionReport) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    made = [(KINDS[entry.kind], entry.platform_ms) for entry in report.kinds]
    by_way = (("platform", report.fetch.platform_mib_s), ("direct", report.fetch.direct_mib_s))
    return [*made, *((f"the file, {way}", summary) for way, summary in by_way)]
