"""The kernel's word about changed directories (inotify(7)), through ctypes; reading its records is pure.

Below ``watchtree``. Python has no binding of its own, and the calls are three.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MODIFY = 0x00000002
ATTRIB = 0x00000004
MOVED_FROM = 0x00000040
MOVED_TO = 0x00000080
CREATE = 0x00000100
DELETE = 0x00000200
DELETE_SELF = 0x00000400
MOVE_SELF = 0x00000800
OVERFLOW = 0x00004000
IGNORED = 0x00008000
IS_DIRECTORY = 0x40000000

_ONLY_DIRECTORIES = 0x01000000
_DONT_FOLLOW = 0x02000000
_WANTED = MODIFY | ATTRIB | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF
_HEADER = struct.Struct("iIII")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Record:
    """One event: which watch, what happened (a mask), and the entry's name; empty for the directory itself."""

    watch: int
    mask: int
    name: str


def open_queue() -> int:
    """A descriptor whose reads give records, non-blocking. Raises OSError (EMFILE: too many instances)."""
    return _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))


def add_watch(descriptor: int, path: str, *, follow: bool) -> int:
    """Watch a directory; answers the number its records carry. Raises OSError (ENOSPC: too many watches)."""
    mask = _WANTED | _ONLY_DIRECTORIES | (0 if follow else _DONT_FOLLOW)
    return _checked(_libc.inotify_add_watch(descriptor, os.fsencode(path), ctypes.c_uint32(mask)))


def remove_watch(descriptor: int, watch: int) -> None:
    """Watch no longer; one that is gone already is fine."""
    _libc.inotify_rm_watch(descriptor, watch)


def records(raw: bytes) -> Iterator[Record]:
    """The records of one read; the kernel never splits any."""
    at = 0
    while at + _HEADER.size <= len(raw):
        watch, mask, _cookie, size = _HEADER.unpack_from(raw, at)
        at += _HEADER.size
        name = raw[at : at + size].split(b"\0", 1)[0]
        at += size
        yield Record(watch, mask, os.fsdecode(name))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
