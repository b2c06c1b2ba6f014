"""Whose guest may start next: so many at once, and of one owner only so many of them.

A guest that comes from a snapshot is its owner's from the first instruction on, and can be made to take for ever. So
those have turns apart from pool members, whose guests are ours until they are handed over, and no owner can hold all
of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turns:
    """Use from one event loop."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._most_of_one = most_of_one
        self._owners: dict[str, tuple[asyncio.Semaphore, int]] = {}

    def __len__(self) -> int:
        """Owners that have a turn or wait for one."""
        return len(self._owners)

    @contextlib.asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it for the length of the block. First come, first served, among one owner's."""
        mine, users = self._owners.get(owner, (asyncio.Semaphore(self._most_of_one), 0))
        self._owners[owner] = (mine, users + 1)
        try:
            async with mine, self._all:
                yield
        finally:
            users = self._owners[owner][1] - 1
            if users:
                self._owners[owner] = (mine, users)
            else:
                del self._owners[owner]
