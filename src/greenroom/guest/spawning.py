"""Turning a request for a command into a running process with its pipes.

Below ``processes``, which follows what was started here. Everything in :func:`start` blocks for a fork and
an exec, so it runs on the spawning pool. The C code of ``subprocess`` does the session, the groups and the
user change in the child. What it cannot do, taking a controlling terminal, is done by ``preexec_fn``. Python
there is safe beside threads only because it is one ioctl: no import, no lock, no other object.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .errors import AgentError, from_os_error, printable
from .paths import resolve
from .sessions import CommandGroups
from .terminals import Size, open_terminal, take_control
from .users import User

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of every command: fixed, because an init hands its children a shorter one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start a command; ``terminal`` is the size of the one it gets instead of pipes."""

    execution_id: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    user: User
    stdin: bool
    terminal: Size | None = None


@dataclass(frozen=True, slots=True)
class Spawned:
    """A started process: its descriptors are ours, non-blocking, and closed by whoever follows it.

    ``outputs`` pairs the name of each output in the event stream with its descriptor; ``group`` is the
    directory of the command's cgroup where there is one.
    """

    execution_id: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    stdin: int | None
    outputs: tuple[tuple[str, int], ...]
    group: str | None = None

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


def start(launch: Launch, groups: CommandGroups | None = None) -> Spawned:
    """Start the command. Raises :class:`AgentError` with a clear text when it cannot be started."""
    pipes = _Pipes()
    group: str | None = None
    popen: subprocess.Popen[bytes] | None = None
    try:
        stdin, outputs = pipes.open_terminal(launch) if launch.terminal else pipes.open(launch.stdin)
        group = groups.create(launch.execution_id) if groups is not None else None
        if groups is not None and group is not None:
            with groups.inside(group):
                popen = _popen(launch, pipes.ends)
        else:
            popen = _popen(launch, pipes.ends)
        pidfd = os.pidfd_open(popen.pid)
        _reset_oom_score(popen.pid)
        spawned = Spawned(launch.execution_id, popen, pidfd, stdin, outputs, group)
        pipes.ours.clear()
        group = popen = None
        return spawned
    except OSError as error:
        raise _start_error(error, launch) from None
    except subprocess.SubprocessError:
        raise AgentError("internal", "the command could not take its terminal") from None
    except ValueError as error:  # zero bytes or lone surrogates in arguments or environment
        raise AgentError("invalid_argument", f"the command cannot be started: {error}") from None
    finally:
        pipes.close()
        if popen is not None:  # it runs, but cannot be followed
            popen.kill()
            popen.wait()
        if groups is not None and group is not None:
            groups.discard(group)


class _Pipes:
    """The descriptors of one start: ours are handed on if all goes well, theirs are closed in any case."""

    def __init__(self) -> None:
        self.ours: list[int] = []
        self.theirs: list[int] = []
        self.ends = (-1, -1, -1)
        """Stdin, stdout and stderr of the command."""

    def open(self, stdin: bool) -> tuple[int | None, tuple[tuple[str, int], ...]]:
        """Three pipes, or two and nothing to read; answers our ends."""
        ours_in: int | None = None
        if stdin:
            child_in, ours_in = os.pipe2(os.O_CLOEXEC)
            self.ours.append(ours_in)
        else:
            child_in = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.theirs.append(child_in)
        stdout, child_out = os.pipe2(os.O_CLOEXEC)
        self.ours.append(stdout)
        self.theirs.append(child_out)
        stderr, child_err = os.pipe2(os.O_CLOEXEC)
        self.ours.append(stderr)
        self.theirs.append(child_err)
        self._finish(child_in, child_out, child_err)
        return ours_in, (("stdout", stdout), ("stderr", stderr))

    def open_terminal(self, launch: Launch) -> tuple[int | None, tuple[tuple[str, int], ...]]:
        """One terminal for everything; our end is there twice, to be read and to be written."""
        assert launch.terminal is not None  # noqa: S101
        ours, theirs = open_terminal(launch.terminal, launch.user)
        self.ours.append(ours)
        self.theirs.append(theirs)
        writing = os.dup(ours)
        self.ours.append(writing)
        self._finish(theirs, theirs, theirs)
        return writing, (("pty", ours),)

    def close(self) -> None:
        """Close what nobody has taken."""
        for descriptor in (*self.ours, *self.theirs):
            os.close(descriptor)

    def _finish(self, *ends: int) -> None:
        for descriptor in self.ours:
            os.set_blocking(descriptor, False)
        self.ends = (ends[0], ends[1], ends[2])


def _take_terminal() -> None:
    """Runs in the child just before the exec; see the module."""
    take_control(0)


def _popen(launch: Launch, ends: tuple[int, int, int]) -> subprocess.Popen[bytes]:
    user, group, extra = _identity(launch.user)
    return subprocess.Popen(
        list(launch.arguments),
        stdin=ends[0],
        stdout=ends[1],
        stderr=ends[2],
        cwd=launch.cwd,
        env=dict(launch.environment),
        user=user,
        group=group,
        extra_groups=extra,
        start_new_session=True,
        umask=0o022,
        preexec_fn=None if launch.terminal is None else _take_terminal,
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
