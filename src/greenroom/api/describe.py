"""`python -m greenroom.api.describe`: the API's description, or the README's table of it, on standard output.

It needs no running platform: the table of paths is that of an api whose other ends are not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import cast

from greenroom.api.assembly import Parts
from greenroom.api.e2b.openapi import Paths, document, known
from greenroom.config import RoleSpec
from greenroom.store.records import Store
from greenroom.wire.calling import RoleClient


def paths() -> Paths:
    """The paths table of the E2B dialect, to look at."""
    # Handlers that nobody calls ask nothing of a store, and a client that was not entered opens no connection.
    spec = RoleSpec(role="api", replica=0, state_dir="", cache_dir="")
    return Parts(spec, RoleClient(""), cast(Store, None)).e2b.paths()


def table(paths: Paths) -> str:
    """Markdown: each operation that is supported in a row, those that are not by what is missing."""
    rows = ["| call | |", "|---|---|"]
    missing: dict[str, list[str]] = {}
    for each in known(paths):
        call = f"`{each.method} {each.path}`"
        if each.supported:
            rows.append(f"| {call} | {each.what.removesuffix('.')} |")
        else:
            missing.setdefault(each.what, []).append(call)
    rows += ["", "Answered with 501 and a text that says so:", "", "| not supported | calls |", "|---|---|"]
    rows += [f"| {what} | {', '.join(calls)} |" for what, calls in sorted(missing.items())]
    return "\n".join(rows) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m greenroom.api.describe", description=__doc__)
    parser.add_argument("--table", action="store_true", help="Markdown for the README instead of OpenAPI")
    chosen = parser.parse_args(arguments)
    table_of = paths()
    if chosen.table:
        sys.stdout.write(table(table_of))
    else:
        json.dump(document(table_of), sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
