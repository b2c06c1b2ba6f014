"""Writing large files once and well: the digest is made beside the writing and flushing.

A digest takes longer than writing to the page cache, and flushing is the disk's work: with the three at the same time
a file takes no longer than the slowest of them. None of them needs Python's lock.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

Chunk = bytes | memoryview
_BATCH = 4 << 20
"""Bytes that are written and digested together."""
_AHEAD = 8
"""Batches of bytes, which take memory until they are digested, that the writing may be ahead."""
_IOV_MAX = 1024


def written(fd: int, chunks: Iterable[Chunk], *, durable: bool = False) -> tuple[int, str]:
    """Write `chunks` to a file, and flush it if it is to be `durable`.

    Returns its size in bytes and its SHA-256 in hex. Views are released when they have been used. Raises OSError.
    """
    total, size = hashlib.sha256(), 0
    behind: deque[Future[None]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest") as other:
        for batch in batches(chunks):
            views = [memoryview(chunk) for chunk in batch]
            try:
                behind.append(other.submit(_digest, total, [view[:] for view in views]))
                size += _write(fd, views)
            finally:
                _release(views)
                _release(chunk for chunk in batch if isinstance(chunk, memoryview))
            if isinstance(batch[0], bytes) and len(behind) > _AHEAD:
                behind.popleft().result()
        if durable:
            os.fsync(fd)
        for each in behind:
            each.result()
    return size, total.hexdigest()


def batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """The same chunks in lists of about `_BATCH` bytes and at most `_IOV_MAX` chunks."""
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk)
        if size >= _BATCH or len(batch) == _IOV_MAX:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _digest(total: hashlib._Hash, views: list[memoryview]) -> None:
    try:
        for view in views:
            total.update(view)
    finally:
        _release(views)


def _write(fd: int, views: list[memoryview]) -> int:
    """Write them all, however much the kernel takes at a time; returns the bytes."""
    size = sum(len(view) for view in views)
    rest = size
    at, offset = 0, 0
    while rest:
        with views[at][offset:] as first:
            done = os.writev(fd, [first, *views[at + 1 :]])
        rest -= done
        offset += done
        while at < len(views) and offset >= len(views[at]):
            offset -= len(views[at])
            at += 1
    return size


def _release(views: Iterable[memoryview]) -> None:
    for view in views:
        view.release()


def flush(path: Path) -> None:
    """Let a file, or the names in a directory, outlive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
