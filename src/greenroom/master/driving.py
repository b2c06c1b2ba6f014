"""The shell around `driver`: what happens goes in, and nodes whose list of targets has changed are told it.

A node that is told has it within milliseconds; every answer to its heartbeats has the same list, so one that could not
be told has it a heartbeat later. Decisions are made where something happened that counts, at once; what heartbeats
tell of speed and memory counts every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Iterable

import msgspec

from greenroom.errors import GreenroomError, PermanentError
from greenroom.fleet.view import View
from greenroom.fleet.warm import Pool
from greenroom.master.catalogue import Catalogue
from greenroom.master.driver import Decision, Driver
from greenroom.master.membership import Membership
from greenroom.master.metrics import DECISIONS, POOL_CALLS
from greenroom.master.watching import LONGEST_WAIT
from greenroom.wire import metrics
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import DrivenPool, DrivenPools, NodeInfo, NodeStatus, PoolName, PoolSpec
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)

IN_FLIGHT = 16
"""Nodes that are told at once."""
CALL_DEADLINE = 5.0
"""Seconds for a node to take its list."""
RETRY_FIRST, RETRY_LAST = 0.1, 2.0
"""Seconds until a node that could not be told is told again: doubling from the first to the last."""
GIVE_UP = 20.0
"""Seconds after which it is left to the heartbeats."""
LOOK_EVERY = 5.0
"""Seconds between two decisions for what heartbeats tell of speed and memory."""
_SHARE = 5
"""Of all time, decisions may take one part in so many: a fleet that is so large tells of changes a little later."""


class Driving:
    """Drives the pools while `run` runs; with several masters, the leader's is the one that does."""

    def __init__(
        self, client: RoleClient, view: View, membership: Membership, catalogue: Catalogue, driver: Driver
    ) -> None:
        self._client = client
        self._view = view
        self._membership = membership
        self._catalogue = catalogue
        self._driver = driver
        self._decision = Decision({}, [], 0, None)
        self._told: dict[str, list[PoolSpec]] = {}
        """By node, the list that it has taken, or had with a heartbeat's answer."""
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(IN_FLIGHT)
        self._kick = asyncio.Event()
        self._beaten = False
        """Heartbeats have told something since the last decision."""
        # Drawn from the clock for the reason that the node table's is.
        self._revision = int(time.time() * 1000)
        self._driven: list[DrivenPool] = []
        self._news = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Driving {self._driver!r} telling={sorted(self._telling)} revision={self._revision}>"

    def statistics(self) -> dict[str, int]:
        """Members wanted and unplaced, pools that have a problem, nodes that are being told."""
        lists = self._decision.lists.values()
        placed = sum(spec.target for specs in lists for spec in specs)
        return {
            "wanted": placed + self._decision.unplaced,
            "unplaced": self._decision.unplaced,
            "problems": sum(bool(pool.problem) for pool in self._decision.driven),
            "telling": len(self._telling),
        }

    # What happens

    def declared(self) -> None:
        """What is declared was read anew."""
        catalogue = self._catalogue
        self._driver.declare(catalogue.pools, catalogue.declared.pools(catalogue.known))
        self._kick.set()

    def nodes(self, infos: Iterable[NodeInfo]) -> None:
        """The node table as it is now."""
        may = [info.status.name for info in infos if info.live and not info.status.draining]
        self._driver.follow(may)
        for name in [name for name in self._told if name not in may]:
            # Whatever it had, it is told anew when it returns.
            del self._told[name]
        self._kick.set()

    def heard(self, status: NodeStatus) -> list[PoolSpec]:
        """A node tells of itself; returns its list, which is to be in the answer."""
        node = self._driver.nodes.get(status.name)
        first = node is not None and not node.heard
        if self._driver.heard(status, time.monotonic()):
            self._kick.set()
        self._beaten = True
        if first:
            # What it was told before, by this master's earlier self, is right until all is worked out anew; one that
            # was told nothing begins with its share, whose images it has to prepare.
            if not self._driver.list_of(status.name):
                self._decide()
            else:
                self._decision.lists[status.name] = self._driver.list_of(status.name)
        wanted = self._decision.lists.get(status.name, [])
        self._told[status.name] = wanted
        return wanted

    def moved(self, code: str) -> None:
        """The view has taken in something of a node."""
        node = self._view.node(code)
        if node is not None and self._driver.counted(node.name, node.pools.values()):
            self._kick.set()

    def arrived(self, pool: Pool) -> None:
        """A claim has come for a pool."""
        self._driver.arrived(PoolName(*pool), time.monotonic())

    # What follows from it

    async def run(self) -> None:
        """Decide, and tell nodes, until it is cancelled."""
        try:
            while True:
                self._kick.clear()
                begun = time.monotonic()
                # A fault here is one of ours; the pools of the fleet must not stand still for it.
                try:
                    self._decide()
                except Exception:
                    _log.exception("the pools could not be worked out; trying again")
                await asyncio.sleep((_SHARE - 1) * (time.monotonic() - begun))
                await self._rest()
        finally:
            await stop(*self._telling.values())

    async def _rest(self) -> None:
        wake = self._decision.wake
        pause = LOOK_EVERY if wake is None else min(LOOK_EVERY, max(0.01, wake - time.monotonic()))
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._kick.wait()
                    return
            if self._beaten or (wake is not None and wake <= time.monotonic()):
                return

    def _decide(self) -> None:
        begun = time.perf_counter()
        self._beaten = False
        self._decision = decision = self._driver.decide(time.monotonic())
        DECISIONS.observe(time.perf_counter() - begun)
        if decision.driven != self._driven:
            self._driven = decision.driven
            self._revision += 1
            self._news.set()
            self._news = asyncio.Event()
        for name, wanted in decision.lists.items():
            heard = self._driver.nodes[name].heard
            if heard and name in self._told and self._told[name] != wanted and name not in self._telling:
                task = self._telling[name] = spawn(self._tell(name), f"pools of {name}")
                task.add_done_callback(functools.partial(self._told_all, name))

    def _told_all(self, name: str, _task: asyncio.Task[None]) -> None:
        self._telling.pop(name, None)

    async def _tell(self, name: str) -> None:
        """Tell a node its list until it has the latest, or the heartbeats have to do."""
        pause, ends = RETRY_FIRST, time.monotonic() + GIVE_UP
        while time.monotonic() < ends:
            info = self._membership.get(name)
            wanted = self._decision.lists.get(name)
            if info is None or not info.live or wanted is None or self._told.get(name) == wanted:
                return
            try:
                async with self._turn:
                    with metrics.Outcome(POOL_CALLS):
                        url = f"{info.status.api_url}/v1/pools"
                        await self._client.call("PUT", url, msgspec.Raw, wanted, deadline=CALL_DEADLINE)
            except PermanentError as error:
                _log.error("node %s does not take its pools: %s", name, error.message)
                return
            except GreenroomError as error:
                _log.debug("node %s cannot be told its pools yet: %s", name, error.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_LAST)
            else:
                self._told[name] = wanted
                pause = RETRY_FIRST

    # Who wants to know

    async def newer(self, after: int, wait: float) -> DrivenPools:
        """What became of the declared pools, once its revision is not `after`, or after `wait` seconds (30 at most)."""
        ends = time.monotonic() + min(wait, LONGEST_WAIT)
        while self._revision == after and not self._closed:
            remaining = ends - time.monotonic()
            if remaining <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._news.wait()
        return DrivenPools(self._revision, self._driven)

    def close(self) -> None:
        """The master is leaving: answer everyone now."""
        self._closed = True
        self._news.set()
