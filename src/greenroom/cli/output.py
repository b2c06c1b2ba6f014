"""How answers (standard output) and errors (standard error) reach people and scripts.

An answer that cannot be written is an error (`OutputLost`); an error that cannot be written has nowhere to go.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_DEGRADED = 3
EXIT_NOT_RUNNING = 4


class OutputLost(OSError):
    """Standard output takes no more: its reader has left (EPIPE), its disk is full, its terminal is closed."""


@contextlib.contextmanager
def writing_output() -> Iterator[None]:
    """Tells a failure to write output from every other OSError."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise OutputLost(error.errno, error.strerror) from error


class _StandardOutput(io.FileIO):
    """File descriptor 1, whose failures are OutputLost wherever in the program they come up."""

    def write(self, data: ReadableBuffer, /) -> int:
        with writing_output():
            return super().write(data)


def guard_output() -> None:
    """Have every failure to write to `sys.stdout` raise OutputLost from now on."""
    old = sys.__stdout__
    if old is None or sys.stdout is not old:
        return  # closed from the start, or somebody else's already
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_StandardOutput(old.fileno(), "wb", closefd=False)),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=old.line_buffering,
    )


def drop_output() -> None:
    """Point standard output at nothing, so that the flush at exit cannot fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str) -> None:
    """Write a line for people to standard error, which may be gone."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def fail(message: str) -> None:
    """Write an error: what happened and what to do, in a line or two."""
    first, *rest = message.strip().splitlines() or ["unknown error"]
    say(f"error: {first}")
    for line in rest:
        say(f"  {line}")


def warn(message: str) -> None:
    """Write something that is worth knowing and no error."""
    say(f"note: {message}")


def print_json(content: object) -> None:
    """One JSON document on standard output."""
    print(msgspec.json.format(msgspec.json.encode(content)).decode())


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: Collection[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """A table; on a terminal as wide as that if possible, elsewhere as wide as it needs.

    Only cells of the `texts` columns are broken, between words. Where that does not suffice, `spare` columns are
    left out, the first named first; after that, lines are longer than the terminal is wide.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = _terminal_width()
    shown, needed = _fitting(columns, rows, terminal, texts, spare)
    width = max(needed, 200 if terminal is None else terminal)
    console = Console(width=width, highlight=False, soft_wrap=False)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in shown:
        table.add_column(name, overflow="fold", no_wrap=name not in texts)
    for row in rows:
        table.add_row(*(Text(cell) for name, cell in zip(columns, row, strict=True) if name in shown))
    console.print(table)
    if left_out := [name for name in columns if name not in shown]:
        print(f"(not shown for want of width: {', '.join(left_out)})")
    console.print()


def _terminal_width() -> int | None:
    """Characters on a line of the terminal that answers go to; None when it is none."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else None


_GAP = 2
"""Blanks that rich puts between two columns."""
_TEXT_WIDTH = 16
"""Columns to which a text may be narrowed."""


def _fitting(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    available: int | None,
    texts: Collection[str],
    spare: Sequence[str],
) -> tuple[list[str], int]:
    """The columns that fit into `available` characters (None: any number), and the width they need."""
    from rich.cells import cell_len

    least: dict[str, int] = {}
    for index, name in enumerate(columns):
        cells = [name, *(row[index] for row in rows)]
        # A line break in a cell is none of the table's making.
        widest = max(cell_len(line) for cell in cells for line in (cell.splitlines() or [""]))
        if available is not None and name in texts:
            longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
            widest = min(widest, max(longest, _TEXT_WIDTH))
        least[name] = widest
    shown = list(columns)
    to_drop = [name for name in spare if name in shown]

    def width() -> int:
        return sum(least[name] + _GAP for name in shown) - _GAP

    while available is not None and width() > available and to_drop:
        shown.remove(to_drop.pop(0))
    return shown, width()


def ago(instant: float | None) -> str:
    """How long ago a Unix second was; empty for None."""
    return "" if instant is None else _whole(time.time() - instant)


def until(instant: float) -> str:
    """How far ahead a Unix second is; what no one lives to see is said in words."""
    from greenroom.wire.messages import FOREVER

    ahead = instant - time.time()
    if ahead > FOREVER / 2:
        return "when it is deleted"
    return f"in {_whole(ahead)}" if ahead > 0 else "over"


def _whole(seconds: float) -> str:
    """A length of time to the second, which is as much as a table needs."""
    from greenroom.cli.reports import format_seconds

    return f"{max(0.0, seconds):.0f} s" if seconds < 60 else format_seconds(seconds)
