"""Turning a request for a command into a running process with its pipes.

Below ``processes``, which follows what was started here. Everything in :func:`start` blocks for a fork and
an exec, so it runs on the spawning pool. ``preexec_fn`` is not used (unsafe beside threads): the C code of
``subprocess`` does the session, the groups and the user change in the child.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .errors import AgentError, from_os_error, printable
from .paths import resolve
from .users import User

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of every command: fixed, because an init hands its children a shorter one."""

_MAX_KILL_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start a command."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    user: User
    stdin: bool


@dataclass(frozen=True, slots=True)
class Spawned:
    """A started process: its descriptors are ours, non-blocking, and closed by whoever follows it.

    ``outputs`` pairs the name of each output in the event stream with its descriptor.
    """

    popen: subprocess.Popen[bytes]
    pidfd: int
    stdin: int | None
    outputs: tuple[tuple[str, int], ...]

    @property
    def pid(self) -> int:
        """Process, group and session id in one: every command leads a session of its own."""
        return self.popen.pid


def environment(user: User, sandbox: Mapping[str, str], request: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command, later sources winning: account, sandbox, request."""
    merged = {
        "PATH": DEFAULT_PATH,
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
    }
    merged.update(sandbox)
    merged.update(request)
    for name in merged:
        if not name or "=" in name:
            raise AgentError("invalid_argument", f"{name!r} cannot name an environment variable")
    return merged


def working_directory(requested: str, user: User, default: str) -> str:
    """Where the command starts. Raises ``invalid_argument`` when a requested directory does not exist.

    Without a request it is the template's directory, else the home, else the root: an account without a
    home can still run commands.
    """
    if requested:
        path = resolve(requested, user)
        if not os.path.isdir(path):
            raise AgentError("invalid_argument", f"cwd {printable(path)!r} does not exist or is no directory")
        return path
    for candidate in (default and resolve(default, user), user.home):
        if candidate and os.path.isdir(candidate):
            return candidate
    return "/"


def start(launch: Launch) -> Spawned:
    """Start the command. Raises :class:`AgentError` with a clear text when it cannot be started."""
    ours: list[int] = []
    theirs: list[int] = []
    try:
        if launch.stdin:
            child_in, stdin = os.pipe2(os.O_CLOEXEC)
            theirs.append(child_in)
            ours.append(stdin)
        else:
            child_in, stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), None
            theirs.append(child_in)
        stdout, child_out = os.pipe2(os.O_CLOEXEC)
        ours.append(stdout)
        theirs.append(child_out)
        stderr, child_err = os.pipe2(os.O_CLOEXEC)
        ours.append(stderr)
        theirs.append(child_err)
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        popen = _popen(launch, child_in, child_out, child_err)
        try:
            pidfd = os.pidfd_open(popen.pid)
        except OSError:
            popen.kill()
            popen.wait()
            raise
        _reset_oom_score(popen.pid)
        spawned = Spawned(popen, pidfd, stdin, (("stdout", stdout), ("stderr", stderr)))
        ours.clear()
        return spawned
    except OSError as error:
        raise _start_error(error, launch) from None
    except ValueError as error:  # zero bytes or lone surrogates in arguments or environment
        raise AgentError("invalid_argument", f"the command cannot be started: {error}") from None
    finally:
        for descriptor in (*ours, *theirs):
            os.close(descriptor)


def _popen(launch: Launch, stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    user, group, extra = _identity(launch.user)
    return subprocess.Popen(
        list(launch.arguments),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=launch.cwd,
        env=dict(launch.environment),
        user=user,
        group=group,
        extra_groups=extra,
        start_new_session=True,
        umask=0o022,
    )


def _identity(user: User) -> tuple[int | None, int | None, list[int] | None]:
    """What to change to; nothing where we are that user already, which lets subprocess use vfork."""
    same_user = (os.geteuid(), os.getegid()) == (user.uid, user.gid)
    if same_user and {*os.getgroups(), os.getegid()} == set(user.groups):
        return None, None, None
    if os.geteuid() != 0:
        if same_user:
            return None, None, None
        raise AgentError("permission_denied", f"the agent may not run commands as {user.name!r}")
    return user.uid, user.gid, list(user.groups)


def _start_error(error: OSError, launch: Launch) -> AgentError:
    program = printable(launch.arguments[0])
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        if error.filename == launch.cwd and error.filename != launch.arguments[0]:
            return AgentError("invalid_argument", f"cwd {printable(launch.cwd)!r} does not exist")
        return AgentError("not_found", f"program {program!r} was not found")
    if error.errno == errno.E2BIG:
        return AgentError("invalid_argument", "the arguments and the environment are too long together")
    if error.errno == errno.ENOEXEC:
        return AgentError("invalid_argument", f"{program!r} is not in a format this system can execute")
    return from_os_error(error, str(error.filename or launch.arguments[0]))


def _reset_oom_score(pid: int) -> None:
    # The agent shields itself from the out-of-memory killer; its commands must not inherit the shield.
    if oom_score_adjustment() < 0:
        with suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("0")


_own_oom_score = 0


def oom_score_adjustment() -> int:
    """The adjustment this agent runs under, as last set by :func:`shield_from_oom`."""
    return _own_oom_score


def shield_from_oom(score: int = -900) -> None:
    """Make the kernel's out-of-memory killer prefer commands to the agent; needs root."""
    global _own_oom_score
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))
        _own_oom_score = score


def signal_session(leader: int, number: signal.Signals) -> None:
    """Signal a command and whatever it has started, as far as it can be told apart.

    SIGTERM goes once to the process group and to the other members of the session. SIGKILL also reaches
    descendants that made sessions of their own, and is repeated until no new process turns up. Only a
    daemon that has detached completely (new session, parent gone) is out of reach.
    """
    done: set[int] = set()
    for _ in range(_MAX_KILL_ROUNDS if number == signal.SIGKILL else 1):
        # Who belongs is read before anybody dies, as orphans lose the link to their ancestors.
        members = session_members(leader, descendants=number == signal.SIGKILL) - done
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)
        for pid, group in ((pid, _group_of(pid)) for pid in members):
            if group is not None and group != leader:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        done |= members
        if not members:
            return


def session_members(leader: int, *, descendants: bool) -> set[int]:
    """Live processes of the leader's session or group, and on request all their descendants."""
    members: set[int] = set()
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = _stat_fields(name)
        if fields is None or fields[0] in (b"Z", b"X"):
            continue
        pid = int(name)
        parents[pid] = int(fields[1])
        if leader in (int(fields[2]), int(fields[3])):
            members.add(pid)
    grown = descendants
    while grown:
        more = {pid for pid, parent in parents.items() if parent in members or parent == leader} - members
        members |= more
        grown = bool(more)
    return members


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _stat_fields(pid: str) -> list[bytes] | None:
    """State, parent, group and session of a process (proc(5), /proc/pid/stat fields 3 to 6)."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            raw = file.read(1024)
    except OSError:
        return None
    # The command name stands in parentheses and may itself contain spaces and parentheses.
    fields = raw[raw.rfind(b")") + 2 :].split(None, 4)
    return fields[:4] if len(fields) >= 4 else None
