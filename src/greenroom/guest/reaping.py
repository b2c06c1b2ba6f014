"""Children that nobody asked for: processes whose parents have died end up with the agent, and are reaped.

That happens where the agent is the first process of its guest (or container), and where it was told to be a
subreaper; elsewhere init does it. Commands themselves are never touched here: they are children of the
spawning *threads*, while orphans are given to the main thread, and the kernel lists the children of each
thread (proc(5), ``/proc/pid/task/tid/children``).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36

_log = logging.getLogger(__name__)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own (prctl(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the agent cannot become a subreaper")


def watch_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """Reap from now on, whenever a child ends. Must be called on the main thread, which must not spawn."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the main thread is given orphans")
    if not os.path.exists(_children()):
        _log.warning("this kernel lists no children: orphans will stay as zombies")
        return
    loop.add_signal_handler(signal.SIGCHLD, reap)
    reap()


def reap() -> int:
    """Reap every orphan that has ended; answers how many."""
    count = 0
    try:
        with open(_children(), "rb", buffering=0) as file:
            raw = bytearray()
            while block := file.read(65536):
                raw += block
    except OSError:
        return 0
    for word in raw.split():
        with suppress(ChildProcessError):
            count += os.waitpid(int(word), os.WNOHANG)[0] != 0
    return count


def _children() -> str:
    return f"/proc/self/task/{threading.main_thread().native_id}/children"
