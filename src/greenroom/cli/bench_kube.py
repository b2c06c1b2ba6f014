"""`bench kube`: the Kubernetes dialect on fleets that are started for it. What is measured is in `bench.kube`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli.bench_support import meter_on_stderr, run_to_the_end, show, temporary_directory
from greenroom.cli.options import JsonFileOption, examples

if TYPE_CHECKING:
    from greenroom.bench.kube import Part


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "greenroom bench kube",
            "greenroom bench kube --quick   # everything, small, to see that it works",
            "greenroom bench kube --only pick --only list",
            "greenroom bench kube --json kube.json",
        )
    )(kube)


def kube(
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PART",
            show_default=False,
            help="Measure this part only; may be repeated. One of pick, list, watch, serial, grid, spread, burst, "
            "drained, scale, store, seed (default: all)",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small numbers everywhere, for a quick look.")
    ] = False,
    json: JsonFileOption = None,
) -> int:
    """Measure the Kubernetes API: real master, api and node daemons on simulated VMs, each part beside a baseline.

    [b]pick[/]: choosing a node, and finding a sandbox by id and name, in up to a million.
    [b]list[/]: 50,000 sandboxes over 200 nodes, as JSON and as a Table, to the last byte.
    [b]watch[/]: ten watchers see creates and deletes; a thousand at 200 events a second lose nothing.
    [b]serial[/]: claims one after the other until a watch shows them Ready; how fast a pool fills.
    [b]grid[/]: the same by the size of the pool and the number of clients.
    [b]spread[/], [b]burst[/], [b]drained[/]: many at once: over 26 nodes, on two, and on a pool that runs dry.
    [b]scale[/]: a pool and 2,500 sandboxes to nothing, finalizers included.
    [b]store[/], [b]seed[/]: what 10,000 sandboxes, and the 3,000 of the predecessor's record, write to the store.

    Needs no VM and no root. Everything runs in a temporary directory on free ports and ends with the command. The
    whole takes about ten minutes on two cores. Exit status 3 when something failed or a target was missed.
    """
    from greenroom.bench import kube as measuring
    from greenroom.bench import report as reports
    from greenroom.cli.interrupts import Interrupts
    from greenroom.master.catalogue import BASE, BASE_SIZE

    plan = measuring.KubePlan(
        template=BASE, size=BASE_SIZE, parts=_parts(only or measuring.PARTS), quick=quick
    )
    if json is not None:
        reports.check_writable(json)
    with Interrupts() as interrupts, temporary_directory() as directory, meter_on_stderr() as meter:
        found = run_to_the_end(interrupts, lambda: measuring.measure(directory, plan, meter))
    return show(found, found.notes, found.tables, measuring.failures(found), json, passed=found.passed)


def _parts(given: Sequence[str]) -> list[Part]:
    """The parts with these names, in the order in which they are measured. Raises BadParameter."""
    from greenroom.bench.kube import PARTS

    for name in given:
        if name not in PARTS:
            raise typer.BadParameter(f"--only {name}: one of {', '.join(PARTS)}")
    return [part for part in PARTS if part in given]
