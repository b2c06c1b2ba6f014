"""`bench lifecycle`: a node in this process and the bare script beside it. What they do is in `bench.lifecycle`."""

from __future__ import annotations

from typing import Annotated

import typer

from greenroom.cli.bench_support import meter_on_stderr, run_to_the_end, show, temporary_directory
from greenroom.cli.options import (
    CacheDirOption,
    JsonFileOption,
    StateDirOption,
    cache_dir_of,
    examples,
    state_dir_of,
)

MEMORY_MIB = 256
"""Memory of each guest."""
DIRTY_MOST = 96
"""MiB; tmpfs takes half of a guest's memory at most."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "greenroom bench lifecycle",
            "greenroom bench lifecycle --rounds 10 --dirty 32 --forks 8 --json lifecycle.json",
            "greenroom bench lifecycle --rounds 1 --dirty 16 --forks 2   # a quick look",
        )
    )(lifecycle)


def lifecycle(
    context: typer.Context,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, max=1000, help="Rounds; the sides swap places.")
    ] = 5,
    dirty: Annotated[
        int,
        typer.Option(
            "--dirty", metavar="MIB", min=1, max=DIRTY_MOST, help="Random bytes written in the guest, MiB."
        ),
    ] = 64,
    forks: Annotated[
        int, typer.Option("--forks", metavar="N", min=1, max=20, help="Children of a fork.")
    ] = 4,
    json: JsonFileOption = None,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Pause, resume, snapshot, start from a snapshot and fork a VM, beside a bare script of the same steps.

    The guest has 256 MiB. The bare script is `bench/bare_lifecycle.py` of the checkout, which takes turns with
    Greenroom step by step. Works in a temporary directory with the settings of the state directory; needs root.
    Exit status 3 when a step failed.
    """
    from greenroom.bench import lifecycle as measuring
    from greenroom.bench import report as reports
    from greenroom.bench.supply import spec_size
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.words import load_settings
    from greenroom.config import RoleSpec
    from greenroom.master.catalogue import BASE

    plan = measuring.LifecyclePlan(
        template=BASE, size=spec_size(MEMORY_MIB), rounds=rounds, dirty_mib=dirty, forks=forks
    )
    plan.check()
    if json is not None:
        reports.check_writable(json)
    settings = load_settings(state_dir_of(context, state_dir))
    cache = cache_dir_of(context, cache_dir)
    with Interrupts() as interrupts, temporary_directory() as directory, meter_on_stderr() as meter:
        spec = RoleSpec(
            role="node", replica=0, state_dir=str(directory), cache_dir=str(cache), config=settings
        )
        found = run_to_the_end(interrupts, lambda: measuring.run(spec, plan, meter))
    return show(found, found.notes, found.tables, measuring.failures(found), json, passed=not found.failed)
