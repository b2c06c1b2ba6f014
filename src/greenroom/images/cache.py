"""Directories that are either whole or absent: built beside their place, then renamed into it.

Builders on one machine (several nodes, two state directories) take turns by `flock`, so work is done once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[str, float | None], None]
"""Told the present step in plain words and, where known, how much of it is done (0 to 1)."""


def silent(_step: str, _done: float | None) -> None:
    """A Progress that tells nobody."""


@contextlib.contextmanager
def exclusive(lock: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold `lock` (a file, made when missing) for the block; `waiting` is called once if another holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def publish(final: Path, build: Callable[[Path], None], progress: Progress = silent) -> Path:
    """Return `final`, building it first when it is absent: `build` fills a fresh directory beside it.

    What an interrupted build left is thrown away. The directory becomes visible in one rename, after its
    data were flushed, so that a power cut leaves it whole or absent.
    """
    if final.is_dir():
        return final
    lock = final.with_name(f".{final.name}.lock")
    with exclusive(lock, lambda: progress(f"waiting for another builder of {final.name}", None)):
        if final.is_dir():
            return final
        scratch = final.with_name(f".{final.name}.building")
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True)
        try:
            build(scratch)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        os.sync()
        scratch.rename(final)
    return final
