"""`status`: what runs, how well, and what it holds."""

from __future__ import annotations

import typer

from greenroom.cli.options import JsonOption, StateDirOption, examples, state_dir_of


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "greenroom status",
            "greenroom status --json | python3 -m json.tool",
            "greenroom status > /dev/null && echo all is well   # 3: degraded, 4: not running",
        )
    )(status)


def status(context: typer.Context, json: JsonOption = False, state_dir: StateDirOption = None) -> int:
    """Show roles, nodes, warm pools and sandboxes.

    The exit status is 0 when everything is up, 3 when a part is down, 4 when nothing runs.
    """
    import asyncio

    from greenroom.cli.observation import observe
    from greenroom.cli.output import EXIT_DEGRADED, EXIT_NOT_RUNNING, print_json
    from greenroom.cli.records import StateDir

    found = asyncio.run(observe(StateDir(state_dir_of(context, state_dir))))
    if json:
        print_json(found)
    else:
        from greenroom.cli.tables import show

        show(found)
    return {"up": 0, "degraded": EXIT_DEGRADED}.get(found.state, EXIT_NOT_RUNNING)
