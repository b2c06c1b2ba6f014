"""Naming a process so that a signal can never reach another one that was given the same pid later.

A pid alone is no name: the kernel reuses it. `ProcessId` adds the process's start time in ticks since boot
and the id of that boot, both from /proc, and signals go through a pidfd that is opened before the check.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

import msgspec

MARK = "GREENROOM_SUPERVISOR"
"""Environment variable that a supervisor gives to every role and, through it, to the role's children."""


class ProcessId(msgspec.Struct, frozen=True):
    """One process of one boot: pid, start in clock ticks since boot, boot id."""

    pid: int
    ticks: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of the living process `pid`, or None when there is none (a zombie is none)."""
        ticks = _start_ticks(pid)
        return None if ticks is None else cls(pid, ticks, _boot_id())

    @classmethod
    def own(cls) -> ProcessId:
        """This process's identity."""
        own = cls.of(os.getpid())
        if own is None:  # /proc not mounted
            raise OSError("cannot read /proc/self/stat; Greenroom needs /proc")
        return own

    def alive(self) -> bool:
        """Whether exactly this process still runs."""
        return self.boot == _boot_id() and _start_ticks(self.pid) == self.ticks

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False when the process is gone. PermissionError if it is another user's."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True

    def wait_gone(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the end of this process; True when it has ended."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive():
                return True
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            return bool(poller.poll(max(0.0, timeout) * 1000))
        finally:
            os.close(fd)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat_fields(pid: int) -> list[bytes] | None:
    """The fields of /proc/<pid>/stat from the third on; the second, a name, may hold blanks and brackets."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return raw[raw.rindex(b")") + 2 :].split()


def _start_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    if fields is None or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def marked_group(leader: int, mark: str) -> list[ProcessId]:
    """Living processes of the process group `leader` whose environment carries our `mark`.

    A group outlives its leader, and once it is empty its number is free for others; the mark, which is random
    for each supervisor, tells a role's children from strangers.
    """
    found: list[ProcessId] = []
    needle = f"{MARK}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        fields = _stat_fields(int(entry.name))
        if fields is None or int(fields[2]) != leader:
            continue
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0")
            identity = ProcessId.of(int(entry.name))
            if needle in environment and identity is not None:
                found.append(identity)
    return found


def end(process: ProcessId, timeout: float) -> bool:
    """SIGTERM, and SIGKILL when `timeout` seconds have passed; True unless it outlives even that by 5 s."""
    if not process.signal(signal.SIGTERM) or process.wait_gone(timeout):
        return True
    process.signal(signal.SIGKILL)
    return process.wait_gone(5.0)


def kill_group(leader: int, mark: str) -> int:
    """SIGKILL what is left of a role's process group; returns how many processes were hit."""
    hit = 0
    deadline = time.monotonic() + 5.0
    while (members := marked_group(leader, mark)) and time.monotonic() < deadline:
        hit += sum(member.signal(signal.SIGKILL) for member in members)
        for member in members:
            member.wait_gone(1.0)
    return hit


def describe_exit(status: int) -> str:
    """A `Popen.returncode` in plain words."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


CLEAN_EXIT = describe_exit(0)
"""How the end of a process that ended as it should is described."""
