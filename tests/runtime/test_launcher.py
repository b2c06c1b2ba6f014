"""The two ways of starting a QEMU give the same fence; what the forking one holds is its own and goes with it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from greenroom.config import VmConfig, default_cache_dir
from greenroom.errors import SetupError
from greenroom.runtime import launcher
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.command import Descriptors
from greenroom.runtime.launcher import Chain, ForkServer
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.slots import Slots
from greenroom.runtime.vm import QemuVm
from tests.runtime.conftest import SMALL, spec_in


def test_each_qemu_has_an_address_layout_of_its_own_unless_asked_otherwise() -> None:
    assert VmConfig().launcher == "exec"


def test_descriptors_are_placed_in_their_order() -> None:
    fds = Descriptors(ram=5, qmp=9, tap=7, overlay=3, backing=(20, 11), state=4)
    placed = fds.placed_from(100)
    assert placed.all() == tuple(range(100, 107))
    assert (placed.ram, placed.backing, placed.state) == (100, (104, 105), 106)
    assert Descriptors(ram=1, qmp=2, tap=3, overlay=4, backing=()).placed_from(50).all() == (50, 51, 52, 53)


def test_without_a_compiler_forking_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_more: None)
    with pytest.raises(SetupError, match="install --no-install-recommends gcc"):
        launcher.library(tmp_path)


@pytest.mark.vm
@pytest.mark.parametrize("how", ["exec", "fork"])
async def test_both_ways_fence_a_vm_in_alike(how: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("microVMs need root: namespaces, uids and cgroups")
    if how == "fork" and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    runtime = QemuRuntime(spec_in(tmp_path, launcher=how, launcher_forks=2))
    try:
        golden = await runtime.snapshot_golden("base", SMALL, lambda _step, _done: None)
        # One more than a server makes: the second server must fence as well as the first.
        for _ in range(3):
            vm = await runtime.restore(golden)
            assert isinstance(vm, QemuVm)
            assert isinstance(runtime._launcher, ForkServer if how == "fork" else Chain)
            lines = Path(f"/proc/{vm.pid}/status").read_text(encoding="utf-8").splitlines()
            status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
            assert set(status["Uid"].split()) | set(status["Gid"].split()) == {str(vm.uid)}
            assert status["Groups"] == ""
            assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
            assert Cgroups.detect().pids(vm.slot.owner.cgroup) == {vm.pid}
            assert os.readlink(f"/proc/{vm.pid}/ns/net") != os.readlink("/proc/self/ns/net")
            limits = Path(f"/proc/{vm.pid}/limits").read_text(encoding="ascii").splitlines()
            words = {line[:26].strip(): line[26:].split()[:2] for line in limits}
            assert words["Max core file size"] == ["0", "0"]
            assert words["Max open files"] == ["256", "256"]
            assert words["Max file size"] == [str((4096 + 256) << 20)] * 2
            fds = {os.readlink(f"/proc/{vm.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{vm.pid}/fd")}
            assert not any("launcher" in name for name in fds)
            assert sum(name.startswith("socket:") for name in fds) <= 2
    finally:
        await runtime.close()
    assert not any(runtime.left().values())


@pytest.mark.vm
def test_a_server_that_dies_is_begun_anew(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("gcc") is None:
        pytest.skip("needs root and a C compiler")
    slots, cgroups = Slots(tmp_path, 200_000), Cgroups.detect()
    server = ForkServer(
        slots,
        cgroups,
        shutil.which("qemu-system-x86_64") or "",
        launcher.library(default_cache_dir()),
        forks=9,
        huge_pages=False,
    )
    try:
        server._begin()
        assert server._process is not None
        first = server._process.pid
        assert server._slot is not None
        (directory,) = [path for _, path in slots.recorded()]
        assert directory == server._slot.directory
        server._process.kill()
        server._process.wait()
        server._end()
        server._begin()
        assert server._process.pid != first
    finally:
        server.close()
        cgroups.remove(f"greenroom/{slots.tag}")
        slots.release_block()
    assert list(slots.recorded()) == []
