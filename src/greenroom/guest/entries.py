"""What a file is, in the words of the contract: type, mode, owner, times, link target, metadata.

User-defined metadata lives in extended attributes ``user.e2b.<key>``, where programs in the guest can read
and set it too. Blocking; callers run it on the file pool.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import Any

from .errors import AgentError, printable
from .users import UserDirectory

ATTRIBUTE_PREFIX = "user.e2b."
MAX_METADATA_BYTES = 4096
"""All keys, prefix included, and values of one file together (bytes)."""

MAX_METADATA_KEY = 246
"""Bytes of a key: Linux allows 255 for an attribute name, the prefix takes nine."""

_MIN_SECONDS = -62135596800  # 0001-01-01, the first instant a Protobuf timestamp can hold
_MAX_SECONDS = 253402300799  # 9999-12-31T23:59:59, the last one

_NO_ATTRIBUTES = frozenset(
    {errno.ENOTSUP, errno.ENODATA, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP}
)


def describe(path: str, users: UserDirectory, info: os.stat_result | None = None) -> dict[str, Any]:
    """The EntryInfo message of a path. Raises OSError when it does not exist.

    Of a symbolic link, type and mode are those of what it finally points to, the rest is the link's own;
    a dangling one has no known type.
    """
    if info is None:
        info = os.lstat(path)
    entry: dict[str, Any] = {
        "name": printable(os.path.basename(path)) or "/",
        "type": _kind(info.st_mode),
        "path": printable(path),
        "size": str(info.st_size),
        "mode": stat.S_IMODE(info.st_mode) & 0o777,
        "permissions": _permissions(info.st_mode),
        "owner": users.user_name(info.st_uid),
        "group": users.group_name(info.st_gid),
        "modifiedTime": timestamp(info.st_mtime_ns),
    }
    if stat.S_ISLNK(info.st_mode):
        target = os.path.realpath(path)
        entry["isSymlink"] = True
        entry["symlinkTarget"] = printable(target)
        try:
            resolved = os.stat(path)
        except OSError:
            entry["type"] = "FILE_TYPE_UNSPECIFIED"
            entry["mode"] = 0
        else:
            entry["type"] = _kind(resolved.st_mode)
            entry["mode"] = stat.S_IMODE(resolved.st_mode) & 0o777
    if metadata := read_metadata(path):
        entry["metadata"] = metadata
    return entry


def timestamp(nanoseconds: int) -> str:
    """RFC 3339 in UTC with nanoseconds, kept within the years 1 to 9999."""
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    seconds = min(max(seconds, _MIN_SECONDS), _MAX_SECONDS)
    moment = time.gmtime(seconds)
    return (
        f"{moment.tm_year:04d}-{moment.tm_mon:02d}-{moment.tm_mday:02d}"
        f"T{moment.tm_hour:02d}:{moment.tm_min:02d}:{moment.tm_sec:02d}.{fraction:09d}Z"
    )


def read_metadata(target: str | int) -> dict[str, str]:
    """The metadata of a file; empty where there is none or the file system has no attributes."""
    try:
        names = os.listxattr(target)
        return {
            name[len(ATTRIBUTE_PREFIX) :]: os.getxattr(target, name).decode("utf-8", "replace")
            for name in names
            if name.startswith(ATTRIBUTE_PREFIX)
        }
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            return {}
        raise


def replace_metadata(descriptor: int, metadata: dict[str, str], *, fresh: bool) -> None:
    """Make these the only metadata of an open file; a ``fresh`` one has none to remove.

    Raises ``failed_precondition`` where the file system cannot keep any.
    """
    if not fresh:
        for key in read_metadata(descriptor):
            if key not in metadata:
                os.removexattr(descriptor, ATTRIBUTE_PREFIX + key)
    try:
        for key, value in metadata.items():
            os.setxattr(descriptor, ATTRIBUTE_PREFIX + key, value.encode("utf-8"))
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            raise AgentError("failed_precondition", "this file system cannot keep file metadata") from None
        raise


def check_metadata(metadata: dict[str, str]) -> None:
    """Refuse metadata that would not fit. Raises ``invalid_argument``."""
    total = 0
    for key, value in metadata.items():
        size = len(key.encode("utf-8"))
        if not key or size > MAX_METADATA_KEY:
            raise AgentError("invalid_argument", f"a metadata key must have 1 to {MAX_METADATA_KEY} bytes")
        total += len(ATTRIBUTE_PREFIX) + size + len(value.encode("utf-8"))
    if total > MAX_METADATA_BYTES:
        raise AgentError(
            "invalid_argument", f"the metadata takes {total} bytes, more than {MAX_METADATA_BYTES}"
        )


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "FILE_TYPE_FILE"
    if stat.S_ISDIR(mode):
        return "FILE_TYPE_DIRECTORY"
    return "FILE_TYPE_UNSPECIFIED"


def _permissions(mode: int) -> str:
    text = stat.filemode(mode)
    return "L" + text[1:] if stat.S_ISLNK(mode) else text
