"""Nothing is left half done: an interruption waits for what is in flight."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.bench.lanes import in_lanes, unbroken
from greenroom.errors import RuntimeFailure
from greenroom.wire.tasks import spawn


async def test_interrupted_work_is_finished_first() -> None:
    begun, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go.wait()
        done.set()

    task = spawn(unbroken(work(), "work"), "outer")
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def test_a_result_and_an_error_come_through() -> None:
    async def good() -> int:
        return 42

    async def bad() -> int:
        raise RuntimeFailure("no")

    assert await unbroken(good(), "good") == 42
    with pytest.raises(RuntimeFailure):
        await unbroken(bad(), "bad")


@pytest.mark.parametrize(("count", "parallel"), [(1, 1), (7, 1), (7, 3), (3, 7)])
async def test_each_number_is_done_once_by_as_many_lanes(count: int, parallel: int) -> None:
    done: list[int] = []
    running = most = 0

    async def work(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        done.append(number)

    await in_lanes(count, parallel, work, "lane")
    assert sorted(done) == list(range(count))
    assert most == min(count, parallel)


async def test_an_error_in_one_lane_ends_the_others() -> None:
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise RuntimeFailure("no")
        await asyncio.Event().wait()

    with pytest.raises(RuntimeFailure):
        await in_lanes(10, 2, work, "lane")
    assert len(begun) <= 2
