"""`bench faults`: a platform of its own, killed over and over under load. What it looks for is in `bench.faults`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from greenroom.cli.bench_support import (
    engine_of_node,
    meter_on_stderr,
    run_to_the_end,
    temporary_directory,
)
from greenroom.cli.options import CacheDirOption, cache_dir_of, examples

if TYPE_CHECKING:
    from greenroom.bench.faults import Look
    from greenroom.bench.faults_records import FaultPlan, Records, Stray, Verdict
    from greenroom.bench.report import Conditions
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.processes import ProcessId
    from greenroom.cli.records import StateDir
    from greenroom.cli.target import Target

RESTART_PAUSE = 0.5
"""Seconds before a killed role is started again. The supervisor's own pause grows to half a minute, which would make
a run of a hundred kills one of an hour."""
SETTINGS = "[proxy]\ndrain = 0.5\n"
"""`config.toml` of the platform: at its end nobody has to be waited for."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "greenroom bench faults --kills 5      # a quick look",
            "greenroom bench faults --kills 100 --out bench-results/faults",
            "greenroom bench faults --kills 25 --seed 7 --load 8 --held 12 --json verdict.json",
        )
    )(faults)


def faults(
    context: typer.Context,
    kills: Annotated[
        int, typer.Option("--kills", metavar="N", min=1, max=10_000, help="How often the target is killed.")
    ] = 100,
    load: Annotated[
        int, typer.Option("--load", metavar="N", min=1, max=256, help="Clients at work all the time.")
    ] = 4,
    held: Annotated[
        int, typer.Option("--held", metavar="N", min=2, max=1000, help="Sandboxes at the same time, at most.")
    ] = 6,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", metavar="N", min=0, show_default=False, help="Of all that is drawn (default: a new one)"
        ),
    ] = None,
    target: Annotated[Literal["node"], typer.Option("--target", help="What is killed.")] = "node",
    warm: Annotated[
        int, typer.Option("--warm", metavar="N", min=1, max=4096, help="Sandboxes kept warm.")
    ] = 4,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Where kills, requests, checks and the verdict are written."
        ),
    ] = Path("bench-results/faults"),
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", show_default=False, help="Also write the verdict to this file."
        ),
    ] = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Kill the node again and again while clients are at work, and look whether anything was lost or left.

    Starts a platform in a temporary directory and stops it afterwards; needs root. After every kill each sandbox
    that a client was told of must be listed, reachable and the machine it was, and no key may stand for two. At
    the end nothing may be left on the host. Exit status 3 when a fault was found.
    """
    import secrets

    from greenroom.bench import report as reports
    from greenroom.bench.faults_records import FaultPlan, records
    from greenroom.cli.interrupts import Interrupts

    plan = FaultPlan(
        kills=kills,
        load=load,
        held=held,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        target=target,
        warm=warm,
    )
    if json is not None:
        reports.check_writable(json)
    with Interrupts() as interrupts, records(out) as rows:
        verdict = _measure(interrupts, cache_dir_of(context, cache_dir), plan, rows, out)
    reports.write(out / "verdict.json", verdict)
    if json is not None:
        reports.write(json, verdict)
    return _show(verdict, out)


def _measure(interrupts: Interrupts, cache_dir: Path, plan: FaultPlan, rows: Records, out: Path) -> Verdict:
    """Start a platform, kill it as planned, take it down and count what is left, whatever happens between."""
    from greenroom.bench import faults_host, faults_verdict
    from greenroom.bench import report as reports
    from greenroom.bench.faults_records import Stray
    from greenroom.cli.launch import bring_up, take_down
    from greenroom.cli.output import warn
    from greenroom.cli.plans import UpOptions
    from greenroom.cli.records import StateDir
    from greenroom.cli.reports import reporter_for
    from greenroom.errors import GreenroomError

    with temporary_directory() as directory:
        state = StateDir(directory / "state")
        state.root.mkdir(mode=0o700)
        (state.root / "config.toml").write_text(SETTINGS, encoding="utf-8")
        options = UpOptions(
            state_dir=str(state.root),
            cache_dir=str(cache_dir),
            port=0,
            warm=plan.warm,
            restart_pause=RESTART_PAUSE,
        )
        reporter = reporter_for(sys.stderr)
        strays: list[Stray] = []
        seconds = 0.0
        try:
            bring_up(options, reporter, interrupts)
            interrupts.release()
            conditions = _conditions(state)
            try:
                strays, seconds = _kill_and_look(interrupts, state, plan, rows)
            except GreenroomError as error:
                # It is a finding, and what was seen until then counts.
                strays = [Stray(vm="the run", why=f"it was given up: {error.message}")]
                seconds = rows.last()
        finally:
            interrupts.hold()
            try:
                tags = faults_host.tags_in(state.root)
                take_down(state, 60.0, reporter)
            finally:
                reporter.close()
        left = faults_host.count(state.root, tags)
        verdict = faults_verdict.judge(
            reports.finish(conditions), plan, seconds, rows.kills, rows.requests, rows.checks, strays, left
        )
        if not verdict.passed:
            _keep_logs(state, out)
            warn(f"the roles' logs are in {out / 'log'}")
    interrupts.release()
    return verdict


def _conditions(state: StateDir) -> Conditions:
    """Where this runs. Raises NodeUnavailable when the platform does not tell."""
    import asyncio

    from greenroom.bench import report as reports
    from greenroom.errors import NodeUnavailable
    from greenroom.master.catalogue import BASE, BASE_SIZE
    from greenroom.wire.calling import role_client
    from greenroom.wire.credentials import own_token
    from greenroom.wire.messages import MasterStatus

    masters = [role.url for role in state.roles() if role.role == "master" and role.state == "ready"]

    async def ask() -> MasterStatus:
        async with role_client(own_token(state.secrets, "operator")) as client:
            return await client.call("GET", f"{masters[0]}/v1/status", MasterStatus)

    if not masters or not (told := asyncio.run(ask())).nodes:
        raise NodeUnavailable("the platform that was started for this has no node")
    return reports.gather_conditions(engine_of_node(state, told.nodes[0].status), BASE, BASE_SIZE)


def _kill_and_look(
    interrupts: Interrupts, state: StateDir, plan: FaultPlan, rows: Records
) -> tuple[list[Stray], float]:
    from greenroom.bench import faults as running
    from greenroom.cli.target import find_target

    target = find_target(state.root)
    with meter_on_stderr() as meter:
        meter.say(f"{plan.kills} kills under {plan.load} clients, seed {plan.seed}")

        async def work() -> tuple[list[Stray], float]:
            async with _Commands(target) as commands:
                return await running.run(
                    plan, _Node(state), target.url, target.key, commands.run, rows, meter
                )

        return run_to_the_end(interrupts, work)


class _Node:
    """The one node of a platform, by the supervisor's records."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self.home = state.root / "node-0"

    def _process(self) -> ProcessId | None:
        found = next((role.process for role in self._state.roles() if role.name == "node-0"), None)
        return found if found is not None and found.alive() else None

    def pid(self) -> int | None:
        process = self._process()
        return None if process is None else process.pid

    def kill(self, pid: int) -> bool:
        process = self._process()
        return process is not None and process.pid == pid and process.signal(signal.SIGKILL)

    def restarts(self) -> int:
        return next((role.restarts for role in self._state.roles() if role.name == "node-0"), 0)

    async def look(self) -> Look:
        from greenroom.bench.faults import Look
        from greenroom.cli.observation import observe

        seen = await observe(self._state)
        return Look(
            up=seen.state == "up",
            pid=next((role.pid for role in seen.roles if role.name == "node-0"), None),
            warm=sum(pool.warm for pool in seen.pools),
            starting=sum(pool.starting for pool in seen.pools),
            target=sum(pool.target for pool in seen.pools),
            problems=seen.problems,
        )


class _Commands:
    """Runs commands in sandboxes through the platform's entry. Use as an async context manager."""

    def __init__(self, target: Target) -> None:
        from greenroom.cli.client import Client

        self._client = Client(target)

    async def __aenter__(self) -> _Commands:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.__aexit__(*exc)

    async def run(self, sandbox_id: str, token: str | None, line: str) -> tuple[int, str]:
        """Exit status and standard output. Raises NodeUnavailable for a stream that broke off."""
        import contextlib

        from greenroom.cli.client import SandboxHandle
        from greenroom.cli.frames import Ended, Output
        from greenroom.errors import NodeUnavailable

        output = b""
        stream = self._client.run(SandboxHandle(sandbox_id, token), line)
        async with contextlib.aclosing(stream):
            async for message in stream:
                match message:
                    case Output(data, error):
                        output += b"" if error else data
                    case Ended(status):
                        return status, output.decode(errors="replace")
        raise NodeUnavailable("the stream was closed before the command had ended")


def _keep_logs(state: StateDir, out: Path) -> None:
    """Copy the roles' logs to where the rows are; they hold no secrets."""
    import shutil

    shutil.copytree(state.log, out / "log", dirs_exist_ok=True)


def _show(verdict: Verdict, out: Path) -> int:
    from greenroom.bench import faults_verdict
    from greenroom.bench import report as reports
    from greenroom.cli.output import EXIT_DEGRADED, print_table

    for line in reports.conditions_lines(verdict.conditions):
        print(line)
    print()
    for table in faults_verdict.tables(verdict):
        print(table.title)
        print_table("", table.columns, table.rows)
    for line in faults_verdict.lines(verdict):
        print(line)
    print(f"every kill, request and check is in {out}")
    return 0 if verdict.passed else EXIT_DEGRADED
