"""How answers (standard output) and errors (standard error) reach people and scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_DEGRADED = 3
EXIT_NOT_RUNNING = 4


def fail(message: str) -> None:
    """Write an error: what happened and what to do, in a line or two."""
    first, *rest = message.strip().splitlines() or ["unknown error"]
    print(f"error: {first}", file=sys.stderr)
    for line in rest:
        print(f"  {line}", file=sys.stderr)


def warn(message: str) -> None:
    """Write something that is worth knowing and no error."""
    print(f"note: {message}", file=sys.stderr)


def print_json(content: object) -> None:
    """One JSON document on standard output."""
    print(msgspec.json.format(msgspec.json.encode(content)).decode())


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; on a terminal as wide as that, elsewhere wide enough not to break cells."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 200, highlight=False)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    console.print()


def ago(instant: float | None) -> str:
    """How long ago a Unix second was; empty for None."""
    return "" if instant is None else _whole(time.time() - instant)


def until(instant: float) -> str:
    """How far ahead a Unix second is."""
    ahead = instant - time.time()
    return f"in {_whole(ahead)}" if ahead > 0 else "over"


def _whole(seconds: float) -> str:
    """A length of time to the second, which is as much as a table needs."""
    from greenroom.cli.reports import format_seconds

    return f"{max(0.0, seconds):.0f} s" if seconds < 60 else format_seconds(seconds)
