"""What a node runs beside its VMs, bounded in memory: each such process has a cgroup of its own.

It lies apart from the VMs' (`greenroom-services`, not `greenroom`): what guests do must not take CPU time from it,
and it weighs as much as any process of the host. As with a VM, an owner record is on disk before the cgroup exists
(`<node home>/companions/<name>.json`), and the sweep of a later run goes by it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from greenroom.errors import SetupError
from greenroom.runtime.cgroups import NORMAL_SHARES, Cgroups, Limits

PARENT = "greenroom-services"
_TASKS = 64
"""Threads and processes in one of them; the egress process bounds itself to fewer."""


class Companion(msgspec.Struct, frozen=True, kw_only=True):
    """The owner record of one process's cgroup."""

    home: str
    """The node's home directory, which is the owner."""
    tag: str
    name: str
    cgroup: str
    """Path below each controller's mount point."""


class Companions:
    """Those of one node. Blocks, for less than a millisecond but for `clear`."""

    def __init__(self, home: Path, tag: str, cgroups: Cgroups) -> None:
        self._home = home
        self._tag = tag
        self._cgroups = cgroups
        self._directory = home / "companions"
        self._own: set[str] = set()
        """Names that this process has admitted: a sweep is for what others left."""

    def admit(self, name: str, pid: int, memory: int) -> None:
        """Bound the process `pid` and its threads to `memory` bytes; one that takes more is killed by the kernel.

        What is left of an earlier one of this name is ended first. Raises SetupError.
        """
        record = Companion(
            home=str(self._home), tag=self._tag, name=name, cgroup=f"{PARENT}/{self._tag}-{name}"
        )
        self._own.add(name)
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            temporary = self._directory / f".{name}"
            temporary.write_bytes(msgspec.json.encode(record))
            temporary.rename(self._directory / f"{name}.json")
            limits = Limits(
                memory=memory, cpus=float(os.cpu_count() or 1), pids=_TASKS, cpu_shares=NORMAL_SHARES
            )
            self._cgroups.kill(record.cgroup)
            self._cgroups.remove(record.cgroup)
            self._cgroups.create(record.cgroup, limits)
            for file in self._cgroups.join_files(record.cgroup):
                file.write_text(f"{pid}\n", encoding="ascii")
        except OSError as error:
            raise SetupError(f"the {name} process cannot be bounded: {error.strerror}") from error

    def recorded(self) -> list[Companion]:
        """The records on disk; what cannot be read is none of ours."""
        found: list[Companion] = []
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._directory.glob("*.json")):
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    record = msgspec.json.decode(path.read_bytes(), type=Companion)
                    if record.tag == self._tag and record.name == path.stem:
                        found.append(record)
        return found

    def sweep(self) -> dict[str, int]:
        """Remove what earlier runs left; counts of processes and cgroups."""
        return self._remove(self._own)

    def clear(self) -> dict[str, int]:
        """Remove all, at the end; counts of processes and cgroups."""
        return self._remove(())

    def _remove(self, kept: Collection[str]) -> dict[str, int]:
        counts = {"processes": 0, "cgroups": 0}
        for record in self.recorded():
            if record.name in kept:
                continue
            counts["processes"] += self._cgroups.kill(record.cgroup)
            counts["cgroups"] += int(self._cgroups.remove(record.cgroup))
            (self._directory / f"{record.name}.json").unlink(missing_ok=True)
        self._cgroups.remove_if_empty(PARENT)
        return counts
