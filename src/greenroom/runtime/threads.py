"""Blocking work in a thread of its own, for what may take long: the shared workers must stay free for short work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T], name: str) -> T:
    """Run `work` in a new thread and return its result or raise its error.

    A cancellation waits for the thread first, because nothing can interrupt it and what it makes must be known;
    its result is then lost, so `work` should give a thing that may be (or have been interrupted from outside).
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised again below
            _tell(done.set_exception, error)
        else:
            _tell(done.set_result, result)

    def _tell(how: Callable[..., None], what: object) -> None:
        try:
            loop.call_soon_threadsafe(how, what)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            return

    threading.Thread(target=run, name=name, daemon=True).start()
    cancelled = False
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        done.exception()  # taken note of
        raise asyncio.CancelledError
    return done.result()
