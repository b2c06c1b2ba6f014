"""What a node's members are on the host, counted from the outside while `density` fills a pool.

VMs are found by their cgroups, as `faults_host` does it, so that the count does not rest on the node's own word.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import psutil

from greenroom.bench.idle_host import Usage, usage_of
from greenroom.bench.lanes import unbroken
from greenroom.bench.report import Meter
from greenroom.bench.stages import Memory, StagedRuntime, memory_of
from greenroom.bench.supply import without_stock
from greenroom.config import RoleSpec
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.namespaces import listing
from greenroom.runtime.slots import tag_of
from greenroom.store.sqlite import SqliteStore
from greenroom.wire.ids import new_template_id
from greenroom.wire.messages import Size, Template

KERNEL_FIELDS = ("Slab", "PageTables", "KernelStack", "Percpu")
"""Of /proc/meminfo: kernel memory that belongs to no process."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory right now, MiB."""

    available: float
    kernel: float
    """Sum of KERNEL_FIELDS."""


class MembersOnHost(msgspec.Struct, frozen=True, kw_only=True):
    """The VMs of a node whose QEMU runs, and what else they occupy."""

    memories: list[Memory]
    """One for each member, those that only wait for a state left out."""
    stocked: int
    """QEMUs that wait for a state."""
    processes: int
    """In the cgroups of all slots."""
    threads: int
    fds: int
    """Open descriptors of these processes."""
    namespaces: int
    node: Usage
    """The node's own process."""
    node_fds: int


def host_memory(meminfo: Path = Path("/proc/meminfo")) -> HostMemory:
    """Read /proc/meminfo."""
    found: dict[str, float] = {}
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) / 1024
    return HostMemory(
        available=found["MemAvailable"], kernel=sum(found.get(name, 0.0) for name in KERNEL_FIELDS)
    )


def members(home: Path, node_pid: int) -> MembersOnHost:
    """Everything of the node at `home`. A VM that ends meanwhile is left out."""
    cgroups, tag = Cgroups.detect(), tag_of(home)
    memories: list[Memory] = []
    stocked = processes = threads = fds = 0
    for number in cgroups.children(f"greenroom/{tag}"):
        pids = cgroups.pids(f"greenroom/{tag}/{number}")
        whole = (home / "vms" / number / "vm.json").exists()
        stocked += bool(pids) and not whole
        for pid in pids:
            with contextlib.suppress(OSError, psutil.Error):
                memory, tasks, open_files = memory_of(pid), psutil.Process(pid).num_threads(), _fds(pid)
                processes, threads, fds = processes + 1, threads + tasks, fds + open_files
                if whole:
                    memories.append(memory)
    return MembersOnHost(
        memories=memories,
        stocked=stocked,
        processes=processes,
        threads=threads,
        fds=fds,
        namespaces=len(listing(f"gr-{tag}-")),
        node=usage_of([node_pid]),
        node_fds=_fds(node_pid),
    )


def _fds(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def make_golden(spec: RoleSpec, template: str, size: Size, meter: Meter) -> None:
    """See that the golden is in the cache: booting it is no part of a fill, and may take longer than one may stall.

    `spec` names a state directory that nothing else uses. Raises GreenroomError.
    """
    engine = StagedRuntime(without_stock(spec))
    try:
        await unbroken(engine.snapshot_golden(template, size, lambda step, _done: meter.say(step)), "golden")
    finally:
        await unbroken(engine.close(), "close the engine")


async def seed(store_file: Path, template: str, size: Size) -> None:
    """Write the template in this size into a store that no platform has used yet; the first to write it wins.

    The api claims in the template's size, so that this is what makes it claim from the pool that is measured.
    """
    store = await SqliteStore.open(store_file)
    try:
        await store.add_template(
            Template(template_id=new_template_id(), name=template, size=size, created_at=time.time())
        )
    finally:
        await store.close()
