"""Doing a number of things, so many at a time, without ever leaving one half done.

What a benchmark starts holds processes and namespaces of the host. An interruption therefore lets what is in
flight come to its end first and is passed on then, when everything made is known to whoever cleans up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from greenroom.wire.tasks import spawn, stop

T = TypeVar("T")


async def unbroken(work: Coroutine[Any, Any, T], name: str) -> T:
    """Run `work` to its end, whatever happens meanwhile; a cancellation is raised after that.

    Use it where a cut in the middle would leave something that nobody knows of. It must end by itself: each
    call that it makes has a deadline.
    """
    task = spawn(work, name)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    result: T = task.result()
    return result


async def in_lanes(count: int, parallel: int, work: Callable[[int], Awaitable[None]], name: str) -> None:
    """Call `work` with 0 to `count` - 1, at most `parallel` at a time; each lane takes the next number.

    Returns when all are done. An exception of `work` stops the other lanes after their present call.
    """
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            await work(number)

    lanes = [spawn(lane(), f"{name} {index + 1}") for index in range(min(parallel, count))]
    try:
        await asyncio.gather(*lanes)
    finally:
        await stop(*lanes)
