"""Where the running platform's entry is and which API key to use there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from greenroom.cli.default_key import MAKE_ANOTHER, read_secret
from greenroom.cli.records import StateDir
from greenroom.config import RoleSpec
from greenroom.errors import PermanentError, SetupError, TemporaryError
from greenroom.store.keys import is_secret


class NotRunning(PermanentError):
    """No supervisor runs on this state directory."""

    kind = "not_running"
    status = 503


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The entry of a platform, the domain of its sandboxes and an API key's secret."""

    url: str
    domain: str
    key: str
    tls_port: int | None = None
    kube_port: int | None = None


def find_target(state_dir: Path, key_file: Path | None = None) -> Target:
    """The running platform of `state_dir`. Raises NotRunning, TemporaryError while it starts, SetupError."""
    state = StateDir(state_dir)
    record = state.running()
    if record is None:
        raise NotRunning(f"nothing is running on {state_dir}; `greenroom up --detach` starts it")
    if record.state != "running":
        raise TemporaryError(f"the platform is {record.state}; see `greenroom status`")
    return Target(
        url=record.entry_url,
        domain=record.domain,
        key=_read_key(state, key_file),
        tls_port=record.tls_port,
        kube_port=record.kube_port,
    )


def check_runs_commands(state_dir: Path) -> None:
    """Raise SetupError when no node of the platform has VMs in which a command could run."""
    if engines_of(StateDir(state_dir)) == {"simulated"}:
        raise SetupError(
            "this platform runs on the simulated engine, which has no VMs and runs no commands\n"
            "Stop it with `greenroom down` and start it, as root, without --engine simulated"
        )


def engines_of(state: StateDir) -> set[str]:
    """The VM engines that the nodes were started with."""
    found: set[str] = set()
    for path in state.node_specs():
        try:
            found.add(msgspec.json.decode(path.read_bytes(), type=RoleSpec).config.vm.engine)
        except (OSError, msgspec.DecodeError):
            continue
    return found


def _read_key(state: StateDir, key_file: Path | None) -> str:
    if key_file is not None:
        try:
            secret = key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise SetupError(f"cannot read the API key in {key_file}: {reason}") from error
        if not is_secret(secret):
            raise SetupError(f"{key_file} does not hold an API key (e2b_ and 40 hexadecimal digits)")
        return secret
    found = read_secret(state)
    if found is None:
        raise SetupError(
            "there is no default API key here, or it was revoked\n"
            f"{MAKE_ANOTHER}; or name a file that holds an API key with --key-file"
        )
    return found
