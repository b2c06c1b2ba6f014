"""What happens when the disk under the VMs' overlays runs full: the sandbox that takes most of it ends.

Overlays grow as guests write, each up to its whole disk, so the node lends out more than there is. Refill stops
early (`pools.disk_floor_mib`); this guard is for what runs. Below `pools.disk_emergency_mib` it ends the sandbox
whose overlay is the largest, one at a time, as the kernel does with memory: nobody else's sandbox, journal or
time-out may suffer. A guest whose write failed was stopped by QEMU; it goes on as soon as there is room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from greenroom.errors import GreenroomError
from greenroom.node.headroom import free_mib

_log = logging.getLogger(__name__)
LOOK = 1.0
"""Seconds between two looks at the disk."""
AFTERMATH = 60.0
"""Seconds after the last emergency in which stopped guests are looked for."""
REASON = "the host's disk was nearly full, and it had written most"


def choose(free: int, emergency_mib: int, used: Mapping[str, int]) -> str | None:
    """The sandbox to end, or None while there is room. `free` are MiB, `used` are bytes of overlays by sandbox.

    The largest writer goes, the greater name among equals, so that two looks agree.
    """
    if free >= emergency_mib or not used:
        return None
    return max(used, key=lambda name: (used[name], name))


class DiskGuard:
    """Watches the disk of `directory`. `used` tells overlay sizes, `end` ends a sandbox, `revive` all stopped ones."""

    def __init__(
        self,
        directory: Path,
        emergency_mib: int,
        used: Callable[[], Mapping[str, int]],
        end: Callable[[str, str], Awaitable[None]],
        revive: Callable[[], Awaitable[int]],
        free: Callable[[Path], int] = free_mib,
    ) -> None:
        self._directory = directory
        self._emergency_mib = emergency_mib
        self._used = used
        self._end = end
        self._revive = revive
        self._free = free
        self._calm_at = 0.0
        self.ended = 0
        """Sandboxes that were ended for the disk's sake."""

    async def run(self) -> None:
        """Look for ever; a look that fails is logged and repeated."""
        while True:
            await asyncio.sleep(LOOK)
            try:
                await self.look()
            except (GreenroomError, OSError) as error:
                _log.warning("cannot look after the disk: %s", error)

    async def look(self) -> None:
        """One look: end one sandbox if need be, and let stopped guests go on after an emergency."""
        now = asyncio.get_running_loop().time()
        free = self._free(self._directory)
        if free < self._emergency_mib:
            self._calm_at = now + AFTERMATH
        victim = choose(free, self._emergency_mib, self._used())
        if victim is not None:
            _log.error(
                "only %d MiB of disk are free: ending sandbox %s, which has written most", free, victim
            )
            self.ended += 1
            await self._end(victim, REASON)
        elif now < self._calm_at and (revived := await self._revive()):
            _log.warning("there is room again: %d stopped guests go on", revived)
