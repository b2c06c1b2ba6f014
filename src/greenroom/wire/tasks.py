"""The one way to start a background task: it cannot be garbage-collected and its error cannot be lost."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

from greenroom.errors import GreenroomError

_log = logging.getLogger(__name__)
_running: set[asyncio.Task[Any]] = set()


def spawn(coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Run `coroutine` as a task called `name`, keep it alive, and log what it raises.

    An error of ours is one line, because whoever awaits the task deals with it; any other has its traceback.
    """
    # The task's own context, so that the line about its failure carries the request that it ran for.
    context = contextvars.copy_context()
    task = asyncio.get_running_loop().create_task(coroutine, name=name, context=context)
    _running.add(task)
    task.add_done_callback(_finished, context=context)
    return task


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, GreenroomError):
        _log.info("task %s: %s: %s", task.get_name(), error.kind, error.message)
    else:
        _log.error("task %s failed", task.get_name(), exc_info=error)


async def stop(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks and wait until each has ended; errors they raise meanwhile are already logged."""
    live = [task for task in tasks if task is not None and not task.done()]
    for task in live:
        task.cancel()
    await asyncio.gather(*live, return_exceptions=True)
