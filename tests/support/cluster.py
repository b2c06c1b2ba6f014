"""A control plane for tests: real master and api processes, fake nodes, API keys, plain HTTP clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from greenroom.config import ApiConfig, ClaimsConfig, Config, NodesConfig, PoolsConfig, RoleSpec
from greenroom.store.keys import create_api_key
from greenroom.store.records import ApiKey
from greenroom.store.sqlite import SqliteStore
from greenroom.wire import credentials
from greenroom.wire.calling import RoleClient
from tests.support.fake_node import FakeNode
from tests.support.role_process import RoleProcess

T = TypeVar("T")

QUICK = Config(
    api=ApiConfig(call_deadline=5.0),
    claims=ClaimsConfig(queue_wait=1.0, handover_deadline=5.0),
    pools=PoolsConfig(default_target=5),
    nodes=NodesConfig(heartbeat=0.05, lease=1.0),
)
"""Settings with short waits; what is tested is that they are kept, not how long they are."""

_owners = itertools.count()


class Cluster:
    """The state directory of a control plane and what runs on it. All it starts ends with `stack`."""

    def __init__(self, state: Path, stack: contextlib.ExitStack) -> None:
        self.state = state
        self.stack = stack
        self.masters: list[RoleProcess] = []
        self.apis: list[RoleProcess] = []
        self.nodes: list[FakeNode] = []
        credentials.ensure(state / "secrets")

    def spec(self, role: Any, replica: int = 0, config: Config = QUICK, **fields: Any) -> RoleSpec:
        """A role's spec in this state directory."""
        return RoleSpec(
            role=role,
            replica=replica,
            state_dir=str(self.state),
            cache_dir=str(self.state),
            config=config,
            **fields,
        )

    def master(self, config: Config = QUICK, **fields: Any) -> RoleProcess:
        """Start a master."""
        role = RoleProcess(self.spec("master", len(self.masters), config, **fields))
        self.masters.append(self.stack.enter_context(role))
        return role

    def api(self, config: Config = QUICK, **fields: Any) -> RoleProcess:
        """Start an api that knows all masters started before it."""
        fields.setdefault("master_urls", [master.url for master in self.masters])
        role = RoleProcess(self.spec("api", len(self.apis), config, **fields))
        self.apis.append(self.stack.enter_context(role))
        return role

    def node(self, name: str = "node-0", warm: int = 100) -> FakeNode:
        """Start a fake node that reports to all masters started before it, and wait until they know it."""
        node = FakeNode(self.state / "secrets", name, [master.url for master in self.masters], warm)
        self.nodes.append(self.stack.enter_context(node))
        node.wait_registered()
        return node

    def key(self, owner: str = "") -> tuple[ApiKey, str]:
        """An API key, of a new owner unless one is named."""
        name = owner or f"owner-{next(_owners)}"
        return self.stored(lambda store: create_api_key(store, "test", name))

    def stored(self, work: Callable[[SqliteStore], Coroutine[Any, Any, T]]) -> T:
        """Do something with the store, as another process would."""

        async def main() -> T:
            store = await SqliteStore.open(self.state / "store.db")
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(main())

    def call(
        self,
        role: str,
        method: str,
        url: str,
        kind: type[T],
        body: object = None,
        deadline: float = 20.0,
    ) -> T:
        """Call an internal API with `role`'s credential."""

        async def main() -> T:
            async with RoleClient(credentials.own_token(self.state / "secrets", role)) as client:
                return await client.call(method, url, kind, body, deadline=deadline)

        return asyncio.run(main())


@contextlib.contextmanager
def cluster(state: Path) -> Iterator[Cluster]:
    """A cluster without anything running yet."""
    with contextlib.ExitStack() as stack:
        yield Cluster(state, stack)


@contextlib.contextmanager
def http(api: RoleProcess, secret: str | None) -> Iterator[httpx.Client]:
    """A plain HTTP client of an api, with an API key or without."""
    headers = {} if secret is None else {"X-API-Key": secret}
    with httpx.Client(base_url=api.url, headers=headers, timeout=30.0, trust_env=False) as client:
        yield client
