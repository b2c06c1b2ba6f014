"""What the benchmarks' commands share: an event loop, a directory of their own, a progress bar, the engine's name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from greenroom.bench.claim import ClaimReport
    from greenroom.bench.density import DensityReport
    from greenroom.bench.execution import ExecutionReport
    from greenroom.bench.idle import IdleReport
    from greenroom.bench.kube import KubeReport
    from greenroom.bench.lifecycle import LifecycleReport
    from greenroom.bench.report import Meter, Table
    from greenroom.bench.restore import RestoreReport
    from greenroom.bench.summaries import Summary
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.records import StateDir
    from greenroom.runtime.engine import EngineInfo
    from greenroom.wire.messages import NodeStatus

T = TypeVar("T")


def engine_of_node(state: StateDir, node: NodeStatus) -> EngineInfo:
    """What the node runs VMs with; the reason is the verdict that it left in its cache."""
    import msgspec

    from greenroom.errors import SetupError
    from greenroom.runtime import probe
    from greenroom.runtime.engine import EngineInfo

    version, why = "", ""
    supervisor = state.supervisor()
    if node.engine == "qemu":
        try:
            version = probe.qemu_version()
        except SetupError:
            version = "unknown"
        try:
            raw = (Path(supervisor.cache_dir if supervisor else "") / "kvm-verdict.json").read_bytes()
            verdict = msgspec.json.decode(raw, type=probe.Verdict)
            why = verdict.reason if verdict.accelerator == node.accelerator else ""
        except (OSError, msgspec.DecodeError):
            why = ""
    return EngineInfo(
        engine=node.engine,
        accelerator=node.accelerator,
        version=version,
        reason=why or "it was asked for",
    )


def run_to_the_end(interrupts: Interrupts, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a benchmark to its end, or to the end of its clean-up when a signal stops it (Interrupted).

    It runs on the event loop that nodes run on.
    """
    import logging

    import uvloop

    from greenroom.cli.output import warn

    logging.getLogger("qemu").setLevel(logging.CRITICAL)
    return interrupts.run(
        work,
        on_stop=lambda: warn("stopping; what was made is removed first"),
        loop_factory=uvloop.new_event_loop,
    )


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory of this run's own. It stays, with a note, if it still has records of what is on the host."""
    import shutil
    import tempfile

    from greenroom.cli.output import warn

    directory = Path(tempfile.mkdtemp(prefix="greenroom-bench-"))
    try:
        yield directory
    finally:
        if any(directory.glob("**/vms/*/owner.json")):
            warn(f"kept {directory}: it names what could not be removed")
        else:
            shutil.rmtree(directory, ignore_errors=True)


class _PlainMeter:
    """One line a step, for logs."""

    def __init__(self) -> None:
        self._last = ""

    def say(self, text: str) -> None:
        if text != self._last:
            print(text, file=sys.stderr, flush=True)
        self._last = text

    def begin(self, total: int) -> None:
        """Lines do not count."""

    def advance(self) -> None:
        """Lines do not count."""


@contextlib.contextmanager
def meter_on_stderr() -> Iterator[Meter]:
    """A progress bar on a terminal, else lines; on standard error."""
    import os

    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield _PlainMeter()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    task = progress.add_task("", total=None)

    class LiveMeter:
        def say(self, text: str) -> None:
            progress.update(task, description=text)

        def begin(self, total: int) -> None:
            progress.reset(task, total=total)

        def advance(self) -> None:
            progress.advance(task)

    with progress:
        yield LiveMeter()


def show(
    report: RestoreReport
    | ClaimReport
    | IdleReport
    | DensityReport
    | LifecycleReport
    | ExecutionReport
    | KubeReport,
    notes: Sequence[str],
    tables: Sequence[Table],
    failures: Sequence[tuple[str, Summary]],
    json: Path | None,
    *,
    passed: bool,
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
    return 0 if passed else EXIT_DEGRADED
