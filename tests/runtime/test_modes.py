"""Restore modes: the rule, what is remembered, and that a VM of either mode is as good as one of the other."""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from greenroom.errors import RuntimeFailure
from greenroom.runtime import memory, modes
from greenroom.runtime.modes import Cost, Measured
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.threads import in_own_thread
from greenroom.runtime.vm import QemuVm
from tests.runtime.conftest import SMALL, spec_in
from tests.runtime.test_qemu import running
from tests.support.shell import sh


def measured(cow: tuple[float, float], copy: tuple[float, float]) -> Measured:
    return Measured(cow=Cost(ms=cow[0], mib=cow[1]), copy=Cost(ms=copy[0], mib=copy[1]))


@pytest.mark.parametrize(
    ("cow", "copy", "mode"),
    [
        ((60, 16), (150, 140), "cow"),
        ((150, 16), (80, 140), "cow"),
        ((170, 16), (80, 140), "copy"),
        ((60, 150), (150, 140), "copy"),
    ],
)
def test_the_rule(cow: tuple[float, float], copy: tuple[float, float], mode: str) -> None:
    choice = modes.choose("auto", measured(cow, copy))
    assert choice.mode == mode
    assert f"{cow[0]} ms" in choice.reason
    assert f"{copy[1]} MiB" in choice.reason


def test_what_is_asked_for_wins_and_without_figures_it_is_cow() -> None:
    assert modes.choose("copy", measured((1, 1), (9, 9))).mode == "copy"
    assert modes.choose("cow", measured((9, 9), (1, 1))).mode == "cow"
    assert modes.choose("auto", None).mode == "cow"


def test_what_was_measured_is_remembered_for_each_golden(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "modes.json"
    first, second = measured((1, 2), (3, 4)), measured((5, 6), (7, 8))
    assert modes.remembered(file, "a") is None
    modes.remember(file, "a", first)
    modes.remember(file, "b", second)
    assert (modes.remembered(file, "a"), modes.remembered(file, "b")) == (first, second)
    file.write_bytes(b"{damaged")
    assert modes.remembered(file, "a") is None


def test_loading_reads_each_byte_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = memory.new("test", 64 << 20)
    for at in (0, 5 << 20, 33 << 20):
        os.pwrite(fd, os.urandom(3 << 20), at)
    copied = memory.save(fd, tmp_path / "ram")
    reads: list[tuple[int, int]] = []
    plain = memory.read

    def counted(source: int, length: int, position: int) -> bytes:
        data = plain(source, length, position)
        reads.append((position, len(data)))
        return data

    monkeypatch.setattr(memory, "read", counted)
    loaded = memory.load(tmp_path / "ram", "loaded")
    assert all(start + length <= after for (start, length), (after, _) in pairwise(reads))
    assert copied <= sum(length for _, length in reads) <= copied + (1 << 20)
    own = memory.copy(loaded, "own")
    assert memory.resident(own) == copied
    os.pwrite(own, b"changed", 0)
    assert os.pread(loaded, 64 << 20, 0) == os.pread(fd, 64 << 20, 0)
    for each in (fd, loaded, own):
        os.close(each)


async def test_a_thread_of_ones_own_gives_its_result_and_its_error() -> None:
    assert await in_own_thread(lambda: threading.current_thread().name, "mine") == "mine"

    def fails() -> None:
        raise RuntimeFailure("as told")

    with pytest.raises(RuntimeFailure, match="as told"):
        await in_own_thread(fails, "failing")


async def test_a_cancellation_waits_for_the_thread() -> None:
    go, ended = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(20)
        ended.set()

    task = asyncio.get_running_loop().create_task(in_own_thread(work, "slow"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@pytest.mark.vm
async def test_a_copy_has_ram_of_its_own_and_works(tmp_path: Path) -> None:
    runtime = QemuRuntime(spec_in(tmp_path, restore_mode="copy"))
    try:
        golden = await runtime.snapshot_golden("base", SMALL, lambda _step, _done: None)
        assert "copy was asked for" in (await runtime.describe()).detail[golden.digest]
        loaded = runtime._goldens[golden.digest]
        before = os.pread(loaded.ram, 1 << 20, 0)
        async with running(runtime, golden) as first, running(runtime, golden) as second:
            for vm, word in ((first, "one"), (second, "two")):
                assert isinstance(vm, QemuVm)
                assert (await sh(vm, f"echo {word} > /tmp/mark; cat /tmp/mark")).out == f"{word}\n"
            files = {
                os.stat(f"/proc/{vm.pid}/fd/{fd}").st_ino
                for vm in (first, second)
                for fd in os.listdir(f"/proc/{vm.pid}/fd")
                if "-copy" in os.readlink(f"/proc/{vm.pid}/fd/{fd}")
            }
            assert len(files) == 2
            assert os.fstat(loaded.ram).st_ino not in files
        assert os.pread(loaded.ram, 1 << 20, 0) == before
    finally:
        await runtime.close()
    assert not any(runtime.left().values())


@pytest.mark.vm
async def test_the_modes_are_measured_once_and_the_choice_is_told(tmp_path: Path) -> None:
    runtime = QemuRuntime(spec_in(tmp_path))
    try:
        golden = await runtime.snapshot_golden("base", SMALL, lambda _step, _done: None)
        told = (await runtime.describe()).detail[golden.digest]
        assert told.startswith(("cow: ", "copy: "))
        assert "MiB a VM" in told
        key = modes.key(golden.digest, runtime._cache)
        assert modes.remembered(runtime._cache / "restore-modes.json", key) is not None
        assert not any(runtime.left().values())
    finally:
        await runtime.close()


@pytest.mark.vm
async def test_a_slow_medium_is_read_once_for_twenty_vms_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medium is slow by a reader that waits: no clock is asked, only how many bytes came off it and when."""
    runtime = QemuRuntime(spec_in(tmp_path))
    slow = QemuRuntime(spec_in(tmp_path / "slow"))
    plain, go, begun = memory.read, threading.Event(), threading.Event()
    from_medium: list[int] = []

    def reader(source: int, length: int, position: int) -> bytes:
        if threading.current_thread().name.startswith("load ") and "ram.img" in os.readlink(
            f"/proc/self/fd/{source}"
        ):
            begun.set()
            go.wait(120)
            from_medium.append(length)
        return plain(source, length, position)

    try:
        golden = await runtime.snapshot_golden("base", SMALL, lambda _step, _done: None)
        monkeypatch.setattr(memory, "read", reader)
        loading = asyncio.get_running_loop().create_task(
            slow.snapshot_golden("base", SMALL, lambda _step, _done: None)
        )
        await asyncio.to_thread(begun.wait, 60)
        # The slow golden is on its way and stays there; another one's fill goes on meanwhile.
        for _ in range(3):
            await runtime.stop(await runtime.restore(golden))
        assert not loading.done()
        go.set()
        held = await loading
        size = sum(from_medium)
        assert golden.ram_bytes <= size <= (SMALL.memory_mib << 20)
        vms = [await slow.restore(held) for _ in range(20)]
        assert sum(from_medium) == size
        assert len({vm.name for vm in vms}) == 20
    finally:
        go.set()
        await slow.close()
        await runtime.close()
