"""Waiting for something to become true, with a deadline: never for luck, never for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], bool], deadline: float = 10.0) -> None:
    """Return as soon as `condition` holds. Raises TimeoutError past `deadline` seconds.

    For states that have no event to wait on; it looks every millisecond.
    """
    async with asyncio.timeout(deadline):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def until_true(condition: Callable[[], Any], deadline: float = 60.0) -> None:
    """The same for tests that are not asynchronous, and for what takes a call to look at."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.02)
