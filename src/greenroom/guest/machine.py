"""The guest's own identity: clock, entropy, machine id, host name. The only code that changes them.

:class:`Machine` does it for real and needs root. :class:`RecordingMachine` is for tests: it writes down
what it was told instead, so that the agent can run on a workstation without touching it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# linux/random.h: _IOW('R', 0x03, int[2]) and _IO('R', 0x07)
_RNDADDENTROPY = 0x40085203
_RNDRESEEDCRNG = 0x5207

_KEPT = "run/greenroom/agent.json"

_log = logging.getLogger(__name__)


class Machine:
    """Changes the machine this process runs on. ``root`` exists so that tests can look at the files."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)

    def add_entropy(self, seed: bytes) -> None:
        """Credit the seed to the kernel's pool and reseed everything that draws from it.

        Two clones of one snapshot hold the same generator state; without this they would produce the same
        "random" numbers.
        """
        descriptor = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
        try:
            header = struct.pack("ii", len(seed) * 8, len(seed))
            fcntl.ioctl(descriptor, _RNDADDENTROPY, header + seed)
            fcntl.ioctl(descriptor, _RNDRESEEDCRNG)
        finally:
            os.close(descriptor)
        random.seed(seed + os.urandom(32))

    def set_machine_id(self, machine_id: str) -> None:
        """Write ``/etc/machine-id``, and D-Bus's copy where there is one that is no link to it."""
        self._name("etc/machine-id", machine_id + "\n")
        copy = self._root / "var/lib/dbus/machine-id"
        if copy.exists() and not copy.is_symlink():
            self._name("var/lib/dbus/machine-id", machine_id + "\n")

    def set_hostname(self, name: str) -> None:
        """Set the kernel's host name and the files that repeat it."""
        self._set_kernel_hostname(name)
        self._name("etc/hostname", name + "\n")
        hosts = self._root / "etc/hosts"
        try:
            lines = hosts.read_text().splitlines()
        except FileNotFoundError:
            lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback"]
        # 127.0.1.1 is where Debian keeps a host's own name.
        kept = [line for line in lines if line.split("#", 1)[0].split()[:1] != ["127.0.1.1"]]
        self._name("etc/hosts", "\n".join([*kept, f"127.0.1.1\t{name}"]) + "\n")

    def keep(self, settings: dict[str, Any]) -> None:
        """Remember the settings until the next boot, readable by root only.

        If the agent dies and init starts it again, it must still ask for the same tokens: an agent without
        tokens would be open to everybody.
        """
        path = self._root / _KEPT
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(_KEPT, json.dumps({"bootId": _boot_id(), "settings": settings}), 0o600)

    def recall(self) -> dict[str, Any]:
        """What :meth:`keep` was last given during this boot; empty when there is nothing."""
        try:
            kept = json.loads((self._root / _KEPT).read_text())
            settings = kept["settings"] if kept["bootId"] == _boot_id() else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("the kept settings cannot be read: %s", type(error).__name__)
            return {}
        return settings if isinstance(settings, dict) else {}

    def now_ns(self) -> int:
        """Wall clock, Unix nanoseconds."""
        return time.clock_gettime_ns(time.CLOCK_REALTIME)

    def set_clock(self, now_ns: int) -> None:
        """Set the wall clock (Unix nanoseconds)."""
        time.clock_settime_ns(time.CLOCK_REALTIME, now_ns)

    def adjust_clock(self, offset_ns: int) -> int:
        """Move the wall clock by an offset; answers the new time (Unix nanoseconds)."""
        self.set_clock(self.now_ns() + offset_ns)
        return self.now_ns()

    def _set_kernel_hostname(self, name: str) -> None:
        socket.sethostname(name)

    def _name(self, relative: str, content: str) -> None:
        """Write one of the files that repeat who this machine is, as well as its disk allows.

        On a full disk what is there is written over, which takes no new block; a file that has none stays away. A
        machine that could not come back for want of a block could not be rid of what fills it, either.
        """
        try:
            self._write(relative, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            try:
                self._overwrite(self._root / relative, content.encode())
            except OSError as second:
                _log.warning("the disk is full: %s stays as it is (%s)", relative, second)

    def _overwrite(self, path: Path, content: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(content)
            file.truncate()

    def _write(self, relative: str, content: str, mode: int = 0o644) -> None:
        """Replace a file at once: a reader sees the old or the new one."""
        path = self._root / relative
        temporary = path.with_name(path.name + ".greenroom")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(file.fileno(), mode)
                file.write(content)
            temporary.replace(path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


class RecordingMachine(Machine):
    """For tests only: changes nothing, appends what it was told to ``<directory>/identity.jsonl``.

    A file ``<directory>/fail`` naming a step ("entropy", "clock", "machineId", "hostname", "settings")
    makes that step raise OSError. Settings are kept below the directory instead of the root. The clock is
    the real one plus an offset of its own.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._offset_ns = 0

    def add_entropy(self, seed: bytes) -> None:
        self._record("entropy", len(seed))

    def set_machine_id(self, machine_id: str) -> None:
        self._record("machineId", machine_id)

    def set_hostname(self, name: str) -> None:
        self._record("hostname", name)

    def keep(self, settings: dict[str, Any]) -> None:
        self._fail_if_told("settings")
        super().keep(settings)

    def now_ns(self) -> int:
        return super().now_ns() + self._offset_ns

    def set_clock(self, now_ns: int) -> None:
        self._record("clock", now_ns)
        self._offset_ns = now_ns - super().now_ns()

    def _record(self, step: str, value: Any) -> None:
        self._fail_if_told(step)
        with (self._directory / "identity.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "value": value}) + "\n")

    def _fail_if_told(self, step: str) -> None:
        with suppress(FileNotFoundError):
            if (self._directory / "fail").read_text().strip() == step:
                raise OSError(f"told to fail at {step}")


def _boot_id() -> str:
    """Differs after every boot, stays through snapshots of memory (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
