"""What a started QEMU is fenced in by, read off the process itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.vm import QemuVm
from tests.runtime.conftest import SMALL, spec_in


@pytest.mark.vm
@pytest.mark.parametrize("stock", [0, 2], ids=["from nothing", "from the stock"])
async def test_every_vm_is_fenced_in_alike(stock: int, tmp_path: Path) -> None:
    runtime = QemuRuntime(spec_in(tmp_path, stock_waiting=stock, stock_slots=stock))
    try:
        golden = await runtime.snapshot_golden("base", SMALL, lambda _step, _done: None)
        for _ in range(3):
            vm = await runtime.restore(golden)
            assert isinstance(vm, QemuVm)
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
            assert sum(name.startswith("socket:") for name in fds) <= 2
    finally:
        await runtime.close()
    assert not any(runtime.left().values())
