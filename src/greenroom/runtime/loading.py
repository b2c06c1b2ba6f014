"""Snapshots in use: the RAM of one is made once in memory and shared by all VMs that are restored from it.

A snapshot's RAM is a copy of its golden's with its own pages laid over, sealed like a golden's: VMs map it
copy-on-write, so that what their parent had changed is in memory once, however many there are. It stays as long as
someone uses it: a VM of this run, or a `hold`. VMs that outlive a run keep it alive, and the next run borrows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from greenroom.errors import RuntimeFailure, SnapshotDamaged, UnknownSnapshot
from greenroom.images.base import Image
from greenroom.runtime import command, memory, pages
from greenroom.runtime.capture import Ground
from greenroom.runtime.command import Machine
from greenroom.runtime.engine import Golden
from greenroom.runtime.golden import Loaded, Source, blank_overlay
from greenroom.runtime.onhand import rooted
from greenroom.runtime.pages import PAGE, Run
from greenroom.runtime.places import Place
from greenroom.runtime.slots import Origin
from greenroom.runtime.snapshots import Manifest, Store
from greenroom.runtime.stock import Stock
from greenroom.runtime.threads import in_own_thread
from greenroom.runtime.vm import Fence, QemuVm


class LoadedSnapshot:
    """A snapshot ready to be restored from (`golden.Source`). `close` it once nothing uses it any more."""

    bare_state = True

    def __init__(self, store: Store, manifest: Manifest, golden: Loaded, holders: Iterable[int]) -> None:
        """Check and load it; blocks. `holders` are processes that may hold its RAM already.

        Raises SnapshotDamaged or OSError.
        """
        self.manifest = manifest
        self.golden = manifest.golden
        self.machine = manifest.machine
        self.mode = golden.mode
        self.qemu = manifest.qemu
        self.name = f"snapshot-{manifest.snapshot.name}-{manifest.build}"
        self.controls = _controls(store, manifest)
        self.runs: list[Run] = []
        self.ram = self._state = -1
        self.layers: tuple[int, ...] = tuple(store.open_layers(manifest))
        self.backing: tuple[int, ...] = self.layers
        try:
            self.backing = (*map(os.dup, golden.backing), *self.layers)
            if manifest.snapshot.kind == "full":
                self.runs = runs_of(store, manifest)
                borrowed = (memory.borrow(pid, self.name) for pid in holders)
                held = next((fd for fd in borrowed if fd is not None), None)
                self.ram = self._make_ram(store, golden) if held is None else held
                self._state = _make_state(store, manifest, self.name)
        except BaseException:
            self.close()
            raise

    def _make_ram(self, store: Store, golden: Loaded) -> int:
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(1, "check") as other:
            # The pages are checked while the golden's are copied.
            checking = other.submit(store.open, self.manifest, "ram")
            stack.callback(_close_result, checking)
            fd = memory.copy(golden.ram, self.name)
            try:
                pages.lay(fd, self.runs, checking.result())
                memory.seal(fd)
            except BaseException as error:
                os.close(fd)
                if isinstance(error, ValueError):
                    raise SnapshotDamaged(
                        f"the snapshot {self.manifest.snapshot.name} cannot be used: {error}; delete it"
                    ) from error
                raise
        return fd

    def open_state(self) -> int:
        """See `golden.Source`."""
        return os.open(f"/proc/self/fd/{self._state}", os.O_RDONLY | os.O_CLOEXEC)

    def origin(self) -> Origin:
        """The record of a VM that is restored from it."""
        snapshot = self.manifest.snapshot
        return Origin(
            golden=self.golden.digest,
            template=snapshot.template,
            size=snapshot.size,
            build=self.golden.build,
            snapshot=snapshot.name,
            snapshot_build=self.manifest.build,
        )

    def close(self) -> None:
        fds = [fd for fd in (self.ram, self._state, *self.backing) if fd >= 0]
        self.ram = self._state = -1
        self.backing = self.layers = ()
        for fd in fds:
            os.close(fd)


def _close_result(opening: Future[int]) -> None:
    if opening.exception() is None:
        os.close(opening.result())


def runs_of(store: Store, manifest: Manifest) -> list[Run]:
    """The pages by which a snapshot's RAM differs from its golden's. Raises SnapshotDamaged."""
    raw = store.read(manifest, "ram.index")
    try:
        return pages.decode(raw, (manifest.golden.size.memory_mib << 20) // PAGE)
    except ValueError as error:
        name = manifest.snapshot.name
        raise SnapshotDamaged(f"the snapshot {name} cannot be used: {error}; delete it") from error


def _controls(store: Store, manifest: Manifest) -> list[str]:
    return msgspec.json.decode(store.read(manifest, "controls"), type=list[str])


def _make_state(store: Store, manifest: Manifest, name: str) -> int:
    raw = store.read(manifest, "state")
    fd = memory.new(f"{name}-state", len(raw))
    try:
        os.pwrite(fd, raw, 0)
        memory.seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Loading:
    """The snapshots in use of one engine; belongs to its event loop. `close` it at the end."""

    def __init__(
        self,
        store: Store,
        golden: Callable[[Golden, Image, Machine], Awaitable[Loaded]],
        holders: Callable[[], list[int]],
    ) -> None:
        """`golden` gives the loaded golden that was made so, `holders` the processes of the VMs that live."""
        self._store = store
        self._golden = golden
        self._holders = holders
        self._loaded: dict[str, LoadedSnapshot] = {}
        self._users: dict[str, int] = {}
        self._busy = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._loaded)

    async def use(self, name: str) -> LoadedSnapshot:
        """The snapshot, loaded; give it back by `done`. Raises UnknownSnapshot, SnapshotDamaged, RuntimeFailure."""
        manifest = await asyncio.to_thread(self._store.manifest, name)
        _check_fit(manifest)
        async with self._busy:
            loaded = self._loaded.get(manifest.build)
            if loaded is None:
                golden = await self._golden(manifest.golden, manifest.image, manifest.machine)
                holders = self._holders()
                try:
                    loaded = await in_own_thread(
                        lambda: LoadedSnapshot(self._store, manifest, golden, holders), f"load {name}"
                    )
                except OSError as error:
                    raise RuntimeFailure(f"the snapshot {name} cannot be loaded: {error.strerror}") from error
                self._loaded[manifest.build] = loaded
            self._users[manifest.build] = self._users.get(manifest.build, 0) + 1
        return loaded

    def done(self, loaded: LoadedSnapshot) -> None:
        """One user less; the last one closes it."""
        build = loaded.manifest.build
        self._users[build] -= 1
        if not self._users[build]:
            del self._users[build], self._loaded[build]
            loaded.close()

    def close(self) -> None:
        for loaded in self._loaded.values():
            loaded.close()
        self._loaded.clear()
        self._users.clear()

    async def ground(self, origin: Origin, golden: Loaded) -> Ground:
        """What a VM with this origin stands on."""
        lower: list[Run] | None = []
        if origin.snapshot:
            lower = await asyncio.to_thread(self._lower, origin)
        return Ground(
            golden=golden.golden,
            image=golden.image,
            machine=golden.machine,
            golden_ram=golden.ram,
            lower=lower,
        )

    def _lower(self, origin: Origin) -> list[Run] | None:
        """The pages of the snapshot that a VM was restored from; None when it is gone: they can be found again."""
        for loaded in list(self._loaded.values()):
            if loaded.manifest.build == origin.snapshot_build:
                return loaded.runs
        try:
            manifest = self._store.manifest(origin.snapshot)
            if manifest.build == origin.snapshot_build and manifest.snapshot.kind == "full":
                return runs_of(self._store, manifest)
        except (SnapshotDamaged, UnknownSnapshot):
            return None
        return None


class Holds:
    """Snapshots that are kept in memory, with VMs of them in stock, though no VM may use them now."""

    def __init__(self, loading: Loading, stock: Stock[QemuVm, Source]) -> None:
        self._loading = loading
        self._stock = stock
        self._held: dict[str, list[LoadedSnapshot]] = {}
        """By name, one for each `hold`; a name that came again may stand for two snapshots."""

    async def hold(self, name: str) -> None:
        """Raises what `Loading.use` does."""
        loaded = await self._loading.use(name)
        self._held.setdefault(name, []).append(loaded)
        if loaded.manifest.snapshot.kind == "full":
            self._stock.add(loaded.name, loaded)

    async def let_go(self, name: str) -> None:
        """Undo one `hold`, if there is one."""
        held = self._held.get(name)
        if not held:
            return
        loaded = held.pop()
        if not held:
            del self._held[name]
        if loaded not in held:
            await self._stock.remove(loaded.name)
        self._loading.done(loaded)

    def clear(self) -> None:
        """Forget all, at the end, when stock and memory are given back at once."""
        self._held.clear()


def _check_fit(manifest: Manifest) -> None:
    """Raises SnapshotDamaged when this version starts its VMs otherwise than the one that made the snapshot."""
    if command.digest(manifest.machine) != manifest.command:
        raise SnapshotDamaged(
            f"the snapshot {manifest.snapshot.name} was made by a version of Greenroom that starts its VMs otherwise, "
            "and only that one can restore it"
        )


async def boot(
    fence: Fence, cache: Path, loaded: LoadedSnapshot, place: Place | None, qmp_deadline: float
) -> QemuVm:
    """A VM over the disk of a snapshot that boots when it is started. Raises RuntimeFailure."""
    image, machine = rooted(loaded.manifest.image, cache), loaded.machine
    fds: list[int] = []
    try:
        fds += [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in (image.kernel, image.initramfs)]
        fds.append(memory.new(f"{loaded.name}-booted", machine.size.memory_mib << 20))
        vm = await QemuVm.create(
            fence,
            machine,
            blank_overlay(cache, machine.size.disk_mib),
            lambda given: command.qemu(machine, given, paused=True),
            ram=fds[2],
            backing=loaded.backing,
            state=None,
            boot=(fds[0], fds[1]),
            qmp_deadline=qmp_deadline,
            place=place,
        )
    except OSError as error:
        raise RuntimeFailure(f"a VM cannot boot: its kernel cannot be read ({error.strerror})") from error
    finally:
        for fd in fds:
            os.close(fd)
    vm.state = "paused"
    return vm
