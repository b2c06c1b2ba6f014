"""One at a time for each key."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.errors import NodeUnavailable
from greenroom.master.turns import Turns
from greenroom.wire.tasks import spawn, stop


async def test_equal_keys_go_one_after_the_other_and_others_do_not_meet() -> None:
    turns, order = Turns(), []
    going = asyncio.Event()

    async def work(name: str, key: str) -> None:
        async with turns.turn(key, 30, key):
            order.append(name)
            await going.wait()
            order.append(f"{name} done")

    tasks = [spawn(work(*each), "work") for each in (("a1", "a"), ("a2", "a"), ("b1", "b"))]
    await asyncio.sleep(0.01)
    assert order == ["a1", "b1"]
    assert len(turns) == 2
    going.set()
    await asyncio.gather(*tasks)
    assert order[-2:] == ["a2", "a2 done"]
    assert len(turns) == 0


async def test_who_waits_too_long_is_told_to_come_again() -> None:
    turns = Turns()
    async with turns.turn("a", 30, "x"):
        with pytest.raises(NodeUnavailable, match=r"the thing: another request .* try again"):
            async with turns.turn("a", 0.01, "the thing"):
                raise AssertionError
    assert len(turns) == 0


async def test_those_who_wait_are_bounded_and_may_leave() -> None:
    turns = Turns(most=2)

    async def wait() -> None:
        async with turns.turn("a", 30, "x"):
            raise AssertionError

    async with turns.turn("a", 30, "x"):
        waiting = spawn(wait(), "waiting")
        await asyncio.sleep(0)
        with pytest.raises(NodeUnavailable, match="too many"):
            async with turns.turn("b", 30, "x"):
                raise AssertionError
        await stop(waiting)
        async with turns.turn("b", 30, "x"):
            assert len(turns) == 2
    assert len(turns) == 0
