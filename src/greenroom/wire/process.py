"""What every role's `__main__` does: read the spec, run the role's life, turn errors into an exit status."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from greenroom.config import RoleSpec
from greenroom.errors import GreenroomError
from greenroom.wire.logs import setup_logging
from greenroom.wire.serving import raise_file_limit, read_spec

_log = logging.getLogger(__name__)
EX_USAGE = 2
EX_CONFIG = 78
"""Exit status when the machine or the settings lack something, as in sysexits(3)."""


def run_process(
    role: str,
    life: Callable[[RoleSpec], Coroutine[Any, Any, None]],
    arguments: list[str],
    *,
    fast_loop: bool = True,
) -> int:
    """Run `life` with the spec that the one argument names, until it ends; returns the exit status.

    An error of ours is one line of the log. `fast_loop` takes uvloop instead of asyncio's own loop.
    """
    if len(arguments) != 1:
        print(f"usage: python -m greenroom.{role} SPEC.json", file=sys.stderr)
        return EX_USAGE
    spec = read_spec(arguments[0])
    setup_logging(role, spec.replica, spec.config.logs.level)
    raise_file_limit()
    runner = uvloop.run if fast_loop else asyncio.run
    try:
        runner(life(spec))
    except asyncio.CancelledError:
        return 0
    except GreenroomError as error:
        _log.critical("%s", error.message)
        return EX_CONFIG
    return 0
