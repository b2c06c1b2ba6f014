"""The sandboxes of all nodes as this api sees them: lists are answered from memory, no node is asked.

What a list has in it, seen from a client:

- What was done through this api is in it. A node says in its answers where its stream of changes stood, and a list
  waits until the view is that far.
- What was done through another api is in it as well, as long as this one keeps up: a node answers for a change only
  after it has sent the change to those who follow (`node.followers`), and a list first takes in what has arrived. On
  one machine that is in order. Between machines a list that overtakes the stream may miss it, by the time that the
  bytes are on their way; an api whose stream stands still is not waited for by the node for longer than 50 ms.
- A node that is alive and cannot be read makes the list fail, as before (503, try again): its part would be old. It is
  given `PATIENCE` seconds to be read again. A dead node's sandboxes are left out and the node is named. A node that
  the view is behind of is named too; what is known of it is in the list.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

from prometheus_client.core import Metric

from greenroom.errors import NodeUnavailable
from greenroom.fleet.following import Following
from greenroom.fleet.view import View
from greenroom.wire import metrics
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import Listed, NodeInfo, NodeList

_log = logging.getLogger(__name__)

Encoder = tuple[Hashable, Callable[[Listed], bytes]]
"""What makes a text of a sandbox, and what tells this kind of text from others."""
PATIENCE = 2.0
"""Seconds that a list waits for nodes that cannot be read at the moment."""
BRIEFLY = 0.5
"""Seconds since it was lost for which a node may be expected to be read again at once."""


class Seen:
    """See the module. Told of the node table by whoever keeps it."""

    def __init__(self, client: RoleClient) -> None:
        self.view = View()
        self._following = Following(client, self.view)
        self._missing: list[str] = []
        client.heard = self._following.heard

    def learn(self, nodes: NodeList) -> None:
        """The node table as a master has it now."""
        self._following.nodes(nodes.nodes)

    async def close(self) -> None:
        """Follow nobody any more."""
        await self._following.close()

    def read(self) -> Iterable[Metric]:
        """How much is seen now, for a scrape."""
        counts = self.view.statistics()
        rows = [(("whole",), counts["nodes"] - counts["partial"]), (("partial",), counts["partial"])]
        yield metrics.gauges("greenroom_api_view_nodes", "Nodes, by whether they are read", ("state",), rows)
        rest = [((), counts["sandboxes"])]
        yield metrics.gauges("greenroom_api_view_sandboxes", "Sandboxes that this api knows of", (), rest)

    def owner_of(self, sandbox_id: str) -> str | None:
        """Whose a sandbox is, or None where that is not known here."""
        entry = self.view.get(sandbox_id)
        return None if entry is None else entry.sandbox.owner

    def encoded(self, sandboxes: Iterable[Listed], encoders: Mapping[str, Encoder]) -> list[bytes]:
        """What the encoders, found by the template's name, make of sandboxes. It is kept with each as long as it stays
        as it is."""
        get = self.view.get
        texts = []
        for sandbox in sandboxes:
            kind, make = encoders[sandbox.template]
            entry = get(sandbox.sandbox_id)
            if entry is None or entry.sandbox is not sandbox:
                texts.append(make(sandbox))
            else:
                texts.append(entry.fragment(kind, make))
        return texts

    async def caught_up(self, codes: Collection[str]) -> bool:
        """Wait until the view has these nodes as far as their answers have shown them, for `PATIENCE` seconds."""
        return await self._following.settled(codes, PATIENCE)

    async def current(self) -> list[str]:
        """Take in what has arrived, and wait for what answers have shown; then the names of nodes of which not all, or
        not the latest, is in the view.

        A node that is away is not waited for, but one is that has only just been heard of, or been lost.
        """
        await self._following.settled((), 0)
        nodes = self.view.nodes()
        behind = self._following.behind(nodes)
        now = time.time()
        new = {
            code
            for code, since in self.view.partial().items()
            if nodes[code].position is None and since > now - PATIENCE
        }
        lost = {code for code, since in self.view.partial().items() if since > now - BRIEFLY}
        if behind or new:
            await self._following.settled(behind | new, PATIENCE)
        elif lost:
            await self._following.settled(lost, BRIEFLY)
        nodes = self.view.nodes()
        away = self._following.behind(nodes) | self.view.partial().keys()
        return sorted(nodes[code].name for code in away)

    async def of_owner(self, owner: str, nodes: Iterable[NodeInfo]) -> tuple[list[Listed], list[str]]:
        """An owner's sandboxes, and the names of those of `nodes` whose sandboxes are not in it, or not the latest.

        Raises NodeUnavailable when one that should be alive cannot be read.
        """
        names = {info.status.code: info.status.name for info in nodes if info.live}
        dead = [info.status.name for info in nodes if not info.live]
        behind: set[str] = set()
        if not await self._following.settled(names, PATIENCE):
            for code in names:
                node = self.view.node(code)
                if node is not None and node.since is not None:
                    raise NodeUnavailable(f"the sandboxes of node {names[code]} cannot be read")
            behind = self._following.behind(names)
        missing = sorted([*dead, *(names[code] for code in behind)])
        if missing != self._missing:
            self._missing = missing
            if missing:
                _log.warning("lists are without %s, or without the latest of it", ", ".join(missing))
            else:
                _log.info("lists are whole again")
        mine = self.view.of_owner(owner).values()
        return [
            entry.sandbox for entry in mine if entry.node.code in names and entry.sandbox.state != "ended"
        ], missing
