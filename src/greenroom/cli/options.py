"""Options that many commands share, and how the places they name are settled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from greenroom.config import default_cache_dir, default_state_dir

StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        show_default=False,
        help="Where the platform keeps its state (default: $GREENROOM_STATE_DIR or /var/lib/greenroom)",
    ),
]
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        show_default=False,
        help="Where images and snapshots are kept (default: $GREENROOM_CACHE_DIR or /var/cache/greenroom)",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        show_default=False,
        help="A file with the secret of the API key to use (default: the one `greenroom up` made)",
    ),
]


class Globals(msgspec.Struct):
    """What was given before the command."""

    state_dir: Path | None = None
    cache_dir: Path | None = None


def state_dir_of(context: typer.Context, given: Path | None) -> Path:
    """The state directory: named after the command, else before it, else the default. Absolute."""
    return (given or _globals(context).state_dir or default_state_dir()).expanduser().absolute()


def cache_dir_of(context: typer.Context, given: Path | None) -> Path:
    """The cache directory, found the same way."""
    return (given or _globals(context).cache_dir or default_cache_dir()).expanduser().absolute()


def _globals(context: typer.Context) -> Globals:
    found = context.find_root().obj
    return found if isinstance(found, Globals) else Globals()


def examples(*lines: str) -> str:
    """The end of a `--help` text. Brackets are escaped, because the text is read as rich markup."""
    escaped = (line.replace("[", r"\[") for line in lines)
    return "\n\n".join(["[bold]Examples[/]", *(f"$ {line}" for line in escaped)])
