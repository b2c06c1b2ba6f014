"""Whether this machine has memory and disk left for another VM, and if not what there is to do about it.

Refill stops at the floors of `[pools]`, so that what runs already never pays for what is only kept ready. Whoever
then waits in vain is told this reason: a larger pool would not have helped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from greenroom.config import PoolsConfig

_ROOM = "delete snapshots and sandboxes that are not needed, or make room on the disk"


class Shortage(NamedTuple):
    """Why nothing may be started now, and what helps, both in plain words."""

    reason: str
    remedy: str


def available_mib() -> int:
    """MiB of memory that can be had without swapping."""
    return psutil.virtual_memory().available >> 20


def free_mib(directory: Path) -> int:
    """MiB that are free on the disk of `directory`. Raises OSError."""
    return shutil.disk_usage(directory).free >> 20


class Headroom:
    """Looks at the machine of a node whose state lies in `home`."""

    def __init__(
        self,
        config: PoolsConfig,
        home: Path,
        memory: Callable[[], int] = available_mib,
        disk: Callable[[Path], int] = free_mib,
    ) -> None:
        self._config = config
        self._home = home
        self._memory = memory
        self._disk = disk

    def room_mib(self) -> int:
        """MiB of memory that more members may take; 0 where nothing may be started for whatever reason."""
        if self.shortage() is not None:
            return 0
        try:
            return max(0, self._memory() - self._config.memory_floor_mib)
        except OSError:
            return 0

    def emergency(self) -> Shortage | None:
        """The disk, where it is so full that a guest's first write would stop it; None while it is not."""
        try:
            disk = self._disk(self._home)
        except OSError:
            return None
        least = self._config.disk_emergency_mib
        if disk >= least:
            return None
        return Shortage(f"only {disk} MiB of the node's disk are free, and {least} MiB are needed", _ROOM)

    def shortage(self) -> Shortage | None:
        """What is short right now; None when there is room for another VM."""
        try:
            memory, disk = self._memory(), self._disk(self._home)
        except OSError as error:
            return Shortage(
                f"this machine does not tell its free memory and disk ({error.strerror})",
                "see the node's log",
            )
        memory_floor, disk_floor = self._config.memory_floor_mib, self._config.disk_floor_mib
        if memory < memory_floor:
            return Shortage(
                f"only {memory} MiB of memory are available, the floor is {memory_floor} MiB",
                "end or pause sandboxes that are not needed, give the machine more memory, or lower "
                "[pools] memory_floor_mib",
            )
        if disk < disk_floor:
            return Shortage(
                f"only {disk} MiB of disk are free, the floor is {disk_floor} MiB",
                f"{_ROOM}, or lower [pools] disk_floor_mib",
            )
        return None
