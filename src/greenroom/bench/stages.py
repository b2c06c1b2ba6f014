"""The platform's own engine with marks at the borders of a restore's stages, set from outside.

`QemuRuntime.restore` is measured as it is. Two things it does anyway show where it stands: it asks the cgroups
for their join files when namespace, limits and overlay are done and the process comes next, and it enters the
VM in its table when QMP has answered and the state comes next. The marks cost under a microsecond each. Should
the engine one day do without either, the stages read None and the whole is measured all the same.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from greenroom.config import RoleSpec
from greenroom.errors import RuntimeFailure
from greenroom.runtime import golden as goldens
from greenroom.runtime import guestclient, memory
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.command import qemu
from greenroom.runtime.engine import Golden, Vm
from greenroom.runtime.golden import Loaded
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.stocking import Wants
from greenroom.runtime.vm import QemuVm


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one restore, from the call to a paused VM, and of its parts."""

    total_ms: float
    prepare_ms: float | None = None
    """Slot, cgroup, namespace with tap, overlay (of the baseline: overlay alone), until the process starts."""
    process_ms: float | None = None
    """From there until QMP answers; for Greenroom, the chain that fences QEMU in is part of it."""
    load_ms: float | None = None
    """Loading the device state."""

    @classmethod
    def between(cls, began: float, spawned: float | None, answered: float | None, ended: float) -> Stages:
        """From readings of `time.perf_counter` at the borders."""

        def span(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else (end - start) * 1000

        return cls(
            total_ms=(ended - began) * 1000,
            prepare_ms=span(began, spawned),
            process_ms=span(spawned, answered),
            load_ms=span(answered, ended),
        )


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What one process holds, in MiB: its proportional share of shared pages included, and its own alone."""

    pss_mib: float
    private_mib: float
    shared_file_mib: float = 0.0
    """The part of `pss_mib` that lies in memory files (memfd_create(2)), such as a golden's RAM."""


def memory_of(pid: int) -> Memory:
    """Read `/proc/<pid>/smaps_rollup` (proc(5)). Raises OSError when the process is gone."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0])
    private = found.get("Private_Clean", 0) + found.get("Private_Dirty", 0)
    return Memory(
        pss_mib=found.get("Pss", 0) / 1024,
        private_mib=private / 1024,
        shared_file_mib=found.get("Pss_Shmem", 0) / 1024,
    )


class _MarkingCgroups(Cgroups):
    """Remembers when the join files of a cgroup were first asked for."""

    def __init__(self, version: int, mounts: dict[str, Path]) -> None:
        super().__init__(version, mounts)
        self.marks: dict[str, float] = {}

    def join_files(self, path: str) -> list[Path]:
        self.marks.setdefault(path.rpartition("/")[2], time.perf_counter())
        return super().join_files(path)


class _MarkingTable(dict[str, QemuVm]):
    """Remembers when a VM was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[str, float] = {}

    def __setitem__(self, name: str, vm: QemuVm) -> None:
        self.marks[name] = time.perf_counter()
        super().__setitem__(name, vm)


class StagedRuntime(QemuRuntime):
    """`QemuRuntime`, with `restore_staged` beside `restore`, a stock filled on demand and a cold boot."""

    def __init__(self, spec: RoleSpec) -> None:
        super().__init__(spec)
        # `detect` is declared to give Cgroups; as a class method it makes one of the class it is called on.
        self._marking = _MarkingCgroups.detect()
        self._fence.cgroups = self._marking
        self._table = _MarkingTable()
        self._vms = self._table

    @property
    def tag(self) -> str:
        """Names everything this runtime makes on the host: `gr-<tag>-…`."""
        return self._slots.tag

    def loaded(self, golden: Golden) -> Loaded:
        """The descriptors of a golden in use. Raises RuntimeFailure when it is not loaded."""
        found = self._goldens.get(golden.digest)
        if found is None:
            raise RuntimeFailure(f"the golden {golden.digest} is not loaded")
        return found

    async def restore_staged(self, golden: Golden) -> tuple[Vm, Stages]:
        """Restore and tell how long it took. Raises what `restore` does."""
        began = time.perf_counter()
        vm = await self.restore(golden)
        ended = time.perf_counter()
        marks = self._marking.marks if isinstance(self._marking, _MarkingCgroups) else {}
        spawned, answered = marks.get(vm.name.rpartition("-")[2]), self._table.marks.get(vm.name)
        return vm, Stages.between(began, spawned, answered, ended)

    async def fill(self, count: int) -> None:
        """Have `count` QEMUs waiting for the golden used last, and make no more until the next call."""
        self._stock.want(Wants(places=0, waiting=count, most=count))
        self._stock.hold(False)
        await self._stock.filled()
        self._stock.hold()

    async def cold_boot(self, template: str, golden: Golden, deadline: float) -> float:
        """Milliseconds from nothing to the first answer of a VM that boots the image as a golden does."""
        image, loaded = self._images[template], self.loaded(golden)
        ram = memory.new("greenroom-cold", golden.size.memory_mib << 20)
        opened = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in (image.kernel, image.initramfs)]
        began = time.perf_counter()
        try:
            vm = await QemuVm.create(
                self._fence,
                loaded.machine,
                goldens.blank_overlay(self._cache, golden.size.disk_mib),
                lambda fds: qemu(loaded.machine, fds),
                ram=ram,
                backing=loaded.backing[:1],
                state=None,
                boot=(opened[0], opened[1]),
                qmp_deadline=self._settings.qmp_deadline,
            )
            try:
                await guestclient.wait_ready(vm, deadline)
                return (time.perf_counter() - began) * 1000
            finally:
                await vm.destroy()
        finally:
            for fd in (ram, *opened):
                os.close(fd)
