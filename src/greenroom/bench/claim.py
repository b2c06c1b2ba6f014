"""How long does a client wait for a sandbox, and how much of that does the warm pool save?

Claims go one after the other through a running platform's entry: create, the result of the command `true`,
kill. Rounds alternate between a full pool (`warm`) and one kept empty (`on_demand`, where each claim waits for
a restore), and change places, so that both meet the same machine. Before each claim the pool is at rest: refill
and clean-up of the one before are over. The pool is declared again as it was whatever ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, Protocol

import msgspec

from greenroom.bench.lanes import unbroken
from greenroom.bench.report import (
    RATIO_COLUMNS,
    SUMMARY_COLUMNS,
    Conditions,
    Meter,
    Table,
    cell,
    finish,
    gather_conditions,
    ratio_cells,
    reason,
    summary_cells,
)
from greenroom.bench.summaries import Ratio, Sample, Summary, compare, summarise
from greenroom.errors import GreenroomError, NodeUnavailable, RuntimeFailure, SetupError, UnknownSandbox
from greenroom.runtime.engine import EngineInfo
from greenroom.wire.calling import RoleClient
from greenroom.wire.ids import node_code_of
from greenroom.wire.messages import MasterStatus, NodeInfo, NodeStatus, PoolSpec, Sandbox, SandboxList

Supply = Literal["warm", "on_demand"]

SETTLE_DEADLINE = 120.0
"""Seconds for the pool to reach a target; it must restore that many VMs, no more."""
SETTLE_PAUSE = 0.05
"""Seconds between two looks at the pool."""
TTL = 120
"""Seconds a sandbox lives, should even the clean-up at the end fail."""
STAGES = ("queue", "turn", "start", "identity", "total")
"""What a node measures of a claim (`Sandbox.claim_ms`), in order; `total` is all of it."""


class Platform(Protocol):
    """A client of the platform's public API. Each call is one request: what is refused counts as failed."""

    async def create_once(self, template: str, ttl: int, metadata: dict[str, str]) -> str:
        """A new sandbox; returns its id. Raises GreenroomError."""

    async def command(self, sandbox_id: str, line: str) -> int:
        """Run a command line in a sandbox that was created here; returns its exit status."""

    async def kill(self, sandbox_id: str) -> bool:
        """End a sandbox; False when there was none."""


class ClaimPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: `count` claims of each supply, divided over `rounds`."""

    template: str
    count: int
    rounds: int

    def share(self, number: int) -> int:
        """Claims of each supply in the round with this number (from 1); the first take what is left over."""
        whole, over = divmod(self.count, self.rounds)
        return whole + (number <= over)


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """One claim as the client saw it and, from `node_ms` on, as the node did. Empty from the failed step on."""

    supply: Supply
    round: int
    number: int
    at: float
    """Seconds since the run began."""
    create_ms: float | None = None
    command_ms: float | None = None
    """From the command's request, sent right after create's answer, to its exit status."""
    usable_ms: float | None = None
    """From the create request to that exit status."""
    kill_ms: float | None = None
    node_ms: dict[str, float] = {}
    clock_offset_ms: float | None = None
    """Guest clock minus host clock at the hand-over."""
    clock_error_ms: float | None = None
    """Half the round trip in which that was measured."""
    error: str = ""
    """Which step failed and why."""


class ClaimSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One supply, all rounds together, in milliseconds."""

    supply: Supply
    create_ms: Summary
    command_ms: Summary
    usable_ms: Summary
    kill_ms: Summary
    node_ms: dict[str, Summary]
    clock_offset_ms: Summary
    clock_distance_ms: Summary
    """The offset without its sign."""
    clock_error_ms: Summary


class ClaimReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was seen. Ratios are on-demand over warm: how often longer one waits without a pool."""

    benchmark: Literal["claim"] = "claim"
    conditions: Conditions
    plan: ClaimPlan
    pool_target: int
    pool_warm: Literal["paused", "running"]
    nodes: int
    summaries: list[ClaimSummary]
    create_ratio: Ratio
    usable_ratio: Ratio
    failed: int
    claims: list[ClaimRow]


class Pool:
    """One declared pool of a running platform: its target changed, its state asked of the nodes themselves."""

    def __init__(self, client: RoleClient, master_url: str, spec: PoolSpec, nodes: list[NodeInfo]) -> None:
        self._client = client
        self._master = master_url
        self.spec = spec
        self._nodes = {info.status.code: info.status.api_url for info in nodes}

    @classmethod
    async def find(cls, client: RoleClient, master_url: str, template: str) -> tuple[Pool, list[NodeInfo]]:
        """The pool of `template` and the live nodes. Raises SetupError when there is none of either."""
        status = await client.call("GET", f"{master_url}/v1/status", MasterStatus)
        spec = next((pool for pool in status.pools if pool.template == template and pool.target > 0), None)
        if spec is None:
            raise SetupError(
                f"the platform keeps no warm pool of {template}; start it with `greenroom up --warm 4`"
            )
        nodes = [info for info in status.nodes if info.live]
        if not nodes:
            raise NodeUnavailable("no node of the platform is live; see `greenroom status`")
        return cls(client, master_url, spec, nodes), nodes

    async def sandbox(self, sandbox_id: str) -> Sandbox:
        """A sandbox in its node's own words. Raises NodeUnavailable or UnknownSandbox."""
        url = self._nodes.get(node_code_of(sandbox_id))
        if url is None:
            raise NodeUnavailable("the sandbox is on a node that joined after the run had begun")
        return await self._client.call("GET", f"{url}/v1/sandboxes/{sandbox_id}", Sandbox)

    async def remove(self, metadata: dict[str, str]) -> None:
        """End every sandbox with this metadata, also one whose create was never answered."""
        wanted = metadata.items()
        for url in self._nodes.values():
            listed = await self._client.call("GET", f"{url}/v1/sandboxes", SandboxList)
            for sandbox in listed.sandboxes:
                if wanted <= sandbox.metadata.items():
                    with contextlib.suppress(UnknownSandbox):
                        await self._client.call(
                            "DELETE", f"{url}/v1/sandboxes/{sandbox.sandbox_id}", type(None)
                        )

    async def declare(self, target: int) -> None:
        """Ask the master for another target; nodes hear of it with their next heartbeat."""
        wanted = msgspec.structs.replace(self.spec, target=target)
        await self._client.call("PUT", f"{self._master}/v1/pools", PoolSpec, wanted)

    async def at_rest(self, target: int) -> None:
        """Wait until exactly `target` members are warm and none is being made.

        Raises RuntimeFailure after SETTLE_DEADLINE with the nodes' reason, if they have one.
        """
        end = time.monotonic() + SETTLE_DEADLINE
        while True:
            seen, why = await self._look()
            if seen == (target, target, 0):
                return
            if time.monotonic() > end:
                raise RuntimeFailure(
                    f"the pool did not come to rest at {target} within {SETTLE_DEADLINE:.0f} s; "
                    + (why or "is somebody else using the platform?")
                )
            await asyncio.sleep(SETTLE_PAUSE)

    async def _look(self) -> tuple[tuple[int, int, int], str]:
        """Target, warm and starting members over all nodes, and why refill is held back."""
        target = warm = starting = 0
        why = ""
        for url in self._nodes.values():
            status = await self._client.call("GET", f"{url}/v1/status", NodeStatus)
            for pool in status.pools:
                if (pool.template, pool.size) == (self.spec.template, self.spec.size.name):
                    target, warm, starting = target + pool.target, warm + pool.warm, starting + pool.starting
                    why = pool.reason or why
        return (target, warm, starting), why

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """For the length of the block the target may be changed; afterwards it is what it was before."""
        try:
            yield
        finally:
            await unbroken(self._put_back(), "put the pool back")

    async def _put_back(self) -> None:
        problem = ""
        for pause in (0.0, 0.5, 1.0, 2.0, 4.0):
            await asyncio.sleep(pause)
            try:
                await self.declare(self.spec.target)
                return
            except GreenroomError as error:
                problem = error.message
        raise RuntimeFailure(
            f"the pool of {self.spec.template} could not be set back to {self.spec.target}: {problem}; "
            "it has no members until it is declared again"
        )


class _Claims:
    """Makes claims, all with metadata by which what is left of them is found at the end."""

    def __init__(self, platform: Platform, pool: Pool) -> None:
        self._platform = platform
        self._pool = pool
        self._metadata = {"greenroom.by": f"bench-{secrets.token_hex(4)}"}
        self.began = time.perf_counter()

    async def one(self, supply: Supply, number: int, index: int) -> ClaimRow:
        """Create, use and kill one sandbox. A step that fails is the last; the sandbox is killed all the same."""
        row = ClaimRow(supply=supply, round=number, number=index, at=time.perf_counter() - self.began)
        replace = msgspec.structs.replace
        step, sandbox_id = "create", ""
        try:
            begun = time.perf_counter()
            # Unbroken, so that after an interruption the clean-up finds what this has made.
            creating = self._platform.create_once(self._pool.spec.template, TTL, self._metadata)
            sandbox_id = await unbroken(creating, "create")
            created = time.perf_counter()
            row = replace(row, create_ms=(created - begun) * 1000)
            step = "command"
            status = await self._platform.command(sandbox_id, "true")
            ended = time.perf_counter()
            if status != 0:
                raise RuntimeFailure(f"`true` ended with status {status}")
            row = replace(row, command_ms=(ended - created) * 1000, usable_ms=(ended - begun) * 1000)
            step = "ask the node"
            seen = await self._pool.sandbox(sandbox_id)
            row = replace(
                row,
                node_ms=seen.claim_ms,
                clock_offset_ms=seen.clock_offset_ms,
                clock_error_ms=seen.clock_error_ms,
            )
            step = "kill"
            begun = time.perf_counter()
            await self._platform.kill(sandbox_id)
            return replace(row, kill_ms=(time.perf_counter() - begun) * 1000)
        except (GreenroomError, OSError) as error:
            row = replace(row, error=f"{step}: {reason(error)}")
        if sandbox_id:
            with contextlib.suppress(GreenroomError, OSError):
                await self._platform.kill(sandbox_id)
        return row

    async def close(self) -> None:
        """End what is left. Raises RuntimeFailure when that is not certain."""
        try:
            await unbroken(self._pool.remove(self._metadata), "remove")
        except GreenroomError as error:
            raise RuntimeFailure(
                f"sandboxes of this run may be left: {error.message}; they end by themselves within {TTL} s"
            ) from error


async def run(
    platform: Platform,
    client: RoleClient,
    master_url: str,
    engine_of: Callable[[NodeStatus], Awaitable[EngineInfo]],
    plan: ClaimPlan,
    meter: Meter,
) -> ClaimReport:
    """Measure as planned. `client` calls the roles with the operator's credential.

    However it ends, the sandboxes made are killed and the pool is declared as before. Raises SetupError when
    there is no pool of VMs to measure, RuntimeFailure when the pool does not come to rest.
    """
    pool, nodes = await Pool.find(client, master_url, plan.template)
    if nodes[0].status.engine == "simulated":
        raise SetupError("the platform runs on the simulated engine, which has no VMs to measure")
    engine = await engine_of(nodes[0].status)
    conditions = await asyncio.to_thread(gather_conditions, engine, plan.template, pool.spec.size)
    claims = _Claims(platform, pool)
    rows: list[ClaimRow] = []
    targets: dict[Supply, int] = {"warm": pool.spec.target, "on_demand": 0}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(pool.kept())
        stack.push_async_callback(claims.close)
        meter.say("one uncounted claim")
        await pool.at_rest(pool.spec.target)
        await claims.one("warm", 0, 0)
        meter.begin(2 * plan.count)
        claims.began = time.perf_counter()
        for number in range(1, plan.rounds + 1):
            order: list[Supply] = ["warm", "on_demand"]
            for supply in order if number % 2 else reversed(order):
                meter.say(f"round {number} of {plan.rounds}, {supply.replace('_', ' ')}")
                await pool.declare(targets[supply])
                for index in range(plan.share(number)):
                    await pool.at_rest(targets[supply])
                    rows.append(await claims.one(supply, number, index))
                    meter.advance()
    return summarise_run(finish(conditions), plan, pool.spec, len(nodes), rows)


def summarise_run(
    conditions: Conditions, plan: ClaimPlan, pool: PoolSpec, nodes: int, rows: list[ClaimRow]
) -> ClaimReport:
    """The report over all rows."""
    return ClaimReport(
        conditions=conditions,
        plan=plan,
        pool_target=pool.target,
        pool_warm=pool.warm,
        nodes=nodes,
        summaries=[_summary(rows, "warm"), _summary(rows, "on_demand")],
        create_ratio=_ratio(rows, lambda row: row.create_ms),
        usable_ratio=_ratio(rows, lambda row: row.usable_ms),
        failed=sum(bool(row.error) for row in rows),
        claims=rows,
    )


def _sample(row: ClaimRow, value: float | None) -> Sample:
    return Sample(value, row.error or "the node did not tell")


def _summary(rows: list[ClaimRow], supply: Supply) -> ClaimSummary:
    mine = [row for row in rows if row.supply == supply]

    def over(value: Callable[[ClaimRow], float | None]) -> Summary:
        return summarise(_sample(row, value(row)) for row in mine)

    def distance(row: ClaimRow) -> float | None:
        return None if row.clock_offset_ms is None else abs(row.clock_offset_ms)

    return ClaimSummary(
        supply=supply,
        create_ms=over(lambda row: row.create_ms),
        command_ms=over(lambda row: row.command_ms),
        usable_ms=over(lambda row: row.usable_ms),
        kill_ms=over(lambda row: row.kill_ms),
        node_ms={name: summarise(_sample(row, row.node_ms.get(name)) for row in mine) for name in STAGES},
        clock_offset_ms=over(lambda row: row.clock_offset_ms),
        clock_distance_ms=over(distance),
        clock_error_ms=over(lambda row: row.clock_error_ms),
    )


def _ratio(rows: list[ClaimRow], value: Callable[[ClaimRow], float | None]) -> Ratio:
    def by_round(supply: Supply) -> dict[int, list[Sample]]:
        found: dict[int, list[Sample]] = {}
        for row in rows:
            if row.supply == supply:
                found.setdefault(row.round, []).append(_sample(row, value(row)))
        return found

    return compare(by_round("on_demand"), by_round("warm"))


def tables(report: ClaimReport) -> list[Table]:
    """The report for people."""
    steps = [
        ("create", "create_ms"),
        ("`true` after it", "command_ms"),
        ("both: until usable", "usable_ms"),
        ("kill", "kill_ms"),
    ]
    clocks = [
        ("offset", "clock_offset_ms"),
        ("without sign", "clock_distance_ms"),
        ("uncertainty ±", "clock_error_ms"),
    ]
    names = [(entry, entry.supply.replace("_", " ")) for entry in report.summaries]
    return [
        Table(
            "Claims one after the other, as the client sees them, ms",
            ["step", "supply", *SUMMARY_COLUMNS],
            [
                [step, supply, *summary_cells(getattr(entry, field))]
                for step, field in steps
                for entry, supply in names
            ],
        ),
        Table(
            "The node's own stages, p50 (p95), ms",
            ["supply", *STAGES],
            [
                [
                    supply,
                    *(
                        f"{cell(entry.node_ms[name].p50)} ({cell(entry.node_ms[name].p95)})"
                        for name in STAGES
                    ),
                ]
                for entry, supply in names
            ],
        ),
        Table(
            "What the warm pool saves: on demand over warm",
            ["time", *RATIO_COLUMNS],
            [
                ["create", *ratio_cells(report.create_ratio)],
                ["until usable", *ratio_cells(report.usable_ratio)],
            ],
        ),
        Table(
            "Guest clock minus host clock at the hand-over, ms",
            ["", "supply", *SUMMARY_COLUMNS],
            [
                [what, supply, *summary_cells(getattr(entry, field))]
                for what, field in clocks
                for entry, supply in names
            ],
        ),
    ]


def notes(report: ClaimReport) -> list[str]:
    """What was asked for, for people."""
    nodes = "1 node" if report.nodes == 1 else f"{report.nodes} nodes"
    return [
        f"pool of {report.pool_target} that wait {report.pool_warm}, on {nodes}; {report.plan.count} claims of "
        f"each kind in {report.plan.rounds} rounds, from one client on this machine"
    ]


def failures(report: ClaimReport) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [
        (
            entry.supply.replace("_", " "),
            summarise(
                Sample(None, row.error) if row.error else Sample(0.0)
                for row in report.claims
                if row.supply == entry.supply
            ),
        )
        for entry in report.summaries
    ]
