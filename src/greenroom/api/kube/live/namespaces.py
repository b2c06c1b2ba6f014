"""Namespaces: every name that a sandbox's owner, an API key or an object has is one, and `default` always is.

Nobody makes or deletes one. What names them beside sandboxes is asked for whenever a list is wanted (`others`), and
its changes are told to those who watch then; `refresh` tells them at once.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping

from greenroom.api.kube.kinds import NAMESPACE
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.instants import instant_text
from greenroom.api.kube.live.observing import Live
from greenroom.api.kube.live.reads import Current, ReadOnly
from greenroom.api.kube.live.shelves import LiveRow
from greenroom.api.kube.objects import Key, Object, same
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.watching import Cache, Change
from greenroom.fleet.view import NodeView

Others = Callable[[], Awaitable[Mapping[str, float]]]
"""Names, and since when there is something (Unix seconds; infinity where that is not known)."""


async def nothing() -> Mapping[str, float]:
    """Names no namespace."""
    return {}


def _born(obj: Object) -> object:
    return obj["metadata"].get("creationTimestamp")


class NamespaceStorage(ReadOnly):
    """See the module."""

    kind = NAMESPACE

    def __init__(self, live: Live, current: Current, others: Others = nothing) -> None:
        super().__init__(current)
        self._live = live
        self._others = others
        self.cache = Cache(live.clock.next(), clock=live.clock)
        self._counts: dict[str, int] = {}
        """Sandboxes of each."""
        self._named: set[str] = {documents.DEFAULT_NAMESPACE}
        self._oldest: dict[str, float] = {}
        """When the oldest thing was made that has been in each."""
        self._objects: dict[str, Object] = {}
        self._settle({documents.DEFAULT_NAMESPACE})
        live.follow(self)

    def changed(self, before: LiveRow | None, after: LiveRow | None) -> None:
        """See `Follower`."""
        if before is not None:
            name = before.key[0]
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
        if after is not None:
            self._counts[after.key[0]] = self._counts.get(after.key[0], 0) + 1
            self._learn(after.key[0], after.facts.listed.started_at)
        self._settle({row.key[0] for row in (before, after) if row is not None})

    def node(self, node: NodeView, *, there: bool) -> None:
        """See `Follower`."""

    def close(self) -> None:
        """See `Follower`."""

    def _settle(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            there = name in self._counts or name in self._named
            before = self._objects.get(name)
            if there == (before is not None) and (before is None or same(_born(before), self._since(name))):
                continue
            version = self._live.clock.next()
            self._objects.pop(name, None)
            if not there:
                self._oldest.pop(name, None)
            after = self._made(name, version) if there else None
            if after is not None:
                self._objects[name] = after
            self.cache.record(Change(version, before, after))

    def _learn(self, name: str, at: float) -> None:
        self._oldest[name] = min(at, self._oldest.get(name, math.inf))

    def _since(self, name: str) -> str | None:
        at = self._oldest.get(name, math.inf)
        return None if at == math.inf else instant_text(at)

    def _made(self, name: str, version: int) -> Object:
        born = self._since(name)
        return {
            "apiVersion": NAMESPACE.api_version,
            "kind": NAMESPACE.name,
            "metadata": {
                "name": name,
                "uid": documents.uid_of(NAMESPACE, name),
                "resourceVersion": str(version),
                **({} if born is None else {"creationTimestamp": born}),
                "labels": {"kubernetes.io/metadata.name": name},
            },
            "spec": {"finalizers": []},
            "status": {"phase": "Active"},
        }

    async def refresh(self) -> None:
        """Learn which namespaces are named beside those of sandboxes."""
        others = await self._others()
        named = {documents.DEFAULT_NAMESPACE, *others}
        changed = named ^ self._named
        for name, at in others.items():
            if at < self._oldest.get(name, math.inf):
                self._learn(name, at)
                changed.add(name)
        self._named = named
        self._settle(changed)

    async def list(self, namespace: str) -> Listing:
        """See `Storage`."""
        missing = await self.current()
        await self.refresh()
        return Listing(self.cache.version, [self._objects[name] for name in sorted(self._objects)], missing)

    async def get(self, key: Key) -> Object | None:
        """See `Storage`."""
        await self.current()
        await self.refresh()
        return self._objects.get(key[1])
