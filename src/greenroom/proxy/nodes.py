"""Which nodes there are: what the masters say, and how far it is believed when they lose their memory.

A node's address changes at once. A node that *vanishes* is believed at once only from a master whose earlier
list had it and that was followed without a break since. A master that was just started, or another one, may
simply not have heard from its nodes yet, and forgetting a node cuts its sandboxes off; such a list must go
without the node for `DOUBT` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence

from greenroom.errors import GreenroomError
from greenroom.proxy.resources import Relay
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import NodeList

_log = logging.getLogger(__name__)
_CODE = re.compile(r"[a-z0-9]{4}")

WAIT = 25
"""Seconds a master may hold the question back until something changes."""
DOUBT = 15.0
"""Seconds a node is kept that an unfamiliar list does not have; a node registers again within a few."""
PAUSE_FIRST, PAUSE_LAST = 0.1, 2.0


class Membership:
    """The believed nodes by code. Pure: told lists and times, asked for relays."""

    def __init__(self) -> None:
        self._relays: dict[str, Relay] = {}
        self._doubted: dict[str, float] = {}
        self._familiar = False

    def __repr__(self) -> str:
        return f"<Membership {sorted(self._relays)} doubted={sorted(self._doubted)}>"

    @property
    def relays(self) -> dict[str, Relay]:
        return dict(self._relays)

    @property
    def next_decision(self) -> float | None:
        """The time at which `settle` would forget a doubted node, or None."""
        return min(self._doubted.values(), default=None)

    def interrupted(self) -> None:
        """The master did not answer; the next list may come from one that remembers less."""
        self._familiar = False

    def learn(self, nodes: NodeList, now: float) -> None:
        """Take a master's list, received at the monotonic time `now`."""
        told: dict[str, Relay] = {}
        for node in nodes.nodes:
            status = node.status
            if not _CODE.fullmatch(status.code) or not 0 < status.relay_port < 65536 or not status.relay_host:
                _log.error("node %s has no usable code or relay address; it gets no traffic", status.name)
                continue
            told[status.code] = Relay(status.relay_host, status.relay_port, status.api_url)
        for code in self._relays.keys() - told.keys():
            if self._familiar and code not in self._doubted:
                del self._relays[code]
            else:
                self._doubted.setdefault(code, now + DOUBT)
        for code in told:
            self._doubted.pop(code, None)
        self._relays.update(told)
        self._familiar = True
        self.settle(now)

    def settle(self, now: float) -> None:
        """Forget the nodes that were missing for long enough."""
        for code in [code for code, until in self._doubted.items() if until <= now]:
            del self._doubted[code]
            self._relays.pop(code, None)


async def follow(
    client: RoleClient, masters: Sequence[str], apply: Callable[[dict[str, Relay]], None]
) -> None:
    """Call `apply` with the nodes at the first list and after each change. Runs until it is cancelled.

    One master at a time is asked, the next one when it fails; with all failing, what was known stays.
    """
    membership = Membership()
    loop = asyncio.get_running_loop()
    applied: dict[str, Relay] | None = None
    master, after, failures, pause = 0, None, 0, PAUSE_FIRST
    while True:
        query = f"after={after}&wait={_patience(membership, loop.time())}" if after is not None else ""
        try:
            url = f"{masters[master]}/v1/nodes?{query}".rstrip("?")
            nodes = await client.call("GET", url, NodeList, deadline=WAIT + 10.0)
        except GreenroomError as error:
            _log.warning("a master does not tell its nodes: %s", error.message)
            membership.interrupted()
            # Another master counts its own revisions, and this one may have begun anew.
            master, after, failures = (master + 1) % len(masters), None, failures + 1
            if failures % len(masters) == 0:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_LAST)
        else:
            failures, pause, after = 0, PAUSE_FIRST, nodes.revision
            membership.learn(nodes, loop.time())
        membership.settle(loop.time())
        if membership.relays != applied and (applied is not None or after is not None):
            applied = membership.relays
            apply(applied)


def _patience(membership: Membership, now: float) -> int:
    """Seconds to wait for news: not beyond the moment at which a doubted node must be decided."""
    decision = membership.next_decision
    return WAIT if decision is None else max(1, min(WAIT, round(decision - now)))
