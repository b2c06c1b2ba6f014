"""The real engine: QEMU, on KVM where a probe boot proves it usable, else by emulation (TCG).

A restore maps the golden's RAM privately, so a VM's memory costs only the pages it changes, and loads some
hundred KiB of device state; the VM then stands paused, not having run a single instruction of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import psutil

from greenroom.config import RoleSpec
from greenroom.errors import (
    GreenroomError,
    NodeUnavailable,
    RuntimeFailure,
    SetupError,
    SnapshotDamaged,
    UnknownTemplate,
)
from greenroom.images import base
from greenroom.images.base import Image
from greenroom.images.cache import publish
from greenroom.images.commands import find
from greenroom.runtime import capture, disks, guestclient, memory, namespaces, places, probe
from greenroom.runtime import golden as goldens
from greenroom.runtime.cgroups import GUESTS, Cgroups
from greenroom.runtime.command import Machine, qemu
from greenroom.runtime.companions import Companions
from greenroom.runtime.disk_alone import DiskAloneStore
from greenroom.runtime.engine import (
    Adopted,
    CaptureResult,
    ClockReading,
    EngineInfo,
    Golden,
    Identity,
    Progress,
    Snapshot,
    Vm,
    quiet,
)
from greenroom.runtime.firewall import ruleset
from greenroom.runtime.golden import Loaded, Source
from greenroom.runtime.loading import Holds, LoadedSnapshot, Loading, boot
from greenroom.runtime.measuring import choose_mode
from greenroom.runtime.namespaces import Outlets
from greenroom.runtime.onhand import Goldens
from greenroom.runtime.places import Place, destroy_owner, limits_of
from greenroom.runtime.slots import Origin, Slot, Slots
from greenroom.runtime.snapshots import Store
from greenroom.runtime.stock import Stock
from greenroom.runtime.stocking import Wants
from greenroom.runtime.threads import in_own_thread
from greenroom.runtime.vm import Fence, QemuVm
from greenroom.wire.messages import Network, Size
from greenroom.wire.network import Rules, parse

_log = logging.getLogger(__name__)
_ADOPT_PARALLEL = 32


class QemuRuntime:
    """See `engine.Runtime`. One per node; `close` it at the end."""

    def __init__(self, spec: RoleSpec) -> None:
        self._spec = spec
        self._settings = spec.config.vm
        self._cache = spec.cache
        spec.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._slots = Slots(spec.home, self._settings.uid_base)
        baseline = ruleset(parse(Network(), spec.config.network))
        self._fence = Fence(
            self._slots, Cgroups.detect(), lambda machine: limits_of(machine, self._settings), baseline
        )
        self._companions = Companions(self._slots.home, self._slots.tag, self._fence.cgroups)
        self._images: dict[str, Image] = {}
        self._vms: dict[str, QemuVm] = {}
        self._info: EngineInfo | None = None
        self._building: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = set()
        self._on_hand = Goldens(self._cache, self._holders)
        self._goldens = self._on_hand.current
        self._store = Store(self._slots.home, self._slots.tag)
        self._loading = Loading(self._store, self._on_hand.of, self._holders)
        self._disks = Loading(DiskAloneStore(self._store), self._on_hand.of, self._holders)
        """What boots."""
        self._uses: dict[str, tuple[Loading, LoadedSnapshot]] = {}
        """By the VM that was restored from it; the first is what loaded it."""
        self._stock: Stock[QemuVm, Source] = Stock(
            self,
            Wants(
                places=self._settings.stock_slots,
                waiting=self._settings.stock_waiting,
                most=self._settings.stock_most,
            ),
            os.cpu_count() or 1,
            self._has_room,
        )
        self._holds = Holds(self._loading, self._stock)

    def _has_room(self) -> bool:
        """Whether the host has so much memory that some of it may go into the stock."""
        return psutil.virtual_memory().available >> 20 > self._spec.config.pools.memory_floor_mib

    async def describe(self, progress: Progress = quiet) -> EngineInfo:
        if self._info is None:
            self._info = await asyncio.to_thread(self._probe, progress)
            _log.info(
                "engine qemu %s on %s: %s", self._info.version, self._info.accelerator, self._info.reason
            )
        detail = {name: f"{loaded.mode.mode}: {loaded.mode.reason}" for name, loaded in self._goldens.items()}
        return msgspec.structs.replace(self._info, detail=detail)

    def _probe(self, progress: Progress) -> EngineInfo:
        boot = base.boot_files(self._cache, progress)
        verdict = probe.choose(
            self._settings.accelerator, boot, self._settings.probe_deadline, self._cache / "kvm-verdict.json"
        )
        return EngineInfo(
            engine="qemu",
            accelerator=verdict.accelerator,
            version=probe.qemu_version(),
            reason=verdict.reason,
        )

    async def prepare_image(self, template: str, progress: Progress) -> None:
        if template != "base":
            raise UnknownTemplate(f"this node has no image for the template {template!r}")
        self._images[template] = await asyncio.to_thread(base.ensure, self._cache, progress)

    async def snapshot_golden(self, template: str, size: Size, progress: Progress) -> Golden:
        if template not in self._images:
            await self.prepare_image(template, progress)
        image = self._images[template]
        info = await self.describe(progress)
        machine = Machine(
            binary=find(probe.BINARY),
            accelerator=info.accelerator,
            cpu_model="host" if info.accelerator == "kvm" else self._settings.cpu_model_tcg,
            tcg_cache_mib=self._settings.tcg_cache_mib,
            size=size,
        )
        name = goldens.key(image, machine, info.version)
        if name not in self._goldens:
            if size.disk_mib != image.disk_mib:
                raise SetupError(
                    f"size {size.name} wants a disk of {size.disk_mib} MiB, the image {template} has {image.disk_mib}"
                )
            # In a thread of its own: a slow medium must not hold up the workers that start other VMs.
            loaded = await in_own_thread(
                lambda: self._load_golden(name, image, machine, template, progress), f"load {name}"
            )
            if name in self._goldens:  # it was asked for twice at the same time
                loaded.close()
                return self._goldens[name].golden
            self._goldens[name] = loaded
            await choose_mode(
                loaded, self._settings.restore_mode, self._cache, lambda each: self.make_waiting(each, None)
            )
            self._stock.add(name, loaded)
        return self._goldens[name].golden

    def _load_golden(
        self, name: str, image: Image, machine: Machine, template: str, progress: Progress
    ) -> Loaded:
        """Build the golden if the cache lacks it, then load it. Blocks; runs in a worker thread."""
        blank = goldens.blank_overlay(self._cache, machine.size.disk_mib)

        def build(target: Path) -> None:
            deadline = self._settings.boot_deadline
            asyncio.run(
                self._interruptible(
                    goldens.build(
                        target, name, image, machine, template, self._fence, blank, progress, deadline
                    )
                )
            )

        directory = publish(self._cache / name, build, progress)
        progress("loading the golden snapshot", None)
        golden = msgspec.json.decode((directory / "golden.json").read_bytes(), type=Golden)
        holders = self._holders()
        if self._on_hand.has(name):
            holders.insert(0, os.getpid())
        return Loaded(golden, directory, image, machine, holders)

    def _holders(self) -> list[int]:
        """Processes of VMs, which may hold RAM that need not be loaded again."""
        return [vm.pid for vm in self._vms.values() if vm.pid is not None and vm.state != "stopping"]

    async def _interruptible(self, building: Coroutine[Any, Any, None]) -> None:
        """Run `building` on this thread's loop so that `interrupt` can end it from another."""
        task = asyncio.create_task(building)  # noqa: TID251 (awaited right here)
        entry = (asyncio.get_running_loop(), task)
        self._building.add(entry)
        try:
            await task
        except asyncio.CancelledError:
            raise SetupError("the golden snapshot was given up, because the node is leaving") from None
        finally:
            self._building.discard(entry)

    def interrupt(self) -> None:
        self._stock.hold()
        for loop, task in list(self._building):
            loop.call_soon_threadsafe(task.cancel)

    async def restore(self, source: Golden | Snapshot) -> Vm:
        if isinstance(source, Snapshot):
            # With less a guest is stopped by its first write.
            self._check_room(self._spec.config.pools.disk_emergency_mib)
            return await self._restore_snapshot(source)
        loaded = self._goldens.get(source.digest)
        if loaded is None:
            raise RuntimeFailure(f"the golden {source.digest} is not loaded on this node")
        vm = await self._restore(loaded, source.digest)
        golden = loaded.golden
        vm.slot.remember(
            Origin(golden=golden.digest, template=golden.template, size=golden.size, build=golden.build)
        )
        return vm

    async def _restore_snapshot(self, snapshot: Snapshot) -> Vm:
        loading = self._loading if snapshot.kind == "full" else self._disks
        loaded = await loading.use(snapshot.name)
        try:
            vm = await self._make_child(loaded)
        except BaseException:
            loading.done(loaded)
            raise
        self._uses[vm.name] = loading, loaded
        try:
            vm.slot.inherit(loaded.controls)
            await asyncio.to_thread(disks.adopt_layers, vm.directory, loaded.layers)
            vm.slot.remember(loaded.origin())
        except OSError as error:
            await self.stop(vm)
            raise RuntimeFailure(f"a VM could not be written down: {error.strerror}") from error
        return vm

    async def _make_child(self, loaded: LoadedSnapshot) -> QemuVm:
        if loaded.manifest.snapshot.kind == "full":
            return await self._restore(loaded, loaded.name)
        place = self._stock.take_place(loaded.golden.digest)
        vm = await boot(self._fence, self._cache, loaded, place, self._settings.qmp_deadline)
        self._vms[vm.name] = vm
        return vm

    async def _restore(self, loaded: Source, shelf: str) -> QemuVm:
        """A paused VM with the state of `loaded`, out of the stock of that name if there is some."""
        with self._stock.restoring():
            vm = self._stock.take_waiting(shelf)
            if vm is not None and await self._loads(vm):
                return vm
            # A place has nothing of what will run in it but the sizes, which a snapshot has from its golden.
            place = self._stock.take_place(shelf) or self._stock.take_place(loaded.golden.digest)
            vm = await self.make_waiting(loaded, place, hurry=True)
            self._vms[vm.name] = vm
            try:
                await vm.load()
                vm.slow_down(loaded.machine)
            except BaseException:
                await asyncio.shield(self.stop(vm))
                raise
        return vm

    async def capture(self, vm: Vm, name: str, *, memory: bool = True, durable: bool = True) -> CaptureResult:
        own = self._own(vm)
        origin = own.slot.origin()
        if origin is None:
            raise RuntimeFailure("the VM is not whole yet and cannot be captured")
        # Below it, what is saved of one would be paid by the sandboxes that a full disk ends.
        self._check_room(self._spec.config.pools.disk_floor_mib)
        golden = await self._on_hand.below(origin)
        return await capture.capture(
            own,
            self._store,
            name,
            await self._loading.ground(origin, golden),
            with_memory=memory,
            durable=durable,
            blank=goldens.blank_overlay(self._cache, golden.machine.size.disk_mib),
            flatten_deadline=self._settings.boot_deadline,
        )

    def _check_room(self, least_mib: int) -> None:
        """Raises NodeUnavailable where the disk has less than `least_mib` free."""
        free = shutil.disk_usage(self._spec.home).free >> 20
        if free < least_mib:
            raise NodeUnavailable(
                f"only {free} MiB of the node's disk are free, and {least_mib} MiB are needed; delete snapshots or "
                "sandboxes that are not needed",
                retry_after=10,
            )

    async def snapshots(self) -> list[Snapshot]:
        return [manifest.snapshot for manifest in await asyncio.to_thread(self._store.all)]

    async def snapshot(self, name: str) -> Snapshot:
        return (await asyncio.to_thread(self._store.manifest, name)).snapshot

    async def delete_snapshot(self, name: str) -> None:
        await asyncio.to_thread(self._store.remove, name)

    async def hold(self, snapshot: Snapshot) -> None:
        await self._holds.hold(snapshot.name)

    async def let_go(self, snapshot: Snapshot) -> None:
        await self._holds.let_go(snapshot.name)

    async def _loads(self, vm: QemuVm) -> bool:
        """Whether a QEMU from the stock, which may have died in this moment, takes its state; else it is removed."""
        self._vms[vm.name] = vm
        try:
            await vm.load()
        except RuntimeFailure as error:
            _log.warning("a QEMU from the stock is of no use: %s", error.message)
            await asyncio.shield(self.stop(vm))
            return False
        except BaseException:
            await asyncio.shield(self.stop(vm))
            raise
        return True

    async def make_waiting(self, golden: Source, place: Place | None, *, hurry: bool = False) -> QemuVm:
        """A QEMU in `place`, or in a new one, that waits for the state of `golden`. See `stock.Maker`."""
        state, ram = golden.open_state(), golden.ram
        own_ram = golden.mode.mode == "copy"
        try:
            if own_ram:
                try:
                    ram = await in_own_thread(
                        lambda: memory.copy(golden.ram, f"{golden.name}-copy"), "copy golden RAM"
                    )
                except BaseException:
                    if place is not None:
                        await asyncio.shield(self.drop_place(place))
                    raise
            vm = await QemuVm.create(
                self._fence,
                golden.machine,
                goldens.blank_overlay(self._cache, golden.machine.size.disk_mib),
                lambda fds: qemu(golden.machine, fds, own_ram=own_ram, bare_state=golden.bare_state),
                ram=ram,
                backing=golden.backing,
                state=state,
                qmp_deadline=self._settings.qmp_deadline,
                place=place,
                hurry=hurry,
            )
        finally:
            os.close(state)
            if ram != golden.ram:
                os.close(ram)
        try:
            if golden.qemu and capture.qemu_build(await vm.execute("query-version")) != golden.qemu:
                raise SnapshotDamaged(
                    f"the snapshot was saved by QEMU {golden.qemu}, and only that can load it"
                )
            await vm.prepare_load()
        except BaseException:
            await asyncio.shield(vm.destroy())
            raise
        return vm

    async def make_place(self, golden: Source) -> Place:
        """See `stock.Maker`."""
        fence = self._fence
        blank = goldens.blank_overlay(self._cache, golden.machine.size.disk_mib)
        return await asyncio.to_thread(
            places.make, fence.slots, fence.cgroups, fence.limits, golden.machine, blank, fence.rules
        )

    async def drop_place(self, place: Place) -> None:
        """See `stock.Maker`."""

        def drop() -> None:
            place.close()
            places.remove(place.slot, self._slots, self._fence.cgroups)

        await asyncio.to_thread(drop)

    async def start(self, vm: Vm) -> None:
        own = self._own(vm)
        async with own.moving:
            await own.execute("cont")
            own.state = "running"

    async def sync(self, vm: Vm, deadline: float) -> None:
        own = self._own(vm)
        await guestclient.sync(own, deadline, own.slot.control)

    async def introduce(self, vm: Vm, identity: Identity, deadline: float) -> ClockReading:
        own = self._own(vm)
        reading = await guestclient.introduce(
            own,
            identity,
            deadline,
            self._spec.config.claims.clock_tolerance_ms,
            own.slot.control,
            own.slot.inherited(),
        )
        own.slot.forget_inherited()
        origin = own.slot.origin()
        if origin is not None and not origin.introduced:
            own.slot.remember(msgspec.structs.replace(origin, introduced=True))
        return reading

    async def pause(self, vm: Vm) -> None:
        own = self._own(vm)
        async with own.moving:
            await own.execute("stop")
            own.state = "paused"

    async def resume(self, vm: Vm) -> None:
        await self.start(vm)

    @property
    def service_uid(self) -> int:
        return self._slots.service_uid

    def confine(self, name: str, pid: int, memory: int) -> None:
        self._companions.admit(name, pid, memory)

    async def restrict(self, vm: Vm, rules: Rules) -> None:
        await self._own(vm).restrict(ruleset(rules))

    def open_outlets(self, vm: Vm) -> Outlets | None:
        return self._own(vm).open_outlets()

    def disk_use(self, vm: Vm) -> int:
        try:
            return disks.own_bytes(self._own(vm).directory)
        except OSError:
            return 0

    async def revive(self, vm: Vm) -> bool:
        own = self._own(vm)
        async with own.moving:
            if (await own.execute("query-status"))["status"] != "io-error":
                return False
            await own.execute("cont")
        return True

    async def stop(self, vm: Vm) -> None:
        own = self._own(vm)
        await own.destroy()
        self._vms.pop(own.name, None)
        if (use := self._uses.pop(own.name, None)) is not None:
            loading, loaded = use
            loading.done(loaded)

    def _own(self, vm: Vm) -> QemuVm:
        if not isinstance(vm, QemuVm):
            raise RuntimeFailure(f"{vm.name} is not a VM of the qemu engine")
        return vm

    async def hand_out(self, vm: Vm) -> None:
        self._own(vm).slot.hand_out()

    async def adopt(self) -> list[Adopted]:
        slots = [Slot(owner, directory) for owner, directory in self._slots.recorded()]
        limit = asyncio.Semaphore(_ADOPT_PARALLEL)

        async def one(slot: Slot) -> Adopted | None:
            origin = slot.origin()
            if origin is None:
                return None
            async with limit:
                vm = await QemuVm.adopt(self._fence, slot, self._settings.qmp_deadline)
            if vm is None:
                return None
            self._vms[vm.name] = vm
            if slot.in_pause:
                with contextlib.suppress(GreenroomError):
                    await capture.clear(vm)
            return Adopted(vm, origin.template, origin.size, slot.handed_out, origin.introduced)

        found = await asyncio.gather(*(one(slot) for slot in slots))
        return [adopted for adopted in found if adopted is not None]

    async def detach(self) -> None:
        await self._stock.close()
        await asyncio.gather(*(vm.detach() for vm in self._vms.values()))
        self._vms.clear()
        self._uses.clear()
        self._close_goldens()
        await asyncio.to_thread(self._companions.clear)

    def _close_goldens(self) -> None:
        self._loading.close()
        self._disks.close()
        self._holds.clear()
        self._on_hand.close()

    async def sweep(self) -> dict[str, int]:
        return await asyncio.to_thread(self._sweep)

    def _sweep(self) -> dict[str, int]:
        removed = {"processes": 0, "namespaces": 0, "cgroups": 0, "directories": 0}
        adopted = {vm.directory for vm in self._vms.values()}
        for owner, directory in list(self._slots.recorded()):
            if directory in adopted or owner.number in self._slots.own:
                continue
            for kind, count in destroy_owner(owner, self._fence.cgroups).items():
                removed[kind] += count
            self._slots.forget(owner, directory)
            removed["directories"] += 1
        for kind, count in self._companions.sweep().items():
            removed[kind] += count
        removed["directories"] += self._store.sweep()
        for manifest in self._store.all():
            self._on_hand.note_use(manifest.golden, manifest.image)
        return removed

    def left(self) -> dict[str, int]:
        """What is on the host under this node's tag right now, by kind; all zero after a clean end."""
        tag = self._slots.tag
        cgroup = f"{GUESTS}/{tag}"
        children = self._fence.cgroups.children(cgroup)
        return {
            "processes": sum(len(self._fence.cgroups.pids(f"{cgroup}/{name}")) for name in children),
            "namespaces": len(namespaces.listing(f"gr-{tag}-")),
            "cgroups": len(children) + len(self._companions.recorded()),
            "directories": len(list(self._slots.recorded())) + len(self._store.left()),
        }

    def release(self) -> None:
        """Give back what outlives single VMs: the node's cgroup parent and its uid block."""
        cgroups = self._fence.cgroups
        cgroups.remove(f"{GUESTS}/{self._slots.tag}")
        cgroups.remove_if_empty(GUESTS)
        self._slots.release_block()

    async def close(self) -> None:
        await self._stock.close()
        await asyncio.gather(*(self.stop(vm) for vm in list(self._vms.values())))
        self._close_goldens()
        await asyncio.to_thread(self._companions.clear)
        if not any(self.left().values()):
            await asyncio.to_thread(self.release)
