"""`env`: what a shell or program needs to point E2B's SDKs at this platform."""

from __future__ import annotations

import shlex

import typer

from greenroom.cli.options import JsonOption, KeyFileOption, StateDirOption, examples, state_dir_of


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            'eval "$(greenroom env)"',
            "greenroom env --json",
            "greenroom env --key-file ./ci.key",
        )
    )(env)


def env(
    context: typer.Context,
    json: JsonOption = False,
    key_file: KeyFileOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Print the environment variables that point the E2B SDKs here, as shell commands."""
    from greenroom.cli.output import print_json
    from greenroom.cli.target import find_target

    target = find_target(state_dir_of(context, state_dir), key_file)
    values = {
        "E2B_API_KEY": target.key,
        "E2B_API_URL": target.url,
        "E2B_SANDBOX_URL": target.url,
        "E2B_DOMAIN": target.domain,
    }
    if json:
        print_json(values)
        return
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")
    # With it set, to whatever, the SDKs talk to fixed local ports instead of the URLs above.
    print("unset E2B_DEBUG")
