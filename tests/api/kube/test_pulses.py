"""Watchers are woken at once after a pause, and together while changes keep coming."""

from __future__ import annotations

import asyncio

from greenroom.api.kube.pulses import CHUNKS, Pulse, pulse_of
from greenroom.api.kube.watching import Cache


async def test_the_first_is_woken_at_once_and_the_next_together() -> None:
    pulse = Pulse(every=3600, each=3600)
    one, other = asyncio.Event(), asyncio.Event()
    pulse.wake(one)
    async with asyncio.timeout(20):
        await one.wait()
    pulse.wake(one)
    one.clear()
    pulse.wake(other)
    await asyncio.sleep(0)
    assert not one.is_set()
    assert not other.is_set()


async def test_all_who_were_woken_meanwhile_come_with_the_next() -> None:
    pulse = Pulse(every=0.01, each=1)
    events = [asyncio.Event() for _ in range(3)]
    for _ in range(3):
        for event in events:
            event.clear()
            pulse.wake(event)
        async with asyncio.timeout(20):
            await asyncio.gather(*(event.wait() for event in events))


async def test_chunks_are_kept_until_the_next_time() -> None:
    pulse = Pulse(every=0)
    assert pulse.keep("a", b"x") == b"x"
    assert pulse.chunk("a") == b"x"
    for number in range(2 * CHUNKS):
        pulse.keep(number, b"y")
    assert pulse.chunk(2 * CHUNKS - 1) is None
    news = asyncio.Event()
    pulse.wake(news)
    async with asyncio.timeout(20):
        await news.wait()
    assert pulse.chunk("a") is None


def test_a_cache_has_one() -> None:
    cache = Cache()
    assert pulse_of(cache) is pulse_of(cache)
    assert pulse_of(cache) is not pulse_of(Cache())
