"""`bench platform`, `density` and `report`: what a platform costs this machine, idle and full, and a page of it all.

What is looked at is in `greenroom.bench.idle` and `greenroom.bench.density`; here the platform is started, handed
to them by its records and its HTTP, and stopped again whatever happens.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli.bench_platform import own_platform
from greenroom.cli.bench_support import (
    engine_of_node,
    meter_on_stderr,
    run_to_the_end,
    show,
    temporary_directory,
)
from greenroom.cli.options import (
    CacheDirOption,
    JsonFileOption,
    StateDirOption,
    cache_dir_of,
    examples,
    state_dir_of,
)

if TYPE_CHECKING:
    from greenroom.bench.density import DensityPlan, DensityReport, PoolLook, Seen
    from greenroom.bench.density_host import MembersOnHost
    from greenroom.bench.idle import IdlePlan, IdleReport, IdleSample
    from greenroom.bench.report import Conditions, Meter
    from greenroom.bench.supply import HeldRow
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.records import StateDir
    from greenroom.config import RoleSpec
    from greenroom.wire.calling import RoleClient
    from greenroom.wire.messages import NodeInfo, Size

DENSITY_SIZE = "bench"
DENSITY_MIB = 256
"""Memory of a member of `bench density`, MiB."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "greenroom bench platform",
            "greenroom bench platform --minutes 0.5 --json platform.json   # a quick look",
        )
    )(platform)
    app.command(
        epilog=examples(
            "greenroom bench density",
            "greenroom bench density --count 100 --claim 5 --alive 0 --json density.json",
        )
    )(density)
    app.command(
        "report",
        epilog=examples(
            "greenroom bench report", "greenroom bench report --results /tmp/results --out /tmp/page"
        ),
    )(make_page)


def platform(
    context: typer.Context,
    minutes: Annotated[
        float,
        typer.Option("--minutes", metavar="M", min=0.05, max=1440, help="How long the platform is measured."),
    ] = 5.0,
    json: JsonFileOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Start a platform with empty pools, leave it alone, and measure its memory and CPU.

    Works in a temporary directory with the settings of the state directory. Exit status 3 when it takes more
    than it should: 600 MB of memory (PSS of all processes) or 2 % of one core.
    """
    from greenroom.bench import idle
    from greenroom.bench import report as reports
    from greenroom.cli.interrupts import Interrupts

    if json is not None:
        reports.check_writable(json)
    plan = idle.IdlePlan(seconds=minutes * 60)
    with Interrupts() as interrupts:
        report = _idle(interrupts, state_dir_of(context, state_dir), cache_dir_of(context, cache_dir), plan)
    return show(report, report.notes, report.tables, [], json, passed=report.within)


def _idle(interrupts: Interrupts, settings: Path, cache_dir: Path, plan: IdlePlan) -> IdleReport:
    from greenroom.bench import idle
    from greenroom.bench import report as reports
    from greenroom.master.catalogue import BASE_SIZE

    with temporary_directory() as directory, meter_on_stderr() as meter:
        bare = run_to_the_end(interrupts, lambda: idle.baseline(plan, directory, meter))

        def measure(state: StateDir) -> tuple[list[IdleSample], Conditions]:
            conditions = _conditions(state, BASE_SIZE)
            samples = run_to_the_end(interrupts, lambda: idle.measure(plan, lambda: _roots(state), meter))
            return samples, reports.finish(conditions)

        with own_platform(interrupts, directory / "state", cache_dir, settings=settings) as state:
            samples, conditions = measure(state)
    return idle.summarise_run(conditions, plan, bare, samples)


def density(
    context: typer.Context,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, max=4096, help="Paused members.")
    ] = 800,
    claim: Annotated[
        int, typer.Option("--claim", metavar="N", min=0, max=256, help="Sandboxes claimed and asked.")
    ] = 10,
    alive: Annotated[
        int,
        typer.Option(
            "--alive",
            metavar="N",
            min=0,
            max=1000,
            help="VMs whose memory is read afterwards by restore mode, paused and after their first answer.",
        ),
    ] = 40,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", min=0, show_default=False, help="Of what the sandboxes are asked."
        ),
    ] = None,
    json: JsonFileOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Fill a pool with paused VMs of 256 MiB, measure them, claim a few, take all down and count what is left.

    Works on a platform of its own in a temporary directory, with the settings of the state directory; needs
    root and about 20 MiB for each member. Exit status 3 when the pool was not filled, an answer was wrong or
    something was left.
    """
    import secrets

    from greenroom.bench import density as measuring
    from greenroom.bench import report as reports
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.words import load_settings
    from greenroom.master.catalogue import BASE, BASE_SIZE
    from greenroom.wire.messages import Size

    plan = measuring.DensityPlan(
        template=BASE,
        size=Size(f"{DENSITY_SIZE}-{DENSITY_MIB}", BASE_SIZE.cpus, DENSITY_MIB, BASE_SIZE.disk_mib),
        count=count,
        claims=min(claim, count),
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        alive=alive,
    )
    settings = state_dir_of(context, state_dir)
    plan.check(load_settings(settings).pools.memory_floor_mib)
    if json is not None:
        reports.check_writable(json)
    with Interrupts() as interrupts:
        report = _fill(interrupts, settings, cache_dir_of(context, cache_dir), plan)
    return show(report, report.notes, report.tables, measuring.failures(report), json, passed=report.passed)


def make_page(
    results: Annotated[
        Path, typer.Option("--results", metavar="DIR", help="Where the benchmarks' JSON files lie.")
    ] = Path("bench-results"),
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where performance.md and its pictures go.")
    ] = Path("docs"),
) -> int:
    """Make a page with tables and pictures of what the benchmarks wrote; what was not measured is said to be.

    Needs matplotlib (`scripts/setup.sh bench`).
    """
    from greenroom.bench import performance

    words = performance.read_words()
    found = performance.read(results, words)
    place, pictures = performance.write(out, words, found)
    for result in found:
        print(f"{result.section.file}: {result.problem or 'shown'}")
    print(f"{place}, with {len(pictures)} pictures in {out / performance.PICTURES}")
    return 0


def _fill(interrupts: Interrupts, settings: Path, cache_dir: Path, plan: DensityPlan) -> DensityReport:
    import time

    from greenroom.bench import density as measuring
    from greenroom.bench import density_host, faults_host
    from greenroom.bench import report as reports

    with temporary_directory() as directory, meter_on_stderr() as meter:
        tags: list[str] = []
        began_down = 0.0

        def seed(state: StateDir) -> None:
            spec = _beside(directory / "golden", settings, cache_dir)
            run_to_the_end(
                interrupts, lambda: density_host.make_golden(spec, plan.template, plan.size, meter)
            )
            run_to_the_end(interrupts, lambda: density_host.seed(state.store, plan.template, plan.size))

        with own_platform(
            interrupts, directory / "state", cache_dir, settings=settings, prepare=seed
        ) as state:
            conditions = _conditions(state, plan.size)
            seen = _filled(interrupts, state, plan, meter)
            tags += faults_host.tags_in(state.root)
            meter.say("taking all down")
            began_down = time.monotonic()
        down = time.monotonic() - began_down
        left = faults_host.count(state.root, tags)
        after = density_host.host_memory()
        held: tuple[list[HeldRow], list[str]] = ([], [])
        if plan.alive:
            held = _by_mode(interrupts, directory, settings, cache_dir, plan, meter)
        finished = reports.finish(conditions)
        return measuring.summarise_run(finished, plan, seen, down, left, after, held)


def _filled(interrupts: Interrupts, state: StateDir, plan: DensityPlan, meter: Meter) -> Seen:
    """Connect to the platform and do what the plan says with it."""
    from greenroom.bench import density as measuring
    from greenroom.cli.client import Client
    from greenroom.cli.target import find_target
    from greenroom.wire.calling import role_client
    from greenroom.wire.credentials import own_token

    async def work() -> Seen:
        token = own_token(state.secrets, "operator")
        async with Client(find_target(state.root)) as client, role_client(token) as roles:
            return await measuring.run(_Filled(state, plan, client, roles), plan, meter)

    return run_to_the_end(interrupts, work)


def _by_mode(
    interrupts: Interrupts, directory: Path, settings: Path, cache_dir: Path, plan: DensityPlan, meter: Meter
) -> tuple[list[HeldRow], list[str]]:
    """What a few VMs hold by restore mode, with the platform gone."""
    from greenroom.bench import supply

    notes: list[str] = []
    spec = supply.without_stock(_beside(directory / "modes", settings, cache_dir))

    async def work() -> list[HeldRow]:
        return await supply.held_by_mode(spec, plan.template, plan.alive, plan.size.memory_mib, meter, notes)

    return run_to_the_end(interrupts, work), notes


def _beside(state_dir: Path, settings: Path, cache_dir: Path) -> RoleSpec:
    """A node's place without a platform, for an engine in this process."""
    from greenroom.cli.words import load_settings
    from greenroom.config import RoleSpec

    return RoleSpec(
        role="node",
        replica=0,
        state_dir=str(state_dir),
        cache_dir=str(cache_dir),
        config=load_settings(settings),
    )


class _Filled:
    """The platform of a state directory, as `bench.density` wants it."""

    def __init__(self, state: StateDir, plan: DensityPlan, client: object, roles: RoleClient) -> None:
        from greenroom.cli.client import Client, SandboxHandle

        assert isinstance(client, Client)  # noqa: S101
        self._client = client
        self._roles = roles
        self._plan = plan
        self._home = state.root / "node-0"
        self._handles: dict[str, SandboxHandle] = {}
        records = {role.role: role for role in state.roles()}
        self._master, self._node = records["master"].url, records["node"].url
        process = records["node"].process
        self._node_pid = 0 if process is None else process.pid

    async def declare(self, target: int) -> None:
        from greenroom.wire.messages import PoolSpec

        wanted = PoolSpec(template=self._plan.template, size=self._plan.size, target=target)
        await self._roles.call("PUT", f"{self._master}/v1/pools", PoolSpec, wanted)

    async def look(self) -> PoolLook:
        from greenroom.bench.density import PoolLook
        from greenroom.wire.messages import NodeStatus

        status = await self._roles.call("GET", f"{self._node}/v1/status", NodeStatus)
        pool = next((pool for pool in status.pools if pool.size == self._plan.size.name), None)
        if pool is None:
            return PoolLook(warm=0, starting=0, failed=0, reason="the node has not heard of the pool yet")
        return PoolLook(warm=pool.warm, starting=pool.starting, failed=pool.failed, reason=pool.reason)

    async def create(self, template: str, ttl: int) -> str:
        made = await self._client.create(template, ttl)
        self._handles[made.sandbox_id] = made
        return made.sandbox_id

    async def command(self, sandbox_id: str, line: str) -> tuple[int, str]:
        from greenroom.cli.frames import Ended, Output
        from greenroom.errors import NodeUnavailable

        output = b""
        async with contextlib.aclosing(self._client.run(self._handles[sandbox_id], line)) as stream:
            async for message in stream:
                match message:
                    case Output(data, error):
                        output += b"" if error else data
                    case Ended(status):
                        return status, output.decode(errors="replace")
        raise NodeUnavailable("the stream was closed before the command had ended")

    async def kill(self, sandbox_id: str) -> object:
        return await self._client.kill(sandbox_id)

    def members(self) -> MembersOnHost:
        from greenroom.bench.density_host import members

        return members(self._home, self._node_pid)


def _roots(state: StateDir) -> dict[str, int]:
    """The platform's processes by role, from the supervisor's records."""
    found = {role.name: role.process.pid for role in state.roles() if role.process is not None}
    supervisor = state.running()
    return found | ({"supervisor": supervisor.process.pid} if supervisor is not None else {})


def _conditions(state: StateDir, size: Size) -> Conditions:
    """Where this runs. Raises NodeUnavailable when the platform does not tell."""
    import asyncio

    from greenroom.bench import report as reports
    from greenroom.errors import NodeUnavailable
    from greenroom.master.catalogue import BASE
    from greenroom.wire.calling import role_client
    from greenroom.wire.credentials import own_token
    from greenroom.wire.messages import MasterStatus

    masters = [role.url for role in state.roles() if role.role == "master" and role.state == "ready"]

    async def ask() -> list[NodeInfo]:
        async with role_client(own_token(state.secrets, "operator")) as client:
            return (await client.call("GET", f"{masters[0]}/v1/status", MasterStatus)).nodes

    if not masters or not (nodes := asyncio.run(ask())):
        raise NodeUnavailable("the platform that was started for this has no node")
    return reports.gather_conditions(engine_of_node(state, nodes[0].status), BASE, size)
