"""Turns: no owner can hold all of them, and nothing is remembered of those who have none."""

from __future__ import annotations

import asyncio

from greenroom.node.turns import Turns
from greenroom.wire.tasks import spawn, stop
from tests.support.waiting import until


async def test_one_owner_cannot_hold_up_another() -> None:
    turns = Turns(3, 2)
    held: list[str] = []

    async def hang(owner: str) -> None:
        async with turns.of(owner):
            held.append(owner)
            await asyncio.Event().wait()

    hanging = [spawn(hang("bad"), f"bad {n}") for n in range(6)]
    await until(lambda: len(held) == 2)
    async with turns.of("good"):
        assert held == ["bad", "bad"]
    assert len(turns) == 1
    await stop(*hanging)
    assert len(turns) == 0


async def test_all_together_are_bounded() -> None:
    turns = Turns(2, 2)
    now = most = 0

    async def work(owner: str) -> None:
        nonlocal now, most
        async with turns.of(owner):
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    await asyncio.gather(*(work(f"owner-{n % 5}") for n in range(20)))
    assert most == 2
    assert len(turns) == 0
