"""`bench`: the benchmarks, with a progress bar, a table and a file. What they measure is in `greenroom.bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from greenroom.cli import bench_execution, bench_faults, bench_host, bench_kube, bench_lifecycle
from greenroom.cli.bench_support import meter_on_stderr, run_to_the_end, show, temporary_directory
from greenroom.cli.options import (
    CacheDirOption,
    JsonFileOption,
    KeyFileOption,
    StateDirOption,
    cache_dir_of,
    examples,
    group_options,
    state_dir_of,
)

if TYPE_CHECKING:
    from greenroom.bench.claim import Part

_bench = typer.Typer(
    callback=group_options,
    help="Measure this machine: restores against bare QEMU, claims from one process to a whole platform, faults.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples("greenroom bench restore", "greenroom bench claim --count 40 --json claim.json"),
)

RoundsOption = Annotated[
    int, typer.Option("--rounds", metavar="N", min=1, max=1000, help="Rounds; the sides swap places.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench_faults.register(_bench)
    bench_host.register(_bench)
    bench_lifecycle.register(_bench)
    bench_execution.register(_bench)
    bench_kube.register(_bench)
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
    rounds: RoundsOption = 3,
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
    return show(
        found,
        measuring.notes(found),
        measuring.tables(found),
        measuring.failures(found),
        json,
        passed=not found.failed,
    )


@_bench.command(
    epilog=examples(
        "greenroom bench claim",
        "greenroom bench claim --quick   # everything, small, to see that it works",
        "greenroom bench claim --part engine --part http   # no VM, no root",
        "greenroom bench claim --part patterns --pattern-count 40 --pattern-pool 10 --every 100",
        "greenroom bench claim --count 40 --json claim.json",
        "greenroom --state-dir /srv/greenroom bench claim --key-file ci.key",
    )
)
def claim(
    context: typer.Context,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            metavar="PART",
            show_default=False,
            help="Measure this part only; may be repeated. One of engine, http, supply, output, patterns, boot "
            "(default: all)",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small numbers wherever none is given, for a quick look.")
    ] = False,
    claims: Annotated[
        int | None,
        typer.Option(
            "--claims",
            metavar="N",
            min=1,
            max=1_000_000,
            show_default=False,
            help="engine, http: claims without VMs, one at a time (default: 2000; quick: 200)",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            metavar="N",
            min=1,
            max=10_000,
            show_default=False,
            help="supply, output: sandboxes of each kind in all, spread over the rounds (default: 20; quick: 2)",
        ),
    ] = None,
    rounds: RoundsOption = 4,
    pattern_count: Annotated[
        int | None,
        typer.Option(
            "--pattern-count",
            metavar="N",
            min=1,
            max=10_000,
            show_default=False,
            help="patterns: creates of each pattern (default: 20; quick: 3)",
        ),
    ] = None,
    pattern_pool: Annotated[
        int | None,
        typer.Option(
            "--pattern-pool",
            metavar="N",
            min=0,
            max=4096,
            show_default=False,
            help="patterns: warm members before each pattern (default: 20; quick: 3)",
        ),
    ] = None,
    every: Annotated[
        float,
        typer.Option(
            "--every",
            metavar="MS",
            min=1.0,
            max=60_000.0,
            help="patterns: milliseconds between two staggered creates.",
        ),
    ] = 200.0,
    boots: Annotated[
        int | None,
        typer.Option(
            "--boots",
            metavar="N",
            min=1,
            max=100,
            show_default=False,
            help="boot: cold boots, and restores beside them (default: 3; quick: 1)",
        ),
    ] = None,
    warm: Annotated[
        int,
        typer.Option("--warm", metavar="N", min=1, max=4096, help="Pool of a platform started for this."),
    ] = 2,
    json: JsonFileOption = None,
    key_file: KeyFileOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Measure the claim: the engine in process, a node's API, a whole platform; each beside a baseline.

    [b]engine[/]: claims in this process, commit included, beside a bare SQLite transaction; VMs simulated.
    [b]http[/]: the same over the API of a node process with simulated VMs, beside a trivial request.
    [b]supply[/]: create, `true`, kill, from a warm pool and from an empty one.
    [b]output[/]: create to a command's first output, beside bare `cont` to the same; the hand-over apart.
    [b]patterns[/]: creates one after the other, one every --every ms, all at once.
    [b]boot[/]: a cold boot beside a restore.

    The last four ask the platform that runs on the state directory, else one started for this in a temporary
    directory and stopped afterwards. On a running platform the base pool is [b]changed[/], empty for a part of the
    run, then declared as before: other users then wait for a restore. The whole takes about five minutes on two
    cores without KVM. Exit status 3 when a claim failed.
    """
    from greenroom.bench import claim as measuring
    from greenroom.bench import report as reports
    from greenroom.cli import bench_claim
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.records import StateDir
    from greenroom.master.catalogue import BASE

    def pick(given: int | None, usual: int, small: int) -> int:
        return given if given is not None else small if quick else usual

    sandboxes = pick(count, 20, 2)
    plan = measuring.ClaimPlan(
        template=BASE,
        parts=_parts(part or measuring.PARTS),
        claims=pick(claims, 2000, 200),
        count=sandboxes,
        rounds=min(rounds, sandboxes),
        pattern_count=pick(pattern_count, 20, 3),
        pattern_pool=pick(pattern_pool, 20, 3),
        every_ms=every,
        boots=pick(boots, 3, 1),
    )
    if json is not None:
        reports.check_writable(json)
    state, cache = StateDir(state_dir_of(context, state_dir)), cache_dir_of(context, cache_dir)
    with Interrupts() as interrupts:
        found = bench_claim.measure(interrupts, state, cache, key_file, warm, plan)
    return show(
        found,
        measuring.notes(found),
        found.tables,
        measuring.failures(found),
        json,
        passed=not found.failed,
    )


def _numbers(text: str) -> list[int]:
    """`1,2` as [1, 2]. Raises BadParameter."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 256 or len(set(found)) != len(found):
        raise typer.BadParameter(f"--parallel {text}: different numbers from 1 to 256, such as 1,2,4")
    return found


def _parts(given: Sequence[str]) -> list[Part]:
    """The parts with these names, in the order in which they are measured. Raises BadParameter."""
    from greenroom.bench.claim import PARTS

    for name in given:
        if name not in PARTS:
            raise typer.BadParameter(f"--part {name}: one of {', '.join(PARTS)}")
    return [part for part in PARTS if part in given]
