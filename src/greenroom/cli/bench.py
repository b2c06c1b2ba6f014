"""`bench`: the benchmarks, with a progress bar, a table and a file. What they measure is in `greenroom.bench`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from greenroom.cli import bench_faults, bench_host
from greenroom.cli.bench_support import (
    engine_of_node,
    meter_on_stderr,
    run_to_the_end,
    temporary_directory,
)
from greenroom.cli.options import (
    CacheDirOption,
    KeyFileOption,
    StateDirOption,
    cache_dir_of,
    examples,
    group_options,
    state_dir_of,
)

if TYPE_CHECKING:
    from greenroom.bench.claim import ClaimPlan, ClaimReport, Platform
    from greenroom.bench.report import Table
    from greenroom.bench.restore import RestoreReport
    from greenroom.bench.summaries import Summary
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.records import StateDir
    from greenroom.cli.target import Target
    from greenroom.runtime.engine import EngineInfo
    from greenroom.wire.messages import NodeStatus

_bench = typer.Typer(
    callback=group_options,
    help="Measure this machine: restores against bare QEMU, warm claims against restores on demand, faults.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples("greenroom bench restore", "greenroom bench claim --count 40 --json claim.json"),
)

JsonFileOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        show_default=False,
        help="Also write conditions, summaries and every row to this file, as JSON.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench_faults.register(_bench)
    bench_host.register(_bench)
    app.add_typer(_bench, name="bench")


@_bench.command(
    epilog=examples(
        "greenroom bench restore",
        "greenroom bench restore --count 40 --parallel 1,2,4 --rounds 5",
        "greenroom bench restore --count 2 --rounds 1 --json restore.json   # a quick look",
    )
)
def restore(
    context: typer.Context,
    count: Annotated[
        int,
        typer.Option(
            "--count",
            metavar="N",
            min=1,
            max=10_000,
            help="VMs in one batch, all alive at once; a batch for each round, side and --parallel number.",
        ),
    ] = 20,
    parallel: Annotated[
        str, typer.Option("--parallel", metavar="N,N…", help="Restores at the same time, one batch for each.")
    ] = "1,2",
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, max=1000, help="Rounds; the sides swap places.")
    ] = 3,
    starts: Annotated[
        int, typer.Option("--starts", metavar="N", min=0, help="VMs of a batch started to the first answer.")
    ] = 3,
    accelerator: Annotated[
        Literal["auto", "kvm", "tcg"] | None,
        typer.Option(
            "--accelerator",
            show_default=False,
            help="How QEMU runs guest code (default: auto)",
        ),
    ] = None,
    json: JsonFileOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Restore VMs from the golden snapshot until they stand paused, beside the same QEMU without any fence.

    Works in a temporary directory with the settings of the state directory. Needs root, and nothing else to
    do for the machine meanwhile. Exit status 3 when a restore failed.
    """
    import msgspec

    from greenroom.bench import report as reports
    from greenroom.bench import restore as measuring
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.words import load_settings
    from greenroom.config import RoleSpec
    from greenroom.master.catalogue import BASE, BASE_SIZE

    plan = measuring.RestorePlan(
        template=BASE,
        size=BASE_SIZE,
        count=count,
        parallel=_numbers(parallel),
        rounds=rounds,
        starts=min(starts, count),
    )
    plan.check()
    if json is not None:
        reports.check_writable(json)
    config = load_settings(state_dir_of(context, state_dir))
    if accelerator is not None:
        config = msgspec.structs.replace(
            config, vm=msgspec.structs.replace(config.vm, accelerator=accelerator)
        )
    with Interrupts() as interrupts, temporary_directory() as directory, meter_on_stderr() as meter:
        spec = RoleSpec(
            role="node",
            replica=0,
            state_dir=str(directory),
            cache_dir=str(cache_dir_of(context, cache_dir)),
            config=config,
        )
        found = run_to_the_end(interrupts, lambda: measuring.run(spec, plan, meter))
    return _show(found, measuring.notes(found), measuring.tables(found), measuring.failures(found), json)


@_bench.command(
    epilog=examples(
        "greenroom bench claim",
        "greenroom bench claim --count 40 --json claim.json",
        "greenroom --state-dir /srv/greenroom bench claim --key-file ci.key",
    )
)
def claim(
    context: typer.Context,
    count: Annotated[
        int,
        typer.Option(
            "--count",
            metavar="N",
            min=1,
            max=10_000,
            help="Claims of each kind (warm, dry) in all, spread over the rounds; one at a time.",
        ),
    ] = 20,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, max=1000, help="Rounds; the kinds swap places.")
    ] = 4,
    warm: Annotated[
        int,
        typer.Option("--warm", metavar="N", min=1, max=4096, help="Pool of a platform started for this."),
    ] = 2,
    json: JsonFileOption = None,
    key_file: KeyFileOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Create a sandbox, run `true` in it and kill it, from a warm pool and from an empty one.

    Measures the platform that runs on the state directory, else one started for this in a temporary directory
    and stopped afterwards. On a running platform the base pool is [b]kept empty[/] for half of the run, then
    declared as before: other users then wait for a restore. Exit status 3 when a claim failed.
    """
    from greenroom.bench import claim as measuring
    from greenroom.bench import report as reports
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.records import StateDir
    from greenroom.master.catalogue import BASE

    plan = measuring.ClaimPlan(template=BASE, count=count, rounds=min(rounds, count))
    if json is not None:
        reports.check_writable(json)
    state = StateDir(state_dir_of(context, state_dir))
    with Interrupts() as interrupts:
        if state.running() is not None:
            found = _measure_claims(interrupts, state, key_file, plan)
        else:
            found = _on_own_platform(interrupts, cache_dir_of(context, cache_dir), warm, plan)
    return _show(found, measuring.notes(found), measuring.tables(found), measuring.failures(found), json)


def _numbers(text: str) -> list[int]:
    """`1,2` as [1, 2]. Raises BadParameter."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 256 or len(set(found)) != len(found):
        raise typer.BadParameter(f"--parallel {text}: different numbers from 1 to 256, such as 1,2,4")
    return found


def _on_own_platform(interrupts: Interrupts, cache_dir: Path, warm: int, plan: ClaimPlan) -> ClaimReport:
    """Start a platform in a temporary directory, measure it and stop it, whatever happens between."""
    from greenroom.cli.launch import bring_up, take_down
    from greenroom.cli.leftovers import describe
    from greenroom.cli.output import warn
    from greenroom.cli.plans import UpOptions
    from greenroom.cli.records import StateDir
    from greenroom.cli.reports import reporter_for
    from greenroom.errors import RuntimeFailure

    warn("no platform is running; starting one for this")
    with temporary_directory() as directory:
        options = UpOptions(state_dir=str(directory / "state"), cache_dir=str(cache_dir), port=0, warm=warm)
        state = StateDir(directory / "state")
        reporter = reporter_for(sys.stderr)
        try:
            bring_up(options, reporter, interrupts)
            interrupts.release()
            return _measure_claims(interrupts, state, None, plan)
        finally:
            interrupts.hold()
            try:
                stopped = take_down(state, 60.0, reporter)
            finally:
                reporter.close()
            if not stopped.clean:
                raise RuntimeFailure(
                    "the platform that was started for this left something behind\n"
                    + "\n".join(describe(swept) for swept in stopped.swept)
                )


def _measure_claims(
    interrupts: Interrupts, state: StateDir, key_file: Path | None, plan: ClaimPlan
) -> ClaimReport:
    """Measure the platform of `state`."""
    from greenroom.bench import claim as measuring
    from greenroom.cli.target import check_runs_commands, find_target
    from greenroom.errors import NodeUnavailable
    from greenroom.wire.calling import role_client
    from greenroom.wire.credentials import own_token

    target = find_target(state.root, key_file)
    check_runs_commands(state.root)
    token = own_token(state.secrets, "operator")
    masters = [role.url for role in state.roles() if role.role == "master" and role.state == "ready"]
    if not masters:
        raise NodeUnavailable("no master is ready; see `greenroom status`")

    async def engine_of(node: NodeStatus) -> EngineInfo:
        return engine_of_node(state, node)

    with meter_on_stderr() as meter:

        async def work() -> ClaimReport:
            async with _one_try(target) as platform, role_client(token) as client:
                return await measuring.run(platform, client, masters[0], engine_of, plan, meter)

        return run_to_the_end(interrupts, work)


def _one_try(target: Target) -> contextlib.AbstractAsyncContextManager[Platform]:
    """A client of the platform whose create is one request, so that a refusal counts instead of being repeated."""
    import uuid

    from greenroom.cli.client import Client, SandboxHandle
    from greenroom.cli.frames import Ended
    from greenroom.errors import NodeUnavailable

    class OneTry(Client):
        def __init__(self) -> None:
            super().__init__(target)
            self._handles: dict[str, SandboxHandle] = {}

        async def __aenter__(self) -> OneTry:
            await super().__aenter__()
            return self

        async def create_once(self, template: str, ttl: int, metadata: dict[str, str]) -> str:
            made = await self._call(
                "POST",
                "/v2/sandboxes",
                SandboxHandle,
                {"templateID": template, "timeout": ttl, "metadata": metadata},
                {"Idempotency-Key": uuid.uuid4().hex},
            )
            self._handles[made.sandbox_id] = made
            return made.sandbox_id

        async def command(self, sandbox_id: str, line: str) -> int:
            async for message in self.run(self._handles[sandbox_id], line):
                if isinstance(message, Ended):
                    return message.status
            raise NodeUnavailable("the stream was closed before the command had ended")

    return OneTry()


def _show(
    report: RestoreReport | ClaimReport,
    notes: Sequence[str],
    tables: Sequence[Table],
    failures: Sequence[tuple[str, Summary]],
    json: Path | None,
) -> int:
    """Print a report, write its file, return the exit status."""
    from greenroom.bench import report as reports
    from greenroom.cli.output import EXIT_DEGRADED, print_table, warn

    for line in [*reports.conditions_lines(report.conditions), *notes]:
        print(line)
    print()
    for table in tables:
        # A title of the table's own would be broken at the table's width.
        print(table.title)
        print_table("", table.columns, table.rows)
    for line in reports.failure_lines(failures):
        warn(line)
    if json is not None:
        reports.write(json, report)
        print(f"all rows are in {json}")
    return EXIT_DEGRADED if report.failed else 0
