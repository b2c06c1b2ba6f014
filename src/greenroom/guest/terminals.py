"""Pseudo-terminals (pty(7)): made before a command starts, resized while it runs.

Below ``spawning``, which hands the far end to the command, and ``commands``, which resizes.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from contextlib import suppress
from dataclasses import dataclass

from .errors import AgentError
from .messages import Message, child, integer
from .users import User

_MAX_SIDE = 0xFFFF
_COLUMNS, _ROWS = 80, 24


@dataclass(frozen=True, slots=True)
class Size:
    """A terminal's size in character cells."""

    columns: int = _COLUMNS
    rows: int = _ROWS


def requested_size(message: Message) -> Size:
    """The size in a ``pty`` message; a missing or zero side is the usual 80 by 24.

    Raises ``invalid_argument`` for what a terminal cannot have.
    """
    size = child(message, "size")
    if size is None:
        return Size()
    columns, rows = integer(size, "cols"), integer(size, "rows")
    if not (0 <= columns <= _MAX_SIDE and 0 <= rows <= _MAX_SIDE):
        raise AgentError("invalid_argument", f"a terminal has 1 to {_MAX_SIDE} columns and rows")
    return Size(columns or _COLUMNS, rows or _ROWS)


def open_terminal(size: Size, user: User) -> tuple[int, int]:
    """A new terminal of this size: our end and the command's. Raises OSError.

    The command's end belongs to its user, so that programs may open it by name again.
    """
    ours, theirs = os.openpty()
    try:
        resize(ours, size)
        with suppress(PermissionError):  # not root: it is ours, and so is the command
            os.fchown(theirs, user.uid, -1)
    except BaseException:
        os.close(ours)
        os.close(theirs)
        raise
    return ours, theirs


def resize(descriptor: int, size: Size) -> None:
    """Tell the terminal its size; the kernel sends SIGWINCH to what runs in front. Raises OSError."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))


def take_control(descriptor: int) -> None:
    """Make a terminal the controlling one of this process, which must lead a session. Raises OSError."""
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
