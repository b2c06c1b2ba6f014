"""One at a time for each key: those who want the same thing queue up, others do not meet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable

from greenroom.errors import NodeUnavailable

MOST = 20_000
"""Turns that may be taken or waited for at once."""


class Turns:
    """Locks by key; there is one only while somebody has it or waits for it."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}
        self._users = 0

    def __len__(self) -> int:
        return len(self._locks)

    @contextlib.asynccontextmanager
    async def turn(self, key: Hashable, deadline: float, what: str) -> AsyncIterator[None]:
        """A block that runs while no other with this key does. Raises NodeUnavailable, with `what` it was about, when
        it is not its turn within `deadline` seconds, or too many wait."""
        if self._users >= self._most:
            raise NodeUnavailable("too many requests are under way; try again shortly")
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        self._users += 1
        try:
            try:
                async with asyncio.timeout(deadline):
                    await lock.acquire()
            except TimeoutError:
                raise NodeUnavailable(
                    f"{what}: another request about it is still under way; try again shortly", retry_after=2
                ) from None
            try:
                yield
            finally:
                lock.release()
        finally:
            self._users -= 1
            users = self._locks[key][1] - 1
            if users:
                self._locks[key] = (lock, users)
            else:
                del self._locks[key]
