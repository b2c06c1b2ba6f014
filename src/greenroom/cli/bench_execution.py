"""`bench exec`: a sandbox of a running platform, asked by two ways. What is asked is in `bench.execution`."""

from __future__ import annotations

import socket
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    KeyFileOption,
    StateDirOption,
    cache_dir_of,
    examples,
    state_dir_of,
)

if TYPE_CHECKING:
    from greenroom.bench.execution import ExecutionPlan, ExecutionReport
    from greenroom.bench.report import Conditions, Meter
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.records import StateDir

TTL = 7200
"""Seconds that the sandbox lives, should even the clean-up at the end fail."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "exec",
        epilog=examples(
            "greenroom bench exec",
            "greenroom bench exec --count 5000 --file 256 --json exec.json",
            "greenroom bench exec --count 50 --file 16   # a quick look",
        ),
    )(execution)


def execution(
    context: typer.Context,
    count: Annotated[
        int,
        typer.Option(
            "--count", metavar="N", min=1, max=1_000_000, help="Of each small request, by each way."
        ),
    ] = 1000,
    echoes: Annotated[
        int | None,
        typer.Option(
            "--echoes",
            metavar="N",
            min=1,
            max=100_000,
            show_default=False,
            help="Of `echo` in a shell (default: a twentieth of --count).",
        ),
    ] = None,
    file: Annotated[
        int, typer.Option("--file", metavar="MIB", min=1, max=3072, help="Size of the file that is fetched.")
    ] = 1024,
    fetches: Annotated[
        int, typer.Option("--fetches", metavar="N", min=0, max=100, help="Times it is fetched by each way.")
    ] = 3,
    json: JsonFileOption = None,
    key_file: KeyFileOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Ask a sandbox's agent through proxy and relay and directly in its namespace, by turns.

    `GET /health`, `Process.List`, `echo` in a shell, and a large file. Asks the platform that runs on the state
    directory, in a sandbox of its own, else one started for this in a temporary directory and stopped afterwards.
    Needs root and a node on this machine. Exit status 3 when a request failed.
    """
    import os

    from greenroom.bench import execution as measuring
    from greenroom.bench import report as reports
    from greenroom.cli.bench_platform import own_platform
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.output import warn
    from greenroom.cli.records import StateDir
    from greenroom.cli.target import check_runs_commands
    from greenroom.errors import SetupError
    from greenroom.master.catalogue import BASE

    if os.geteuid() != 0:
        raise SetupError("this benchmark asks a guest in its network namespace; run it as root")
    if json is not None:
        reports.check_writable(json)
    plan = measuring.ExecutionPlan(
        template=BASE,
        count=count,
        echoes=max(1, count // 20) if echoes is None else echoes,
        file_mib=file,
        fetches=fetches,
    )
    state, cache = StateDir(state_dir_of(context, state_dir)), cache_dir_of(context, cache_dir)
    with Interrupts() as interrupts:
        if state.running() is not None:
            check_runs_commands(state.root)
            found = _on_platform(interrupts, state, key_file, plan)
        else:
            warn("no platform is running; starting one for this")
            with (
                temporary_directory() as directory,
                own_platform(interrupts, directory / "state", cache, warm=1) as own,
            ):
                found = _on_platform(interrupts, own, None, plan)
    return show(found, found.notes, found.tables, measuring.failures(found), json, passed=not found.failed)


def _on_platform(
    interrupts: Interrupts, state: StateDir, key_file: Path | None, plan: ExecutionPlan
) -> ExecutionReport:
    """A sandbox of the platform of `state`, asked and ended."""
    with meter_on_stderr() as meter:
        return run_to_the_end(interrupts, lambda: _measure(state, key_file, plan, meter))


async def _measure(
    state: StateDir, key_file: Path | None, plan: ExecutionPlan, meter: Meter
) -> ExecutionReport:
    from greenroom.bench import execution as measuring
    from greenroom.bench.channels import Channel
    from greenroom.bench.lanes import unbroken
    from greenroom.bench.report import finish
    from greenroom.cli.client import AGENT_PORT, Client
    from greenroom.cli.target import find_target

    target = find_target(state.root, key_file)
    conditions = await _conditions(state, plan)
    entry = urllib.parse.urlsplit(target.url)
    records = measuring.Records()

    async def to_entry() -> socket.socket:
        sock = socket.create_connection((entry.hostname or "", entry.port or 80), timeout=10.0)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    async with Client(target) as client:
        made = await unbroken(client.create(plan.template, TTL), "create")
        try:
            headers = {"Connect-Protocol-Version": "1"}
            if made.token:
                headers["X-Access-Token"] = made.token
            routed = headers | {"E2b-Sandbox-Id": made.sandbox_id, "E2b-Sandbox-Port": str(AGENT_PORT)}
            journals = sorted(state.root.glob("node-*/journal.db"))
            with measuring.Inside(measuring.vm_of(journals, made.sandbox_id)) as inside:
                ways: dict[measuring.Way, Channel] = {
                    "platform": Channel(entry.netloc, to_entry, routed),
                    # The relay has the guest close after each answer, too.
                    "direct": Channel("guest", inside.connect, headers, keep=False),
                    "kept": Channel("guest", inside.connect, headers),
                }
                try:
                    await measuring.measure(ways, plan, records, meter)
                finally:
                    for channel in ways.values():
                        channel.close()
        finally:
            await unbroken(client.kill(made.sandbox_id), "kill")
    return measuring.summarise_run(finish(conditions), plan, records)


async def _conditions(state: StateDir, plan: ExecutionPlan) -> Conditions:
    """Where this runs. Raises NodeUnavailable when the platform does not tell."""
    from greenroom.bench.report import gather_conditions
    from greenroom.errors import NodeUnavailable
    from greenroom.master.catalogue import BASE_SIZE
    from greenroom.wire.calling import role_client
    from greenroom.wire.credentials import own_token
    from greenroom.wire.messages import MasterStatus

    masters = [role.url for role in state.roles() if role.role == "master" and role.state == "ready"]
    if not masters:
        raise NodeUnavailable("no master is ready; see `greenroom status`")
    async with role_client(own_token(state.secrets, "operator")) as roles:
        nodes = (await roles.call("GET", f"{masters[0]}/v1/status", MasterStatus)).nodes
    if not nodes:
        raise NodeUnavailable("the platform has no node; see `greenroom status`")
    engine = engine_of_node(state, nodes[0].status)
    import asyncio

    return await asyncio.to_thread(gather_conditions, engine, plan.template, BASE_SIZE)
