"""How a VM gets its RAM: `cow` or `copy`, which of them is used, and why.

`cow` maps the golden's sealed memory privately: a VM holds only the pages it has changed, and each first write to
a page copies it. `copy` gives each VM a file of its own, filled from that memory and mapped shared: no page is
copied later, but each VM holds all of the golden from the start.

The node measures both on a few VMs and picks by one rule: `cow`, unless it takes more than twice as long to a paused
VM or more memory than `copy`. What was measured is kept in the cache for each golden and medium, because neither
changes; another kernel may, so its release is part of the key too.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

import msgspec

Mode = Literal["cow", "copy"]
MODES: tuple[Mode, ...] = ("cow", "copy")
PATIENCE = 2.0
"""How many times as long as a `copy` a `cow` restore may take and still be picked for its memory."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of a few restores: milliseconds to a paused VM, and MiB that it holds for itself alone."""

    ms: float
    mib: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Both modes on one golden and medium."""

    cow: Cost
    copy: Cost


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The mode and the reason in plain words."""

    mode: Mode
    reason: str


def choose(wanted: Literal["auto", "cow", "copy"], measured: Measured | None) -> Choice:
    """The mode for a golden. Without figures `auto` is `cow`, which can never hold more than it changes."""
    if wanted != "auto":
        return Choice(mode=wanted, reason=f"{wanted} was asked for")
    if measured is None:
        return Choice(mode="cow", reason="nothing was measured")
    cow, copy = measured.cow, measured.copy
    figures = f"cow {cow.ms:.0f} ms and {cow.mib:.0f} MiB a VM, copy {copy.ms:.0f} ms and {copy.mib:.0f} MiB"
    if cow.mib > copy.mib:
        return Choice(mode="copy", reason=f"cow takes more memory: {figures}")
    if cow.ms > PATIENCE * copy.ms:
        return Choice(mode="copy", reason=f"cow takes over {PATIENCE:.0f} times as long: {figures}")
    return Choice(
        mode="cow", reason=f"it takes less memory and not over {PATIENCE:.0f} times as long: {figures}"
    )


def key(digest: str, directory: Path) -> str:
    """What a measurement holds for: the golden, the device it lies on, the kernel."""
    return f"{digest} on {os.stat(directory).st_dev:x} under {platform.release()}"


def remembered(memory: Path, what: str) -> Measured | None:
    """What was measured before for `what`, if it can be read."""
    return _read(memory).get(what)


def remember(memory: Path, what: str, measured: Measured) -> None:
    """Keep it, beside what is known of others."""
    known = _read(memory)
    known[what] = measured
    memory.parent.mkdir(parents=True, exist_ok=True)
    temporary = memory.with_name(f".{memory.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(known))
    temporary.rename(memory)


def _read(memory: Path) -> dict[str, Measured]:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, Measured])
    except (OSError, msgspec.DecodeError):
        return {}
