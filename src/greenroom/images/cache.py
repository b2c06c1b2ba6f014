"""Directories that are either whole or absent: built beside their place, then renamed into it.

Builders on one machine (several nodes, two state directories) take turns by `flock`, so work is done once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from greenroom.errors import SetupError
from greenroom.images.collect import note_use

_BLOCK = 1 << 20
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


MANIFEST = "manifest.json"


class Part(msgspec.Struct, frozen=True):
    """A file of a published directory: its size and the SHA-256 of its data."""

    size: int
    sha256: str


def publish(
    final: Path,
    build: Callable[[Path], None],
    progress: Progress = silent,
    *,
    mode: int = 0o700,
    checked: bool = True,
) -> Path:
    """Return `final`, building it first when it is absent or damaged: `build` fills a fresh directory beside it.

    What an interrupted build left is thrown away. The directory becomes visible in one rename, after its
    data were flushed, so that a power cut leaves it whole or absent. Whoever may not enter the directory by
    `mode` reaches nothing in it. With `checked`, a manifest of all files is kept and compared at every call; a
    damaged directory is put aside as `.damaged-…` and built anew. Raises SetupError when there is no room.
    """
    if final.is_dir():
        final.chmod(mode)
        note_use(final)
        damage = damage_of(final) if checked else ""
        if not damage:
            return final
        progress(f"{final.name} is damaged ({damage}); building it anew", None)
        _put_aside(final)
    lock = final.with_name(f".{final.name}.lock")
    with exclusive(lock, lambda: progress(f"waiting for another builder of {final.name}", None)):
        if final.is_dir():
            return final
        scratch = final.with_name(f".{final.name}.building")
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True, mode=mode)
        try:
            build(scratch)
            if checked:
                parts = {path.name: _part(path) for path in scratch.iterdir() if path.is_file()}
                (scratch / MANIFEST).write_bytes(msgspec.json.encode(parts))
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise SetupError(
                f"cannot build {final}: {error.strerror}; free some space there, or name another "
                "directory by --cache-dir"
            ) from error
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        os.sync()
        scratch.rename(final)
        note_use(final)
    return final


def damage_of(directory: Path) -> str:
    """What is wrong with a published directory, in a few words; empty when every file is as it was built."""
    try:
        parts = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=dict[str, Part])
    except (OSError, msgspec.DecodeError):
        return "it has no readable manifest"
    for name, part in parts.items():
        try:
            if (directory / name).stat().st_size != part.size:
                return f"{name} has another size"
            if _part(directory / name).sha256 != part.sha256:
                return f"{name} has other content"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _part(path: Path) -> Part:
    """Size and digest of a file. Blocks of zeros do not count, so that holes need not be read.

    Blocks lie at multiples of their size, because where a file system puts its holes is its own affair.
    """
    total = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        fd, size, offset = stream.fileno(), os.fstat(stream.fileno()).st_size, 0
        while offset < size:
            try:
                offset = os.lseek(fd, offset, os.SEEK_DATA) // _BLOCK * _BLOCK
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    break
                raise
            data = os.pread(fd, _BLOCK, offset)
            if data.count(0) != len(data):
                total.update(offset.to_bytes(8, "big") + data)
            offset += _BLOCK
    return Part(size, total.hexdigest())


def _put_aside(directory: Path) -> None:
    """Move a damaged directory out of the way; VMs that have its files open keep them."""
    aside = directory.with_name(f".damaged-{directory.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
