"""What the supervisor leaves on disk, so that `down`, `status` and a later `up` find their way without it.

    <state>/run/lock                 held by the supervisor for life, and by `down` while it cleans up
    <state>/run/supervisor.json      SupervisorRecord
    <state>/run/roles.json           list of RoleRecord
    <state>/run/<role>-<n>.spec.json what a role was started with; holds no secret
    <state>/log/<role>-<n>.log       its standard output and error
    <state>/kubeconfig               written by `up` and `env`, 0600: it holds the key's secret
    <state>/secrets/                 credentials (`wire.credentials`) and the default API key

The state directory is 0700: no other account has to reach anything in it by path. VM processes under uids of
their own get the few files they need as open descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from greenroom.cli.processes import ProcessId
from greenroom.errors import SetupError, TemporaryError
from greenroom.wire.credentials import write_private

T = TypeVar("T")

TAIL = 64 << 10
"""Bytes at the end of a log in which its last lines are looked for; one holds a whole traceback."""
LOG_LIMIT = 10 << 20
"""Bytes over which a log is set aside as `<name>.log.1` at the next start."""


class Busy(TemporaryError):
    """Another `greenroom` process holds the state directory's lock."""

    kind = "busy"
    status = 409


class RoleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One role process as the supervisor last saw it. Times are Unix seconds."""

    name: str
    role: str
    replica: int
    state: str
    process: ProcessId | None = None
    url: str = ""
    started_at: float | None = None
    restarts: int = 0
    last_exit: str = ""
    last_exit_at: float | None = None
    progress: str = ""
    """What a role that is starting says it is doing."""


class SupervisorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor of this state directory, or the last one."""

    process: ProcessId
    state: Literal["starting", "running", "stopping", "stopped"]
    started_at: float
    version: str
    mark: str
    """Value of `processes.MARK` in the environment of everything this supervisor started."""
    cache_dir: str
    role_module: str
    entry_url: str = ""
    domain: str = ""
    tls_port: int | None = None
    """Port of the listener with TLS; None without one."""
    kube_port: int | None = None
    """Port of the listener for Kubernetes' clients; None without one."""
    failure: str = ""
    """Why the last start failed; empty when it did not."""


class StateDir:
    """The state directory's paths and records."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = root / "run"
        self.log = root / "log"
        self.secrets = root / "secrets"
        self.default_key = self.secrets / "default.key"
        self.store = root / "store.db"
        self.kubeconfig = root / "kubeconfig"

    def prepare(self) -> None:
        """Make the directory and its parts, private to this user.

        Raises SetupError rather than taking over a directory that belongs to something else.
        """
        root = self.root
        try:
            root.mkdir(parents=True, mode=0o700, exist_ok=True)
            found = root.stat()
            entries = {entry.name for entry in os.scandir(root)} - {"lost+found"}  # a disk of its own
        except OSError as error:
            raise SetupError(f"cannot use the state directory {root}: {error.strerror}") from error
        if found.st_uid != os.geteuid():
            raise SetupError(f"the state directory {root} belongs to another user; name one with --state-dir")
        if entries and not entries & {"run", "secrets", "config.toml"}:
            raise SetupError(
                f"{root} is not empty and is no Greenroom state directory; name another with --state-dir"
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            root.chmod(0o700)
        for part in (self.run, self.log, self.secrets):
            part.mkdir(mode=0o700, exist_ok=True)

    def supervisor(self) -> SupervisorRecord | None:
        """The supervisor's record, or None when there never was one (or it cannot be read)."""
        return _read(self.run / "supervisor.json", SupervisorRecord)

    def running(self) -> SupervisorRecord | None:
        """The record of the supervisor that lives right now, or None."""
        record = self.supervisor()
        return record if record is not None and record.process.alive() else None

    def roles(self) -> list[RoleRecord]:
        """The roles' records, empty when there are none."""
        return _read(self.run / "roles.json", list[RoleRecord]) or []

    def save(self, supervisor: SupervisorRecord, roles: list[RoleRecord]) -> None:
        """Replace both records, each atomically; the roles first, as readers ask for the supervisor first."""
        write_private(self.run / "roles.json", msgspec.json.encode(roles).decode())
        write_private(self.run / "supervisor.json", msgspec.json.encode(supervisor).decode())

    def spec_path(self, name: str) -> Path:
        """Where the spec of the role called `name` lies."""
        return self.run / f"{name}.spec.json"

    def node_specs(self) -> list[Path]:
        """Specs of the nodes that were started here and not yet swept."""
        return sorted(self.run.glob("node-*.spec.json"))

    def log_path(self, name: str) -> Path:
        """The log of the role called `name`, or of `supervisor`."""
        return self.log / f"{name}.log"

    def open_log(self, name: str) -> int:
        """A descriptor that appends to the log of `name`; a log that has grown large is set aside first."""
        path = self.log_path(name)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > LOG_LIMIT:
                path.replace(path.with_name(path.name + ".1"))
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def log_tail(self, name: str, lines: int = 8) -> str:
        """The last lines of a log, to show why something failed; empty when there is none."""
        try:
            with self.log_path(name).open("rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL))
                text = stream.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


class Lock:
    """The state directory's lock: at most one `up`, or one `down` that cleans up. Release by `close`."""

    def __init__(self, state: StateDir) -> None:
        path = state.run / "lock"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 64, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise Busy(f"already running (pid {holder or 'unknown'}); `greenroom down` stops it") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let the next one in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _read(path: Path, kind: type[T]) -> T | None:
    """A record, or None when it is missing or was written by a version that this one cannot read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
