"""Everybody a command has brought into being: found, and signalled together.

Below ``spawning`` and ``processes``. Every command leads a session of its own; where the guest has cgroups
(version 2, Linux 5.14 or newer for ``cgroup.kill``) it also has a group of its own, which no descendant can
leave without root. A kill by group is complete and costs one write. Without groups the sessions and the
tree of parents are searched in ``/proc``, and only a daemon that has detached completely (new session,
parents gone) is out of reach.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from contextlib import suppress

_MAX_KILL_ROUNDS = 16
_RETRIES = 16


class CommandGroups:
    """The directory below which each command gets its cgroup. Used from the spawning threads and the loop.

    A group whose processes outlive their command (a server left running) is removed later, when another
    command ends; there is no timer for it.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lingering: deque[str] = deque()

    @classmethod
    def open(cls, root: str) -> CommandGroups | None:
        """Use (and create) this directory, or None where the kernel does not offer what is needed."""
        try:
            os.makedirs(root, exist_ok=True)
        except OSError:
            return None
        if not (os.access(f"{root}/cgroup.kill", os.W_OK) and os.access(f"{root}/cgroup.procs", os.W_OK)):
            with suppress(OSError):
                os.rmdir(root)
            return None
        groups = cls(root)
        with suppress(OSError):
            # Left by an agent that died: what still runs in them is kept, the empty ones go.
            groups._lingering.extend(entry.path for entry in os.scandir(root) if entry.is_dir())
        return groups

    def create(self, name: str) -> str:
        """A new group; answers its directory. Raises OSError."""
        path = f"{self._root}/{name}"
        os.mkdir(path, 0o755)
        return path

    def kill(self, group: str) -> None:
        """SIGKILL to every process of the group, new ones included."""
        with suppress(OSError), open(f"{group}/cgroup.kill", "wb", buffering=0) as file:
            file.write(b"1")

    def discard(self, group: str) -> None:
        """The command has ended: remove its group now, or once the last of its processes is gone."""
        self._lingering.append(group)
        for _ in range(min(_RETRIES, len(self._lingering))):
            path = self._lingering.popleft()
            try:
                os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError:
                self._lingering.append(path)

    def statistics(self) -> dict[str, int]:
        """Groups that could not be removed yet."""
        return {"lingering": len(self._lingering)}


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
