"""The node table in time: leases end by a timer of the master's, and clients wait for changes.

`master.membership` is the table; this is the clock around it. Whoever changes the table calls `changed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from greenroom.master.membership import Membership
from greenroom.wire.messages import NodeList

LONGEST_WAIT = 30.0
"""Seconds a client may wait in one request; below the usual idle limits of what lies between."""


class NodeWatch:
    """Wakes those who wait for the node table, and the table when a lease ends. `on_change` hears of each change."""

    def __init__(self, membership: Membership, on_change: Callable[[], None] = lambda: None) -> None:
        self._membership = membership
        self._on_change = on_change
        self._next = asyncio.Event()
        self._rearmed = asyncio.Event()
        self._closing = False

    def changed(self) -> None:
        """The revision rose: answer everyone who waits."""
        self._next.set()
        self._next = asyncio.Event()
        self._rearmed.set()
        self._on_change()

    def close(self) -> None:
        """The master is leaving: answer everyone now, so that nobody holds its end up."""
        self._closing = True
        self._next.set()

    async def newer(self, after: int, wait: float) -> NodeList:
        """The table once its revision is not `after`, or after `wait` seconds (30 at most) as it is then.

        "Not" instead of "greater": a client that brings another master's larger number knows another table.
        """
        ends = time.monotonic() + min(wait, LONGEST_WAIT)
        while self._membership.revision == after and not self._closing:
            remaining = ends - time.monotonic()
            if remaining <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._next.wait()
        return self._membership.nodes()

    async def run(self) -> None:
        """End leases when they are due. Runs until it is cancelled."""
        while True:
            if self._membership.expire(time.monotonic()):
                self.changed()
            due = self._membership.next_expiry()
            self._rearmed.clear()
            # Heartbeats only move expiries later, so sleeping to the first one known is never too long.
            pause = None if due is None else max(0.0, due - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._rearmed.wait()
