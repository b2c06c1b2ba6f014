"""What does a platform cost that nobody uses: memory and CPU of all its processes, with pools of 0?

Memory is the sum of the processes' proportional set sizes (PSS), so that a page they share counts once; CPU is the
time they used over a span in which nothing was asked of them. The baseline, measured before the platform starts
so that the two share no pages, is what the same number of processes costs that only import the libraries, and one
Envoy without any configuration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.bench.idle_host import Usage, bare_processes, look
from greenroom.bench.report import Conditions, Meter, Table, Target, cell
from greenroom.errors import RuntimeFailure

PYTHONS = 5
"""Python processes of a platform: master, node, api, proxy's controller, supervisor."""
MOST_PSS_MIB = 572.0
"""Aim: PSS of the whole platform, MiB; 600 MB."""
MOST_CPU_PERCENT = 2.0
"""Aim: CPU of the whole platform, per cent of one core."""
SAMPLE_EVERY = 15.0
"""Seconds between looks at memory; reading it costs the reader time, not the processes."""
BASELINE_SHARE = 0.2
"""Of the span, how long the baseline is watched: it does next to nothing."""

Look = Callable[[Mapping[str, int]], dict[str, Usage]]


class IdlePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How long: `settle` seconds of rest after the start, then `seconds` of measuring."""

    seconds: float
    settle: float = 20.0


class IdleSample(msgspec.Struct, frozen=True, kw_only=True):
    """All groups at `at` seconds since measuring began."""

    at: float
    groups: dict[str, Usage]


class GroupCost(msgspec.Struct, frozen=True, kw_only=True):
    """One group over the span. Memory is the mean of the samples, `pss_max_mib` the largest."""

    name: str
    processes: int
    threads: int
    pss_mib: float
    pss_max_mib: float
    private_mib: float
    rss_mib: float
    cpu_seconds: float
    cpu_percent: float
    """Of one core."""


class IdleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen."""

    benchmark: Literal["platform"] = "platform"
    conditions: Conditions
    plan: IdlePlan
    seconds: float
    """The platform's span as it was."""
    roles: list[GroupCost]
    total: GroupCost
    baseline: list[GroupCost]
    baseline_total: GroupCost
    most_pss_mib: float = MOST_PSS_MIB
    most_cpu_percent: float = MOST_CPU_PERCENT
    samples: list[IdleSample]
    targets: list[Target] = []
    tables: list[Table] = []
    """Both, and the notes, as they are shown to people."""
    notes: list[str] = []

    @property
    def within(self) -> bool:
        """Whether both aims are met; memory by the largest sample."""
        return self.total.pss_max_mib <= self.most_pss_mib and self.total.cpu_percent <= self.most_cpu_percent


async def watch(
    roots: Callable[[], dict[str, int]], seconds: float, look_at: Look = look
) -> list[IdleSample]:
    """Look at the groups now, every SAMPLE_EVERY seconds, and at the end.

    Raises RuntimeFailure when a root changes or ends: what was measured then is a restart, not rest.
    """
    named = roots()
    began = time.monotonic()
    samples: list[IdleSample] = []
    while True:
        at = time.monotonic() - began
        groups = await asyncio.to_thread(look_at, named)
        gone = [name for name, usage in groups.items() if usage.processes == 0]
        if gone or roots() != named:
            raise RuntimeFailure(
                f"the processes changed while they were measured ({', '.join(gone) or 'a role was restarted'}); "
                "see their logs and run it again"
            )
        samples.append(IdleSample(at=at, groups=groups))
        if at >= seconds:
            return samples
        await asyncio.sleep(min(SAMPLE_EVERY, max(0.0, seconds - (time.monotonic() - began))))


async def baseline(plan: IdlePlan, directory: Path, meter: Meter) -> list[IdleSample]:
    """Watch the bare processes for a part of the plan's span."""
    meter.say("baseline: bare processes")
    async with bare_processes(directory, PYTHONS) as roots:
        await asyncio.sleep(min(plan.settle, 5.0))
        return await watch(lambda: roots, plan.seconds * BASELINE_SHARE)


async def measure(
    plan: IdlePlan, roots: Callable[[], dict[str, int]], meter: Meter, look_at: Look = look
) -> list[IdleSample]:
    """Let the platform settle, then watch it. `roots` tells its processes by role."""
    meter.say(f"letting the platform come to rest for {plan.settle:.0f} s")
    await asyncio.sleep(plan.settle)
    meter.say(f"measuring for {plan.seconds:.0f} s")
    return await watch(roots, plan.seconds, look_at)


def costs(samples: list[IdleSample]) -> list[GroupCost]:
    """One row for each group. Raises ValueError without two samples, which span no time."""
    if len(samples) < 2:
        raise ValueError("a cost over time needs two samples")

    def of(name: str) -> Callable[[IdleSample], Usage]:
        return lambda sample: sample.groups[name]

    return [_cost(name, samples, of(name)) for name in samples[0].groups]


def total(samples: list[IdleSample]) -> GroupCost:
    """All groups together; the largest PSS is that of one moment."""
    return _cost("all", samples, lambda sample: _sum(list(sample.groups.values())))


def _cost(name: str, samples: list[IdleSample], pick: Callable[[IdleSample], Usage]) -> GroupCost:
    seen = [pick(sample) for sample in samples]
    seconds = samples[-1].at - samples[0].at
    used = max(0.0, seen[-1].cpu_s - seen[0].cpu_s)

    def mean(value: Callable[[Usage], float]) -> float:
        return sum(map(value, seen)) / len(seen)

    return GroupCost(
        name=name,
        processes=seen[-1].processes,
        threads=seen[-1].threads,
        pss_mib=mean(lambda usage: usage.pss_mib),
        pss_max_mib=max(usage.pss_mib for usage in seen),
        private_mib=mean(lambda usage: usage.private_mib),
        rss_mib=mean(lambda usage: usage.rss_mib),
        cpu_seconds=used,
        cpu_percent=100 * used / seconds if seconds > 0 else 0.0,
    )


def _sum(usages: list[Usage]) -> Usage:
    return Usage(
        processes=sum(usage.processes for usage in usages),
        threads=sum(usage.threads for usage in usages),
        pss_mib=sum(usage.pss_mib for usage in usages),
        private_mib=sum(usage.private_mib for usage in usages),
        rss_mib=sum(usage.rss_mib for usage in usages),
        cpu_s=sum(usage.cpu_s for usage in usages),
    )


def summarise_run(
    conditions: Conditions, plan: IdlePlan, bare: list[IdleSample], samples: list[IdleSample]
) -> IdleReport:
    """The report over all samples."""
    report = IdleReport(
        conditions=conditions,
        plan=plan,
        seconds=samples[-1].at - samples[0].at,
        roles=costs(samples),
        total=total(samples),
        baseline=costs(bare),
        baseline_total=total(bare),
        samples=samples,
    )
    return msgspec.structs.replace(
        report, targets=targets(report), tables=tables(report), notes=notes(report)
    )


_COLUMNS = ["processes", "threads", "PSS MiB", "at most", "private MiB", "RSS MiB", "CPU s", "% of a core"]


def _row(cost: GroupCost) -> list[str]:
    figures = (cost.pss_mib, cost.pss_max_mib, cost.private_mib, cost.rss_mib, cost.cpu_seconds)
    return [
        cost.name, str(cost.processes), str(cost.threads), *map(cell, figures), cell(cost.cpu_percent)
    ]  # fmt: skip


def tables(report: IdleReport) -> list[Table]:
    """The report for people."""
    pythons = [cost for cost in report.baseline if cost.name != "envoy"]
    envoys = [cost for cost in report.baseline if cost.name == "envoy"]
    return [
        Table(
            f"A platform at rest for {report.seconds:.0f} s, pools of 0",
            ["role", *_COLUMNS],
            [_row(cost) for cost in [*report.roles, report.total]],
        ),
        Table(
            f"Baseline: {len(pythons)} Pythons that import uvicorn and aiohttp and sleep, and an Envoy without "
            "configuration",
            ["process", *_COLUMNS],
            [_row(cost) for cost in [*pythons[:1], *envoys, report.baseline_total]],
        ),
        Table(
            "Against the aims",
            ["figure", "platform", "aim", "baseline", "over baseline"],
            [
                [
                    "PSS of all processes, MiB (largest sample)",
                    cell(report.total.pss_max_mib),
                    f"≤ {cell(report.most_pss_mib)}",
                    cell(report.baseline_total.pss_max_mib),
                    _over(report.total.pss_max_mib, report.baseline_total.pss_max_mib),
                ],
                [
                    "CPU, % of a core",
                    cell(report.total.cpu_percent),
                    f"≤ {cell(report.most_cpu_percent)}",
                    cell(report.baseline_total.cpu_percent),
                    _over(report.total.cpu_percent, report.baseline_total.cpu_percent),
                ],
            ],
        ),
    ]


def targets(report: IdleReport) -> list[Target]:
    """What was aimed at."""
    return [
        Target(
            name="idle platform: PSS of all processes",
            value=report.total.pss_max_mib,
            limit=report.most_pss_mib,
            unit=" MiB",
        ),
        Target(
            name="idle platform: CPU of all processes",
            value=report.total.cpu_percent,
            limit=report.most_cpu_percent,
            unit=" % of a core",
        ),
    ]


def _over(figure: float, base: float) -> str:
    return f"{cell(figure / base)} ×" if base > 0 else "–"


def notes(report: IdleReport) -> list[str]:
    """What was done, for people."""
    return [
        f"a platform of its own with nothing in its pools; {report.plan.settle:.0f} s of rest, then "
        f"{len(report.samples)} looks in {report.seconds:.0f} s; CPU time includes children that have ended"
    ]
