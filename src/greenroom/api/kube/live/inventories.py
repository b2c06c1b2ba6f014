"""NodeInventory: what each node has, as the view knows it. Made when it is read, and never written.

A node with two thousand sandboxes has a long inventory, and each of them changes it; so changes of one node are told
to those who watch once a second, and the object of a change is made only when somebody looks at it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from greenroom.api.kube.kinds import INVENTORY
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.conditions import PHASES
from greenroom.api.kube.live.instants import instant_text
from greenroom.api.kube.live.observing import Live
from greenroom.api.kube.live.reads import Current, ReadOnly
from greenroom.api.kube.live.shelves import LiveRow
from greenroom.api.kube.objects import Key, Object
from greenroom.api.kube.rows import LIGHT, Row
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.watching import Cache, Change
from greenroom.fleet.view import NodeView
from greenroom.wire.messages import Listed

EVERY: Final = 1.0
"""Seconds between two changes of one node's inventory that are told."""

ENTRY: Final = 300
"""Bytes of a sandbox in an inventory, about."""


class Addresses(Protocol):
    """Where nodes are."""

    def __call__(self, code: str) -> str:
        """URL of a node, or "" where that is not known."""


class _State:
    """Of one node: what was told of it last."""

    def __init__(self, row: InventoryRow) -> None:
        self.row = row
        self.told = float("-inf")
        self.timer: asyncio.TimerHandle | None = None


class InventoryRow(Row):
    """The inventory of a node: as the node is when the object is made."""

    __slots__ = ("_address", "_at", "_began", "_live", "_node", "_version")

    def __init__(
        self, node: NodeView, live: Live, address: Addresses, version: int, at: float, began: float
    ) -> None:
        self.key = ("", node.name)
        self._node = node
        self._live = live
        self._address = address
        self._version = version
        self._at = at
        self._began = began

    @property
    def began(self) -> float:
        """When the node was first heard of (Unix seconds)."""
        return self._began

    def weight(self) -> int:
        """See `Row`."""
        return LIGHT + ENTRY * len(self._node.entries)

    def object(self) -> Object:
        """See `Row`."""
        node = self._node
        pools = sorted(node.pools.values(), key=lambda pool: (pool.template, pool.size))
        entries = sorted((entry.sandbox for entry in node.entries.values()), key=lambda each: each.sandbox_id)
        metadata = {
            "name": node.name,
            "uid": documents.uid_of(INVENTORY, node.code),
            "resourceVersion": str(self._version),
            "creationTimestamp": instant_text(self._began),
        }
        return {
            "apiVersion": INVENTORY.api_version,
            "kind": INVENTORY.name,
            "metadata": metadata,
            "node": node.name,
            "address": address_of(self._address(node.code)),
            "publishedAt": instant_text(self._at if node.since is None else node.since),
            "reachable": self._live.reachable(node.code),
            "pools": [
                {"template": pool.template, "size": pool.size, "warm": pool.warm, "target": pool.target}
                for pool in pools
            ],
            "templates": [{"template": name} for name in sorted({pool.template for pool in pools})],
            "entries": [entry(each) for each in entries],
        }


def entry(listed: Listed) -> Object:
    """A sandbox in its node's inventory."""
    name = f"{documents.namespace_of(listed)}/{documents.name_of(listed)}"
    told: dict[str, Any] = {
        "name": name,
        "id": listed.sandbox_id,
        "phase": PHASES[listed.state],
        "template": listed.template,
        "claimedAt": instant_text(listed.started_at),
        "cpuCount": listed.size.cpus,
        "memoryBytes": listed.size.memory_mib << 20,
    }
    if documents.claimed(listed):
        told["claimRef"] = name
    if (end := documents.ends(listed)) is not None:
        told["deadline"] = instant_text(end)
    return told


def address_of(url: str) -> str:
    """Host and port of a URL."""
    return urlsplit(url).netloc


class InventoryStorage(ReadOnly):
    """See the module."""

    kind = INVENTORY

    def __init__(self, live: Live, current: Current, address: Addresses = lambda code: "") -> None:
        super().__init__(current)
        self._live = live
        self._address = address
        self.cache = Cache(live.clock.next(), clock=live.clock)
        self._nodes: dict[str, _State] = {}
        live.follow(self)

    def changed(self, before: LiveRow | None, after: LiveRow | None) -> None:
        """See `Follower`."""
        row = after or before
        if row is not None and (node := self._live.view.node(row.sandbox_id[1:5])) is not None:
            self._due(node)

    def node(self, node: NodeView, *, there: bool) -> None:
        """See `Follower`."""
        if there:
            self._due(node)
        elif (state := self._nodes.pop(node.code, None)) is not None:
            if state.timer is not None:
                state.timer.cancel()
            self.cache.record(Change(self._live.clock.next(), state.row, None))

    def _due(self, node: NodeView) -> None:
        state = self._nodes.get(node.code)
        if state is not None and state.timer is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._tell(node)
            return
        wait = 0.0 if state is None else state.told + EVERY - loop.time()
        if state is None or wait <= 0:
            self._tell(node)
        else:
            state.timer = loop.call_later(wait, self._tell, node)

    def _tell(self, node: NodeView) -> None:
        if self._live.view.node(node.code) is not node:
            return
        version = self._live.clock.next()
        state = self._nodes.get(node.code)
        now = self._live.now()
        row = InventoryRow(
            node, self._live, self._address, version, now, now if state is None else state.row.began
        )
        before: Row | None = None
        if state is None:
            state = self._nodes[node.code] = _State(row)
        elif state.row.key == row.key:
            before, state.row = state.row, row
        else:
            # A node of another name is another object.
            self.cache.record(Change(version, state.row, None))
            version = self._live.clock.next()
            row = state.row = InventoryRow(node, self._live, self._address, version, now, now)
        state.timer = None
        try:
            state.told = asyncio.get_running_loop().time()
        except RuntimeError:
            state.told = float("-inf")
        self.cache.record(Change(version, before, row))

    def close(self) -> None:
        """See `Follower`."""
        for state in self._nodes.values():
            if state.timer is not None:
                state.timer.cancel()

    async def list(self, namespace: str) -> Listing:
        """See `Storage`."""
        missing = await self.current()
        rows = sorted((state.row for state in self._nodes.values()), key=lambda row: row.key)
        return Listing(self.cache.version, rows, missing)

    async def get(self, key: Key) -> Object | None:
        """See `Storage`."""
        await self.current()
        row = next((state.row for state in self._nodes.values() if state.row.key == key), None)
        return None if row is None else row.object()
