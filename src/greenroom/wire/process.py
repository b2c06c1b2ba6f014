"""What every role's `__main__` does: read the spec, run the role's life, turn errors into an exit status."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from greenroom.config import RoleSpec
from greenroom.errors import GreenroomError
from greenroom.wire.serving import raise_file_limit, read_spec, setup_logging

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

    An error of ours is one line on standard error. `fast_loop` takes uvloop instead of asyncio's own loop.
    """
    if len(arguments) != 1:
        print(f"usage: python -m greenroom.{role} SPEC.json", file=sys.stderr)
        return EX_USAGE
    setup_logging()
    raise_file_limit()
    runner = uvloop.run if fast_loop else asyncio.run
    try:
        runner(life(read_spec(arguments[0])))
    except asyncio.CancelledError:
        return 0
    except GreenroomError as error:
        print(f"greenroom {role}: {error.message}", file=sys.stderr)
        return EX_CONFIG
    return 0
