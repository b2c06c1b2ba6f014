"""Golden snapshots: boot a template once, warm it up, save it; from then on only restore.

A golden is a directory in the cache: `ram.img` (sparse), `state` (device state), `disk.qcow2` (what the boot
wrote over the image's disk), `golden.json` and `made-of.json`. It depends on everything in `key`: another QEMU or
CPU model cannot load it. `Loaded` is a golden in use: RAM in a sealed memfd, disks open for reading.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from greenroom.errors import RuntimeFailure
from greenroom.images.base import Image
from greenroom.images.commands import run
from greenroom.runtime import guestclient, memory
from greenroom.runtime.command import Descriptors, Machine, qemu
from greenroom.runtime.engine import Golden, Progress
from greenroom.runtime.modes import Choice
from greenroom.runtime.vm import Fence, QemuVm

_log = logging.getLogger(__name__)
_FORMAT = "2"
"""Of the directory; 2 has `made-of.json`."""

WARM_UP = (
    "python3 -c 'import json, subprocess, urllib.request; print(1)' && git --version && curl --version "
    "&& sudo -n true && ls -la / && cat /etc/passwd | grep -c . && ps aux >/dev/null"
)
"""Run once in the golden so that what nearly every sandbox uses is in its page cache already."""


class MadeOf(msgspec.Struct, frozen=True, kw_only=True):
    """What a golden was booted from, for those who meet it later, when something else would be."""

    image: Image
    machine: Machine


def key(image: Image, machine: Machine, version: str) -> str:
    """The name of the golden that these make together."""
    # Any change of the command line may be one of devices, which the snapshot would not fit any more.
    nowhere = Descriptors(ram=0, qmp=0, tap=0, overlay=0, backing=(0, 0))
    parts = (_FORMAT, image.digest, version, WARM_UP, machine.size.name, *qemu(machine, nowhere))
    text = "\0".join(parts)
    return "golden-" + hashlib.sha256(text.encode()).hexdigest()[:20]


def blank_overlay(cache: Path, disk_mib: int) -> Path:
    """A file with the bytes of an empty qcow2 of this size; copying it is 100 times faster than `qemu-img`."""
    path = cache / f"blank-{disk_mib}.qcow2"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = cache / f".blank-{disk_mib}-{os.getpid()}.qcow2"
        run(["qemu-img", "create", "-q", "-f", "qcow2", str(scratch), f"{disk_mib}M"], deadline=60)
        scratch.rename(path)
    return path


async def build(
    target: Path,
    name: str,
    image: Image,
    machine: Machine,
    template: str,
    fence: Fence,
    blank: Path,
    progress: Progress,
    boot_deadline: float,
) -> None:
    """Boot `image`, warm it up and fill `target` with the snapshot. Raises RuntimeFailure saying how far it came."""
    ram = memory.new("greenroom-golden", machine.size.memory_mib << 20)
    disk = os.open(image.disk, os.O_RDONLY | os.O_CLOEXEC)
    boot = (
        os.open(image.kernel, os.O_RDONLY | os.O_CLOEXEC),
        os.open(image.initramfs, os.O_RDONLY | os.O_CLOEXEC),
    )
    state = os.open(target / "state", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o400)
    try:
        progress("booting the golden VM", None)
        vm = await QemuVm.create(
            fence,
            machine,
            blank,
            lambda fds: qemu(machine, fds),
            ram=ram,
            backing=(disk,),
            state=None,
            boot=boot,
            qmp_deadline=60,
        )
        try:
            try:
                await guestclient.wait_ready(vm, boot_deadline)
            except RuntimeFailure as error:
                raise RuntimeFailure(
                    f"{error.message}; its console ends with: {await _last_lines(vm)}"
                ) from error
            progress("warming the golden VM up", None)
            await _warm_up(vm, boot_deadline)
            progress("saving the golden snapshot", None)
            await vm.execute("stop")
            capabilities = [{"capability": "x-ignore-shared", "state": True}]
            await vm.execute("migrate-set-capabilities", {"capabilities": capabilities})
            # Saving takes a descriptor that was handed to the monitor; loading takes an inherited one by number.
            await vm.give("state", state)
            await vm.execute("migrate", {"uri": "fd:state"})
            await vm.migrated(60)
            vm.state = "stopping"
            await vm.execute("quit")
            async with asyncio.timeout(30):
                await vm.ended.wait()
            await asyncio.to_thread(shutil.copyfile, vm.directory / "overlay.qcow2", target / "disk.qcow2")
        finally:
            await vm.destroy()
        resident = await asyncio.to_thread(memory.save, ram, target / "ram.img")
    finally:
        for fd in (ram, disk, state, *boot):
            os.close(fd)
    (target / "disk.qcow2").chmod(0o444)
    golden = Golden(
        digest=name,
        build=secrets.token_hex(8),
        template=template,
        size=machine.size,
        ram_bytes=resident,
        state_bytes=(target / "state").stat().st_size,
    )
    (target / "golden.json").write_bytes(msgspec.json.encode(golden))
    (target / "made-of.json").write_bytes(msgspec.json.encode(MadeOf(image=image, machine=machine)))


async def _last_lines(vm: QemuVm) -> str:
    with contextlib.suppress(RuntimeFailure):
        return " / ".join((await vm.console()).strip().splitlines()[-4:])
    return vm.last_words()


async def _warm_up(vm: QemuVm, deadline: float) -> None:
    """Run the usual programs once and flush the disk. The agent has no token yet, so the calls need none."""
    for user, script in (("user", WARM_UP), ("root", "sync")):
        message = msgspec.json.encode(
            {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", script]}, "stdin": False}
        )
        frame = b"\0" + len(message).to_bytes(4, "big") + message
        authorization = base64.b64encode(f"{user}:".encode()).decode()
        status, stream = await guestclient.request(
            vm,
            "POST",
            "/process.Process/Start",
            frame,
            deadline=deadline,
            headers={"Authorization": f"Basic {authorization}", "Connect-Protocol-Version": "1"},
            content_type="application/connect+json",
        )
        if status != 200 or b'"end"' not in stream:
            raise RuntimeFailure(f"the golden's agent answered {status} to a command and did not run it")


class Source(Protocol):
    """What a VM is restored from: a golden (`Loaded`) or a snapshot (`loading.LoadedSnapshot`)."""

    golden: Golden
    machine: Machine
    mode: Choice
    name: str
    ram: int
    backing: tuple[int, ...]
    bare_state: bool
    """Its state is that of the devices alone."""
    qemu: str
    """The build of QEMU that alone can load the state; empty where the golden's digest says so."""

    def open_state(self) -> int:
        """The device state, opened anew: its offset must not be shared between two restores."""


class Loaded:
    """A golden ready to be restored from. `close` gives its memory back once the last VM is gone."""

    bare_state = False
    qemu = ""

    def __init__(
        self, golden: Golden, directory: Path, image: Image, machine: Machine, holders: Iterable[int] = ()
    ) -> None:
        """`holders` are processes that may hold this golden's RAM already, from an earlier run."""
        self.golden = golden
        self.image = image
        self.machine = machine
        self.mode = Choice(mode="cow", reason="nothing was measured")
        self.name = name = f"{golden.digest}-{golden.build}"
        borrowed = (memory.borrow(pid, name) for pid in holders)
        held = next((fd for fd in borrowed if fd is not None), None)
        self.ram = memory.load(directory / "ram.img", name) if held is None else held
        self.backing: tuple[int, ...] = (
            os.open(image.disk, os.O_RDONLY | os.O_CLOEXEC),
            os.open(directory / "disk.qcow2", os.O_RDONLY | os.O_CLOEXEC),
        )
        # In memory, so that no restore waits for the medium, and not opened by name again: the directory may be
        # built anew while this golden is in use, and the state of another build does not fit this RAM.
        self._state = memory.load(directory / "state", f"{name}-state")

    def open_state(self) -> int:
        """See `Source`."""
        return os.open(f"/proc/self/fd/{self._state}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        for fd in (self.ram, self._state, *self.backing):
            os.close(fd)
