"""Namespaces: every name that a sandbox's owner, an API key or an object has is one, and `default` always is.

Nobody makes or deletes one. What names them beside sandboxes is asked for whenever a list is wanted (`others`), and
its changes are told to those who watch then; `refresh` tells them at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from greenroom.api.kube.kinds import NAMESPACE
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.instants import instant_text
from greenroom.api.kube.live.observing import Live
from greenroom.api.kube.live.reads import Current, ReadOnly
from greenroom.api.kube.live.shelves import LiveRow
from greenroom.api.kube.objects import Key, Object
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.watching import Cache, Change
from greenroom.fleet.view import NodeView

Others = Callable[[], Awaitable[Iterable[str]]]


async def nothing() -> Iterable[str]:
    """Names no namespace."""
    return ()


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
        self._settle({row.key[0] for row in (before, after) if row is not None})

    def node(self, node: NodeView, *, there: bool) -> None:
        """See `Follower`."""

    def close(self) -> None:
        """See `Follower`."""

    def _settle(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            there = name in self._counts or name in self._named
            if there == (name in self._objects):
                continue
            version = self._live.clock.next()
            before = self._objects.pop(name, None)
            after = self._made(name, version) if there else None
            if after is not None:
                self._objects[name] = after
            self.cache.record(Change(version, before, after))

    def _made(self, name: str, version: int) -> Object:
        return {
            "apiVersion": NAMESPACE.api_version,
            "kind": NAMESPACE.name,
            "metadata": {
                "name": name,
                "uid": documents.uid_of(NAMESPACE, name),
                "resourceVersion": str(version),
                "creationTimestamp": instant_text(self._live.now()),
                "labels": {"kubernetes.io/metadata.name": name},
            },
            "spec": {"finalizers": []},
            "status": {"phase": "Active"},
        }

    async def refresh(self) -> None:
        """Learn which namespaces are named beside those of sandboxes."""
        named = {documents.DEFAULT_NAMESPACE, *await self._others()}
        changed = named ^ self._named
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
