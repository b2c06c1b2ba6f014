"""An api's parts put together: what `__main__` serves, and what `describe` only looks at."""

from __future__ import annotations

from greenroom.api.e2b.keys import Authenticator
from greenroom.api.e2b.routes import Dialect
from greenroom.api.kube.assembly import KubeDialect
from greenroom.api.nodes import Fleet
from greenroom.config import RoleSpec
from greenroom.store.records import Store
from greenroom.wire.calling import RoleClient


class Parts:
    """The fleet as `client` reaches it, and the two dialects over it. Nothing is called yet."""

    def __init__(self, spec: RoleSpec, client: RoleClient, store: Store) -> None:
        config = spec.config
        self.fleet = Fleet(client, spec.master_urls, config)
        # Both dialects know a key by the same cache.
        keys = Authenticator(store)
        self.e2b = Dialect(self.fleet, keys, spec.domain, config.api, config.claims, config.network)
        self.kube = KubeDialect(spec, self.fleet, keys, store)
