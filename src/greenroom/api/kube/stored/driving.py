"""What the leader makes of the declared pools: how many members it wants, what has no room, where older ones wait.

A master is asked by long poll. While none answers, or none drives, pools are shown by their declarations alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from greenroom.api.kube.objects import Key
from greenroom.api.kube.stored.pools import Catalogue, PoolKey
from greenroom.errors import GreenroomError
from greenroom.wire import podsizes
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import DrivenPool, DrivenPools, PoolName, Size

_log = logging.getLogger(__name__)

PATH = "/v1/pools/driven"
WAIT = 25.0
"""Seconds that one long poll waits."""
SLACK = 5.0
RETRY_FIRST, RETRY_LAST = 0.2, 5.0
"""Seconds between two tries while nobody answers: doubling from the first to the last."""


class Driven:
    """See the module. `changed` is called when it is other than before."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._pools: dict[Key, DrivenPool] = {}

    def __repr__(self) -> str:
        return f"<Driven pools={len(self._pools)}>"

    def pool(self, key: Key) -> DrivenPool | None:
        """What is told of a pool, or None."""
        return self._pools.get(key)

    def targets(self, key: Key) -> dict[PoolName, int]:
        """Members that are wanted of each kind for a pool, the older kinds first; empty where nothing is told."""
        told = self._pools.get(key)
        if told is None or told.key is None:
            return {}
        names = [*told.old_keys, told.key]
        # One that tells no numbers is of a release before; all of them are then taken to be of the newest kind.
        numbers = (
            told.targets if len(told.targets) == len(names) else [*(0 for _ in told.old_keys), told.desired]
        )
        return dict(zip(names, numbers, strict=True))

    def older(self, key: Key, now: PoolName, catalogue: Catalogue) -> list[PoolKey]:
        """Kinds beside `now` of which members of a pool may wait still, those that a claim should get first."""
        found: list[PoolKey] = []
        for name in self.targets(key):
            template = catalogue.template(name.template)
            size = _size(name.size, template.size if template is not None else None)
            if size is not None and name != now:
                found.append((name.template, size))
        return found

    def learn(self, told: DrivenPools) -> None:
        """Take what a master tells."""
        pools = {(pool.namespace, pool.name): pool for pool in told.pools}
        if pools != self._pools:
            self._pools = pools
            self._changed()

    async def follow(self, client: RoleClient, masters: list[str]) -> None:
        """Ask until it is cancelled."""
        pause, after, place, told = RETRY_FIRST, 0, 0, False
        while True:
            url = f"{masters[place]}{PATH}?after={after}&wait={WAIT}"
            try:
                answer = await client.call("GET", url, DrivenPools, deadline=WAIT + SLACK)
            except GreenroomError as error:
                if not told:
                    _log.warning("what becomes of warm pools is not told: %s", error.message)
                told, after, place = True, 0, (place + 1) % len(masters)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_LAST)
            else:
                pause, after, told = RETRY_FIRST, answer.revision, False
                self.learn(answer)


def _size(name: str, own: Size | None) -> Size | None:
    if own is not None and own.name == name:
        return own
    return next((size for size in podsizes.SIZES if size.name == name), None)
