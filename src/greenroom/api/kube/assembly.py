"""The Kubernetes dialect put together: all its storages, who may use them, the application over them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

from starlette.applications import Starlette

from greenroom.api.keys import KeyRing
from greenroom.api.kube.access import Access
from greenroom.api.kube.live.claims import SandboxClaimStorage
from greenroom.api.kube.live.events import EventStorage
from greenroom.api.kube.live.inventories import InventoryStorage
from greenroom.api.kube.live.namespaces import NamespaceStorage
from greenroom.api.kube.live.observing import Live
from greenroom.api.kube.live.operating import Operating
from greenroom.api.kube.live.sandboxes import SandboxStorage
from greenroom.api.kube.rest import application
from greenroom.api.kube.reviews import Reviews
from greenroom.api.kube.storage import Storage
from greenroom.api.kube.stored.assembly import Stored
from greenroom.api.kube.versions import Clock
from greenroom.api.nodes import Fleet
from greenroom.config import RoleSpec
from greenroom.store.records import Store
from greenroom.wire.calling import RoleClient


class KubeDialect:
    """See the module. `running` has to be entered for it to be current."""

    def __init__(self, spec: RoleSpec, fleet: Fleet, keys: KeyRing, store: Store) -> None:
        self._spec = spec
        self._fleet = fleet
        self._store = store
        # One clock for all kinds: whoever compares versions of two of them finds them in order.
        clock = Clock()
        self.stored = Stored(store, fleet.seen.view, clock)
        self.live = Live(fleet.seen.view, clock)
        config = spec.config
        self._operating = Operating(
            fleet,
            self.live,
            wait=config.claims.queue_wait,
            resume_ttl=float(config.api.default_timeout),
        )
        access = Access(keys)
        self.application: Starlette = application(
            self._storages(), access.admit, ready=self.ready, more=Reviews(access).routes()
        )

    def _storages(self) -> list[Storage]:
        """The storages of all kinds, in the order in which discovery names them: this is where one more joins."""
        live, operating = self.live, self._operating
        templates, pools, quotas = self.stored.storages()
        return [
            SandboxStorage(operating),
            templates,
            pools,
            SandboxClaimStorage(operating, self.stored),
            InventoryStorage(live, operating.current, self._fleet.address),
            NamespaceStorage(live, operating.current, self._namespaces),
            EventStorage(live, operating.current),
            quotas,
        ]

    async def _namespaces(self) -> Mapping[str, float]:
        """Namespaces in which something is kept, or that belong to a key, and since when (Unix seconds)."""
        found = self.stored.namespaces()
        for key in await self._store.api_keys():
            if key.revoked_at is None:
                found[key.owner] = min(key.created_at, found.get(key.owner, key.created_at))
        return found

    def ready(self) -> bool:
        """Whether everything can be answered: the store was read, and every node that is alive at least once. One that
        cannot be read now is told as such, and does not make the whole process useless."""
        live, view = self._fleet.live(), self._fleet.seen.view
        if live is None or not self.stored.ready:
            return False
        nodes = [view.node(code) for code in live]
        return all(node is not None and node.position is not None for node in nodes)

    @contextlib.asynccontextmanager
    async def running(self, client: RoleClient) -> AsyncIterator[None]:
        """For the length of a block, keep it current."""
        try:
            async with self.stored.running(client, self._spec.master_urls):
                yield
        finally:
            self.live.close()
