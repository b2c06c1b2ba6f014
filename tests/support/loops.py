"""Run a test once on asyncio's own event loop and once on uvloop.

Code that registers plain sockets with the loop meets the two loops' different ideas of readiness and closing,
so it is tested on both. The test becomes a synchronous function with a parameter `loop_factory`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

DEADLINE = 30.0
"""Seconds after which a hanging test fails by itself."""


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds, which may be asynchronous. For states that nothing announces."""
    async with asyncio.timeout(DEADLINE):
        while True:
            state = condition()
            if await state if inspect.isawaitable(state) else state:
                return
            await asyncio.sleep(0.002)


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate an `async def test_...`."""

    @functools.wraps(test)
    def run(*args: Any, loop_factory: Callable[[], asyncio.AbstractEventLoop], **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(bounded())

    signature = inspect.signature(test)
    extra = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), extra]
    )
    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would see a coroutine function behind it
    return pytest.mark.parametrize(
        "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )(run)
