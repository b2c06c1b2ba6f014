"""The claim, from the engine in one process to what a client of the whole platform sees; part by part.

Each part is a module with its own question, rows and baseline: `claim_engine` (in process), `claim_http` (a node's
API), `claim_supply` (warm pool against none), `claim_output` (create to a command's first output, and the hand-over
apart), `claim_patterns` (sequential, staggered, burst) and `claim_boot` (cold boot beside restore). The first two
need no VM and say so; the others ask a running platform whose pool is declared again as it was whatever ends the
run, and engines of this process beside it. This module puts them together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.bench import (
    claim_boot,
    claim_engine,
    claim_http,
    claim_output,
    claim_patterns,
    claim_supply,
)
from greenroom.bench.claim_boot import BootFigures
from greenroom.bench.claim_direct import Direct
from greenroom.bench.claim_engine import EngineFigures
from greenroom.bench.claim_http import HttpFigures
from greenroom.bench.claim_output import OutputFigures
from greenroom.bench.claim_patterns import PatternFigures
from greenroom.bench.claim_pool import Platform, Pool, Tenant
from greenroom.bench.claim_supply import SupplyFigures
from greenroom.bench.report import (
    Conditions,
    Meter,
    Table,
    Target,
    gather_conditions,
    medium_of,
    target_table,
)
from greenroom.bench.summaries import Summary
from greenroom.config import RoleSpec
from greenroom.errors import SetupError
from greenroom.runtime.engine import EngineInfo
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import NodeStatus, Size

Part = Literal["engine", "http", "supply", "output", "patterns", "boot"]
PARTS: tuple[Part, ...] = ("engine", "http", "supply", "output", "patterns", "boot")
ON_PLATFORM: frozenset[Part] = frozenset(("supply", "output", "patterns", "boot"))
"""Parts that need a running platform with real VMs."""
BESIDE_PLATFORM: frozenset[Part] = frozenset(("output", "boot"))
"""Those of them that make VMs of their own as well."""


class ClaimPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    template: str
    parts: list[Part]
    claims: int
    """In process, and over HTTP."""
    count: int
    """Sandboxes of each kind in `supply` and `output`, divided over `rounds`."""
    rounds: int
    pattern_count: int
    """Creates of each pattern."""
    pattern_pool: int
    every_ms: float
    """Between two creates of `staggered`."""
    boots: int


class PlatformFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a running platform was asked for, with the conditions it was asked under."""

    conditions: Conditions
    pool_target: int
    pool_warm: Literal["paused", "running"]
    nodes: int
    supply: SupplyFigures | None = None
    output: OutputFigures | None = None
    patterns: PatternFigures | None = None
    boot: BootFigures | None = None


class ClaimReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen; a part that was not asked for is None."""

    benchmark: Literal["claim"] = "claim"
    conditions: Conditions
    plan: ClaimPlan
    engine: EngineFigures | None = None
    http: HttpFigures | None = None
    platform: PlatformFigures | None = None
    targets: list[Target] = []
    failed: int = 0
    tables: list[Table] = []
    """As they are shown to people."""


async def measure_platform(
    platform: Platform,
    client: RoleClient,
    master_url: str,
    engine_of: Callable[[NodeStatus], Awaitable[EngineInfo]],
    plan: ClaimPlan,
    beside: RoleSpec,
    meter: Meter,
) -> PlatformFigures:
    """Measure the parts that need a running platform.

    `client` calls the roles with the operator's credential; `beside` is the spec of a node with the platform's
    settings in a state directory of its own. However it ends, the sandboxes and VMs made are ended and the pool is
    declared as before. Raises SetupError when there is no pool of VMs to measure, RuntimeFailure when the pool does
    not come to rest.
    """
    pool, nodes = await Pool.find(client, master_url, plan.template)
    if nodes[0].status.engine == "simulated":
        raise SetupError("the platform runs on the simulated engine, which has no VMs to measure")
    engine = await engine_of(nodes[0].status)
    conditions = await asyncio.to_thread(gather_conditions, engine, plan.template, pool.spec.size)
    tenant = Tenant(platform, pool)
    wanted = set(plan.parts)
    figures = PlatformFigures(
        conditions=conditions, pool_target=pool.spec.target, pool_warm=pool.spec.warm, nodes=len(nodes)
    )
    replace = msgspec.structs.replace
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(pool.kept())
        stack.push_async_callback(tenant.close)
        direct = None
        if wanted & BESIDE_PLATFORM:
            meter.say("an engine beside the platform")
            beside.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = Direct(beside, plan.template, pool.spec.size, meter)
            direct = await stack.enter_async_context(made)
        meter.say("one uncounted claim")
        await pool.at_rest(pool.spec.target)
        warm_up = claim_supply.ClaimRow(supply="warm", round=0, number=0, at=0.0)
        await claim_supply.one(tenant, warm_up)
        if "supply" in wanted:
            found = await claim_supply.measure(tenant, plan.count, plan.rounds, meter)
            figures = replace(figures, supply=found)
        if direct is not None and "output" in wanted:
            output = await claim_output.measure(tenant, direct, plan.count, plan.rounds, meter)
            figures = replace(figures, output=output)
        if "patterns" in wanted:
            patterns = await claim_patterns.measure(
                tenant, plan.pattern_count, plan.pattern_pool, plan.every_ms, meter
            )
            figures = replace(figures, patterns=patterns)
        if direct is not None and "boot" in wanted:
            await pool.declare(pool.spec.target)
            await pool.at_rest(pool.spec.target)
            figures = replace(figures, boot=await claim_boot.measure(direct, plan.boots, meter))
    return figures


def conditions_of(plan: ClaimPlan, found: PlatformFigures | None, size: Size, directory: Path) -> Conditions:
    """The conditions of a run: the platform's if one was measured, else those of this process alone."""
    if found is not None:
        base = found.conditions
    else:
        engine = EngineInfo(
            engine="simulated", accelerator="none", version="1", reason="the parts asked for run no VM"
        )
        base = gather_conditions(engine, plan.template, size)
    return msgspec.structs.replace(base, medium=medium_of(directory))


def put_together(
    conditions: Conditions,
    plan: ClaimPlan,
    engine: EngineFigures | None,
    http: HttpFigures | None,
    platform: PlatformFigures | None,
) -> ClaimReport:
    """The report over all parts."""
    report = ClaimReport(conditions=conditions, plan=plan, engine=engine, http=http, platform=platform)
    return msgspec.structs.replace(
        report,
        targets=_targets(report),
        failed=sum(summary.failed for _, summary in failures(report)),
        tables=tables(report),
    )


def _targets(report: ClaimReport) -> list[Target]:
    made: list[Target] = []
    if report.engine is not None:
        made += claim_engine.targets(report.engine)
    if report.http is not None:
        made += claim_http.targets(report.http)
    if report.platform is not None and report.platform.output is not None:
        made += claim_output.targets(report.platform.output)
    return made


def tables(report: ClaimReport) -> list[Table]:
    """The report for people."""
    made: list[Table] = []
    if report.engine is not None:
        made += claim_engine.tables(report.engine)
    if report.http is not None:
        made += claim_http.tables(report.http)
    if (platform := report.platform) is not None:
        if platform.supply is not None:
            made += claim_supply.tables(platform.supply)
        if platform.output is not None:
            made += claim_output.tables(platform.output)
        if platform.patterns is not None:
            made += claim_patterns.tables(platform.patterns)
        if platform.boot is not None:
            made += claim_boot.tables(platform.boot)
    if found := _targets(report):
        made.append(target_table(found))
    return made


def notes(report: ClaimReport) -> list[str]:
    """What was asked for, for people."""
    made: list[str] = []
    plan = report.plan
    if report.engine is not None:
        engine = report.engine
        made.append(
            f"in process: {engine.claim_ms.attempts} claims on a pool of {engine.pool}, VMs simulated and the "
            f"hand-over left out; {engine.durable} of them were in the journal's file right after"
        )
    if report.http is not None:
        made.append(
            f"over HTTP: {report.http.claim_ms.attempts} pairs of a claim and {report.http.trivial} to a node "
            "process with simulated VMs, the hand-over left out"
        )
    if (platform := report.platform) is not None:
        nodes = "1 node" if platform.nodes == 1 else f"{platform.nodes} nodes"
        made.append(
            f"on real VMs: pool of {platform.pool_target} that wait {platform.pool_warm}, on {nodes}; {plan.count} "
            f"claims of each kind in {plan.rounds} rounds, from one client on this machine"
        )
    return made


def failures(report: ClaimReport) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    made: list[tuple[str, Summary]] = []
    if report.engine is not None:
        made += claim_engine.failures(report.engine)
    if report.http is not None:
        made += claim_http.failures(report.http)
    if (platform := report.platform) is not None:
        if platform.supply is not None:
            made += claim_supply.failures(platform.supply)
        if platform.output is not None:
            made += claim_output.failures(platform.output)
        if platform.patterns is not None:
            made += claim_patterns.failures(platform.patterns)
        if platform.boot is not None:
            made += claim_boot.failures(platform.boot)
    return made
