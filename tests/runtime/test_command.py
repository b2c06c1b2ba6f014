"""QEMU's command line: what golden and clone share, what they may never differ in, and the fence's order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from greenroom.runtime.command import Descriptors, Machine, digest, fenced, qemu
from greenroom.wire.messages import Size

MACHINE = Machine(
    binary="/usr/bin/qemu", accelerator="tcg", cpu_model="Nehalem", size=Size("s", 2, 256, 1024)
)
GOLDEN = qemu(MACHINE, Descriptors(ram=5, qmp=6, tap=7, overlay=8, backing=(9,), boot=(12, 13)))
CLONE = qemu(MACHINE, Descriptors(ram=5, qmp=6, tap=7, overlay=8, backing=(9, 10), state=11))


def devices(argv: list[str]) -> list[str]:
    return [b.partition(",")[0] for a, b in pairwise(argv) if a == "-device"]


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


@pytest.mark.parametrize("option", ["-machine", "-accel", "-cpu", "-smp", "-m", "-rtc", "-sandbox"])
def test_golden_and_clone_are_the_same_machine(option: str) -> None:
    assert value(GOLDEN, option) == value(CLONE, option)


def test_golden_and_clone_have_the_same_devices() -> None:
    assert devices(GOLDEN) == devices(CLONE) == ["isa-serial", "virtio-blk-pci", "virtio-net-pci"]


def test_a_clones_ram_is_private_and_the_goldens_is_kept() -> None:
    assert "share=off" in value(CLONE, "-object")
    assert "share=on" in value(GOLDEN, "-object")


def test_a_clone_waits_paused_and_carries_no_kernel() -> None:
    assert "-S" in CLONE
    assert value(CLONE, "-incoming") == "defer"
    assert "-kernel" not in CLONE


def test_every_disk_but_the_overlay_is_read_only() -> None:
    disks = [word for word in CLONE if word.startswith(("driver=file", "driver=raw", "driver=qcow2"))]
    assert len(disks) == 6
    assert [("read-only=on" in disk) for disk in disks] == [True, True, True, True, False, False]
    assert "backing=disk2" in disks[-1]


def test_seccomp_is_complete() -> None:
    assert (
        value(CLONE, "-sandbox") == "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    )


def test_the_fence_joins_the_cgroup_as_root_and_drops_privileges_last() -> None:
    argv = fenced(CLONE, uid=4711, cgroup_files=[Path("/a b/cgroup.procs")], disk_mib=1024)
    line = " ".join(argv)
    places = [
        line.index(word)
        for word in ("cgroup.procs", "ulimit -c 0", "ulimit -n 256", "ulimit -f", "setpriv", "/usr/bin/qemu")
    ]
    assert places == sorted(places)
    assert "'/a b/cgroup.procs'" in line
    for word in ("--reuid=4711", "--regid=4711", "--clear-groups", "--no-new-privs", "--bounding-set=-all"):
        assert word in argv
    assert argv[-len(CLONE) :] == CLONE


def test_a_snapshots_child_expects_the_state_of_devices_alone_and_is_else_the_same() -> None:
    fds = Descriptors(ram=5, qmp=6, tap=7, overlay=8, backing=(9, 10), state=11)
    heir = qemu(MACHINE, fds, bare_state=True)
    assert heir == [*CLONE, "-global", "migration.send-configuration=off"]


def test_a_vm_that_is_to_boot_later_waits() -> None:
    fds = Descriptors(ram=5, qmp=6, tap=7, overlay=8, backing=(9,), boot=(12, 13))
    assert qemu(MACHINE, fds, paused=True) == [*GOLDEN, "-S"]


def test_the_digest_stands_for_the_machine() -> None:
    other = msgspec.structs.replace(MACHINE, cpu_model="max")
    assert digest(MACHINE) == digest(msgspec.structs.replace(MACHINE))
    assert digest(MACHINE) != digest(other)
