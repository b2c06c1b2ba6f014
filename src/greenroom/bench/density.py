"""How many paused members fit on one machine, what each costs, and do they still work?

A pool of a platform of its own is filled through the node as always: restores as many at a time as it makes, owner
records, namespaces, cgroups and the free-memory floor all in force. When the pool is full every member's memory is
read from the host, some sandboxes are claimed and each is asked something that only it can answer, and in the end
everything is taken down and counted. A fill that stops growing is not waited for: the node's reason is the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

import msgspec
import psutil

from greenroom.bench.density_host import HostMemory, MembersOnHost, host_memory
from greenroom.bench.faults_records import HostCount
from greenroom.bench.lanes import unbroken
from greenroom.bench.report import (
    SUMMARY_COLUMNS,
    Conditions,
    Meter,
    Table,
    Target,
    cell,
    reason,
    summary_cells,
)
from greenroom.bench.summaries import Sample, Summary, rate, summarise
from greenroom.bench.supply import HeldRow, held_table
from greenroom.errors import GreenroomError, SetupError
from greenroom.wire.messages import Size

MEMBER_MIB = 20
"""Asked of the host for each member before anything is made; one took 16 to 17 when this was written."""
LOOK_EVERY = 0.5
"""Seconds between looks at a filling pool."""
STALLED_AFTER = 60.0
"""Seconds without a new member after which a fill is given up."""
FIRST_AFTER = 300.0
"""The same before the first member, for which the node loads its golden and measures how to restore it."""
REST = 5.0
"""Seconds between the last member and the reading of memory."""
TTL = 900
"""Seconds that a sandbox of this run lives should nobody end it."""


class DensityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Fill a pool of `template` in `size` to `count`, claim `claims` of it."""

    template: str
    size: Size
    count: int
    claims: int
    seed: int
    """Of the numbers that the sandboxes are asked to multiply."""
    alive: int = 0
    """VMs whose memory is read by restore mode afterwards; 0 leaves that out."""

    def check(self, floor_mib: int) -> None:
        """Raise SetupError when the host has not got the memory over the floor at which refill stops."""
        available, needed = psutil.virtual_memory().available >> 20, self.count * MEMBER_MIB
        if needed + floor_mib > available:
            room = max(0, available - floor_mib) // MEMBER_MIB
            raise SetupError(
                f"{self.count} members may need {needed} MiB over the floor of {floor_mib} MiB "
                f"(pools.memory_floor_mib) and {available} MiB are available; choose a --count up to {room}"
            )


class PoolLook(msgspec.Struct, frozen=True, kw_only=True):
    """The pool in the node's words."""

    warm: int
    starting: int
    failed: int
    reason: str


class FillSample(msgspec.Struct, frozen=True, kw_only=True):
    """The pool and the host at `at` seconds since the pool was declared."""

    at: float
    warm: int
    starting: int
    available_mib: float


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """One claimed sandbox: what it was asked and what it answered."""

    number: int
    create_ms: float | None = None
    command_ms: float | None = None
    expected: str = ""
    answer: str = ""
    machine_id: str = ""
    right: bool = False
    error: str = ""


class DensityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen. Memory in MiB."""

    benchmark: Literal["density"] = "density"
    conditions: Conditions
    plan: DensityPlan
    reached: int
    failed_members: int
    stopped: str
    """Why the fill ended before the count was reached; empty when it was reached."""
    fill_seconds: float
    per_second: float | None
    pss_mib: Summary
    private_mib: Summary
    pss_sum_mib: float
    before: HostMemory
    full: HostMemory
    host: MembersOnHost
    claims_right: int
    create_ms: Summary
    command_ms: Summary
    down_seconds: float
    left: HostCount
    after: HostMemory
    held: list[HeldRow] = []
    """Of `plan.alive` VMs, by restore mode."""
    held_notes: list[str] = []
    fill: list[FillSample]
    claims: list[ClaimRow]
    targets: list[Target] = []
    tables: list[Table] = []
    """Both, and the notes, as they are shown to people."""
    notes: list[str] = []

    @property
    def passed(self) -> bool:
        """Whether the pool was full, every sandbox was right and nothing was left."""
        return (
            not self.stopped
            and self.reached >= self.plan.count
            and self.claims_right == self.plan.claims
            and self.left.total() == 0
        )


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen while the platform ran."""

    stopped: str
    before: HostMemory
    full: HostMemory
    host: MembersOnHost
    failed_members: int
    fill: list[FillSample]
    claims: list[ClaimRow]


class Filled(Protocol):
    """The platform that is filled. All may raise GreenroomError."""

    async def declare(self, target: int) -> None:
        """Ask for that many members."""

    async def look(self) -> PoolLook:
        """The pool now."""

    async def create(self, template: str, ttl: int) -> str:
        """The id of a new sandbox."""

    async def command(self, sandbox_id: str, line: str) -> tuple[int, str]:
        """Exit status and standard output of a command."""

    async def kill(self, sandbox_id: str) -> object:
        """End a sandbox."""

    def members(self) -> MembersOnHost:
        """What is on the host."""


async def fill(
    platform: Filled,
    count: int,
    meter: Meter,
    *,
    memory: Callable[[], HostMemory] = host_memory,
    clock: Callable[[], float] = time.monotonic,
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[list[FillSample], PoolLook, str]:
    """Declare the pool and look until it is full; also the last look, and why it is not full if it is not.

    It has stopped when no member has come for STALLED_AFTER (the first: FIRST_AFTER) seconds; the node says why.
    """
    samples: list[FillSample] = []
    await platform.declare(count)
    began = grown = clock()
    most = 0
    while True:
        seen = await platform.look()
        now = clock()
        samples.append(
            FillSample(
                at=now - began, warm=seen.warm, starting=seen.starting, available_mib=memory().available
            )
        )
        for _ in range(seen.warm - most):
            meter.advance()
        if seen.warm > most:
            most, grown = seen.warm, now
        meter.say(f"{seen.warm} of {count} members" + (f"; held back: {seen.reason}" if seen.reason else ""))
        if seen.warm >= count:
            return samples, seen, ""
        if now - grown > (STALLED_AFTER if most else FIRST_AFTER):
            why = seen.reason or "the node gives no reason; see its log"
            return samples, seen, f"{seen.warm} of {count} members after {now - began:.0f} s: {why}"
        await rest(LOOK_EVERY)


async def run(platform: Filled, plan: DensityPlan, meter: Meter) -> Seen:
    """Fill, read, claim. Whatever comes, the sandboxes made are ended; the platform is its owner's to stop."""
    before = host_memory()
    meter.begin(plan.count)
    samples, last, stopped = await fill(platform, plan.count, meter)
    await asyncio.sleep(REST)
    meter.say("reading every member's memory")
    host = await asyncio.to_thread(platform.members)
    full = host_memory()
    rows = await claim_some(platform, plan, min(plan.claims, last.warm), meter)
    return Seen(
        stopped=stopped,
        before=before,
        full=full,
        host=host,
        failed_members=last.failed,
        fill=samples,
        claims=rows,
    )


async def claim_some(platform: Filled, plan: DensityPlan, count: int, meter: Meter) -> list[ClaimRow]:
    """Claim `count` sandboxes one by one, ask each, end them all together at the end."""
    drawn = random.Random(plan.seed)  # noqa: S311
    made: list[str] = []
    rows: list[ClaimRow] = []
    try:
        for number in range(1, count + 1):
            meter.say(f"claim {number} of {count}")
            rows.append(await _claim(platform, plan.template, number, drawn, made))
    finally:
        await unbroken(_end(platform, made), "end the sandboxes")
    seen = [row.machine_id for row in rows if row.machine_id]
    return [
        msgspec.structs.replace(row, right=False, error="another sandbox has the same machine id")
        if row.machine_id and seen.count(row.machine_id) > 1
        else row
        for row in rows
    ]


async def _claim(
    platform: Filled, template: str, number: int, drawn: random.Random, made: list[str]
) -> ClaimRow:
    one, other = drawn.randrange(10**8, 10**9), drawn.randrange(10**8, 10**9)
    row = ClaimRow(number=number, expected=str(one * other))
    try:
        began = time.perf_counter()
        sandbox = await unbroken(_create(platform, template, made), "create")
        created = time.perf_counter()
        row = msgspec.structs.replace(row, create_ms=(created - began) * 1000)
        line = f"python3 -c 'print({one} * {other})' && cat /etc/machine-id"
        status, output = await platform.command(sandbox, line)
        words = output.split()
        row = msgspec.structs.replace(
            row,
            command_ms=(time.perf_counter() - created) * 1000,
            answer=words[0] if words else "",
            machine_id=words[1] if len(words) > 1 else "",
        )
        if status != 0:
            return msgspec.structs.replace(row, error=f"the command ended with status {status}")
        if (row.answer, len(row.machine_id)) != (row.expected, 32):
            return msgspec.structs.replace(row, error="it answered something else")
        return msgspec.structs.replace(row, right=True)
    except (GreenroomError, OSError) as error:
        return msgspec.structs.replace(row, error=reason(error))


async def _create(platform: Filled, template: str, made: list[str]) -> str:
    sandbox = await platform.create(template, TTL)
    made.append(sandbox)
    return sandbox


async def _end(platform: Filled, made: list[str]) -> None:
    for sandbox in made:
        with contextlib.suppress(GreenroomError, OSError):  # the platform goes down next, with all of them
            await platform.kill(sandbox)


def summarise_run(
    conditions: Conditions,
    plan: DensityPlan,
    seen: Seen,
    down_seconds: float,
    left: HostCount,
    after: HostMemory,
    held: tuple[list[HeldRow], list[str]] = ([], []),
) -> DensityReport:
    """The report over all that was seen; `held` are the figures by restore mode and notes on them."""
    last = seen.fill[-1]
    pss = [memory.pss_mib for memory in seen.host.memories]
    report = DensityReport(
        conditions=conditions,
        plan=plan,
        reached=last.warm,
        failed_members=seen.failed_members,
        stopped=seen.stopped,
        fill_seconds=last.at,
        per_second=rate(last.warm, last.at),
        pss_mib=summarise(map(Sample, pss)),
        private_mib=summarise(Sample(memory.private_mib) for memory in seen.host.memories),
        pss_sum_mib=sum(pss),
        before=seen.before,
        full=seen.full,
        host=seen.host,
        claims_right=sum(row.right for row in seen.claims),
        create_ms=summarise(Sample(row.create_ms, row.error) for row in seen.claims),
        command_ms=summarise(Sample(row.command_ms, row.error) for row in seen.claims),
        down_seconds=down_seconds,
        left=left,
        after=after,
        held=held[0],
        held_notes=held[1],
        fill=seen.fill,
        claims=seen.claims,
    )
    return msgspec.structs.replace(
        report, targets=targets(report), tables=tables(report), notes=notes(report)
    )


def tables(report: DensityReport) -> list[Table]:
    """The report for people."""
    n = len(report.host.memories)
    made = [
        Table(
            f"Filling a pool to {report.plan.count} paused members",
            [
                "members",
                "failed",
                "seconds",
                "members/s",
                "MemAvailable before",
                "when full",
                "after the end",
            ],
            [
                [
                    str(report.reached),
                    str(report.failed_members),
                    cell(report.fill_seconds),
                    cell(report.per_second),
                    f"{report.before.available:.0f} MiB",
                    f"{report.full.available:.0f} MiB",
                    f"{report.after.available:.0f} MiB",
                ]
            ],
        ),
        Table(
            f"Memory of each paused member, MiB, all {n} alive",
            ["", *SUMMARY_COLUMNS],
            [
                ["PSS", *summary_cells(report.pss_mib)],
                ["private", *summary_cells(report.private_mib)],
            ],
        ),
        Table(
            "Memory of all members together, MiB",
            ["figure", "all", "each"],
            [
                ["PSS", cell(report.pss_sum_mib), _each(report.pss_sum_mib, n)],
                [
                    "MemAvailable lost",
                    cell(report.before.available - report.full.available),
                    _each(report.before.available - report.full.available, n),
                ],
                [
                    "of it, kernel memory (slab, page tables, stacks)",
                    cell(report.full.kernel - report.before.kernel),
                    _each(report.full.kernel - report.before.kernel, n),
                ],
                [
                    "the node's own process, PSS",
                    cell(report.host.node.pss_mib),
                    _each(report.host.node.pss_mib, n),
                ],
            ],
        ),
        Table(
            "What else is on the host when the pool is full",
            [
                "QEMU processes",
                "threads",
                "their descriptors",
                "namespaces",
                "node's threads",
                "node's descriptors",
            ],
            [
                [
                    str(report.host.processes),
                    str(report.host.threads),
                    str(report.host.fds),
                    str(report.host.namespaces),
                    str(report.host.node.threads),
                    str(report.host.node_fds),
                ]
            ],
        ),
        Table(
            "Sandboxes claimed from the full pool",
            ["", *SUMMARY_COLUMNS],
            [
                ["create, ms", *summary_cells(report.create_ms)],
                ["a multiplication in Python, ms", *summary_cells(report.command_ms)],
            ],
        ),
        Table(
            "Right answers, and what was left after the end",
            ["claimed", "right", "seconds to take all down", "left on the host"],
            [
                [
                    str(len(report.claims)),
                    str(report.claims_right),
                    cell(report.down_seconds),
                    str(report.left.total()),
                ]
            ],
        ),
    ]
    return made + ([held_table(report.held)] if report.held else [])


def targets(report: DensityReport) -> list[Target]:
    """What was aimed at."""
    return [
        Target(
            name=f"density: members missing of {report.plan.count}",
            value=float(report.plan.count - report.reached),
            limit=0.0,
            unit="",
        ),
        Target(
            name=f"density: wrong answers of {report.plan.claims} claimed",
            value=float(report.plan.claims - report.claims_right),
            limit=0.0,
            unit="",
        ),
        Target(
            name="density: left on the host after the end",
            value=float(report.left.total()),
            limit=0.0,
            unit="",
        ),
    ]


def _each(value: float, count: int) -> str:
    return cell(value / count) if count else "–"


def notes(report: DensityReport) -> list[str]:
    """What was done, for people."""
    lines = [
        f"one node, {report.plan.count} paused members of {report.plan.size.memory_mib} MiB each wanted; the pool "
        "hands out the member that has waited longest",
        *report.held_notes,
    ]
    return [*lines, f"the fill stopped: {report.stopped}"] if report.stopped else lines


def failures(report: DensityReport) -> list[tuple[str, Summary]]:
    """The summary in which each failed claim is counted once."""
    return [("claims", summarise(Sample(0.0 if row.right else None, row.error) for row in report.claims))]
