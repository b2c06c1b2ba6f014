"""What the lifecycle benchmark asks of its two sides, and the records they answer with.

A side has one VM at a time, which the others of a round stem from. The steps are the same on both, and each ends by
looking whether the VM, or the children, still have what was written before.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

SideName = Literal["greenroom", "bare"]
SIDES: tuple[SideName, SideName] = ("greenroom", "bare")
Step = Literal["snapshot", "start", "fork", "pause", "resume"]
STEPS: tuple[Step, ...] = ("snapshot", "start", "fork", "pause", "resume")

FILE = "/dev/shm/dirty"  # noqa: S108 (in the guest)
"""Where the guest is made dirty: tmpfs, so that it is memory and nothing else."""
MARK = f"stat -c %s {FILE} && tail -c 65536 {FILE} | sha256sum"
"""By whose output a VM shows that it goes on with the memory of the one before."""


def growing(mib: int) -> str:
    """The command that adds so many MiB of random bytes, which no page has in common with another."""
    return f"head -c {mib << 20} /dev/urandom >> {FILE}"


class Took(msgspec.Struct, frozen=True, kw_only=True):
    """One step, in milliseconds."""

    ms: float
    """The whole call."""
    answer_ms: float | None = None
    """From its beginning to the first answer of the guest's agent, of several guests the last one's."""
    stop_ms: float | None = None
    """For which the parent stood still."""
    ram_mib: float | None = None
    """Memory that was saved: pages in which the VM differs from its golden."""
    stages: dict[str, float] = {}


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """PSS in MiB of children of one snapshot that were made one after the other."""

    children: int
    first_mib: float
    """Of the first, while it was the only one."""
    paused_mib: float
    """Of all together, none of which has run."""
    answered_mib: float
    """Of all together, after each has answered once and was stopped again."""

    @property
    def further_mib(self) -> float | None:
        """What each one more paused child took; None for a single one."""
        return (self.paused_mib - self.first_mib) / (self.children - 1) if self.children > 1 else None


class Side(Protocol):
    """One side. Every method raises GreenroomError."""

    @property
    def name(self) -> SideName: ...

    async def begin(self) -> None:
        """Have a new running VM, whose agent answers."""

    async def grow(self, mib: int) -> None:
        """Write so many MiB more in the VM's memory."""

    async def snapshot(self) -> Took:
        """Save the VM, which goes on; the snapshot before is deleted."""

    async def start(self) -> Took:
        """Make a VM from the snapshot, to its first answer; it is ended then."""

    async def held(self, children: int) -> Held:
        """Make so many from the snapshot, which stay paused, and read what they hold; they are ended then."""

    async def fork(self, children: int) -> Took:
        """Make so many that go on where the VM stands, all at once, to their first answers; they are ended then."""

    async def pause(self) -> Took:
        """Save the VM and end its process."""

    async def resume(self) -> Took:
        """Bring it back, to its first answer."""

    async def rest(self) -> None:
        """Wait until nothing goes on here, so that the other side's step meets a machine at rest."""

    async def end(self) -> None:
        """End the VM and delete what was saved."""
