"""Writes the README's table of supported calls anew: `make docs`, or with --check only says whether it is so.

The control API's part is that of `python -m greenroom.api.describe --table`; the agent's remote procedure calls are
asked of its services. Nothing of the table is typed by hand, and tests/test_docs.py fails when it is out of date.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from greenroom.api.describe import paths, table
from greenroom.guest.commands import CommandService
from greenroom.guest.executions import ProcessTable
from greenroom.guest.filesystem import FilesystemService
from greenroom.guest.settings import Settings
from greenroom.guest.users import UserDirectory
from greenroom.guest.watching import WatchService
from greenroom.guest.workers import Workers

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- supported calls, written by `make docs` -->\n", "<!-- end of supported calls -->\n"


def agent_table() -> str:
    """Markdown: the agent's services and what their methods do."""
    settings, users = Settings(), UserDirectory()
    # The services are only looked at: nobody calls what would need threads or processes.
    workers, processes = cast(Workers, None), cast(ProcessTable, None)
    commands = CommandService(settings, users, workers, processes)
    files = FilesystemService(settings, users, workers)
    watches = WatchService(settings, users, workers)
    rows = ["| agent's call | |", "|---|---|"]
    rows += _rows("process.Process", {**commands.unary, **commands.streaming}, commands.streaming)
    methods = {**files.methods, **watches.unary, **watches.streaming}
    rows += _rows("filesystem.Filesystem", methods, watches.streaming)
    return "\n".join(rows) + "\n"


def _rows(service: str, methods: Mapping[str, Callable[..., Any]], streams: Mapping[str, Any]) -> list[str]:
    found = []
    for name, method in sorted(methods.items()):
        said = " ".join((inspect.getdoc(method) or "").split()).replace("``", "`").removesuffix(".")
        stream = " (stream)" if name in streams else ""
        if said[1:2].islower():  # not a name such as SIGTERM
            said = said[:1].lower() + said[1:]
        found.append(f"| `{service}/{name}`{stream} | {said} |")
    return found


def written(text: str) -> str:
    """The README with the table as it is now between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"README.md lacks the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{table(paths())}\n{agent_table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write, or check."""
    now = README.read_text(encoding="utf-8")
    wanted = written(now)
    if arguments == ["--check"]:
        if now != wanted:
            sys.stderr.write("the table of supported calls in README.md is out of date: run `make docs`\n")
        return int(now != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
