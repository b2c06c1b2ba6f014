"""What every benchmark's result has in common: the conditions it was measured under, tables, a file.

A figure without its machine, load and version compares with nothing, so conditions are gathered at the start
of a run and the load again at its end.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

import greenroom
from greenroom.bench.summaries import Ratio, Summary
from greenroom.errors import GreenroomError, SetupError
from greenroom.runtime.engine import EngineInfo
from greenroom.wire.messages import Size

Load = tuple[float, float, float]
"""Runnable processes on average over 1, 5 and 15 minutes."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when a benchmark ran."""

    date: str
    """Start of the run, UTC, ISO 8601."""
    greenroom: str
    commit: str | None
    """Commit of the checkout that ran; None when it did not run from one."""
    modified: bool | None
    """Whether files of the package differed from that commit."""
    python: str
    cpu_model: str
    cpus: int
    """CPUs that this process may use."""
    memory_mib: int
    kernel: str
    engine: str
    engine_version: str
    accelerator: str
    accelerator_reason: str
    template: str
    size: Size
    """What each guest is given."""
    medium: str = ""
    """File system and device on which the benchmark's own files lie; empty where nobody looked."""
    load_before: Load
    load_after: Load | None = None


class Table(msgspec.Struct, frozen=True):
    """A table of a result, ready to be shown."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that was aimed at: `value` should be `limit` at most, or at least. None when it was not measured."""

    name: str
    value: float | None
    limit: float
    unit: str
    at_least: bool = False

    @property
    def aim(self) -> str:
        """What was aimed at, for people."""
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{self.unit}"

    @property
    def verdict(self) -> str:
        """`met`, `missed` or, without a value, `not measured`."""
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "missed"


class Meter(Protocol):
    """Is told how far a benchmark has come."""

    def say(self, text: str) -> None:
        """A step that began."""

    def begin(self, total: int) -> None:
        """From now on `advance` is called up to `total` times."""

    def advance(self) -> None:
        """One more attempt is over."""


def gather_conditions(engine: EngineInfo, template: str, size: Size) -> Conditions:
    """The conditions right now. What this machine does not tell reads `unknown`; raises nothing."""
    commit, modified = _checkout(Path(greenroom.__file__).resolve().parent)
    return Conditions(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        greenroom=greenroom.__version__,
        commit=commit,
        modified=modified,
        python=platform.python_version(),
        cpu_model=_cpu_model(),
        cpus=len(os.sched_getaffinity(0)),
        memory_mib=psutil.virtual_memory().total >> 20,
        kernel=platform.release(),
        engine=engine.engine,
        engine_version=engine.version,
        accelerator=engine.accelerator,
        accelerator_reason=engine.reason,
        template=template,
        size=size,
        load_before=os.getloadavg(),
    )


def medium_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """File system and device that `path` lies on, such as `ext4 on /dev/vda (rotational)`; `unknown` where not told.

    Source of the fields: proc(5), /proc/[pid]/mountinfo; `rotational` is sysfs' word, which virtual disks often get.
    """
    try:
        number = path.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        for line in mountinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == device:
                kind, source = after.split()[:2]
                return f"{kind} on {source}{_rotation(device)}"
    except (OSError, IndexError, ValueError):
        pass
    return "unknown"


def _rotation(device: str) -> str:
    """What sysfs says of a block device's kind, in brackets; of a partition its disk's."""
    for place in ("queue", "../queue"):
        try:
            found = Path(f"/sys/dev/block/{device}/{place}/rotational").read_text(encoding="ascii").strip()
        except OSError:
            continue
        return " (rotational)" if found == "1" else " (not rotational)"
    return ""


def finish(conditions: Conditions) -> Conditions:
    """The same conditions with the load at the end of the run."""
    return msgspec.structs.replace(conditions, load_after=os.getloadavg())


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.machine() or "unknown"


def _checkout(package: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout that holds `package`, and whether the package differs from it."""
    if package.parent.name != "src" or not (package.parent.parent / ".git").exists():
        return None, None
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    return (commit or None), (None if changes is None else bool(changes))


def _git(directory: Path, *arguments: str) -> str | None:
    """Output of a git command, None when it fails (no git, or a checkout that git does not trust)."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write(path: Path, report: msgspec.Struct) -> None:
    """Write a report as indented JSON, whole or not at all. Raises SetupError when it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise SetupError(f"cannot write {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Raise SetupError now if `write` would fail for want of a directory or a permission, not after the run."""
    parent = path.absolute().parent
    if path.is_dir():
        raise SetupError(f"{path} is a directory; name a file")
    if not parent.is_dir():
        raise SetupError(f"cannot write {path}: there is no directory {parent}")
    if not os.access(parent, os.W_OK):
        raise SetupError(f"cannot write {path}: {parent} is not writable")


def conditions_lines(conditions: Conditions) -> list[str]:
    """The conditions for people, a few lines."""
    size, after = conditions.size, conditions.load_after
    commit = "" if conditions.commit is None else f", commit {conditions.commit[:12]}"
    changed = " (modified)" if conditions.modified else ""
    return [
        f"{conditions.date}, Greenroom {conditions.greenroom}{commit}{changed}, Python {conditions.python}",
        f"{conditions.cpus} × {conditions.cpu_model}, {conditions.memory_mib} MiB, Linux {conditions.kernel}",
        f"{conditions.engine} {conditions.engine_version} on {conditions.accelerator}: "
        f"{conditions.accelerator_reason}",
        f"guest {conditions.template}/{size.name}: {size.cpus} CPU, {size.memory_mib} MiB, "
        f"disk {size.disk_mib} MiB" + (f"; files on {conditions.medium}" if conditions.medium else ""),
        f"load average before {_load(conditions.load_before)}"
        + ("" if after is None else f", after {_load(after)}"),
    ]


def reason(error: Exception) -> str:
    """Why an attempt failed, in one line."""
    text = error.message if isinstance(error, GreenroomError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def _load(load: Load) -> str:
    return " ".join(f"{value:.2f}" for value in load)


def cell(value: float | None) -> str:
    """A figure with three significant digits or, from 100 on, whole; `–` for none."""
    if value is None:
        return "–"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    # Below a tenth two decimals would leave one digit, or none; a whole zero stays one.
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def summary_cells(summary: Summary) -> list[str]:
    """n, failed, min, p50, p95, max."""
    figures = (summary.min, summary.p50, summary.p95, summary.max)
    return [str(summary.n), str(summary.failed), *map(cell, figures)]


SUMMARY_COLUMNS = ["n", "failed", "min", "p50", "p95", "max"]
"""Headings of `summary_cells`."""


def tail_cells(summary: Summary) -> list[str]:
    """n, failed, p50, p95, p99, max: for samples so many that the hundredth part of them says something."""
    figures = (summary.p50, summary.p95, summary.p99, summary.max)
    return [str(summary.n), str(summary.failed), *map(cell, figures)]


TAIL_COLUMNS = ["n", "failed", "p50", "p95", "p99", "max"]
"""Headings of `tail_cells`."""


def ratio_cells(ratio: Ratio) -> list[str]:
    """The ratio and what it was in the rounds."""
    return [cell(ratio.overall), f"{cell(ratio.low)} to {cell(ratio.high)}"]


RATIO_COLUMNS = ["median", "of rounds from"]
"""Headings of `ratio_cells`."""


def target_table(targets: Sequence[Target]) -> Table:
    """What was aimed at beside what was measured."""
    return Table(
        "Targets",
        ["figure", "target", "measured", ""],
        [[entry.name, entry.aim, f"{cell(entry.value)}{entry.unit}", entry.verdict] for entry in targets],
    )


def failure_lines(summaries: Sequence[tuple[str, Summary]]) -> list[str]:
    """One line for each reason of failures, for people."""
    return [
        f"{name}: {count} of {summary.attempts} failed: {reason}"
        for name, summary in summaries
        for reason, count in sorted(summary.errors.items())
    ]
