"""Everybody a command has brought into being: found, and signalled together.

Below ``spawning`` and ``processes``. Every command leads a session of its own; where the guest has cgroups
(version 2, Linux 5.14 or newer for ``cgroup.kill``) it also has a group of its own, which no descendant can
leave without root. A kill by group is complete and costs one write. Without groups the sessions and the
tree of parents are searched in ``/proc``, and only a daemon that has detached completely (new session,
parents gone) is out of reach.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .errors import AgentError

_MAX_KILL_ROUNDS = 16
_RETRIES = 16
_MYSELF = b"0"

_log = logging.getLogger(__name__)


class CommandGroups:
    """The directory below which each command gets its cgroup. Used from the spawning threads and the loop.

    A command is born inside its group: the agent itself enters it, forks, and returns. Moving the child
    afterwards would leave a moment in which it can fork and get away, and moving itself before its exec would
    mean to run Python in the child, which costs more than all the rest of a start (1 ms; 15 ms under TCG).

    A group whose processes outlive their command (a server left running) is removed later, when another
    command ends; there is no timer for it.
    """

    def __init__(self, root: str, home: int) -> None:
        self._root = root
        self._home = home
        """The ``cgroup.procs`` of the agent's own group, open for writing."""
        self._moving = threading.Lock()
        self._lingering: deque[str] = deque()

    @classmethod
    def open(cls, root: str) -> CommandGroups | None:
        """Use (and create) this directory, or None where the kernel does not offer what is needed."""
        try:
            os.makedirs(root, exist_ok=True)
        except OSError:
            return None
        try:
            groups = cls(root, os.open(f"{_own_group(root)}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
            if not os.access(f"{root}/cgroup.kill", os.W_OK):
                raise FileNotFoundError(errno.ENOENT, "this kernel cannot kill groups", root)
            groups._try_it_out()
        except (OSError, AgentError) as error:
            _log.info("no cgroups for commands: %s", error)
            with suppress(OSError):
                os.rmdir(root)
            return None
        with suppress(OSError):
            # Left by an agent that died: what still runs in them is kept, the empty ones go.
            groups._lingering.extend(entry.path for entry in os.scandir(root) if entry.is_dir())
        return groups

    def create(self, name: str) -> str | None:
        """A new group; answers its directory.

        None where root of the guest has taken the groups away: then commands run without, and a kill
        searches for them.
        """
        path = f"{self._root}/{name}"
        try:
            os.mkdir(path, 0o755)
        except OSError as error:
            _log.info("no cgroup for a command: %s", error)
            return None
        return path

    @contextmanager
    def inside(self, group: str) -> Iterator[None]:
        """The agent is in the group, and so is what it forks. Raises ``internal`` if it cannot get in or out."""
        with self._moving:
            try:
                _enter(f"{group}/cgroup.procs")
            except OSError as error:
                raise _immobile(error) from None
            try:
                yield
            finally:
                try:
                    os.write(self._home, _MYSELF)
                except OSError as error:
                    raise _immobile(error) from None

    def kill(self, group: str) -> None:
        """SIGKILL to every process of the group, new ones included."""
        with suppress(OSError), open(f"{group}/cgroup.kill", "wb", buffering=0) as file:
            file.write(b"1")

    def discard(self, group: str) -> None:
        """The command has ended: remove its group now, or once the last of its processes is gone."""
        self._lingering.append(group)
        for _ in range(min(_RETRIES, len(self._lingering))):
            path = self._lingering.popleft()
            if not _removed(path):
                self._lingering.append(path)

    def _try_it_out(self) -> None:
        probe = self.create(f"probe-{os.getpid()}")
        if probe is None:
            raise PermissionError(errno.EACCES, "no group can be made", self._root)
        try:
            with self.inside(probe):
                pass
        finally:
            os.rmdir(probe)

    def statistics(self) -> dict[str, int]:
        """Groups that could not be removed yet."""
        return {"lingering": len(self._lingering)}


def _immobile(error: OSError) -> AgentError:
    return AgentError("internal", f"the command's cgroup cannot be entered or left: {error.strerror}")


def _enter(procs: str) -> None:
    descriptor = os.open(procs, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, _MYSELF)
    finally:
        os.close(descriptor)


def _own_group(root: str) -> str:
    """The directory of the group this process is in (cgroups(7)), in the mount that holds ``root``.

    Raises OSError where there is none.
    """
    own = ""
    with open("/proc/self/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                own = line[3:].rstrip("\n")
    with open("/proc/self/mounts") as file:
        for fields in (line.split(" ") for line in file):
            if fields[2] == "cgroup2" and root.startswith(fields[1] + "/") and own:
                return fields[1] + own.rstrip("/")
    raise FileNotFoundError(errno.ENOENT, "cgroup version 2 is not mounted there", root)


def _removed(group: str) -> bool:
    """Remove a group and the empty ones that its processes made below it; False while somebody is in there."""
    try:
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def signal_session(leader: int, number: signal.Signals) -> None:
    """Signal a command and whatever it has started, as far as it can be told apart.

    SIGTERM goes once to the process group and to the other members of the session. SIGKILL also reaches
    descendants that made sessions of their own, and is repeated until no new process turns up.
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
