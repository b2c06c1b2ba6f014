"""Waiting for something to become true, with a deadline: never for luck, never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], deadline: float = 10.0) -> None:
    """Return as soon as `condition` holds. Raises TimeoutError past `deadline` seconds.

    For states that have no event to wait on; it looks every millisecond.
    """
    async with asyncio.timeout(deadline):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
