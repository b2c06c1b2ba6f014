"""Paths as requests name them, and directories made on the way with the right owner.

The agent works as root on behalf of a user: whoever holds the access token owns the guest, so there are no
permission checks here, but whatever is created belongs to the user who asked for it.
"""

from __future__ import annotations

import os

from .errors import AgentError
from .users import User

DIRECTORY_MODE = 0o755
FILE_MODE = 0o644


def resolve(path: str, user: User, default: str = "") -> str:
    """The absolute, normalised form of a path.

    Empty is ``default`` (or the home), ``~`` is the home, anything relative is relative to the home.
    Symbolic links stay as they are. Raises ``invalid_argument`` for a path no system call would take.
    """
    check(path)
    if not path:
        path = default or user.home
    if path == "~" or path.startswith("~/"):
        path = user.home + path[1:]
    elif not path.startswith("/"):
        path = f"{user.home}/{path}"
    # POSIX lets normpath keep exactly two leading slashes; here they mean nothing.
    return "/" + os.path.normpath(path).lstrip("/")


def check(path: str) -> None:
    """Refuse zero bytes and text that has no file name encoding."""
    if "\0" in path:
        raise AgentError("invalid_argument", "a path must not contain a zero byte")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise AgentError("invalid_argument", "a path must be valid Unicode") from None


def make_directories(path: str, user: User) -> bool:
    """Create a directory and its missing parents, mode 0755, owned by the user.

    Answers whether the last one was created here. Raises OSError; ENOTDIR where a file is in the way.
    """
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if os.path.isdir(path):
            return False
        raise NotADirectoryError(20, os.strerror(20), path) from None
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent == path:
            raise
        make_directories(parent, user)
        return make_directories(path, user)
    give(path, user)
    return True


def give(target: str | int, user: User) -> None:
    """Make a path or an open file the user's.

    Without root it can only stay ours, which is what the tests of an unprivileged agent want.
    """
    if os.geteuid() == 0 or user.uid == os.geteuid():
        os.chown(target, user.uid, user.gid)
