"""One QEMU: started behind its fence, spoken to by QMP, ended together with everything that is its own.

`QemuVm.create` takes a place (a slot with namespace, tap, cgroup and overlay), makes one when it is given none, and
starts the process in it; `load` then gives it a golden's state. `destroy` undoes all of it from the owner record
alone, so it serves a half-made VM, a finished one and, through `places.destroy_owner`, one that an earlier run of
the node left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qemu.qmp import QMPClient, QMPError

from greenroom.errors import GreenroomError, RuntimeFailure
from greenroom.runtime import guestclient, namespaces, places
from greenroom.runtime.cgroups import Cgroups, Limits
from greenroom.runtime.command import Descriptors, Machine
from greenroom.runtime.engine import VmInfo
from greenroom.runtime.launcher import Order, launch
from greenroom.runtime.namespaces import Outlets
from greenroom.runtime.places import Place, destroy_owner
from greenroom.runtime.slots import Slot, Slots
from greenroom.wire.tasks import spawn

_log = logging.getLogger(__name__)
_NORMAL = 1024
"""CPU weight of a normal process."""


class Fence:
    """What all VMs of a node share: slots, cgroup hierarchies, limits, and the nftables rules of a new place."""

    def __init__(
        self, slots: Slots, cgroups: Cgroups, limits: Callable[[Machine], Limits], rules: str
    ) -> None:
        self.slots = slots
        self.cgroups = cgroups
        self.limits = limits
        self.rules = rules


class QemuVm:
    """A QEMU process and all that belongs to it. Make one with `create`."""

    def __init__(self, fence: Fence, slot: Slot, qmp_deadline: float) -> None:
        self._fence = fence
        self._slot = slot
        self._deadline = qmp_deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._handle: int | None = None
        self._state_fd: int | None = None
        self._client: QMPClient | None = None
        self._destroying: asyncio.Task[None] | None = None
        self._rules: str | None = fence.rules
        self._giving = asyncio.Lock()
        self.capturing = asyncio.Lock()
        """Held while the VM is captured: one at a time."""
        self.moving = asyncio.Lock()
        """Held while its CPUs are stopped or let go on, and through the pause of a capture."""
        self.ended = asyncio.Event()
        self.state = "new"

    def __repr__(self) -> str:
        return f"<QemuVm {self.name} {self.state} pid={self.pid}>"

    @property
    def name(self) -> str:
        return self._slot.name

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def slot(self) -> Slot:
        """The owner record and what else is on disk of this VM."""
        return self._slot

    @property
    def uid(self) -> int:
        return self._slot.owner.uid

    @property
    def directory(self) -> Path:
        """The slot's directory, which only root can enter."""
        return self._slot.directory

    @classmethod
    async def create(
        cls,
        fence: Fence,
        machine: Machine,
        overlay_template: Path,
        command: Callable[[Descriptors], list[str]],
        *,
        ram: int,
        backing: tuple[int, ...],
        state: int | None,
        boot: tuple[int, int] | None = None,
        qmp_deadline: float,
        place: Place | None = None,
        hurry: bool = False,
    ) -> QemuVm:
        """Make a VM's process and connect to its QMP socket. The descriptors given stay the caller's.

        A `place` made ahead is the VM's from the call on. With `hurry` the process has a normal one's weight until
        `slow_down`: no guest runs in it yet, and somebody waits for it. Raises RuntimeFailure after everything
        that was made has been removed again.
        """
        slot = fence.slots.take() if place is None else place.slot
        vm = cls(fence, slot, qmp_deadline)
        launching = spawn(
            asyncio.to_thread(
                vm._launch, machine, overlay_template, command, ram, backing, state, boot, place, hurry
            ),
            f"launch {vm.name}",
        )
        try:
            await asyncio.shield(launching)
            vm._watch()
            await vm._connect_qmp()
        except BaseException as error:
            # The thread cannot be interrupted: what it still makes must exist before it can be removed.
            await asyncio.wait({launching})
            await asyncio.shield(vm.destroy())
            if isinstance(error, GreenroomError | asyncio.CancelledError):
                raise
            raise RuntimeFailure(f"a VM could not be started: {error}") from error
        vm.state = "prelaunched"
        return vm

    def _launch(
        self,
        machine: Machine,
        overlay_template: Path,
        command: Callable[[Descriptors], list[str]],
        ram: int,
        backing: tuple[int, ...],
        state: int | None,
        boot: tuple[int, int] | None,
        place: Place | None,
        hurry: bool,
    ) -> None:
        """The blocking part of `create`, in a worker thread."""
        owner, fence = self._slot.owner, self._fence
        if place is None:
            place = places.make(
                fence.slots,
                fence.cgroups,
                fence.limits,
                machine,
                overlay_template,
                fence.rules,
                self._slot,
            )
        with contextlib.ExitStack() as stack:
            stack.callback(place.close)
            if hurry:
                fence.cgroups.weigh(owner.cgroup, _NORMAL)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            stack.callback(listener.close)
            with _short_path(self._slot.directory) as short:
                listener.bind(f"{short}/qmp")
            os.chmod(self._slot.directory / "qmp", 0o600)
            listener.listen(4)
            log = os.open(self._slot.directory / "qemu.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, log)
            self._handle = place.take_handle()
            self._process = launch(
                Order(
                    command=command,
                    fds=Descriptors(
                        ram=ram,
                        qmp=listener.fileno(),
                        tap=place.tap,
                        overlay=place.overlay,
                        backing=backing,
                        state=state,
                        boot=boot,
                    ),
                    uid=owner.uid,
                    handle=self._handle,
                    cgroup_files=fence.cgroups.join_files(owner.cgroup),
                    disk_mib=machine.size.disk_mib,
                    log=log,
                )
            )
            self._pid = self._process.pid
            self._pidfd = os.pidfd_open(self._pid)
            self._state_fd = state

    @classmethod
    async def adopt(cls, fence: Fence, slot: Slot, qmp_deadline: float) -> QemuVm | None:
        """Take over the VM of a slot that an earlier process made; None when it is dead or does not answer."""
        pids = fence.cgroups.pids(slot.owner.cgroup)
        if len(pids) != 1:
            return None
        vm = cls(fence, slot, qmp_deadline)
        try:
            vm._pid = pids.pop()
            vm._pidfd = os.pidfd_open(vm._pid)
            vm._handle = namespaces.open_handle(slot.owner.netns)
            # An earlier run made its rules, perhaps by other settings: whatever is wanted next is loaded.
            vm._rules = None
            vm._watch()
            await vm._connect_qmp()
            vm.state = "running" if (await vm.execute("query-status"))["running"] else "paused"
        except (OSError, GreenroomError) as error:
            _log.warning("VM %s cannot be adopted: %s", slot.name, error)
            await vm.detach()
            return None
        return vm

    def _watch(self) -> None:
        assert self._pidfd is not None  # noqa: S101
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        self._unwatch()
        if self._process is not None:
            self._process.poll()
        if self.state not in ("stopping", "stopped"):
            _log.warning("VM %s ended by itself: %s", self.name, self.last_words())
            self.state = "ended"
        self.ended.set()

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    async def _connect_qmp(self) -> None:
        client = QMPClient(self.name)
        with _short_path(self._slot.directory) as short:
            try:
                async with asyncio.timeout(self._deadline):
                    await client.connect(f"{short}/qmp")
            except (QMPError, OSError, TimeoutError) as error:
                raise RuntimeFailure(f"a VM's QEMU does not answer: {self.last_words() or error}") from error
        self._client = client

    def last_words(self) -> str:
        """The end of QEMU's error output, for logs and error texts of operators."""
        try:
            return (self._slot.directory / "qemu.log").read_text(errors="replace").strip()[-400:]
        except OSError:
            return ""

    async def execute(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run one QMP command. Raises RuntimeFailure when it fails or takes too long."""
        if self._client is None:
            raise RuntimeFailure("the VM has no QMP connection any more")
        try:
            async with asyncio.timeout(self._deadline):
                return await self._client.execute(command, arguments)
        except (QMPError, OSError, TimeoutError) as error:
            raise RuntimeFailure(f"QMP {command} failed: {str(error) or type(error).__name__}") from error

    async def give(self, name: str, fd: int) -> None:
        """Hand a descriptor to QEMU under a name."""
        async with self._giving:
            self._send(fd)
            await self.execute("getfd", {"fdname": name})

    async def give_to_set(self, number: int, fd: int) -> None:
        """Hand a descriptor to QEMU as one of the set `number`, for a file name `/dev/fdset/<number>`."""
        async with self._giving:
            self._send(fd)
            await self.execute("add-fd", {"fdset-id": number})

    def _send(self, fd: int) -> None:
        """Send a descriptor beside the QMP stream, where the command that follows finds it.

        By a socket of our own over the same connection: the one that uvloop shows cannot pass any.
        """
        writer = None if self._client is None else self._client._writer
        if writer is None:
            raise RuntimeFailure("the VM has no QMP connection any more")
        shown = writer.transport.get_extra_info("socket")
        try:
            with socket.fromfd(shown.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as own:
                # White space between two messages of JSON, to carry it.
                socket.send_fds(own, [b" "], [fd])
        except OSError as error:
            raise RuntimeFailure(f"a VM's QEMU takes no descriptor: {error.strerror}") from error

    def slow_down(self, machine: Machine) -> None:
        """Give the process the weight of a VM, before a guest runs in it."""
        self._fence.cgroups.weigh(self._slot.owner.cgroup, self._fence.limits(machine).cpu_shares)

    async def load(self) -> None:
        """Load the device state that the VM was created with; it stands paused then. Works once.

        Raises RuntimeFailure when the state does not fit or QEMU has died.
        """
        if self._state_fd is None:
            raise RuntimeFailure("the VM has no state to load")
        fd, self._state_fd = self._state_fd, None
        await self.execute("migrate-incoming", {"uri": f"fd:{fd}"})
        await self.migrated(self._deadline)
        self.state = "paused"

    async def prepare_load(self) -> None:
        """What can be done for `load` before its time."""
        capabilities = [{"capability": "x-ignore-shared", "state": True}]
        await self.execute("migrate-set-capabilities", {"capabilities": capabilities})

    async def migrated(self, deadline: float) -> None:
        """Wait until the migration (either way) is complete. Raises RuntimeFailure when it fails."""
        end = asyncio.get_running_loop().time() + deadline
        pause = 0.002
        while True:
            info = await self.execute("query-migrate")
            status = info.get("status")
            if status == "completed":
                return
            if status in ("failed", "cancelled") or self.ended.is_set():
                raise RuntimeFailure(
                    f"loading the snapshot failed: {info.get('error-desc') or self.last_words()}"
                )
            if asyncio.get_running_loop().time() > end:
                raise RuntimeFailure("loading the snapshot takes too long")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    async def console(self) -> str:
        """The last 64 KiB that the guest wrote to its serial console."""
        return str(await self.execute("ringbuf-read", {"device": "console", "size": 65536, "format": "utf8"}))

    async def connect(self, port: int, deadline: float = 10.0) -> socket.socket:
        """See `engine.Vm.connect`."""
        if self._handle is None:
            raise ConnectionRefusedError("the VM is gone")
        sock = namespaces.open_socket(self._handle)
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(deadline):
                await loop.sock_connect(sock, (namespaces.GUEST_ADDRESS, port))
        except BaseException:
            namespaces.reset_on_close(sock)
            sock.close()
            raise
        return sock

    async def restrict(self, rules: str) -> None:
        """Load nftables rules into the VM's namespace, unless they are those it has. Raises RuntimeFailure."""
        if rules == self._rules:
            return
        self._rules = None
        try:
            await asyncio.to_thread(namespaces.change_rules, self._slot.owner.netns, rules)
        except OSError as error:
            raise RuntimeFailure(f"the network rules of a VM could not be loaded: {error}") from error
        self._rules = rules

    def open_outlets(self) -> Outlets:
        """New sockets at which the guest's connections end. Raises RuntimeFailure."""
        if self._handle is None:
            raise RuntimeFailure("the VM is gone")
        try:
            return namespaces.open_outlets(self._handle)
        except OSError as error:
            raise RuntimeFailure(f"the way out of a VM could not be opened: {error}") from error

    async def connect_inside(self, port: int) -> socket.socket:
        """See `engine.Vm.connect_inside`."""
        return await guestclient.open_inside(self, port, self._slot.control)

    def describe(self) -> VmInfo:
        """See `engine.Vm.describe`."""
        owner = self._slot.owner
        return VmInfo(name=self.name, state=self.state, pid=self.pid, uid=owner.uid, netns=owner.netns)

    async def detach(self) -> None:
        """Let go of the VM without touching it: it runs on for whoever adopts it."""
        self._unwatch()
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
        await self._disconnect()
        if self._process is not None:
            # It is not ours to wait for any more; init will.
            self._process.returncode = 0

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(QMPError, OSError, EOFError, TimeoutError):
                async with asyncio.timeout(5):
                    await client.disconnect()

    async def destroy(self) -> None:
        """End the process and remove everything of the VM; safe to call twice and at any time."""
        if self._destroying is None:
            self._destroying = spawn(self._destroy(), f"destroy {self.name}")
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        self.state = "stopping"
        self._unwatch()
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
        if self._process is not None and self._process.poll() is None:
            # By its pid first: started a moment ago, it may not have joined the cgroup yet.
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(destroy_owner, self._slot.owner, self._fence.cgroups)
        await self._disconnect()
        self._fence.slots.give_back(self._slot)
        self.state = "stopped"
        self.ended.set()


@contextlib.contextmanager
def _short_path(directory: Path) -> Any:
    """A path to `directory` that fits into a Unix socket's 107 bytes, however long the real one is."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
