"""Starting QEMU behind its fence: by the chain of small tools or, where that is asked for, by forking.

Starting a QEMU costs about 40 ms of CPU, of which some 12 go into the dynamic linker: 50 libraries, 250,000
relocations, and the 4 MB that those write are then private to every VM. `Chain`, the default, pays that for each
VM, and each has an address layout of its own. `ForkServer` pays it once: a QEMU that stops before its main() (see
`launcher.c`) forks each VM, which fences itself in and goes on as QEMU. All VMs of one server share its layout,
which weakens the address randomisation between them, so it is only used where `[vm] launcher` says `fork`, and
the server is renewed after every so many.

The server is a process like a VM's: it has a slot and a cgroup, so a sweep finds it. It ends with its socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from greenroom.errors import RuntimeFailure, SetupError
from greenroom.images.commands import run
from greenroom.runtime import namespaces
from greenroom.runtime.cgroups import Cgroups, Limits
from greenroom.runtime.command import DESCRIPTORS, Descriptors, fenced, largest_file
from greenroom.runtime.places import destroy_owner
from greenroom.runtime.slots import Slot, Slots

_SOURCE = Path(__file__).with_name("launcher.c")
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_FIRST_FD = 100
_ANSWER_DEADLINE = 20.0
_LIMITS = Limits(memory=256 << 20, cpus=2.0, pids=256, cpu_shares=1024)
"""For the server alone: a child joins its own cgroup before anything else."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A QEMU to start. All descriptors are the caller's and stay its own."""

    command: Callable[[Descriptors], list[str]]
    """QEMU's arguments, given the descriptors as QEMU will see them."""
    fds: Descriptors
    uid: int
    netns: str
    handle: int
    """Descriptor of the namespace called `netns`."""
    cgroup_files: Sequence[Path]
    disk_mib: int
    log: int


class Launched(NamedTuple):
    """A QEMU that was started; whoever gets this closes `pidfd`."""

    pid: int
    pidfd: int
    fds: Descriptors
    """As QEMU sees them."""
    child: subprocess.Popen[bytes] | None
    """Set when it is this process's own child, which must wait for it."""


class Launcher(Protocol):
    """Starts QEMUs, in the cgroup before anything of them runs. Thread-safe; every call blocks."""

    def launch(self, order: Order) -> Launched:
        """Raises RuntimeFailure when it does not come up, OSError when something is not there."""

    def close(self) -> None:
        """Give back what the launcher itself holds. What it started goes on."""


class Chain:
    """Execs QEMU behind `sh` and `setpriv` (see `command.fenced`), from a thread that is in its namespace already.

    The child inherits the namespace of the thread that starts it, which spares one more program.
    """

    def launch(self, order: Order) -> Launched:
        argv = fenced(
            order.command(order.fds),
            uid=order.uid,
            cgroup_files=order.cgroup_files,
            disk_mib=order.disk_mib,
        )

        def start() -> subprocess.Popen[bytes]:
            namespaces.enter(order.handle)
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=order.log,
                stderr=order.log,
                pass_fds=order.fds.all(),
                start_new_session=True,
                cwd="/",
                env=_ENVIRONMENT,
            )

        child = namespaces.in_thread(start)
        return Launched(child.pid, os.pidfd_open(child.pid), order.fds, child)

    def close(self) -> None:
        """Nothing is held."""


def library(cache: Path) -> Path:
    """The compiled `launcher.c`, made when the cache lacks it. Raises SetupError without a C compiler."""
    compiler = next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None)
    if compiler is None:
        raise SetupError("no C compiler is installed; run: apt-get install --no-install-recommends gcc")
    flags = [
        "-O2",
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-fno-builtin",
        "-w",
        "-Wl,-z,relro,-z,now,-z,noexecstack",
    ]
    digest = hashlib.sha256(" ".join(flags).encode() + _SOURCE.read_bytes()).hexdigest()[:20]
    path = cache / f"launcher-{os.uname().machine}-{digest}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = cache / f".launcher-{os.getpid()}-{threading.get_ident()}.so"
        run([compiler, *flags, "-o", str(scratch), str(_SOURCE)], deadline=60)
        scratch.chmod(0o555)
        scratch.rename(path)
    return path


class ForkServer:
    """Forks QEMUs from one that is linked already."""

    def __init__(
        self, slots: Slots, cgroups: Cgroups, binary: str, preload: Path, *, forks: int, huge_pages: bool
    ) -> None:
        """`forks` are the VMs of one server, before it is renewed for another address layout."""
        self._slots = slots
        self._cgroups = cgroups
        self._binary = binary
        self._preload = preload
        self._forks = forks
        self._huge_pages = huge_pages
        self._lock = threading.Lock()
        self._slot: Slot | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._left = 0
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def launch(self, order: Order) -> Launched:
        fds = order.fds.placed_from(_FIRST_FD)
        arguments = b"".join(word.encode() + b"\0" for word in order.command(fds))
        with contextlib.ExitStack() as stack:
            joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in order.cgroup_files]
            for fd in joins:
                stack.callback(os.close, fd)
            inherited = order.fds.all()
            head = struct.pack(
                "=6IQ",
                order.uid, len(joins), len(inherited), DESCRIPTORS, not self._huge_pages, 0,
                largest_file(order.disk_mib),
            )  # fmt: skip
            handed = [self._null, order.log, order.handle, *joins, *inherited]
            with self._lock:
                pid, pidfd = self._ask(head + arguments, handed)
        return Launched(pid, pidfd, fds, None)

    def _ask(self, packet: bytes, handed: list[int]) -> tuple[int, int]:
        """Send an order; begin anew once, should the server have died since the last one."""
        for attempt in (1, 2):
            if self._left <= 0:
                self._end()
                self._begin()
            assert self._socket is not None  # noqa: S101
            self._left -= 1
            try:
                socket.send_fds(self._socket, [packet], handed)
                raw, fds, _, _ = socket.recv_fds(self._socket, 4, 1)
            except OSError as error:
                self._left = 0
                if attempt == 2:
                    raise RuntimeFailure(f"the launcher does not answer: {error}") from error
                continue
            if fds:
                return struct.unpack("=i", raw)[0], fds[0]
            self._left = 0
            if raw:
                raise RuntimeFailure("the launcher could not fork a VM")
        raise RuntimeFailure('the launcher ends at once; set [vm] launcher = "exec" and look into its log')

    def _begin(self) -> None:
        self._slot = slot = self._slots.take()
        owner = slot.owner
        try:
            self._cgroups.create(owner.cgroup, _LIMITS)
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with (
                its,
                open(self._preload, "rb") as preload,
                open(slot.directory / "launcher.log", "wb") as log,
            ):
                ours.settimeout(_ANSWER_DEADLINE)
                self._socket = ours
                joins = " && ".join(
                    f"echo $$ > {shlex.quote(str(path))}" for path in self._cgroups.join_files(owner.cgroup)
                )
                self._process = subprocess.Popen(
                    [
                        "/bin/sh", "-c", f'{joins} && exec "$@"', "greenroom-launcher",
                        # By descriptor, because the loader would split a path at spaces and colons.
                        "env", f"LD_PRELOAD=/proc/self/fd/{preload.fileno()}",
                        f"GREENROOM_LAUNCHER={its.fileno()}", self._binary,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(preload.fileno(), its.fileno()),
                    start_new_session=True,
                    cwd="/",
                    env=_ENVIRONMENT,
                )  # fmt: skip
        except BaseException:
            self._end()
            raise
        self._left = self._forks

    def _end(self) -> None:
        """End the server, if there is one, and everything that is its own. VMs that it forked go on."""
        link, self._socket = self._socket, None
        process, self._process = self._process, None
        slot, self._slot = self._slot, None
        self._left = 0
        if link is not None:
            link.close()
        if slot is None:
            return
        # It ends with its socket. What it forked last may still be on the way into a cgroup of its own.
        end = time.monotonic() + _ANSWER_DEADLINE
        while self._cgroups.pids(slot.owner.cgroup) and time.monotonic() < end:
            if process is not None:
                process.poll()
            time.sleep(0.005)
        destroy_owner(slot.owner, self._cgroups)
        if process is not None:
            process.wait()
        self._slots.give_back(slot)

    def close(self) -> None:
        with self._lock:
            self._end()
            null, self._null = self._null, -1
            if null >= 0:
                os.close(null)


def choose(
    wanted: str, cache: Path, slots: Slots, cgroups: Cgroups, binary: str, *, forks: int, huge_pages: bool
) -> Launcher:
    """The launcher for `wanted` (`exec` or `fork`). Blocks while it compiles, once for a cache.

    Raises SetupError when `fork` cannot be had.
    """
    if wanted == "exec":
        return Chain()
    return ForkServer(slots, cgroups, binary, library(cache), forks=forks, huge_pages=huge_pages)
