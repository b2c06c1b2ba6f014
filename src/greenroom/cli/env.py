"""`env`: what a shell or program needs to point E2B's SDKs at this platform."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli.options import JsonOption, KeyFileOption, StateDirOption, examples, state_dir_of

if TYPE_CHECKING:
    from greenroom.cli.target import Target


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            'eval "$(greenroom env)"',
            'eval "$(greenroom env --tls)"    # by names and HTTPS alone, as with E2B itself',
            "greenroom env --json",
            "greenroom env --key-file ./ci.key",
        )
    )(env)


def env(
    context: typer.Context,
    tls: Annotated[
        bool, typer.Option("--tls", help="Everything by HTTPS and host name: E2B_DOMAIN and SSL_CERT_FILE.")
    ] = False,
    json: JsonOption = False,
    key_file: KeyFileOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Print the environment variables that point the E2B SDKs here, as shell commands."""
    from greenroom.cli.output import print_json
    from greenroom.cli.target import find_target

    state = state_dir_of(context, state_dir)
    target = find_target(state, key_file)
    if key_file is None:
        _check_default(state, target)
    # With E2B_DEBUG set, to whatever, the SDKs talk to fixed local ports instead of the URLs here.
    unset = ["E2B_DEBUG"]
    values = {"E2B_API_KEY": target.key, "E2B_DOMAIN": target.domain}
    if tls:
        values["SSL_CERT_FILE"] = _bundle(state, target)
        # They would win over the domain.
        unset += ["E2B_API_URL", "E2B_SANDBOX_URL"]
    else:
        values |= {"E2B_API_URL": target.url, "E2B_SANDBOX_URL": target.url}
    if json:
        print_json(values)
        return
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"unset {' '.join(unset)}")


def _check_default(state: Path, target: Target) -> None:
    """Raise SetupError for a default key that the platform does not take: whoever was given it would only get 401s."""
    import asyncio

    from greenroom.cli.default_key import MAKE_ANOTHER, is_good
    from greenroom.cli.records import StateDir
    from greenroom.errors import SetupError

    if not asyncio.run(is_good(StateDir(state), target.key)):
        raise SetupError(
            "the default API key was revoked, or is not one of this platform\n"
            f"{MAKE_ANOTHER}; or name a file that holds an API key with --key-file"
        )


def _bundle(state: Path, target: Target) -> str:
    """The file with the authorities to trust. Raises SetupError for a platform without TLS."""
    from greenroom.errors import SetupError
    from greenroom.proxy import certificate_files, certificates

    if target.tls_port is None:
        raise SetupError(
            "this platform has no listener with TLS\n"
            "Stop it with `greenroom down` and start it with `greenroom up --detach --tls-port 8443`"
        )
    return str(certificate_files.place_of(state, certificates.host_of(target.domain)) / "bundle.pem")
