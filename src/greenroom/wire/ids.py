"""Ids that carry meaning: a sandbox id names its home node, so routing needs no table per sandbox.

A sandbox id is `i`, the node's four-character code, then fifteen random characters, all of `[a-z0-9]`: E2B's
clients split host names at `-`, so ids have none. Fifteen base-36 characters are 77 bits.
"""

from __future__ import annotations

import re
import secrets

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
CODE_LENGTH = 4
_RANDOM_LENGTH = 15
_PATTERN = re.compile(rf"i[a-z0-9]{{{CODE_LENGTH + _RANDOM_LENGTH}}}")
_SNAPSHOT = re.compile(rf"s[a-z0-9]{{{CODE_LENGTH + _RANDOM_LENGTH}}}")


def _draw(length: int) -> str:
    # One draw of a number with that many digits: a draw for each digit would cost a claim 20 µs.
    number = secrets.randbelow(len(ALPHABET) ** length)
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(digits)


def new_node_code() -> str:
    """A code for a new node; the node keeps it in its journal for life."""
    return _draw(CODE_LENGTH)


def new_sandbox_id(node_code: str) -> str:
    """A fresh sandbox id homed on the node with `node_code`."""
    return "i" + node_code + _draw(_RANDOM_LENGTH)


def new_snapshot_id(node_code: str) -> str:
    """A fresh id of a snapshot that the node with `node_code` keeps: like a sandbox's, with `s`."""
    return "s" + node_code + _draw(_RANDOM_LENGTH)


def is_snapshot_id(text: str) -> bool:
    """True if `text` has the form of a snapshot id; a template's can have it too."""
    return _SNAPSHOT.fullmatch(text) is not None


ASLEEP = "asleep-"
"""Begins the names of those snapshots that are paused sandboxes."""


def new_template_id() -> str:
    """A fresh opaque template id of twenty characters, as E2B's are."""
    return _draw(20)


def is_sandbox_id(text: str) -> bool:
    """True if `text` has the form of a sandbox id; says nothing about whether one exists."""
    return _PATTERN.fullmatch(text) is not None


def node_code_of(sandbox_id: str) -> str:
    """The code of the node that a well-formed sandbox or snapshot id names. Raises ValueError on any other text."""
    if not (is_sandbox_id(sandbox_id) or is_snapshot_id(sandbox_id)):
        raise ValueError("not the id of a sandbox or snapshot")
    return sandbox_id[1 : 1 + CODE_LENGTH]
