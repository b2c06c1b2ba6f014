"""The stored kinds put together: three storages, what they depend on, and the tasks that keep them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from greenroom.api.kube.live.claims import Found
from greenroom.api.kube.live.instants import seconds_of
from greenroom.api.kube.objects import metadata_of
from greenroom.api.kube.status import StatusError
from greenroom.api.kube.storage import Storage
from greenroom.api.kube.stored.driving import Driven
from greenroom.api.kube.stored.following import Following, Restating
from greenroom.api.kube.stored.kinds import PoolStorage, QuotaStorage, TemplateStorage
from greenroom.api.kube.stored.pools import Catalogue
from greenroom.api.kube.stored.poolstatus import Totals
from greenroom.api.kube.versions import Clock
from greenroom.errors import TemporaryError
from greenroom.fleet.usage import Usage
from greenroom.fleet.view import Entry, NodeView, View
from greenroom.store.records import Store
from greenroom.wire.calling import RoleClient
from greenroom.wire.tasks import spawn, stop


class Stored:
    """The stored kinds over a store and a view. Also the `Pools` of the claims' storage."""

    def __init__(self, store: Store, view: View, clock: Clock | None = None) -> None:
        clock = clock or Clock()
        self.catalogue = Catalogue()
        self._totals = Totals(view)
        self._pools_due = Restating(self._restate_pools)
        self._quotas_due = Restating(self._restate_quotas)
        self._owners: set[str] = set()
        self.driven = Driven(self._pools_due.mark)
        self.templates = TemplateStorage(store, clock, self.catalogue, self._pools_due.mark)
        self.pools = PoolStorage(
            store, clock, self.catalogue, self.templates, self._totals, self.driven, self._pools_due.mark
        )
        self.quotas = QuotaStorage(store, clock, Usage(view))
        self._following = Following(
            store, (self.templates, self.pools, self.quotas), self.catalogue, self._pools_due.mark
        )
        for storage in (self.templates, self.pools, self.quotas):
            storage.look = self._following.look
        view.observe_nodes(self._node)
        view.observe(self._entered)

    @property
    def ready(self) -> bool:
        """Whether the store has been read."""
        return self._following.caught_up

    def storages(self) -> list[Storage]:
        """The storages."""
        return [self.templates, self.pools, self.quotas]

    async def pool(self, namespace: str, name: str) -> Found:
        """See `live.claims.Pools`. Raises 404 for a pool that is not there, 422 for one that can have no members."""
        try:
            return self.pools.pool(namespace, name)
        except StatusError as error:
            if error.reason != "NotFound":
                raise
        # It may have been made a moment ago, by another process.
        with contextlib.suppress(TemporaryError):
            await self._following.look()
        return self.pools.pool(namespace, name)

    def namespaces(self) -> dict[str, float]:
        """The namespaces in which something is kept, and when the oldest of that was made (Unix seconds)."""
        found: dict[str, float] = {}
        for storage in (self.templates, self.pools, self.quotas):
            for (namespace, _), document in storage.documents().items():
                made = seconds_of(metadata_of(document).get("creationTimestamp"))
                known = found.get(namespace, float("inf"))
                found[namespace] = known if made is None else min(made, known)
        return found

    async def look(self) -> None:
        """Take in what the store has now, and compute what follows from it. Raises TemporaryError."""
        await self._following.look()
        self._restate_pools()

    @contextlib.asynccontextmanager
    async def running(
        self, client: RoleClient | None = None, masters: list[str] | None = None
    ) -> AsyncIterator[None]:
        """For the length of a block, follow the store, and the master where one is named."""
        tasks: list[asyncio.Task[None]] = [spawn(self._following.run(), "follow-store")]
        if client is not None and masters:
            tasks.append(spawn(self.driven.follow(client, masters), "follow-driven-pools"))
        try:
            yield
        finally:
            await stop(*tasks)
            self._pools_due.close()
            self._quotas_due.close()

    def _node(self, node: NodeView, _there: bool) -> None:
        if self._totals.learn(node.code):
            self._pools_due.mark()

    def _entered(self, before: Entry | None, after: Entry | None) -> None:
        self._owners.update(entry.sandbox.owner for entry in (before, after) if entry is not None)
        self._quotas_due.mark()

    def _restate_pools(self) -> None:
        self.pools.part()
        self.pools.restate()

    def _restate_quotas(self) -> None:
        owners, self._owners = self._owners, set()
        self.quotas.restate([key for key in self.quotas.documents() if key[0] in owners])
