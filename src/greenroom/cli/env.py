"""`env`: what a shell or program needs to point E2B's SDKs, kubectl and Kubernetes' client libraries here."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli.options import JsonOption, KeyFileOption, StateDirOption, examples, state_dir_of

if TYPE_CHECKING:
    from greenroom.cli.target import Target
    from greenroom.store.records import ApiKey


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            'eval "$(greenroom env)"',
            'eval "$(greenroom env --tls)"    # by names and HTTPS alone, as with E2B itself',
            "greenroom env --json",
            "greenroom env --key-file ./ci.key",
            "greenroom env --kubeconfig ~/.kube/greenroom",
        )
    )(env)


def env(
    context: typer.Context,
    tls: Annotated[
        bool, typer.Option("--tls", help="Everything by HTTPS and host name: E2B_DOMAIN and SSL_CERT_FILE.")
    ] = False,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            show_default=False,
            help="Where to write the kubeconfig (default: in the state directory)",
        ),
    ] = None,
    json: JsonOption = False,
    key_file: KeyFileOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Print the environment variables that point the E2B SDKs and kubectl here, as shell commands.

    Also writes the kubeconfig that KUBECONFIG names. It holds the API key; only its owner can read it.
    """
    from greenroom.cli.output import print_json
    from greenroom.cli.target import find_target

    state = state_dir_of(context, state_dir)
    target = find_target(state, key_file)
    key = _key_of(state, target, default=key_file is None)
    # With E2B_DEBUG set, to whatever, the SDKs talk to fixed local ports instead of the URLs here.
    unset = ["E2B_DEBUG"]
    values = {"E2B_API_KEY": target.key, "E2B_DOMAIN": target.domain}
    if tls:
        values["SSL_CERT_FILE"] = _bundle(state, target)
        # They would win over the domain.
        unset += ["E2B_API_URL", "E2B_SANDBOX_URL"]
    else:
        values |= {"E2B_API_URL": target.url, "E2B_SANDBOX_URL": target.url}
    if target.kube_port is not None or kubeconfig is not None:
        values["KUBECONFIG"] = _kubeconfig(state, target, key, kubeconfig, default=key_file is None)
    if json:
        print_json(values)
        return
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"unset {' '.join(unset)}")


def _key_of(state: Path, target: Target, *, default: bool) -> ApiKey | None:
    """The record of the key in use, None for one that is not known.

    Raises SetupError for a default key that the platform does not take: whoever was given it would only get 401s.
    """
    import asyncio

    from greenroom.cli.default_key import MAKE_ANOTHER, known
    from greenroom.cli.records import StateDir
    from greenroom.errors import SetupError

    found = asyncio.run(known(StateDir(state), target.key))
    if found is None and default:
        raise SetupError(
            "the default API key was revoked, or is not one of this platform\n"
            f"{MAKE_ANOTHER}; or name a file that holds an API key with --key-file"
        )
    return found


def _kubeconfig(state: Path, target: Target, key: ApiKey | None, path: Path | None, *, default: bool) -> str:
    """Write the kubeconfig and tell where it is. One for a key beside the default one lies beside its file."""
    from greenroom.cli import kubeconfig
    from greenroom.cli.records import StateDir

    if path is None:
        usual = StateDir(state).kubeconfig
        path = usual if default else usual.with_name(f"kubeconfig-{'unknown' if key is None else key.key_id}")
    kubeconfig.write(path, state, target, "default" if key is None else key.owner)
    return str(path.absolute())


def _bundle(state: Path, target: Target) -> str:
    """The file with the authorities to trust. Raises SetupError for a platform without TLS."""
    from greenroom.errors import SetupError
    from greenroom.wire import certificate_files, certificates

    if target.tls_port is None:
        raise SetupError(
            "this platform has no listener with TLS\n"
            "Stop it with `greenroom down` and start it with `greenroom up --detach --tls-port 8443`"
        )
    return str(certificate_files.place_of(state, certificates.host_of(target.domain)) / "bundle.pem")
