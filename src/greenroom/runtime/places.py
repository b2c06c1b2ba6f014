"""A place for a VM: a slot with cgroup, namespace, tap and overlay, everything but the process.

Places can be made ahead (`stock`), because nothing in them depends on what will run there except the sizes of
memory and disk. They are made by system calls, netlink and libraries; no command is forked. The owner record is
on disk first, so `destroy_owner` undoes a half-made place as well as a whole VM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from greenroom.config import VmConfig
from greenroom.runtime import namespaces
from greenroom.runtime.cgroups import Cgroups, Limits
from greenroom.runtime.command import Machine
from greenroom.runtime.slots import Owner, Slot, Slots


class Place:
    """Made by `make`. Its descriptors are its own until `take_handle` and `close`."""

    def __init__(self, slot: Slot, tap: int, handle: int, overlay: int) -> None:
        self.slot = slot
        self.tap = tap
        self.overlay = overlay
        self._handle = handle

    def take_handle(self) -> int:
        """The namespace's descriptor, the caller's from now on."""
        handle, self._handle = self._handle, -1
        return handle

    def close(self) -> None:
        """Close what is still open; what is on the host stays."""
        fds = (self.tap, self.overlay, self._handle)
        self.tap = self.overlay = self._handle = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def limits_of(machine: Machine, settings: VmConfig) -> Limits:
    """What a VM's cgroup allows its QEMU."""
    size = machine.size
    cache = 0 if machine.accelerator == "kvm" else machine.tcg_cache_mib
    return Limits(
        # Twice, because the first VM to touch a page that is a hole in the golden's RAM is charged for that
        # page and for its own copy of it. It happens once for each page of a golden, whoever comes first.
        memory=(2 * size.memory_mib + settings.memory_overhead_mib + cache) << 20,
        cpus=size.cpus + settings.cpu_headroom,
        pids=settings.pids_max,
        cpu_shares=settings.cpu_shares,
    )


def make(
    slots: Slots,
    cgroups: Cgroups,
    limits: Callable[[Machine], Limits],
    machine: Machine,
    overlay_template: Path,
    rules: str,
    slot: Slot | None = None,
) -> Place:
    """Make a place for `machine`, in `slot` or in a new one, behind these nftables rules. Blocks some milliseconds.

    On failure nothing is left of it. Raises GreenroomError or OSError.
    """
    slot = slots.take() if slot is None else slot
    owner = slot.owner
    try:
        with contextlib.ExitStack() as stack:
            cgroups.create(owner.cgroup, limits(machine))
            tap = namespaces.create(owner.netns, rules)
            stack.callback(os.close, tap)
            handle = namespaces.open_handle(owner.netns)
            stack.callback(os.close, handle)
            path = slot.directory / "overlay.qcow2"
            shutil.copyfile(overlay_template, path)
            path.chmod(0o600)
            overlay = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            stack.pop_all()
            return Place(slot, tap, handle, overlay)
    except BaseException:
        remove(slot, slots, cgroups)
        raise


def remove(slot: Slot, slots: Slots, cgroups: Cgroups) -> None:
    """Remove everything of a slot, its record last. Blocks."""
    destroy_owner(slot.owner, cgroups)
    slots.give_back(slot)


def destroy_owner(owner: Owner, cgroups: Cgroups) -> dict[str, int]:
    """Remove everything an owner record stands for, except its directory. Blocks. Counts what there was."""
    counts = {"processes": cgroups.kill(owner.cgroup)}
    counts["namespaces"] = int(namespaces.remove(owner.netns))
    counts["cgroups"] = int(cgroups.remove(owner.cgroup))
    return counts
