"""Throwing away what nobody uses any more: images, goldens and their parts of earlier versions.

Every change of the agent, the packages, QEMU or the CPU model makes a new image or golden, and each takes some
hundred megabytes. Something of the cache is in use when any process has a file in it open (VMs keep their
golden's disk open, nodes the golden itself), or when a build or a start asked for it lately, which `publish`
notes in a marker beside it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

KINDS = ("golden-", "image-", "kernel-", "rootfs-")
_SCRAPS = (".building", ".damaged-")
_SCRAP_AGE = 86_400.0
"""Seconds after which a half-built or damaged directory is nobody's: no build takes that long."""


def marker(directory: Path) -> Path:
    """The file whose time says when `directory` was last asked for."""
    return directory.with_name(f".{directory.name}.used")


def note_use(directory: Path) -> None:
    """`directory` is asked for now."""
    marker(directory).touch()


def unused(cache: Path, open_files: Iterable[str], now: float, keep: float) -> list[Path]:
    """Directories of the cache that nobody has open and nobody asked for in the last `keep` seconds."""
    held = {Path(path).parts[len(cache.parts)] for path in open_files if path.startswith(f"{cache}/")}
    found = []
    for entry in sorted(cache.iterdir()):
        if entry.name.startswith(KINDS) and entry.is_dir() and entry.name not in held:
            try:
                last = marker(entry).stat().st_mtime
            except FileNotFoundError:
                last = entry.stat().st_mtime
            if now - last > keep:
                found.append(entry)
        elif any(scrap in entry.name for scrap in _SCRAPS) and now - entry.stat().st_mtime > _SCRAP_AGE:
            found.append(entry)
    return found


def open_files(cache: Path, proc: Path = Path("/proc")) -> set[str]:
    """Files below `cache` that some process has open. Needs root to see everybody's."""
    found: set[str] = set()
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        # Processes and descriptors come and go while they are looked at.
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(link))
    return {path for path in found if path.startswith(f"{cache}/")}


def collect(cache: Path, keep: float) -> list[str]:
    """Remove what is unused; returns the names. Blocks for as long as removing takes."""
    cache = cache.resolve()
    if not cache.is_dir():
        return []
    removed = []
    for directory in unused(cache, open_files(cache), time.time(), keep):
        # Out of sight first: whoever needs it from now on builds it anew instead of finding half of it.
        aside = directory.with_name(f".removing-{directory.name}-{os.getpid()}")
        directory.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        for leftover in (marker(directory), directory.with_name(f".{directory.name}.lock")):
            leftover.unlink(missing_ok=True)
        removed.append(directory.name)
    return removed
