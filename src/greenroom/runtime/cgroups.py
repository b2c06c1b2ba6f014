"""Bounds on what one VM may take of the host, by cgroup v1 or v2, whichever is mounted.

A VM's processes join before they are exec'ed as anything else, so the cgroup also answers which processes
belong to a slot (`pids`), whatever became of their parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec

from greenroom.errors import SetupError

_PERIOD_US = 100_000
CONTROLLERS = ("memory", "cpu", "pids")
GUESTS = "greenroom"
"""The cgroup under which those of all VMs lie, of every node on the machine."""
NORMAL_SHARES, NORMAL_WEIGHT = 1024, 100
"""What a cgroup weighs that nobody gave a weight, by v1 and v2."""
_MOST_SHARES, _MOST_WEIGHT = 262_144, 10_000


def guests_weight(cpus: int, version: int) -> int:
    """What all guests together weigh on a machine with so many CPUs, in the unit of the cgroup version.

    Against the rest of the host the whole of them counts as one cgroup; left alone it would weigh as much as a single
    process there, however many guests are in it and however many CPUs they could use. As kubelet does for the pods
    of a machine it gets 1024 shares a CPU, which is what a normal cgroup has, and in v2 as many times the normal
    weight. (Kubernetes' KEP-2254 maps 1024 shares on a weight of 39 there, less than half of what everything beside
    it has.)
    """
    if version == 1:
        return min(NORMAL_SHARES * cpus, _MOST_SHARES)
    return min(NORMAL_WEIGHT * cpus, _MOST_WEIGHT)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes, CPUs as a float, threads; `cpu_shares` is the v1 weight (1024 is normal), among siblings."""

    memory: int
    cpus: float
    pids: int
    cpu_shares: int


class Cgroups:
    """The hierarchies this machine has. Make one with `detect`."""

    def __init__(self, version: int, mounts: dict[str, Path]) -> None:
        self.version = version
        self._mounts = mounts

    @classmethod
    def detect(cls, mounts_file: Path = Path("/proc/mounts")) -> Cgroups:
        """Find the hierarchies. Raises SetupError naming the controllers that are missing."""
        unified: Path | None = None
        v1: dict[str, Path] = {}
        for line in mounts_file.read_text(encoding="utf-8").splitlines():
            _, place, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                unified = Path(place)
            elif kind == "cgroup":
                for controller in set(options.split(",")) & set(CONTROLLERS):
                    v1[controller] = Path(place)
        if set(v1) == set(CONTROLLERS):
            return cls(1, v1)
        if unified is not None:
            offered = (unified / "cgroup.controllers").read_text(encoding="utf-8").split()
            missing = set(CONTROLLERS) - set(offered)
            if not missing:
                return cls(2, {"unified": unified})
        else:
            missing = set(CONTROLLERS) - set(v1)
        raise SetupError(
            f"the cgroup controllers {', '.join(sorted(missing))} are not available on this machine; "
            "Greenroom needs memory, cpu and pids to bound its VMs"
        )

    def directories(self, path: str) -> list[Path]:
        """The directories of the cgroup `path`, one a hierarchy."""
        return sorted({mount / path for mount in self._mounts.values()})

    def join_files(self, path: str) -> list[Path]:
        """Files into which a process writes its pid to join."""
        return [directory / "cgroup.procs" for directory in self.directories(path)]

    def create(self, path: str, limits: Limits) -> None:
        """Make the cgroup `path` with `limits`. Its parents are made too and stay."""
        if self.version == 2:
            self._enable_down_to(path)
        for directory in self.directories(path):
            directory.mkdir(parents=True, exist_ok=True)
        if path.startswith(f"{GUESTS}/"):
            # Each time: another node that ends may have removed it meanwhile.
            self._set_weight(GUESTS, guests_weight(os.cpu_count() or 1, self.version))
        quota = int(limits.cpus * _PERIOD_US)
        if self.version == 2:
            directory = self.directories(path)[0]
            _write(directory / "memory.max", limits.memory)
            _write_if_there(directory / "memory.swap.max", 0)
            _write(directory / "cpu.max", f"{quota} {_PERIOD_US}")
            _write(directory / "pids.max", limits.pids)
            self.weigh(path, limits.cpu_shares)
            return
        memory = self._mounts["memory"] / path
        _write(memory / "memory.limit_in_bytes", limits.memory)
        _write_if_there(memory / "memory.memsw.limit_in_bytes", limits.memory)
        cpu = self._mounts["cpu"] / path
        _write(cpu / "cpu.cfs_period_us", _PERIOD_US)
        _write(cpu / "cpu.cfs_quota_us", quota)
        self.weigh(path, limits.cpu_shares)
        _write(self._mounts["pids"] / path / "pids.max", limits.pids)

    def weigh(self, path: str, cpu_shares: int) -> None:
        """Give the cgroup another weight against its siblings; 1024 is that of a normal process."""
        if self.version == 2:
            cpu_shares = max(1, min(10_000, cpu_shares * NORMAL_WEIGHT // NORMAL_SHARES))
        self._set_weight(path, cpu_shares)

    def _set_weight(self, path: str, weight: int) -> None:
        if self.version == 2:
            _write(self.directories(path)[0] / "cpu.weight", weight)
        else:
            _write(self._mounts["cpu"] / path / "cpu.shares", weight)

    def _enable_down_to(self, path: str) -> None:
        """v2: a controller works in a child only when its parent passes it on."""
        wanted = " ".join(f"+{name}" for name in CONTROLLERS)
        place = self._mounts["unified"]
        for part in ["", *path.split("/")[:-1]]:
            place = place / part
            place.mkdir(exist_ok=True)
            _write(place / "cgroup.subtree_control", wanted)

    def pids(self, path: str) -> set[int]:
        """Processes in the cgroup, in any hierarchy."""
        found: set[int] = set()
        for file in self.join_files(path):
            with contextlib.suppress(FileNotFoundError):
                found.update(int(line) for line in file.read_text(encoding="utf-8").split())
        return found

    def kill(self, path: str, deadline: float = 10.0) -> int:
        """SIGKILL everything in the cgroup and wait until it is empty. Returns how many were killed.

        Blocks; call it off the event loop. Raises SetupError when something survives past `deadline` seconds.
        """
        killed: set[int] = set()
        end = time.monotonic() + deadline
        while alive := self.pids(path):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= alive
            if time.monotonic() > end:
                raise SetupError(f"processes {sorted(alive)} in cgroup {path} do not die")
            time.sleep(0.005)
        return len(killed)

    def remove(self, path: str, deadline: float = 5.0) -> bool:
        """Remove an empty cgroup; True if it existed. Blocks briefly while the kernel lets go of dead members."""
        existed = False
        end = time.monotonic() + deadline
        for directory in self.directories(path):
            while True:
                try:
                    directory.rmdir()
                    existed = True
                except FileNotFoundError:
                    pass
                except OSError:
                    if time.monotonic() < end:
                        time.sleep(0.005)
                        continue
                    raise
                break
        return existed

    def remove_if_empty(self, path: str) -> None:
        """Remove a shared parent unless another node still has cgroups in it."""
        for directory in self.directories(path):
            with contextlib.suppress(OSError):
                directory.rmdir()

    def children(self, path: str) -> list[str]:
        """Names of the cgroups directly under `path`."""
        names: set[str] = set()
        for directory in self.directories(path):
            with contextlib.suppress(FileNotFoundError):
                names.update(entry.name for entry in directory.iterdir() if entry.is_dir())
        return sorted(names)


def _write(path: Path, value: object) -> None:
    try:
        path.write_text(f"{value}\n", encoding="ascii")
    except OSError as error:
        raise SetupError(f"cannot set {path} to {value}: {error.strerror}") from error


def _write_if_there(path: Path, value: object) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.write_text(f"{value}\n", encoding="ascii")
