"""How a start or stop is shown while it goes on: the supervisor reports, a reporter shows.

A detached supervisor has no terminal, so its reports travel as JSON lines through a pipe to the command that
started it: `PipeReporter` on one side, `read_reports` on the other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import IO, Literal, Protocol

import msgspec

Kind = Literal["step", "progress", "ready", "notice", "up", "failed", "stopped"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to show. `name` is the role's, or empty for the platform as a whole.

    `step`: something began; `progress`: a role says how far it is (`done` from 0 to 1, or None when it cannot
    tell); `ready`: what began is done; `notice`: a line worth reading; `up`: all is ready; `failed`: the
    start failed; `stopped`: all is gone.
    """

    kind: Kind
    name: str = ""
    text: str = ""
    done: float | None = None


class Reporter(Protocol):
    """Shows reports."""

    def show(self, report: Report) -> None:
        """Show one."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PipeReporter:
    """Sends reports to the command that waits for a detached supervisor; it may be gone at any time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def show(self, report: Report) -> None:
        """Send one; the final one also ends the conversation."""
        if self._fd < 0:
            return
        try:
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
        except OSError:
            self.close()
            return
        if report.kind in ("up", "failed"):
            self.close()

    def close(self) -> None:
        """End the conversation."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def read_reports(stream: IO[bytes]) -> Iterator[Report]:
    """The reports of a detached supervisor until it ends the conversation; unreadable lines are left out."""
    for line in stream:
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line, type=Report)


class PlainReporter:
    """One line for each new step, for logs and scripts."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._began: dict[str, float] = {}
        self._last: dict[str, str] = {}

    def show(self, report: Report) -> None:
        """Print one, unless it only says how far a step is that was printed already."""
        name = report.name
        if report.kind == "step":
            self._began[name] = time.monotonic()
        if report.kind == "progress":
            if self._last.get(name) == report.text:
                return
            self._last[name] = report.text
        line = f"{name}: {report.text}" if name else report.text
        if report.kind == "ready" and name in self._began:
            line += f" ({format_seconds(time.monotonic() - self._began.pop(name))})"
        with contextlib.suppress(OSError):  # a closed terminal must not end what is reported on
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to restore."""


class LiveReporter:
    """Spinners and bars with the elapsed time, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.fields[role]:<10}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lines_only = False

    def show(self, report: Report) -> None:
        """Show one: roles that start as spinners; once all is up, lines, between which nothing moves."""
        with contextlib.suppress(OSError):  # a closed terminal must not end what is reported on
            self._show(report)

    def _show(self, report: Report) -> None:
        if report.kind in ("step", "progress", "ready") and report.name and not self._lines_only:
            self._show_role(report)
            return
        if report.kind in ("up", "failed", "stopped"):
            self._lines_only = True
            self.close()
        style = "red" if report.kind == "failed" else None
        line = f"{report.name}: {report.text}" if report.name else report.text
        if line:
            self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _show_role(self, report: Report) -> None:
        self._progress.start()
        task = self._tasks.get(report.name)
        if task is None:
            task = self._progress.add_task(report.text, total=None, role=report.name)
            self._tasks[report.name] = task
        if report.kind == "ready":
            self._progress.update(task, description=report.text, total=1.0, completed=1.0)
            return
        total = None if report.done is None else 1.0
        self._progress.update(task, description=report.text, total=total, completed=report.done or 0.0)

    def close(self) -> None:
        """Stop drawing; what was drawn stays."""
        with contextlib.suppress(OSError):
            self._progress.stop()
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks.clear()


def reporter_for(stream: IO[str]) -> Reporter:
    """Live on a terminal, plain lines elsewhere. `stream` is where plain lines go (standard error)."""
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveReporter()
    return PlainReporter(stream)


def format_seconds(seconds: float) -> str:
    """A length of time for people: `0.24 s`, `12.3 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
