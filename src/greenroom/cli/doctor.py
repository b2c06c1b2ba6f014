"""`doctor`: what this machine can do, what it lacks, and the command that helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli.options import (
    CacheDirOption,
    JsonOption,
    StateDirOption,
    cache_dir_of,
    examples,
    state_dir_of,
)

if TYPE_CHECKING:
    from greenroom.cli.checks import Finding


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "greenroom doctor",
            "greenroom doctor --probe          # boot a VM on KVM to see whether that works",
            "sudo greenroom doctor --fix       # install the Debian packages that are missing",
            "greenroom doctor --json",
        )
    )(doctor)


def doctor(
    context: typer.Context,
    json: JsonOption = False,
    probe: Annotated[bool, typer.Option("--probe", help="Also boot a VM on KVM.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Install missing Debian packages (as root).")] = False,
    state_dir: StateDirOption = None,
    cache_dir: CacheDirOption = None,
) -> int:
    """Say whether real sandboxes can run here, and what to do if not.

    The exit status is 0 when they can and 1 when something that they need is missing.
    """
    import sys

    from greenroom.cli import checks
    from greenroom.cli.output import EXIT_ERROR, print_json
    from greenroom.cli.words import load_settings

    state, cache = state_dir_of(context, state_dir), cache_dir_of(context, cache_dir)
    vm = load_settings(state).vm
    found = checks.examine(state, cache, vm)
    if fix:
        _install(found)
        found = checks.examine(state, cache, vm)
    if probe:
        print("booting a VM on KVM; without a cached guest kernel this takes minutes", file=sys.stderr)
        found.append(checks.probe(cache, vm))
    missing = [finding for finding in found if finding.state == "missing"]
    if json:
        print_json({"ok": not missing, "findings": found})
    else:
        _show(found)
        if missing:
            print(f"Real sandboxes cannot run here yet: {len(missing)} thing(s) missing.")
            if packages := _packages(missing):
                print(f"The packages at once: {checks.install_command(*packages)}")
                print("or: greenroom doctor --fix")
        else:
            print("Real sandboxes can run here.")
    return EXIT_ERROR if missing else 0


def _show(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    marks = {
        "ok": Text("ok", style="green"),
        "note": Text("note", style="yellow"),
        "missing": Text("missing", style="bold red"),
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in found:
        text = Text(finding.found)
        if finding.fix:
            text.append(f"\n→ {finding.fix}", style="cyan")
        table.add_row(marks[finding.state], Text(finding.name), text)
    console.print(table)
    console.print()


def _packages(found: list[Finding]) -> list[str]:
    return sorted({finding.package for finding in found if finding.package})


def _install(found: list[Finding]) -> None:
    """Install the missing packages, showing the command. Raises SetupError when that cannot be done."""
    import os
    import subprocess
    import sys

    from greenroom.errors import SetupError

    packages = _packages(found)
    if not packages:
        print("no Debian package is missing", file=sys.stderr)
        return
    if os.geteuid() != 0:
        raise SetupError(
            f"installing needs root\nRun `sudo greenroom doctor --fix` or install: {' '.join(packages)}"
        )
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    print(f"running: {' '.join(command)}", file=sys.stderr)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=False,
        )
    except OSError as error:
        raise SetupError(f"apt-get cannot be run: {error.strerror}; is this a Debian system?") from error
    if done.returncode != 0:
        raise SetupError("apt-get failed; run `apt-get update` and try again")
