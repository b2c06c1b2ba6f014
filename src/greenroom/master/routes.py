"""The master's internal HTTP API: what comes in is decoded, handed to the parts, and answered.

`Master` holds the parts of one master process together; `routes` declares who may call what.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from greenroom.config import Config
from greenroom.errors import BadRequest, KeyConflict, NotFound
from greenroom.master.catalogue import Catalogue
from greenroom.master.claims import Claims
from greenroom.master.membership import Membership, record_of
from greenroom.master.metrics import CLAIM_SECONDS, CLAIMS, read
from greenroom.master.placement import Hints
from greenroom.master.shares import shares_of
from greenroom.master.watching import NodeWatch
from greenroom.store.records import Store
from greenroom.wire import logs, metrics
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import ClaimRequest, MasterStatus, NodeStatus, PoolSpec, Registered
from greenroom.wire.serving import endpoint, json_response, read_json
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)


class Master:
    """The parts of one master and the handlers that use them."""

    QUIET = ("/v1/nodes/{name}/heartbeat",)
    """Paths that are asked so often that their requests are no news."""

    def __init__(self, store: Store, client: RoleClient, config: Config) -> None:
        self._config = config
        self.membership = Membership(config.nodes.lease, first_revision=int(time.time() * 1000))
        self.hints = Hints()
        self.catalogue = Catalogue(store)
        self.watch = NodeWatch(self.membership)
        self.claims = Claims(client, self.membership, self.hints, self.catalogue, config.claims)
        self._written = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the store, then keep leases and the store's changes in view for the length of the block."""
        await self.catalogue.seed(self._config.pools)
        await self.catalogue.load()
        self.membership.restore(self.catalogue.nodes, time.monotonic())
        tasks = [
            spawn(self.watch.run(), "node-leases"),
            spawn(self.catalogue.follow(self._written), "store-changes"),
            spawn(self._follow_nodes(), "node-records"),
        ]
        try:
            with metrics.reading(lambda: read(self.membership, self.claims.statistics())):
                yield
        finally:
            self.watch.close()
            await stop(*tasks)

    async def _follow_nodes(self) -> None:
        """Take over what other masters wrote: nodes they registered, dead ones they were told to forget."""
        while True:
            await self._written.wait()
            self._written.clear()
            changed = self.membership.restore(self.catalogue.nodes, time.monotonic())
            kept = {record.name for record in self.catalogue.nodes}
            for info in self.membership.nodes().nodes:
                if info.status.name not in kept and not info.live:
                    changed |= self._forget(info.status.name)
            if changed:
                self.watch.changed()

    def _forget(self, name: str) -> bool:
        self.hints.forget(name)
        return self.membership.remove(name)

    def _shares(self, name: str) -> Registered:
        placeable = [status.name for status in self.membership.placeable()]
        return Registered(shares_of(name, self.catalogue.pools, placeable))

    async def register(self, request: Request) -> Response:
        """A node enters the table, or enters it again: KeyConflict when its code is another node's."""
        status = await read_json(request, NodeStatus)
        wall = time.time()
        # The store first: it also knows the codes of nodes that only another master has heard of.
        await self.catalogue.put_node(record_of(status, wall))
        if self.membership.register(status, time.monotonic(), wall):
            _log.info("node %s (code %s) registered at %s", status.name, status.code, status.api_url)
            self.watch.changed()
        self.hints.reported(status)
        return json_response(self._shares(status.name))

    async def heartbeat(self, request: Request) -> Response:
        """A node is alive. 404 makes it register again, as it does after a master's restart."""
        status = await read_json(request, NodeStatus)
        if status.name != request.path_params["name"]:
            raise BadRequest("name: the heartbeat is of another node than its path says")
        changed = self.membership.heartbeat(status, time.monotonic(), time.time())
        if changed is None:
            raise NotFound(f"the node {status.name} with code {status.code} is not registered here")
        if changed:
            await self.catalogue.put_node(record_of(status, time.time()))
            self.watch.changed()
        self.hints.reported(status)
        return json_response(self._shares(status.name))

    async def nodes(self, request: Request) -> Response:
        """The node table, at once or (`after`, `wait`) when it has changed."""
        after = _number(request, "after", int)
        wait = _number(request, "wait", float)
        return json_response(await self.watch.newer(int(after), wait))

    async def remove_node(self, request: Request) -> Response:
        """Forget a node that will not come back, so that lists no longer name it as missing."""
        name = request.path_params["name"]
        info = self.membership.get(name)
        if info is None:
            raise NotFound(f"there is no node called {name!r}")
        if info.live:
            raise KeyConflict(f"the node {name} is alive; stop it first")
        await self.catalogue.remove_node(name)
        if self._forget(name):
            self.watch.changed()
        return Response(status_code=204)

    async def claim(self, request: Request) -> Response:
        """One sandbox, from the node that suits best."""
        wanted = await read_json(request, ClaimRequest)
        with metrics.Outcome(CLAIMS, seconds=CLAIM_SECONDS):
            sandbox = await self.claims.claim(wanted)
        logs.about(sandbox.sandbox_id)
        return json_response(sandbox, 201)

    async def templates(self, _request: Request) -> Response:
        """All templates."""
        return json_response(self.catalogue.templates)

    async def template(self, request: Request) -> Response:
        """One template by id or name."""
        return json_response(await self.catalogue.template(request.path_params["ref"]))

    async def pools(self, _request: Request) -> Response:
        """All declared pools, whole targets."""
        return json_response(self.catalogue.pools)

    async def put_pool(self, request: Request) -> Response:
        """Declare, change or (target 0) remove a pool. Nodes learn their share with their next heartbeat."""
        pool = await read_json(request, PoolSpec)
        template = await self.catalogue.template(pool.template)
        pool = msgspec.structs.replace(pool, template=template.name)
        await self.catalogue.put_pool(pool)
        return json_response(pool)

    async def status(self, _request: Request) -> Response:
        """What there is: nodes, pools, templates."""
        return json_response(
            MasterStatus(
                nodes=self.membership.nodes().nodes,
                pools=self.catalogue.pools,
                templates=self.catalogue.templates,
            )
        )

    def routes(self) -> list[Route]:
        """The paths and the roles that each admits."""
        readers = ("api", "operator")
        return [
            endpoint("POST", "/v1/nodes/register", self.register, ("node",)),
            endpoint("POST", "/v1/nodes/{name}/heartbeat", self.heartbeat, ("node",)),
            endpoint("GET", "/v1/nodes", self.nodes, ("api", "proxy", "operator")),
            endpoint("DELETE", "/v1/nodes/{name}", self.remove_node, ("operator",)),
            endpoint("POST", "/v1/claims", self.claim, ("api",)),
            endpoint("GET", "/v1/templates", self.templates, readers),
            endpoint("GET", "/v1/templates/{ref:path}", self.template, readers),
            endpoint("GET", "/v1/pools", self.pools, readers),
            endpoint("PUT", "/v1/pools", self.put_pool, ("operator",)),
            endpoint("GET", "/v1/status", self.status, readers),
        ]


def _number(request: Request, name: str, kind: type[int] | type[float]) -> float:
    text = request.query_params.get(name, "0")
    try:
        number = kind(text)
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        raise BadRequest(f"{name}: a number of 0 or more is needed")
    return number
