"""Options that many commands share, and how the places they name are settled."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from greenroom.config import default_cache_dir, default_state_dir
from greenroom.errors import SetupError

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
JsonFileOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        show_default=False,
        help="Also write conditions, summaries and every row to this file, as JSON.",
    ),
]
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
    """What was given before the command, and what was settled from it."""

    state_dir: Path | None = None
    cache_dir: Path | None = None
    settled: Path | None = None
    """The state directory that the command works on, for hints in what is told of it."""

    def take(self, state_dir: Path | None, cache_dir: Path | None) -> None:
        """Remember what was given to the program or to a group of commands; the last one counts."""
        self.state_dir = state_dir or self.state_dir
        self.cache_dir = cache_dir or self.cache_dir


def state_dir_of(context: typer.Context, given: Path | None) -> Path:
    """The state directory: named after the command, else before it, else the default. Absolute.

    It need not exist. Raises SetupError when something else is in its place, or another user's directory.
    """
    found = globals_of(context)
    path = _absolute(given or found.state_dir or default_state_dir())
    found.settled = path
    check_place(path, "state directory", "--state-dir")
    return path


def cache_dir_of(context: typer.Context, given: Path | None) -> Path:
    """The cache directory, found the same way."""
    path = _absolute(given or globals_of(context).cache_dir or default_cache_dir())
    check_place(path, "cache directory", "--cache-dir")
    return path


def globals_of(context: typer.Context) -> Globals:
    """What all commands of this run share."""
    found = context.find_root().obj
    return found if isinstance(found, Globals) else Globals()


def group_options(
    context: typer.Context, state_dir: StateDirOption = None, cache_dir: CacheDirOption = None
) -> None:
    """The callback of a group of commands: takes the options that all its commands share."""
    globals_of(context).take(state_dir, cache_dir)


def _absolute(path: Path) -> Path:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise SetupError(f"{os.fsencode(path)!r} is no UTF-8 text; name a directory that is") from error
    return path.expanduser().absolute()


def check_place(path: Path, what: str, option: str) -> None:
    """Raise SetupError unless there is a directory of ours at `path`, or nothing yet."""
    elsewhere = f"name another with {option}"
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise SetupError(
            f"the {what} {path} lies below something that is not a directory; {elsewhere}"
        ) from error
    except PermissionError as error:
        raise SetupError(
            f"the {what} {path} cannot be reached by this user\nRun this as the user it belongs to, or {elsewhere}"
        ) from error
    except OSError as error:
        raise SetupError(f"cannot use the {what} {path}: {error.strerror}; {elsewhere}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise SetupError(f"the {what} {path} is not a directory; {elsewhere}")
    if found.st_uid != os.geteuid() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        owner = _user_name(found.st_uid)
        how = "sudo greenroom …" if found.st_uid == 0 else f"sudo -u {owner} greenroom …"
        raise SetupError(f"the {what} {path} belongs to {owner}\nRun this as {owner} ({how}), or {elsewhere}")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def examples(*lines: str) -> str:
    """The end of a `--help` text. Brackets are escaped, because the text is read as rich markup."""
    escaped = (line.replace("[", r"\[") for line in lines)
    return "\n\n".join(["[bold]Examples[/]", *(f"$ {line}" for line in escaped)])
