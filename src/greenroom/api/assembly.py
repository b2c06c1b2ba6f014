"""An api's parts put together: what `__main__` serves, and what `describe` only looks at."""

from __future__ import annotations

from greenroom.api.e2b.keys import Authenticator
from greenroom.api.e2b.routes import Dialect
from greenroom.api.nodes import Fleet
from greenroom.config import RoleSpec
from greenroom.store.records import Store
from greenroom.wire.calling import RoleClient


def assembled(spec: RoleSpec, client: RoleClient, store: Store) -> tuple[Fleet, Dialect]:
    """The fleet as `client` reaches it, and the E2B dialect over it. Nothing is called yet."""
    config = spec.config
    fleet = Fleet(client, spec.master_urls, config)
    return fleet, Dialect(fleet, Authenticator(store), spec.domain, config.api, config.claims, config.network)
