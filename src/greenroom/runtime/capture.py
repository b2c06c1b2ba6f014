"""Capturing a VM: what is done while its guest stands still, and what can be done before and after.

In the pause, and nothing else is in it: QEMU's CPUs stop, the devices' state goes to a memfd, the pages that the
VM has changed are read from outside into memory that is there already, and a new empty layer is put on top of its
disk. Then the guest goes on, and all of that is written and published. A VM with RAM of its own (`copy` mode, or
one that booted) has that copied whole in the pause, and compared with the golden's after it.

The state is that of the devices alone (`xen-save-devices-state`, which needs no Xen): a `migrate` of a VM whose RAM
is private would write all of it. Who loads it must be the same QEMU with the same command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from greenroom.errors import GreenroomError, RuntimeFailure
from greenroom.images.base import Image
from greenroom.runtime import command, disks, memory, pagemap, pages
from greenroom.runtime.command import Machine
from greenroom.runtime.engine import CaptureResult, Golden, Snapshot
from greenroom.runtime.pages import PAGE, Run
from greenroom.runtime.slots import Origin
from greenroom.runtime.snapshots import Draft, Manifest, Store, no_room
from greenroom.runtime.threads import in_own_thread
from greenroom.runtime.vm import QemuVm
from greenroom.runtime.writing import Chunk
from greenroom.wire.tasks import spawn

_MARGIN = 64 << 20
"""Bytes of disk and of memory that a capture leaves free beside what it expects to take."""


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What a VM to be captured stands on. The descriptor stays its owner's, who keeps it open meanwhile."""

    golden: Golden
    image: Image
    machine: Machine
    golden_ram: int
    lower: list[Run] | None
    """The pages by which the RAM it was restored with differs from the golden's; None when nobody knows."""


class Stages:
    """Milliseconds by stage."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.pause_ms = 0.0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = (time.perf_counter() - began) * 1000
            self.ms[name] = round(self.ms.get(name, 0.0) + spent, 3)


class _Frozen:
    """What was taken of a VM in the pause, in memory. `close` it."""

    def __init__(self) -> None:
        self.state: int | None = None
        self.base: int | None = None
        """The RAM below the private pages: the file that the VM maps, or a copy of RAM of its own."""
        self.whole = False
        """`base` is all of the VM's RAM and was nobody's ground."""
        self.runs: list[Run] = []
        self.buffer: pagemap.Buffer | None = None

    def close(self) -> None:
        for fd in (self.state, self.base):
            if fd is not None:
                os.close(fd)
        self.state = self.base = None
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None

    def packed(self, ground: Ground) -> tuple[list[Run], Iterator[Chunk]]:
        """The pages that differ from the golden's, and their content in the same order."""
        assert self.base is not None  # noqa: S101
        base, buffer = self.base, self.buffer
        lower = ground.lower
        if self.whole or lower is None:
            lower = pages.differing(base, ground.golden_ram)
        merged = pages.laid(lower, self.runs)

        def content() -> Iterator[Chunk]:
            for piece in pages.packed_together(merged):
                if not piece.upper:
                    yield from pages.content(base, Run(piece.first, piece.length))
                elif buffer is not None:
                    yield from buffer.views(piece.offset * PAGE, piece.length * PAGE)

        return pages.joined(Run(piece.first, piece.length) for piece in merged), content()


async def capture(
    vm: QemuVm,
    store: Store,
    name: str,
    ground: Ground,
    *,
    with_memory: bool,
    durable: bool,
    blank: Path,
    flatten_deadline: float,
) -> CaptureResult:
    """See `engine.Runtime.capture`. One at a time for a VM; `blank` is an empty overlay.

    Once begun it goes on to its end: a cancellation is heeded then, and the snapshot deleted again.
    """
    task = spawn(
        _capture(vm, store, name, ground, with_memory, durable, blank, flatten_deadline), f"capture {vm.name}"
    )
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            await asyncio.to_thread(store.remove, name)
        raise


async def _capture(
    vm: QemuVm,
    store: Store,
    name: str,
    ground: Ground,
    with_memory: bool,
    durable: bool,
    blank: Path,
    flatten_deadline: float,
) -> CaptureResult:
    stages, frozen = Stages(), _Frozen()
    async with vm.capturing:
        with stages.timed("prepare"):
            origin = vm.slot.origin()
            if origin is None or vm.pid is None:
                raise RuntimeFailure("the VM is not whole yet and cannot be captured")
            status = (await vm.execute("query-status"))["status"]
            if status not in ("running", "paused"):
                raise RuntimeFailure(f"a VM whose state is {status!r} cannot be captured; try again later")
            try:
                draft = await asyncio.to_thread(lambda: store.begin(name, durable=durable))
            except OSError as error:
                raise no_room(error) from error
        try:
            with stages.timed("prepare"):
                number = await _prepare(vm, store, frozen, ground, with_memory, blank, flatten_deadline)
            try:
                size = ground.golden.size.memory_mib << 20 if with_memory else None
                async with vm.moving:
                    layers = await _freeze(vm, frozen, stages, number, size)
            except BaseException:
                with contextlib.suppress(GreenroomError):
                    await clear(vm)
                raise
            # While the memory is written QEMU gives its right to write the frozen layers up.
            writing = spawn(
                in_own_thread(lambda: _write(draft, frozen, ground, stages), f"write {name}"), name
            )
            try:
                with stages.timed("retire"):
                    files = await _retire(vm, layers)
                    version = qemu_build(await vm.execute("query-version"))
            finally:
                await asyncio.wait({writing})
            writing.result()
            with stages.timed("layers"):
                await in_own_thread(lambda: _take(draft, vm, files), f"take the disk of {name}")
            with stages.timed("publish"):
                manifest = _manifest(draft, ground, origin, version, with_memory)
                await in_own_thread(lambda: draft.publish(manifest), f"publish {name}")
        except OSError as error:
            await asyncio.to_thread(draft.drop)
            raise no_room(error) from error
        except BaseException:
            await asyncio.shield(asyncio.to_thread(draft.drop))
            raise
        finally:
            frozen.close()
    return CaptureResult(snapshot=manifest.snapshot, pause_ms=stages.pause_ms, stages=stages.ms)


async def clear(vm: QemuVm) -> disks.Chain:
    """Remove what a capture that was broken off had given QEMU, and let a guest go on that it had stopped.

    Returns the disk's layers.
    """
    async with vm.moving:
        if vm.slot.in_pause:
            await vm.execute("cont")
            vm.slot.end_pause()
            vm.state = "running"
    chain = await disks.chain(vm)
    for stray in chain.strays:
        await disks.drop(vm, stray)
    for entry in await vm.execute("query-fdsets"):
        if entry["fdset-id"] >= disks.STATES:
            await vm.execute("remove-fd", {"fdset-id": entry["fdset-id"]})
    return await disks.chain(vm) if chain.strays else chain


async def _prepare(
    vm: QemuVm,
    store: Store,
    frozen: _Frozen,
    ground: Ground,
    with_memory: bool,
    blank: Path,
    flatten_deadline: float,
) -> int:
    """All that can be done while the guest runs; returns the number of the layer that waits to be put on top."""
    chain = await clear(vm)
    if len(chain.layers) > disks.LAYERS_MAX:
        await disks.flatten(vm, chain, flatten_deadline)
        chain = await disks.chain(vm)
    pid = vm.pid or 0
    top = f"/proc/{pid}/fd/{chain.fds[chain.top]}"
    size = ground.golden.size.memory_mib << 20

    def ready() -> None:
        # What is on the disk already need not be flushed in the pause, where QEMU does it before it stops.
        fd = os.open(top, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        expected = 0
        if with_memory:
            ram = pagemap.guest_ram(pid, size)
            # While the guest runs this is only nearly right; an eighth more for what it writes until it stops.
            changed = pages.total(pagemap.private_runs(pid, ram)) * PAGE
            expected = size if ram.shared else min(size, changed + changed // 8 + (4 << 20))
            if psutil.virtual_memory().available < expected + _MARGIN:
                raise RuntimeFailure(
                    f"the node has no {expected >> 20} MiB of memory free, which a capture needs",
                    retry_after=10,
                )
        lower = pages.total(ground.lower or ()) * PAGE
        if shutil.disk_usage(store.directory).free < expected + lower + _MARGIN:
            raise no_room(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        if with_memory and not ram.shared:
            frozen.buffer = pagemap.Buffer(expected, populate=True)

    adding = spawn(disks.add(vm, chain.free, blank), f"add a layer to {vm.name}")
    try:
        try:
            await in_own_thread(ready, f"prepare a capture of {vm.name}")
        finally:
            await asyncio.wait({adding})
        adding.result()
    except BaseException:
        with contextlib.suppress(GreenroomError):
            await clear(vm)
        raise
    return chain.free


async def _freeze(
    vm: QemuVm, frozen: _Frozen, stages: Stages, number: int, ram_size: int | None
) -> tuple[int, ...]:
    """The pause. Returns the numbers of the layers that are frozen from then on."""
    layers = (await disks.chain(vm)).layers
    if ram_size is None:
        # QEMU drains and flushes by itself; the guest need not stop for a cut through its writes.
        with stages.timed("freeze"):
            await disks.freeze(vm, layers[-1], number)
        return layers
    frozen.state = os.memfd_create("greenroom-state", os.MFD_CLOEXEC)
    target = os.open(f"/proc/self/fd/{frozen.state}", os.O_WRONLY | os.O_CLOEXEC)
    sets = [entry["fdset-id"] for entry in await vm.execute("query-fdsets")]
    state = max([disks.STATES, *(each + 1 for each in sets)])
    try:
        await vm.give_to_set(state, target)
    finally:
        os.close(target)
    pid = vm.pid or 0
    running = bool((await vm.execute("query-status"))["running"])
    if running:
        vm.slot.begin_pause()
    began = time.perf_counter()
    try:
        with stages.timed("stop"):
            await vm.execute("stop")
        with stages.timed("state"):
            # `live` means that the VM will go on elsewhere: of one that stands still, QEMU gives its disk up then.
            arguments = {"filename": f"/dev/fdset/{state}", "live": False}
            await vm.execute("xen-save-devices-state", arguments)
        await in_own_thread(lambda: _read(pid, ram_size, frozen, stages), f"read the RAM of {vm.name}")
        with stages.timed("freeze"):
            await disks.freeze(vm, layers[-1], number)
        with stages.timed("cont"):
            if running:
                await vm.execute("cont")
    finally:
        if running:
            stages.pause_ms = round((time.perf_counter() - began) * 1000, 3)
    if running:
        vm.slot.end_pause()
    await vm.execute("remove-fd", {"fdset-id": state})
    return layers


def _read(pid: int, size: int, frozen: _Frozen, stages: Stages) -> None:
    """Take the RAM of a VM that stands still."""
    with stages.timed("scan"):
        ram = pagemap.guest_ram(pid, size)
        base = ram.open(pid)
        if not ram.shared:
            frozen.base = base
            frozen.runs = pagemap.private_runs(pid, ram)
    with stages.timed("read"):
        if ram.shared:
            try:
                frozen.base, frozen.whole = memory.copy(base, "greenroom-captured"), True
            finally:
                os.close(base)
            return
        wanted = pages.total(frozen.runs) * PAGE
        if frozen.buffer is None or len(frozen.buffer) < wanted:
            if frozen.buffer is not None:
                frozen.buffer.close()
            frozen.buffer = pagemap.Buffer(wanted)
        frozen.buffer.read(pid, ram, frozen.runs)


async def _retire(vm: QemuVm, layers: Sequence[int]) -> list[int]:
    """Take QEMU's right to write what is frozen; returns its descriptors of the layers, the lowest first.

    It keeps the right if it wants to, and always while it is paused: then the snapshot gets a copy (`_write`).
    """
    below = command.GOLDEN_DISKS
    fds = (await disks.chain(vm)).fds
    for number in layers:
        if disks.writable(vm.pid or 0, os.stat(f"/proc/{vm.pid}/fd/{fds[number]}")):
            with contextlib.suppress(GreenroomError):
                await disks.retire(vm, number, below)
        below = number
    fds = (await disks.chain(vm)).fds
    return [fds[number] for number in layers]


def _write(draft: Draft, frozen: _Frozen, ground: Ground, stages: Stages) -> None:
    """Write what the VM's memory held. Blocks."""
    if frozen.state is None:
        return
    with stages.timed("write"):
        state = os.fstat(frozen.state).st_size
        draft.write("state", [os.pread(frozen.state, state, 0)])
        runs, content = frozen.packed(ground)
        draft.write("ram.index", [pages.encode(runs)])
        draft.write("ram", content)


def _take(draft: Draft, vm: QemuVm, files: Sequence[int]) -> None:
    """Take the layers of the VM's disk, and what its guest knows its node by. Blocks."""
    draft.write("controls", [msgspec.json.encode([vm.slot.control, *vm.slot.inherited()])])
    pid = vm.pid or 0
    for place, fd in enumerate(files, start=1):
        path = f"/proc/{pid}/fd/{fd}"
        draft.take(f"layer-{place}", path, link=not disks.writable(pid, os.stat(path)))


def _manifest(draft: Draft, ground: Ground, origin: Origin, version: str, with_memory: bool) -> Manifest:
    layers = tuple(sorted((name for name in draft.parts if name.startswith("layer-")), key=_place))
    golden = ground.golden
    snapshot = Snapshot(
        name=draft.name,
        kind="full" if with_memory else "filesystem",
        template=origin.template,
        size=origin.size,
        golden=golden.digest,
        created_at=time.time(),
        parent=origin.snapshot,
        ram_bytes=draft.parts["ram"].size if with_memory else 0,
        disk_bytes=sum(draft.parts[name].size for name in layers),
    )
    return Manifest(
        snapshot=snapshot,
        build=secrets.token_hex(8),
        golden=golden,
        image=ground.image,
        machine=ground.machine,
        command=command.digest(ground.machine),
        qemu=version,
        layers=layers,
        parts=draft.parts,
    )


def _place(layer: str) -> int:
    return int(layer.rpartition("-")[2])


def qemu_build(answer: dict[str, object]) -> str:
    """Version and package of a QEMU, from its answer to `query-version`."""
    version = answer.get("qemu")
    numbers = version if isinstance(version, dict) else {}
    text = ".".join(str(numbers.get(name, "?")) for name in ("major", "minor", "micro"))
    return f"{text} {answer.get('package', '')}".strip()
