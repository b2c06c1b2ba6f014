"""Golden RAM: a sealed memfd that any VM may map privately (copy-on-write) and none can change.

QEMU 7.2 opens guest RAM read-write even for a private mapping, so a plain file would have to be writable by
every sandbox's uid. Seals refuse writes whatever the mode of the descriptor (memfd_create(2), fcntl(2)).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_CHUNK = 256 << 10
"""Granularity in bytes of what is left a hole when it is all zeros."""
_READ = 4 << 20
"""Bytes asked of the medium at a time."""


def new(name: str, size: int) -> int:
    """An empty memfd of `size` bytes that can still be sealed."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def seal(fd: int) -> None:
    """Make the memfd unchangeable for ever. Fails (EBUSY) while someone maps it shared and writable."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def extents(fd: int) -> Iterator[tuple[int, int]]:
    """Where a file has data, as (begin, end) in bytes; the rest of it are holes."""
    offset = 0
    while True:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, offset


def copy_data(source: int, target: int) -> int:
    """Copy what is not a hole from one file to another of the same size; returns the bytes copied.

    The source is read once, from its beginning to its end.
    """
    copied = 0
    with contextlib.suppress(OSError):  # advice only; not every file takes it
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    for start, end in extents(source):
        position = start
        while position < end:
            data = read(source, min(_READ, end - position), position)
            if not data:
                return copied
            for at in range(0, len(data), _CHUNK):
                part = data[at : at + _CHUNK]
                # Zero pages need no memory: leaving them holes keeps the golden small.
                if part.count(0) != len(part):
                    os.pwrite(target, part, position + at)
                    copied += len(part)
            position += len(data)
    return copied


def read(source: int, length: int, position: int) -> bytes:
    """Up to `length` bytes of a file at `position`: the one place at which golden RAM comes off its medium."""
    return os.pread(source, length, position)


def copy(sealed: int, name: str) -> int:
    """A memfd of a VM's own, not sealed, with the content of another one. It needs no medium.

    By sendfile(2), which copies 128 MiB in 70 ms where reading and writing take 210.
    """
    fd = new(name, os.fstat(sealed).st_size)
    try:
        for start, end in extents(sealed):
            os.lseek(fd, start, os.SEEK_SET)
            while start < end:
                sent = os.sendfile(fd, sealed, start, end - start)
                if sent == 0:
                    raise OSError(errno.EIO, "guest RAM could not be copied")
                start += sent
    except BaseException:
        os.close(fd)
        raise
    return fd


def resident(fd: int) -> int:
    """Bytes that a memfd takes in memory, mapped or not."""
    return os.fstat(fd).st_blocks * 512


def save(fd: int, path: Path) -> int:
    """Write a memfd to a sparse file; returns the bytes that are not holes."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o400)
    try:
        os.ftruncate(target, os.fstat(fd).st_size)
        copied = copy_data(fd, target)
        os.fsync(target)
    finally:
        os.close(target)
    return copied


def load(path: Path, name: str) -> int:
    """A sealed memfd with the content of `path`."""
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fd = new(name, os.fstat(source).st_size)
        try:
            copy_data(source, fd)
            seal(fd)
        except BaseException:
            os.close(fd)
            raise
    finally:
        os.close(source)
    return fd


def borrow(pid: int, name: str) -> int | None:
    """The sealed memfd `name` that process `pid` holds, or None: RAM that is there need not be loaded again."""
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return None
    for entry in entries:
        path = f"/proc/{pid}/fd/{entry}"
        try:
            if os.readlink(path) != f"/memfd:{name} (deleted)":
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS:
            return fd
        os.close(fd)
    return None
