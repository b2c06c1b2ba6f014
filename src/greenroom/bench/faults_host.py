"""What a node has on the host, looked for from the outside: by its tag and its directory, not by its own word."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import msgspec
import psutil

from greenroom.bench.faults_records import HostCount, Stray
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.namespaces import listing
from greenroom.runtime.slots import tag_of

_UIDS = Path("/run/greenroom/uids")


class VmOnHost(msgspec.Struct, frozen=True):
    """A slot in whose cgroup something runs."""

    name: str
    claimed: bool
    """It was given to a claim."""
    whole: bool = True
    """It was restored to its end, and may be a member of a pool or a sandbox."""


def count(state: Path, tags: list[str]) -> HostCount:
    """Everything on the host that belongs to the nodes with these tags, whose platform's directory is `state`.

    This process and its parents, whose command lines may name the directory, are left out.
    """
    cgroups = Cgroups.detect()
    processes, namespaces, groups, blocks, mounts = (
        set[str](),
        list[str](),
        list[str](),
        list[str](),
        list[str](),
    )
    held = list(_UIDS.glob("[0-9]*")) if _UIDS.is_dir() else []
    table = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    for tag in tags:
        parent = f"greenroom/{tag}"
        groups += [str(place) for place in cgroups.directories(parent) if place.exists()]
        for path in [parent, *(f"{parent}/{name}" for name in cgroups.children(parent))]:
            processes |= {f"pid {pid} in cgroup {path}" for pid in cgroups.pids(path)}
        groups += [f"{parent}/{name}" for name in cgroups.children(parent)]
        namespaces += listing(f"gr-{tag}-")
        blocks += [entry.name for entry in held if entry.read_text(encoding="utf-8").startswith(tag)]
        mounts += [line for line in table if f"gr-{tag}" in line]
    mounts += [line for line in table if str(state) in line]
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if process.pid not in ours and str(state) in words:
            processes.add(f"pid {process.pid}: {words[:120]}")
    return HostCount(
        processes=sorted(processes),
        namespaces=namespaces,
        cgroups=groups,
        slots=sorted(str(slot.relative_to(state)) for slot in state.glob("node-*/vms/*")),
        uid_blocks=blocks,
        mounts=mounts,
    )


def tags_in(state: Path) -> list[str]:
    """Tags of the nodes that ever ran in a state directory."""
    return [tag_of(home) for home in state.glob("node-*") if home.is_dir()]


def vms(home: Path) -> list[VmOnHost]:
    """The VMs of a node whose processes run, by the cgroups of its slots."""
    cgroups, tag = Cgroups.detect(), tag_of(home)
    return [
        VmOnHost(
            f"gr-{tag}-{number}",
            (home / "vms" / number / "claimed").exists(),
            (home / "vms" / number / "vm.json").exists(),
        )
        for number in cgroups.children(f"greenroom/{tag}")
        if number.isdigit() and cgroups.pids(f"greenroom/{tag}/{number}")
    ]


def journalled(home: Path) -> set[str]:
    """Names of the VMs that a node's journal gives to a claim."""
    db = sqlite3.connect(f"file:{home / 'journal.db'}?mode=ro", uri=True, timeout=5.0)
    try:
        rows = db.execute("SELECT vm FROM claims WHERE state != 'ended' AND vm IS NOT NULL").fetchall()
    finally:
        db.close()
    return {str(row[0]) for row in rows}


def strays(found: list[VmOnHost], claims: set[str], pooled: int, stocked: int) -> list[Stray]:
    """VMs that nothing owns, when claims own those in `claims`, the pools say that they have `pooled`, and the node
    keeps up to `stocked` QEMUs that wait for what they will be restored from.

    A VM that was given to a claim is never pooled again, so that one which no claim has is a stray by name. Which
    of the others a pool has cannot be told from the outside; that there are more than the pools know of can.
    """
    made = [
        Stray(vm=vm.name, why="it was given to a claim that is over")
        for vm in found
        if vm.claimed and vm.name not in claims
    ]
    made += [
        Stray(vm=name, why="the journal gives it to a claim, and nothing of it runs")
        for name in sorted(claims - {vm.name for vm in found})
    ]
    free = [vm for vm in found if not vm.claimed and vm.name not in claims]
    for kind, whole, known in (("pools", True, pooled), ("stock", False, stocked)):
        names = sorted(vm.name for vm in free if vm.whole == whole)
        if len(names) > known:
            made.append(Stray(vm=", ".join(names), why=f"the {kind} can own only {known} of these"))
    return made
