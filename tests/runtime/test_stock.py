"""The stock with things made of nothing, and with real VMs: taken, replaced, held back, removed, swept."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.errors import RuntimeFailure
from greenroom.runtime import stock as module
from greenroom.runtime.engine import Golden
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.stock import Stock
from greenroom.runtime.stocking import Wants
from greenroom.runtime.vm import QemuVm
from tests.runtime.conftest import spec_in

SOME = Wants(places=2, waiting=2, most=8)


class Thing:
    """A waiting QEMU that is none."""

    def __init__(self, number: int, alive: set[int]) -> None:
        self.number = number
        self.ended = asyncio.Event()
        self.directory = Path(str(number))
        self._alive = alive
        alive.add(number)

    async def destroy(self) -> None:
        self._alive.discard(self.number)
        self.ended.set()


class Maker:
    """Makes them, and places that are just as hollow."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.failures = 0
        self.most_at_once = 0
        self._making = 0
        self._numbers = itertools.count()

    async def _made(self) -> Thing:
        self._making += 1
        self.most_at_once = max(self.most_at_once, self._making)
        await asyncio.sleep(0)
        self._making -= 1
        if self.failures:
            self.failures -= 1
            raise RuntimeFailure("nothing is made today")
        return Thing(next(self._numbers), self.alive)

    async def make_place(self, golden: str) -> Any:
        return await self._made()

    async def drop_place(self, place: Any) -> None:
        await place.destroy()

    async def make_waiting(self, golden: str, place: Any | None) -> Thing:
        if place is not None:
            await place.destroy()
        return await self._made()


async def test_it_fills_is_taken_from_and_fills_again() -> None:
    maker = Maker()
    stock: Stock[Thing, str] = Stock(maker, SOME, 2, lambda: True)
    stock.add("a", "a")
    await stock.filled()
    assert len(maker.alive) == 4
    assert maker.most_at_once <= 2
    with stock.restoring():
        taken = stock.take_waiting("a")
        place = stock.take_place("a")
        assert taken is not None
        assert place is not None
        await asyncio.sleep(0)
        assert (stock.levels()[0].waiting, stock.levels()[0].making_waiting) == (1, 0)
    await stock.filled()
    assert len(maker.alive) == 6
    await stock.close()
    assert maker.alive == {taken.number, place.number}  # type: ignore[attr-defined]


async def test_one_that_dies_while_it_waits_is_replaced_and_never_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BACKOFF_FIRST", 0.01)
    maker = Maker()
    stock: Stock[Thing, str] = Stock(maker, SOME, 2, lambda: True)
    stock.add("a", "a")
    await stock.filled()
    shelf = stock._shelves["a"]
    dead = shelf.waiting[0]
    dead.ended.set()
    assert stock.take_waiting("a") is not dead
    await stock.filled()
    assert dead.number not in maker.alive
    assert len(shelf.waiting) == 2
    await stock.close()


async def test_a_failure_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACKOFF_FIRST", 0.01)
    maker = Maker()
    maker.failures = 3
    stock: Stock[Thing, str] = Stock(maker, SOME, 1, lambda: True)
    stock.add("a", "a")
    await stock.filled()
    assert maker.failures == 0
    assert len(maker.alive) == 4
    await stock.close()
    assert not maker.alive


async def test_without_room_nothing_is_made_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.001)
    looked = asyncio.Event()
    maker, room = Maker(), True

    def has_room() -> bool:
        if not room:
            looked.set()
        return room

    stock: Stock[Thing, str] = Stock(maker, SOME, 2, has_room)
    stock.add("a", "a")
    await stock.filled()
    room = False
    stock.want(SOME)
    async with asyncio.timeout(10):
        await looked.wait()
        while stock._tasks:
            await asyncio.wait(stock._tasks)
    assert (stock.levels()[0].waiting, stock.levels()[0].places) == (0, 2)
    await stock.close()
    assert not maker.alive


async def test_the_golden_used_last_has_the_stock_when_there_is_not_enough_for_all() -> None:
    maker = Maker()
    stock: Stock[Thing, str] = Stock(maker, Wants(places=0, waiting=2, most=2), 2, lambda: True)
    stock.add("a", "a")
    stock.add("b", "b")
    await stock.filled()
    assert {level.golden: level.waiting for level in stock.levels()} == {"b": 2, "a": 0}
    with stock.restoring():
        assert stock.take_waiting("a") is None
    await stock.filled()
    assert {level.golden: level.waiting for level in stock.levels()} == {"a": 2, "b": 0}
    await stock.close()


async def test_none_is_possible() -> None:
    stock: Stock[Thing, str] = Stock(Maker(), Wants(places=0, waiting=0, most=9), 2, lambda: True)
    stock.add("a", "a")
    assert stock._loop is None
    assert stock.take_waiting("a") is None
    await stock.close()


@pytest.mark.vm
async def test_restores_come_from_the_stock_and_closing_leaves_nothing(tmp_path: Path) -> None:
    runtime = QemuRuntime(spec_in(tmp_path, stock_slots=2, stock_waiting=2))
    try:
        golden = await _golden(runtime)
        await runtime._stock.filled()
        assert runtime.left() == {"processes": 2, "namespaces": 4, "cgroups": 4, "directories": 4}
        assert not any((await runtime.sweep()).values())
        waiting = {vm.pid for vm in runtime._stock._shelves[golden.digest].waiting}
        places = [place.slot.name for place in runtime._stock._shelves[golden.digest].places]
        runtime._stock.hold()
        vms = [await runtime.restore(golden) for _ in range(4)]
        assert {vm.describe().pid for vm in vms[:2]} == waiting
        assert [vm.name for vm in vms[2:3]] == places[:1]
        for vm in vms:
            assert isinstance(vm, QemuVm)
            assert not (await vm.execute("query-status"))["running"]
            assert vm.slot.origin() is not None
    finally:
        await runtime.close()
    assert not any(runtime.left().values())


@pytest.mark.vm
async def test_a_dead_nodes_stock_is_swept_and_never_adopted(tmp_path: Path) -> None:
    dead = QemuRuntime(spec_in(tmp_path, stock_slots=1, stock_waiting=1))
    heir = QemuRuntime(spec_in(tmp_path))
    try:
        golden = await _golden(dead)
        await dead._stock.filled()
        dead._stock.hold()
        for waiting in dead._stock._shelves[golden.digest].waiting:
            await waiting.detach()  # a dead node watches nothing
        assert await heir.adopt() == []
        assert await heir.sweep() == {"processes": 1, "namespaces": 2, "cgroups": 2, "directories": 2}
    finally:
        await dead.close()
        await heir.close()
    assert not any(heir.left().values())


@pytest.mark.vm
async def test_a_stocked_qemu_that_is_killed_costs_no_restore(tmp_path: Path) -> None:
    runtime = QemuRuntime(spec_in(tmp_path, stock_waiting=1))
    try:
        golden = await _golden(runtime)
        await runtime._stock.filled()
        runtime._stock.hold()
        (waiting,) = runtime._stock._shelves[golden.digest].waiting
        assert waiting.pid is not None
        os.kill(waiting.pid, 9)
        vm = await runtime.restore(golden)
        assert vm.name != waiting.name
    finally:
        await runtime.close()
    assert not any(runtime.left().values())


async def _golden(runtime: QemuRuntime) -> Golden:
    from tests.runtime.conftest import SMALL

    return await runtime.snapshot_golden("base", SMALL, lambda _step, _done: None)


async def test_what_is_removed_from_stock_is_gone_with_all_that_was_being_made() -> None:
    maker = Maker()
    stock: Stock[Thing, str] = Stock(maker, SOME, 2, lambda: True)
    stock.add("a", "a")
    stock.add("b", "b")
    await asyncio.sleep(0)
    await stock.remove("a")
    assert [level.golden for level in stock.levels()] == ["b"]
    await stock.filled()
    assert len(maker.alive) == 4
    await stock.remove("a")
    await stock.remove("b")
    assert maker.alive == set()
    await stock.close()
