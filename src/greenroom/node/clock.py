"""The node's clock: tells the time of day, and notices when somebody has set it.

A sandbox's deadlines are instants on the wall clock, because they are shown to people and outlive the process. Were
they left alone when the wall clock is set (an NTP daemon that finds the machine an hour behind, an operator), a
step forward would end every sandbox at once and a step back would keep them all too long. So the node compares the
wall clock with CLOCK_BOOTTIME (clock_gettime(2)), which nobody can set and which goes on through a suspension: what
one of them has gained on the other is a step, by which the keeper moves its deadlines. Both clocks are slewed
alike (adjtimex(2)), so the ordinary work of an NTP daemon is no step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

SMALLEST = 0.5
"""Seconds below which a difference is not taken for a step: reading two clocks takes time, most on a busy host."""


class Reference(msgspec.Struct, frozen=True):
    """How the clocks stood to each other, to be kept on disk for the next run of the same boot."""

    boot: str
    """The kernel's boot id; after a reboot nothing can be compared, and no sandbox has outlived it."""
    offset: float
    """Seconds of the wall clock minus CLOCK_BOOTTIME."""


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class NodeClock:
    """Use from one thread. The sources of time can be given, for tests."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        since_boot: Callable[[], float] = _boot_time,
        boot_id: Callable[[], str] = _boot_id,
    ) -> None:
        self._wall = wall
        self._since_boot = since_boot
        self.reference = Reference(boot_id(), self._offset())

    def __repr__(self) -> str:
        return f"<NodeClock {self.reference}>"

    def _offset(self) -> float:
        return self._wall() - self._since_boot()

    def now(self) -> float:
        """Unix seconds by the wall clock."""
        return self._wall()

    def take_step(self) -> float:
        """Seconds by which the wall clock was set since the last call (forward is positive), 0.0 if it was not."""
        step = self._offset() - self.reference.offset
        if abs(step) < SMALLEST:
            return 0.0
        self.reference = msgspec.structs.replace(self.reference, offset=self.reference.offset + step)
        return step

    def step_since(self, earlier: Reference | None) -> float:
        """The same, since an earlier run kept its reference."""
        if earlier is None or earlier.boot != self.reference.boot:
            return 0.0
        step = self.reference.offset - earlier.offset
        return step if abs(step) >= SMALLEST else 0.0
