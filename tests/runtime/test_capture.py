"""Captured VMs: what children have of their parent, what nobody has of another, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from greenroom.errors import BadRequest, RuntimeFailure, SnapshotDamaged, UnknownSnapshot
from greenroom.runtime import capture, disks, guestclient, pagemap
from greenroom.runtime.engine import CaptureResult, Golden, Snapshot, disk_of
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.slots import Origin, Slot
from greenroom.runtime.snapshots import Draft
from greenroom.runtime.vm import QemuVm
from tests.runtime.conftest import SMALL, spec_in
from tests.runtime.test_qemu import identity, left_alone, restored, running
from tests.support.shell import sh

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]

COUNTER = (
    "nohup setsid python3 -c 'import time\n"
    "n = 0\n"
    "while True:\n"
    "    n += 1\n"
    '    open("/dev/shm/n.new", "w").write(str(n))\n'
    '    import os; os.rename("/dev/shm/n.new", "/dev/shm/n")\n'
    "    time.sleep(0.02)' >/dev/null 2>&1 & until [ -s /dev/shm/n ]; do :; done"
)


async def count_of(vm: QemuVm, **options: str) -> int:
    return int((await sh(vm, "cat /dev/shm/n", **options)).out)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def captured(
    engine: QemuRuntime, vm: QemuVm, name: str, *, memory: bool = True
) -> AsyncIterator[CaptureResult]:
    """A snapshot of `vm` for the block; afterwards it is deleted and its memory given back."""
    result = await engine.capture(vm, name, memory=memory)
    try:
        yield result
    finally:
        await engine.delete_snapshot(name)
        used = {
            loaded.manifest.snapshot.name
            for loading in (engine._loading, engine._disks)
            for loaded in loading._loaded.values()
        }
        assert name not in used, "nobody uses it any more"


@contextlib.asynccontextmanager
async def child(engine: QemuRuntime, snapshot: Snapshot, **changes: object) -> AsyncIterator[QemuVm]:
    vm = await engine.restore(snapshot)
    assert isinstance(vm, QemuVm)
    try:
        await engine.start(vm)
        await engine.introduce(vm, identity(**changes), 90)
        yield vm
    finally:
        await engine.stop(vm)


async def test_children_go_on_where_their_parent_was_and_nobody_sees_another(
    engine: QemuRuntime, golden: Golden
) -> None:
    async with (
        running(engine, golden, hostname="parent", token="t") as parent,
        contextlib.AsyncExitStack() as stack,
    ):
        await sh(parent, f"{COUNTER}; echo before > /root/disk; echo before > /dev/shm/memory", token="t")
        before = await count_of(parent, token="t")
        result = await stack.enter_async_context(captured(engine, parent, "first"))
        snapshot = result.snapshot
        assert (snapshot.kind, snapshot.template, snapshot.golden) == ("full", "base", golden.digest)
        assert result.pause_ms > 0
        assert set(result.stages) == {
            "prepare", "stop", "state", "scan", "read", "freeze", "cont", "retire", "write", "layers", "publish",
        }  # fmt: skip
        await sh(parent, "echo after > /root/disk; echo parent > /root/own; sync", token="t")
        after = await count_of(parent, token="t")
        assert after > before
        children = [
            await stack.enter_async_context(
                child(engine, snapshot, hostname=f"child-{number}", token=f"t{number}")
            )
            for number in range(3)
        ]
        seen = set()
        for number, vm in enumerate(children):
            token = f"t{number}"
            script = (
                f"cat /root/disk /dev/shm/memory; hostname; [ -e /root/own ] || echo none; echo {number} > /root/own; "
                "sync; cat /etc/machine-id /proc/sys/kernel/random/uuid; cat /proc/sys/kernel/random/boot_id"
            )
            lines = (await sh(vm, script, token=token)).out.split()
            assert lines[:4] == ["before", "before", f"child-{number}", "none"]
            seen.update(lines[4:6])
            first = await count_of(vm, token=token)
            assert first >= before
            assert await count_of(vm, token=token) > first
        assert len(seen) == 6
        for number, vm in enumerate(children):
            assert (await sh(vm, "cat /root/own", token=f"t{number}")).out == f"{number}\n"
        assert (
            await sh(parent, "cat /root/own /root/disk; hostname", token="t")
        ).out == "parent\nafter\nparent\n"
        # The parent's pages are in memory once: all children map one sealed file.
        files = {
            pagemap.guest_ram(vm.pid or 0, golden.size.memory_mib << 20).open(vm.pid or 0) for vm in children
        }
        try:
            assert len({os.fstat(fd).st_ino for fd in files}) == 1
        finally:
            for fd in files:
                os.close(fd)
        # What a guest knows its node by is a secret of its own again.
        assert len({vm.slot.control for vm in (*children, parent)}) == 4
        for vm in children:
            assert vm.slot.inherited() == []
            stolen = {"X-Greenroom-Control": parent.slot.control}
            status, _ = await guestclient.request(vm, "GET", "/clock", deadline=20, headers=stolen)
            assert status == 404


async def test_a_child_of_a_child_has_what_both_changed_and_needs_neither(
    engine: QemuRuntime, golden: Golden
) -> None:
    async with running(engine, golden, token="t") as parent:
        await sh(parent, f"{COUNTER}; echo one > /root/one; echo one > /dev/shm/one", token="t")
        first = (await engine.capture(parent, "generation-1")).snapshot
    async with child(engine, first, token="t") as middle:
        await sh(middle, "echo two > /root/two; echo two > /dev/shm/two; rm /dev/shm/one", token="t")
        second = (await engine.capture(middle, "generation-2")).snapshot
        assert second.parent == "generation-1"
        assert second.ram_bytes > first.ram_bytes
        before = await count_of(middle, token="t")
        await engine.delete_snapshot("generation-1")
        below = (middle.directory / "overlay-below-1.qcow2").stat()
        assert below.st_ino == (engine._store.directory / "generation-2" / "layer-1").stat().st_ino
        # What it stands on is gone from the disk and, to the engine, from memory: its pages are found all the same.
        lower = await engine._loading.ground(
            _origin_of(middle, snapshot_build="gone"), engine._goldens[golden.digest]
        )
        assert lower.lower is None
        middle.slot.remember(_origin_of(middle, snapshot_build="gone"))
        third = (await engine.capture(middle, "generation-3")).snapshot
    for snapshot in (second, third):
        async with child(engine, snapshot, token="t") as vm:
            script = "cat /root/one /root/two /dev/shm/two; [ -e /dev/shm/one ] || echo removed; sync"
            assert (await sh(vm, script, token="t")).out == "one\ntwo\ntwo\nremoved\n"
            assert await count_of(vm, token="t") >= before - 200
        await engine.delete_snapshot(snapshot.name)
    assert await engine.snapshots() == []


def _origin_of(vm: QemuVm, **changes: str) -> Origin:
    origin = vm.slot.origin()
    assert origin is not None
    return msgspec.structs.replace(origin, **changes)


async def test_many_captures_of_one_vm_keep_its_disk_shallow(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        last = None
        for number in range(disks.LAYERS_MAX + 3):
            assert (await sh(vm, f"echo {number} >> /root/all; sync")).code == 0
            result = await engine.capture(vm, f"step-{number}")
            last = result.snapshot
            assert len((await disks.chain(vm)).layers) <= disks.LAYERS_MAX + 1
            assert not (await disks.chain(vm)).strays
            if number != disks.LAYERS_MAX - 2:
                await engine.delete_snapshot(f"step-{number}") if number < disks.LAYERS_MAX + 2 else None
        assert last is not None
        held = {os.readlink(f"/proc/{vm.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{vm.pid}/fd")}
        files = {str(path) for path in vm.directory.glob("overlay*.qcow2")}
        assert files <= held, "a layer that is no part of the disk any more takes room"
        assert 0 < engine.disk_use(vm) < 64 << 20
        names = {path.name for path in vm.directory.glob("overlay*.qcow2")}
        assert len(names) == len((await disks.chain(vm)).layers)
        async with child(engine, last) as heir:
            assert (await sh(heir, "cat /root/all")).out == "".join(
                f"{n}\n" for n in range(disks.LAYERS_MAX + 3)
            )
        # One from before the layers were made one is what it was.
        kept = [each for each in await engine.snapshots() if each.name == f"step-{disks.LAYERS_MAX - 2}"]
        async with child(engine, kept[0]) as heir:
            assert (await sh(heir, "tail -n 1 /root/all")).out == f"{disks.LAYERS_MAX - 2}\n"
    for snapshot in await engine.snapshots():
        await engine.delete_snapshot(snapshot.name)


async def test_a_paused_vm_is_captured_and_stays_paused(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        await sh(vm, "echo kept > /dev/shm/mark; echo kept > /root/mark; sync")
        await engine.pause(vm)
        async with captured(engine, vm, "paused") as result:
            assert result.pause_ms == 0
            assert (await vm.execute("query-status"))["status"] == "paused"
            # QEMU keeps the set of the saved state while it is paused; a second capture must not trip over it.
            async with captured(engine, vm, "paused-again"):
                assert len((await disks.chain(vm)).layers) == 3
            await engine.resume(vm)
            await sh(vm, "echo later > /root/mark; sync")
            async with child(engine, result.snapshot) as heir:
                assert (await sh(heir, "cat /dev/shm/mark /root/mark")).out == "kept\nkept\n"
            assert (await sh(vm, "cat /root/mark")).out == "later\n"


async def test_a_vm_that_never_ran_is_captured(engine: QemuRuntime, golden: Golden) -> None:
    async with (
        restored(engine, golden) as vm,
        captured(engine, vm, "unborn") as result,
        child(engine, result.snapshot, hostname="born") as heir,
    ):
        assert (await sh(heir, "hostname")).out == "born\n"


async def test_a_file_system_alone_boots(engine: QemuRuntime, golden: Golden) -> None:
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    async with running(engine, golden, token="t") as vm, contextlib.AsyncExitStack() as stack:
        old = (
            await sh(vm, f"echo kept > /root/mark; echo lost > /dev/shm/mark; sync; {boot_id}", token="t")
        ).out
        result = await stack.enter_async_context(captured(engine, vm, "disk-only", memory=False))
        assert (result.snapshot.kind, result.snapshot.ram_bytes, result.pause_ms) == ("filesystem", 0, 0.0)
        assert "stop" not in result.stages
        await sh(vm, "echo later > /root/mark; sync", token="t")
        # It knows no token any more: it has booted.
        heir = await stack.enter_async_context(child(engine, result.snapshot, hostname="booted"))
        script = f"cat /root/mark; hostname; [ -e /dev/shm/mark ] || echo gone; {boot_id}"
        lines = (await sh(heir, script)).out.split()
        assert lines[:3] == ["kept", "booted", "gone"]
        assert lines[3] != old.strip()
        # One that booted has RAM of its own; it is captured like any other.
        await sh(heir, "echo again > /dev/shm/mark")
        again = await stack.enter_async_context(captured(engine, heir, "of-a-booted"))
        grandchild = await stack.enter_async_context(child(engine, again.snapshot))
        assert (await sh(grandchild, "cat /dev/shm/mark /root/mark")).out == "again\nkept\n"


async def test_the_disk_of_a_full_snapshot_boots_though_its_memory_is_damaged(
    engine: QemuRuntime, golden: Golden
) -> None:
    async with running(engine, golden) as vm, contextlib.AsyncExitStack() as stack:
        await sh(vm, "echo kept > /root/mark; echo lost > /dev/shm/mark; sync")
        result = await stack.enter_async_context(captured(engine, vm, "whole"))
        ram = engine._store.directory / "whole" / "ram"
        ram.chmod(0o600)
        with ram.open("r+b") as file:
            file.write(b"\xff" * 64)
        with pytest.raises(SnapshotDamaged):
            await engine.restore(result.snapshot)
        heir = await stack.enter_async_context(child(engine, disk_of(result.snapshot), hostname="booted"))
        script = "cat /root/mark; hostname; [ -e /dev/shm/mark ] || echo gone"
        assert (await sh(heir, script)).out.split() == ["kept", "booted", "gone"]
        assert engine._uses[heir.name][1].ram < 0, "it must not keep a memory that it does not have"
        again = await stack.enter_async_context(captured(engine, heir, "of-its-disk"))
        grandchild = await stack.enter_async_context(child(engine, again.snapshot))
        assert (await sh(grandchild, "cat /root/mark")).out == "kept\n"


async def test_a_vm_with_ram_of_its_own_is_captured(golden: Golden, tmp_path: Path) -> None:
    own = QemuRuntime(spec_in(tmp_path, restore_mode="copy"))
    try:
        loaded = await own.snapshot_golden("base", SMALL, lambda _step, _done: None)
        async with running(own, loaded) as vm:
            await sh(vm, "echo kept > /dev/shm/mark")
            result = await own.capture(vm, "copied")
            assert 0 < result.snapshot.ram_bytes < loaded.ram_bytes
            async with child(own, result.snapshot) as heir:
                assert pagemap.guest_ram(heir.pid or 0, SMALL.memory_mib << 20).shared
                assert (await sh(heir, "cat /dev/shm/mark")).out == "kept\n"
    finally:
        await own.close()
    assert not any(own.left().values())


async def test_an_adopted_vm_is_captured_and_its_children_outlive_a_node(
    golden: Golden, tmp_path: Path
) -> None:
    async with left_alone(golden, tmp_path) as (dead, make_heir):
        parent = await dead.restore(golden)
        await dead.start(parent)
        await dead.introduce(parent, identity(token="t"), 60)
        await sh(parent, "echo one > /dev/shm/mark; echo one > /root/mark", token="t")
        await dead.capture(parent, "before")
        await dead.detach()
        # No golden is loaded here: what the VM stands on is found by its record.
        heir = make_heir()
        (adopted,) = await heir.adopt()
        assert isinstance(adopted.vm, QemuVm)
        assert not any((await heir.sweep()).values())
        await sh(adopted.vm, "echo two > /dev/shm/mark; echo two > /root/mark", token="t")
        after = (await heir.capture(adopted.vm, "after")).snapshot
        assert [each.name for each in await heir.snapshots()] == ["after", "before"]
        for snapshot, word in zip(await heir.snapshots(), ("two", "one"), strict=True):
            async with child(heir, snapshot, token="c") as vm:
                assert (await sh(vm, "cat /dev/shm/mark /root/mark", token="c")).out == f"{word}\n{word}\n"
        kept = await heir.restore(after)
        await heir.detach()
        third = make_heir()
        found = {each.vm.name: each for each in await third.adopt()}
        assert set(found) == {kept.name, parent.name}
        vm = found[kept.name].vm
        assert isinstance(vm, QemuVm)
        await third.start(vm)
        await third.introduce(vm, identity(hostname="late", token="late"), 60)
        assert (await sh(vm, "hostname; cat /dev/shm/mark", token="late")).out == "late\ntwo\n"
        # A child whose ground this run has never loaded.
        last = (await third.capture(vm, "last")).snapshot
        # It shares the RAM that the adopted one holds.
        inode = os.fstat(
            fd := pagemap.guest_ram(vm.pid or 0, SMALL.memory_mib << 20).open(vm.pid or 0)
        ).st_ino
        os.close(fd)
        async with child(third, after, token="c") as sibling:
            assert os.fstat(third._uses[sibling.name][1].ram).st_ino == inode
        async with child(third, last, hostname="last", token="c") as sibling:
            assert (await sh(sibling, "hostname; cat /dev/shm/mark", token="c")).out == "last\ntwo\n"


@pytest.mark.fault
async def test_a_guest_that_a_dying_node_had_stopped_goes_on(golden: Golden, tmp_path: Path) -> None:
    async with left_alone(golden, tmp_path) as (dead, make_heir):
        vm = await dead.restore(golden)
        assert isinstance(vm, QemuVm)
        await dead.start(vm)
        await dead.introduce(vm, identity(), 60)
        # As if the node were killed in the middle of a pause: a layer is there, a set with a state, the CPUs stand.
        chain = await disks.chain(vm)
        await disks.add(vm, chain.free, dead._cache / f"blank-{SMALL.disk_mib}.qcow2")
        dead._store.begin("half")
        vm.slot.begin_pause()
        await vm.execute("stop")
        await dead.detach()
        heir = make_heir()
        (adopted,) = await heir.adopt()
        assert isinstance(adopted.vm, QemuVm)
        assert adopted.vm.describe().state == "running"
        assert not adopted.vm.slot.in_pause
        assert (await disks.chain(adopted.vm)).strays == ()
        assert len(list(adopted.vm.directory.glob("overlay*"))) == 1
        assert (await heir.sweep())["directories"] == 1
        assert await heir.snapshots() == []
        assert (await sh(adopted.vm, "echo alive")).out == "alive\n"
        async with captured(heir, adopted.vm, "half") as result:
            assert result.pause_ms > 0


KILLED = """
import asyncio, os, pathlib, signal, sys
from greenroom.runtime import disks
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.slots import Slot
from greenroom.runtime.snapshots import Draft, Store
from greenroom.runtime.vm import QemuVm
from tests.runtime.conftest import spec_in

state, at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
count = 0

def step():
    global count
    count += 1
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(plain):
    def call(*arguments, **options):
        step()
        return plain(*arguments, **options)
    return call

async def main():
    runtime = QemuRuntime(spec_in(state))
    (adopted,) = await runtime.adopt()
    plain = QemuVm.execute

    async def execute(self, name, arguments=None):
        if not name.startswith("query-"):
            step()
        return await plain(self, name, arguments)

    QemuVm.execute = execute
    for owner, names in (
        (Store, ("begin",)), (Draft, ("write", "take", "publish")), (Slot, ("begin_pause", "end_pause")),
        (disks, ("_make",)), (os, ("fsync",)),
    ):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))
    await runtime.capture(adopted.vm, "killed")
    await runtime.detach()

asyncio.run(main())
"""


@pytest.mark.fault
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_node_killed_between_any_two_steps_leaves_all_or_nothing_and_its_vm_runs(
    golden: Golden, tmp_path: Path
) -> None:
    async with left_alone(golden, tmp_path) as (maker, make_heir):
        vm = await maker.restore(golden)
        await maker.start(vm)
        await maker.introduce(vm, identity(), 60)
        await sh(vm, f"{COUNTER}; echo kept > /root/mark; sync")
        await maker.detach()
        outcomes: list[bool] = []
        for at in range(1, 100):
            node = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(tmp_path), str(at))
            code = await node.wait()
            assert code in (0, -signal.SIGKILL)
            heir = make_heir()
            (adopted,) = await heir.adopt()
            assert isinstance(adopted.vm, QemuVm)
            assert (await adopted.vm.execute("query-status"))["status"] == "running"
            assert adopted.vm.describe().state == "running"
            await heir.sweep()
            assert heir._store.left() == []
            found = await heir.snapshots()
            outcomes.append(bool(found))
            seen = await count_of(adopted.vm)
            assert await count_of(adopted.vm) > seen
            if code == 0:
                async with child(heir, found[0]) as last:
                    assert (await sh(last, "cat /root/mark")).out == "kept\n"
                    assert await count_of(last) > 0
                await heir.detach()
                break
            for snapshot in found:
                loaded = await heir._loading.use(snapshot.name)
                heir._loading.done(loaded)
                await heir.delete_snapshot(snapshot.name)
            await heir.detach()
        assert outcomes == sorted(outcomes)
        assert outcomes[-1]
        assert outcomes.count(False) > 20


Break = Callable[[pytest.MonkeyPatch, BaseException], None]


def _at_draft(method: str) -> Break:
    def install(patch: pytest.MonkeyPatch, error: BaseException) -> None:
        def broken(*_args: object, **_options: object) -> None:
            raise error

        patch.setattr(Draft, method, broken)

    return install


def _at_qmp(command: str) -> Break:
    def install(patch: pytest.MonkeyPatch, error: BaseException) -> None:
        plain = QemuVm.execute
        left = [error]

        async def execute(self: QemuVm, name: str, arguments: dict[str, object] | None = None) -> object:
            if name == command and left:
                raise left.pop()
            return await plain(self, name, arguments)

        patch.setattr(QemuVm, "execute", execute)

    return install


def _at_function(module: object, name: str) -> Break:
    def install(patch: pytest.MonkeyPatch, error: BaseException) -> None:
        def broken(*_args: object, **_options: object) -> None:
            raise error

        patch.setattr(module, name, broken)

    return install


FULL = OSError(errno.ENOSPC, "No space left on device")
BREAKS: dict[str, tuple[Break, BaseException]] = {
    "blank": (_at_function(disks, "_make"), FULL),
    "add-fd": (_at_qmp("add-fd"), RuntimeFailure("QMP add-fd failed")),
    "blockdev-add": (_at_qmp("blockdev-add"), RuntimeFailure("QMP blockdev-add failed")),
    "stop": (_at_qmp("stop"), RuntimeFailure("QMP stop failed")),
    "state": (_at_qmp("xen-save-devices-state"), RuntimeFailure("QMP xen-save-devices-state failed")),
    "scan": (_at_function(pagemap, "private_runs"), RuntimeFailure("no pages")),
    "freeze": (_at_qmp("blockdev-snapshot"), RuntimeFailure("QMP blockdev-snapshot failed")),
    "cont": (_at_qmp("cont"), RuntimeFailure("QMP cont failed")),
    "version": (_at_qmp("query-version"), RuntimeFailure("QMP query-version failed")),
    "write": (_at_draft("write"), FULL),
    "take": (_at_draft("take"), FULL),
    "publish": (_at_draft("publish"), FULL),
}


@pytest.mark.fault
async def test_whatever_fails_the_vm_goes_on_and_nothing_is_left(engine: QemuRuntime, golden: Golden) -> None:
    async with running(engine, golden) as vm:
        await sh(vm, f"{COUNTER}; echo kept > /root/mark; sync")
        for step, (install, error) in BREAKS.items():
            before = engine.left()
            with pytest.MonkeyPatch.context() as patch:
                install(patch, error)
                with pytest.raises(RuntimeFailure) as caught:
                    await engine.capture(vm, "broken")
            if error is FULL:
                assert "no room" in caught.value.message
            assert (step, engine.left()) == (step, before)
            assert (step, list(engine._store.directory.iterdir())) == (step, [])
            assert (step, (await vm.execute("query-status"))["status"]) == (step, "running")
            assert (step, vm.describe().state, vm.slot.in_pause) == (step, "running", False)
            assert (step, (await disks.chain(vm)).strays) == (step, ())
            seen = await count_of(vm)
            assert await count_of(vm) > seen
        async with captured(engine, vm, "broken") as result, child(engine, result.snapshot) as heir:
            assert (await sh(heir, "cat /root/mark")).out == "kept\n"


@pytest.mark.fault
async def test_a_vm_that_dies_in_the_middle_is_an_error_and_leaves_nothing(
    engine: QemuRuntime, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(engine, golden) as vm:
        plain = capture._read

        def kill(pid: int, *rest: object) -> None:
            os.kill(pid, signal.SIGKILL)
            plain(pid, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(capture, "_read", kill)
        with pytest.raises(RuntimeFailure):
            await engine.capture(vm, "dead")
        assert await engine.snapshots() == []
        assert list(engine._store.directory.iterdir()) == []


async def test_a_capture_that_nobody_waits_for_any_more_is_undone(
    engine: QemuRuntime, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, plain = asyncio.Event(), Slot.begin_pause

    def begin(slot: Slot) -> None:
        plain(slot)
        paused.set()

    monkeypatch.setattr(Slot, "begin_pause", begin)
    async with running(engine, golden) as vm:
        task = asyncio.get_running_loop().create_task(engine.capture(vm, "unwanted"))
        await paused.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await engine.snapshots() == []
        assert (await sh(vm, "echo alive")).out == "alive\n"


async def test_names_are_checked_and_taken_once(engine: QemuRuntime, golden: Golden) -> None:
    async with restored(engine, golden) as vm, captured(engine, vm, "taken") as result:
        for name in ("taken", "", ".hidden", "../up", "a/b", "UPPER", "x" * 64):
            with pytest.raises(BadRequest):
                await engine.capture(vm, name)
        with pytest.raises(UnknownSnapshot):
            await engine.delete_snapshot("other")
        with pytest.raises(UnknownSnapshot):
            await engine.restore(msgspec.structs.replace(result.snapshot, name="other"))
        assert [each.name for each in await engine.snapshots()] == ["taken"]


async def test_a_damaged_snapshot_is_refused(engine: QemuRuntime, golden: Golden, tmp_path: Path) -> None:
    async with left_alone(golden, tmp_path) as (maker, make_heir):
        vm = await maker.restore(golden)
        await maker.start(vm)
        await maker.introduce(vm, identity(), 60)
        snapshot = (await maker.capture(vm, "whole")).snapshot
        directory = maker._store.directory / "whole"
        for name in ("manifest.json", "controls", "state", "ram.index", "ram", "layer-1"):
            path = directory / name
            plain = path.read_bytes()
            at = len(plain) // 2
            path.chmod(0o600)
            path.write_bytes(plain[:at] + bytes([plain[at] ^ 1]) + plain[at + 1 :])
            reader = make_heir()
            with pytest.raises(SnapshotDamaged, match="whole"):
                await reader.restore(snapshot)
            assert len(reader._loading) == 0
            await reader.detach()
            path.write_bytes(plain)
        reader = make_heir()
        await reader.stop(await reader.restore(snapshot))
        await reader.detach()


async def test_a_frozen_layer_is_nobodys_to_write(engine: QemuRuntime, golden: Golden) -> None:
    """Neither its maker's nor a child's QEMU has a descriptor by which it could change it."""
    async with running(engine, golden) as vm:
        await sh(vm, "echo kept > /root/mark; sync")
        async with captured(engine, vm, "frozen") as result, child(engine, result.snapshot) as heir:
            layer = (engine._store.directory / "frozen" / "layer-1").stat()
            assert layer.st_nlink == 3, "the very file that parent and child stand on"
            assert layer.st_mode & 0o777 == 0o400
            assert not disks.writable(vm.pid or 0, layer)
            assert not disks.writable(heir.pid or 0, layer)
            top = (vm.directory / disks.name_of((await disks.chain(vm)).top)).stat()
            assert disks.writable(vm.pid or 0, top)


async def test_a_layer_that_a_vm_will_not_give_up_is_copied(
    engine: QemuRuntime, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keeps_it(*_args: object) -> None:
        raise RuntimeFailure("it keeps its descriptor")

    monkeypatch.setattr(disks, "retire", keeps_it)
    async with running(engine, golden) as vm:
        await sh(vm, "echo kept > /root/mark; sync")
        async with captured(engine, vm, "copied") as result, child(engine, result.snapshot) as heir:
            layer = (engine._store.directory / "copied" / "layer-1").stat()
            assert layer.st_ino not in {path.stat().st_ino for path in vm.directory.glob("overlay*.qcow2")}
            assert not disks.writable(vm.pid or 0, layer)
            assert (await sh(heir, "cat /root/mark")).out == "kept\n"


async def test_a_held_snapshot_is_restored_from_the_stock(golden: Golden, tmp_path: Path) -> None:
    runtime = QemuRuntime(spec_in(tmp_path, stock_slots=1, stock_waiting=1))
    try:
        loaded = await runtime.snapshot_golden("base", SMALL, lambda _step, _done: None)
        async with running(runtime, loaded) as vm:
            await sh(vm, "echo kept > /dev/shm/mark")
            snapshot = (await runtime.capture(vm, "held")).snapshot
        await runtime.hold(snapshot)
        await runtime.hold(snapshot)
        await runtime._stock.filled()
        waiting = {
            each.name for each in runtime._stock._shelves[runtime._holds._held["held"][0].name].waiting
        }
        assert len(waiting) == 1
        async with child(runtime, snapshot) as heir:
            assert heir.name in waiting
            assert (await sh(heir, "cat /dev/shm/mark")).out == "kept\n"
        await runtime.let_go(snapshot)
        assert len(runtime._loading) == 1
        await runtime.let_go(snapshot)
        await runtime.let_go(snapshot)
        assert len(runtime._loading) == 0
        assert [level.golden for level in runtime._stock.levels()] == [golden.digest]
    finally:
        await runtime.close()
    assert not any(runtime.left().values())


async def test_a_snapshot_that_does_not_fit_any_more_says_why(
    engine: QemuRuntime, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with restored(engine, golden) as vm, captured(engine, vm, "elder") as result:
        with monkeypatch.context() as patch:
            patch.setattr(capture, "qemu_build", lambda _answer: "9.9.9 Debian")
            before = engine.left()
            with pytest.raises(SnapshotDamaged, match="saved by QEMU"):
                await engine.restore(result.snapshot)
            assert engine.left() == before
        with monkeypatch.context() as patch:
            patch.setattr("greenroom.runtime.command.digest", lambda _machine: "other")
            with pytest.raises(SnapshotDamaged, match="starts its VMs otherwise"):
                await engine.restore(result.snapshot)
        loaded = engine._goldens.pop(golden.digest)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(engine._on_hand, "_cache", engine._cache / "nowhere")
                with pytest.raises(SnapshotDamaged, match="cache"):
                    await engine.restore(result.snapshot)
        finally:
            engine._goldens[golden.digest] = loaded
