"""QEMU's command line, and the chain of small tools that fences it in before it is exec'ed.

The chain begins in the slot's network namespace (see `launcher.launch`). Its links, C programs of a Debian base
system, in the order in which privileges are given up:

1. `sh`: as root, joins the slot's cgroups, so that nothing of the VM ever runs outside them, and bounds what
   follows: no core dumps, few descriptors, files no larger than the disk may become;
2. `setpriv`: the slot's own uid and gid, no groups, no capabilities, `no_new_privs`; then QEMU itself, which
   locks itself in further by seccomp.

QEMU gets everything by inherited descriptor and needs no path in the state directory (which is 0700).
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from greenroom.runtime.namespaces import GUEST_MAC
from greenroom.wire.messages import Size

SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_OVERLAY_SLACK = 256 << 20
DESCRIPTORS = 256
"""Open files of one QEMU."""
GOLDEN_DISKS = 2
"""Disks under a VM's own layers: the image's and what its golden's boot wrote over it."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What golden and clones must have in common: the snapshot holds the state of just these devices."""

    binary: str
    accelerator: str
    cpu_model: str
    size: Size
    tcg_cache_mib: int = 256
    """Bound of the translation cache, where there is one; QEMU's own default is 1 GiB."""


class Descriptors(msgspec.Struct, frozen=True, kw_only=True):
    """The open files a QEMU inherits."""

    ram: int
    qmp: int
    tap: int
    overlay: int
    backing: tuple[int, ...]
    """Read-only disks under the overlay, the lowest first; the first is raw, the others qcow2."""
    state: int | None = None
    """Device state to read from (a clone)."""
    boot: tuple[int, int] | None = None
    """Kernel and initramfs, for the one cold boot of a golden: the cache may lie where its uid cannot go."""

    def all(self) -> tuple[int, ...]:
        rest = () if self.state is None else (self.state,)
        return (self.ram, self.qmp, self.tap, self.overlay, *self.backing, *rest, *(self.boot or ()))


def largest_file(disk_mib: int) -> int:
    """Bytes that a VM's overlay may grow to: its disk, once over, and its tables."""
    return (disk_mib << 20) + _OVERLAY_SLACK


def digest(machine: Machine) -> str:
    """Stands for everything on the command line that a saved state may depend on."""
    # Any change of the command line may be one of devices, which the state would not fit any more.
    nowhere = Descriptors(ram=0, qmp=0, tap=0, overlay=0, backing=(0, 0))
    return hashlib.sha256("\0".join(qemu(machine, nowhere)).encode()).hexdigest()[:20]


def qemu(
    machine: Machine,
    fds: Descriptors,
    *,
    own_ram: bool = False,
    bare_state: bool = False,
    paused: bool = False,
) -> list[str]:
    """QEMU's arguments. With `fds.boot` (kernel and initramfs) it starts from nothing and its RAM is
    shared, so that it can be kept, at once or, with `paused`, when it is told to; without, it waits paused for a
    golden's state over private RAM.

    With `own_ram`, the file of the RAM is the VM's alone and is written directly: a private map of it would hold
    every page that the guest writes twice. With `bare_state` it takes a snapshot's state, which is that of the
    devices without a description of the machine before it.
    """
    size = machine.size
    argv = [
        machine.binary,
        "-nodefaults",
        "-no-user-config",
        # A guest that reboots would come up as a machine that nobody has introduced: let it end instead.
        "-no-reboot",
        "-display", "none",
        "-machine", "pc,memory-backend=ram,usb=off,suppress-vmdesc=on",
        "-accel", "kvm" if machine.accelerator == "kvm" else f"tcg,tb-size={machine.tcg_cache_mib}",
        "-cpu", machine.cpu_model,
        "-smp", str(size.cpus),
        "-m", f"{size.memory_mib}M",
        "-object",
        f"memory-backend-file,id=ram,size={size.memory_mib}M,mem-path=/proc/self/fd/{fds.ram},"
        f"share={'on' if fds.boot or own_ram else 'off'}",
        "-chardev", f"socket,id=qmp,fd={fds.qmp},server=on,wait=off",
        "-mon", "chardev=qmp,mode=control",
        "-chardev", "ringbuf,id=console,size=65536",
        "-device", "isa-serial,chardev=console",
        "-rtc", "base=utc,clock=host",
        "-sandbox", SANDBOX,
    ]  # fmt: skip
    for number, fd in enumerate((*fds.backing, fds.overlay), start=1):
        argv += ["-add-fd", f"fd={fd},set={number}"]
    below = ""
    for number in range(1, len(fds.backing) + 1):
        kind = "raw" if number == 1 else "qcow2"
        argv += _disk(number, kind, below, read_only=True)
        below = f"disk{number}"
    argv += _disk(len(fds.backing) + 1, "qcow2", below, read_only=False)
    argv += [
        "-device", f"virtio-blk-pci,drive=disk{len(fds.backing) + 1}",
        "-netdev", f"tap,id=net,fd={fds.tap}",
        "-device", f"virtio-net-pci,netdev=net,mac={GUEST_MAC},romfile=",
    ]  # fmt: skip
    if fds.boot:
        kernel, initramfs = (f"/proc/self/fd/{fd}" for fd in fds.boot)
        argv += [
            "-kernel",
            kernel,
            "-initrd",
            initramfs,
            "-append",
            "console=ttyS0 quiet panic=1 net.ifnames=0",
        ]
        if paused:
            argv.append("-S")
    else:
        # A clone without -kernel loads the snapshot just as well and spares the 13 MB copy of the image.
        argv += ["-S", "-incoming", "defer"]
        if bare_state:
            argv += ["-global", "migration.send-configuration=off"]
    return argv


def _disk(number: int, kind: str, below: str, *, read_only: bool) -> list[str]:
    mode = "on" if read_only else "off"
    argv = [
        "-blockdev",
        f"driver=file,node-name=file{number},filename=/dev/fdset/{number},locking=off,"
        f"read-only={mode},auto-read-only=off,cache.direct=off",
    ]
    backing = f",backing={below}" if below else ""
    argv += ["-blockdev", f"driver={kind},node-name=disk{number},file=file{number},read-only={mode}{backing}"]
    return argv


def fenced(argv: Sequence[str], *, uid: int, cgroup_files: Sequence[Path], disk_mib: int) -> list[str]:
    """`argv` behind the chain that takes its privileges away."""
    steps = [f"echo $$ > {shlex.quote(str(path))}" for path in cgroup_files]
    # `ulimit -f` counts in blocks of 512 bytes (POSIX).
    steps += ["ulimit -c 0", f"ulimit -n {DESCRIPTORS}", f"ulimit -f {largest_file(disk_mib) // 512}"]
    return [
        "/bin/sh", "-c", f'{" && ".join(steps)} && exec "$@"', "greenroom-vm",
        "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--inh-caps=-all",
        "--bounding-set=-all", "--",
        *argv,
    ]  # fmt: skip
