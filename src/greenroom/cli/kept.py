"""What nodes keep on disk for sandboxes that do not run: counted by looking, whether the node runs or not.

A node that is not started again (`up --nodes 1` after `--nodes 2`) still has its paused sandboxes and snapshots, and
nobody else knows of them: to their owners they look as if they had ended. `up` and `status` tell of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from greenroom.wire.ids import ASLEEP, is_snapshot_id


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in one node's directory. Snapshots that share files with each other take them once."""

    node: str
    paused: int
    snapshots: int
    disk_bytes: int


def kept_by(state_dir: Path, node: str) -> Kept:
    """What the node of this name keeps; nothing where its directory cannot be read."""
    directory = state_dir / node / "snapshots"
    files: dict[tuple[int, int], int] = {}
    paused = snapshots = 0
    for entry in _entries(directory):
        if entry.name.startswith(ASLEEP):
            paused += 1
        elif is_snapshot_id(entry.name):
            snapshots += 1
        else:
            continue
        for file in _entries(directory / entry.name):
            try:
                found = file.stat(follow_symlinks=False)
            except OSError:
                continue
            files[found.st_dev, found.st_ino] = found.st_blocks * 512
    return Kept(node=node, paused=paused, snapshots=snapshots, disk_bytes=sum(files.values()))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def out_of_reach(state_dir: Path, started: Collection[str]) -> list[Kept]:
    """What nodes keep that were started here once and are not among those `started`, by their number."""
    names = [
        entry.name
        for entry in _entries(state_dir)
        if entry.name.removeprefix("node-").isdecimal() and entry.name not in started
    ]
    found = [kept_by(state_dir, name) for name in sorted(names, key=_number)]
    return [kept for kept in found if kept.paused or kept.snapshots]


def _number(node: str) -> int:
    return int(node.rpartition("-")[2])


def describe(state_dir: Path, kept: Kept) -> str:
    """What to tell of a node that is not started, and what to do."""
    parts = [
        f"{number} {one if number == 1 else many}"
        for number, one, many in (
            (kept.paused, "paused sandbox", "paused sandboxes"),
            (kept.snapshots, "snapshot", "snapshots"),
        )
        if number
    ]
    what = " and ".join(parts)
    return (
        f"{kept.node} is not started, and nobody can reach what it keeps: {what} ({mib(kept.disk_bytes)})\n"
        f"`greenroom down`, then `greenroom up --nodes {_number(kept.node) + 1}` with your other options, brings it "
        f"back; if nobody needs it, {state_dir / kept.node} may be deleted while nothing runs"
    )


def mib(size: int) -> str:
    """A size on disk, to the MiB and never none where there is something."""
    return f"{-(-size >> 20)} MiB"
