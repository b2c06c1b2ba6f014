"""How a node stays known: it registers with a master, then tells how it is, and learns its share of the pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from greenroom.errors import GreenroomError, NotFound, TemporaryError
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import NodeStatus, PoolSpec, Registered

_log = logging.getLogger(__name__)
_CALL_DEADLINE = 5.0


class Membership:
    """Keeps one node registered. `apply` is called whenever its share of the pools differs from before, or from what it
    has now (`current`): a master tells it between heartbeats too, which can be lost or come late."""

    def __init__(
        self,
        client: RoleClient,
        masters: list[str],
        status: Callable[[], NodeStatus],
        apply: Callable[[list[PoolSpec]], Awaitable[None]],
        heartbeat: float,
        current: Callable[[], list[PoolSpec]] | None = None,
    ) -> None:
        self._client = client
        self._masters = masters
        self._status = status
        self._apply = apply
        self._heartbeat = heartbeat
        self._current = current
        self._shares: list[PoolSpec] | None = None
        self._registered = False

    async def register(self) -> None:
        """Register with the first master that answers; waits for one as long as it takes.

        The node does its duty without a master meanwhile: what it adopted runs, is reached and ends in time.
        """
        told = False
        while True:
            try:
                await self._tell()
                return
            except (TemporaryError, OSError) as error:
                if not told:
                    _log.warning("cannot register yet: %s", error)
                told = True
                await asyncio.sleep(0.2)

    async def run(self) -> None:
        """Send heartbeats for ever; a master that does not know this node gets a registration."""
        failing = False
        while True:
            await asyncio.sleep(self._heartbeat)
            try:
                await self._tell()
                failing = False
            except (GreenroomError, OSError) as error:
                # Whatever is wrong for a moment (no descriptors left, a full disk): this loop must go on.
                if not failing:
                    _log.warning("heartbeat failed: %s", error)
                failing = True

    async def _tell(self) -> None:
        status = self._status()
        last: GreenroomError | None = None
        for master in self._masters:
            try:
                answer = await self._one(master, status)
            except TemporaryError as error:
                last = error
                continue
            # A node that leaves is given no share any more. Its members stay as they are: they are about to end, or
            # are left for its next run, which has the share it had before.
            known = answer.pools == self._shares and (
                self._current is None or answer.pools == self._current()
            )
            if not known and not self._status().draining:
                self._shares = answer.pools
                await self._apply(answer.pools)
            return
        raise last or TemporaryError("this node knows no master")

    async def _one(self, master: str, status: NodeStatus) -> Registered:
        if self._registered:
            try:
                return await self._client.call(
                    "POST",
                    f"{master}/v1/nodes/{status.name}/heartbeat",
                    Registered,
                    status,
                    deadline=_CALL_DEADLINE,
                )
            except NotFound:
                self._registered = False
        answer = await self._client.call(
            "POST", f"{master}/v1/nodes/register", Registered, status, deadline=_CALL_DEADLINE
        )
        self._registered = True
        return answer
