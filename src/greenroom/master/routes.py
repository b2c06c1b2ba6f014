"""The master's internal HTTP API: what comes in is decoded, handed to the parts, and answered.

`Master` holds the parts of one master process together; `routes` declares who may call what.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable

import msgspec
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from greenroom.config import Config
from greenroom.errors import BadRequest, KeyConflict, NotFound
from greenroom.fleet.following import Following
from greenroom.fleet.settling import Settling
from greenroom.fleet.view import View
from greenroom.fleet.warm import WarmIndex
from greenroom.master.admission import Admission
from greenroom.master.catalogue import Catalogue
from greenroom.master.claims import Claims
from greenroom.master.driver import Driver
from greenroom.master.driving import Driving
from greenroom.master.forks import Forks
from greenroom.master.membership import Membership, record_of
from greenroom.master.metrics import CLAIM_SECONDS, CLAIMS, read
from greenroom.master.placement import Placement
from greenroom.master.watching import NodeWatch
from greenroom.store.records import Store
from greenroom.wire import logs, metrics
from greenroom.wire.calling import RoleClient
from greenroom.wire.changes import Position
from greenroom.wire.messages import ClaimRequest, ForkRequest, MasterStatus, NodeStatus, PoolSpec, Registered
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
        self.catalogue = Catalogue(store)
        self.warm = WarmIndex()
        self.view = View(self.warm)
        self.following = Following(client, self.view, self.warm)
        self.settling = Settling(self.view)
        self.watch = NodeWatch(self.membership, self._nodes_changed)
        driver = Driver(config.pools.default_warm)
        self.driving = Driving(client, self.view, self.membership, self.catalogue, driver)
        self.admission = Admission(self.view, self.following, self.membership, self.catalogue, config.claims)
        self.claims = Claims(
            client,
            self.membership,
            Placement(self.view, self.warm, self.membership),
            self.settling,
            self.admission,
            self.catalogue,
            config.claims,
            self.driving.arrived,
        )
        self.forks = Forks(
            client,
            self.membership,
            self.view,
            self.following,
            self.settling,
            self.admission,
            config.api.move_deadline,
        )
        self.catalogue.on_change = self.driving.declared
        self.following.on_move = self._moved
        client.heard = self._heard
        self._written = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the store, then keep leases, nodes and the store's changes in view for the length of the block."""
        await self.catalogue.seed(self._config.pools)
        await self.catalogue.load()
        self.membership.restore(self.catalogue.nodes, time.monotonic())
        self._nodes_changed()
        tasks = [
            spawn(self.watch.run(), "node-leases"),
            spawn(self.catalogue.follow(self._written), "store-changes"),
            spawn(self._follow_nodes(), "node-records"),
            spawn(self.driving.run(), "pools"),
        ]
        try:
            with metrics.reading(self._read):
                yield
        finally:
            self.close()
            await stop(*tasks)
            await self.following.close()

    def close(self) -> None:
        """The master is leaving: whoever waits for news is answered now."""
        self.watch.close()
        self.driving.close()

    def _read(self) -> Iterable[Metric]:
        return read(
            self.membership,
            self.claims.statistics(),
            self.admission.statistics(),
            self.driving.statistics(),
            self.view.statistics(),
        )

    def _nodes_changed(self) -> None:
        infos = self.membership.nodes().nodes
        self.following.nodes(infos)
        self.driving.nodes(infos)

    def _heard(self, position: Position) -> None:
        self.settling.heard(position)
        self.following.heard(position)

    def _moved(self, code: str) -> None:
        self.settling.moved(code, time.monotonic())
        self.driving.moved(code)

    async def _follow_nodes(self) -> None:
        """Take over what other masters wrote: nodes they registered, dead ones they were told to forget."""
        while True:
            await self._written.wait()
            self._written.clear()
            changed = self.membership.restore(self.catalogue.nodes, time.monotonic())
            kept = {record.name for record in self.catalogue.nodes}
            for info in self.membership.nodes().nodes:
                if info.status.name not in kept and not info.live:
                    changed |= self.membership.remove(info.status.name)
            if changed:
                self.watch.changed()

    async def register(self, request: Request) -> Response:
        """A node enters the table, or enters it again: KeyConflict when its code is another node's."""
        status = await read_json(request, NodeStatus)
        wall = time.time()
        # The store first: it also knows the codes of nodes that only another master has heard of.
        await self.catalogue.put_node(record_of(status, wall))
        if self.membership.register(status, time.monotonic(), wall):
            _log.info("node %s (code %s) registered at %s", status.name, status.code, status.api_url)
            self.watch.changed()
        return json_response(Registered(self.driving.heard(status)))

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
        return json_response(Registered(self.driving.heard(status)))

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
        if self.membership.remove(name):
            self.watch.changed()
        return Response(status_code=204)

    async def claim(self, request: Request) -> Response:
        """One sandbox, from the node that suits best."""
        wanted = await read_json(request, ClaimRequest)
        with metrics.Outcome(CLAIMS, seconds=CLAIM_SECONDS):
            sandbox = await self.claims.claim(wanted)
        logs.about(sandbox.sandbox_id)
        return json_response(sandbox, 201)

    async def fork(self, request: Request) -> Response:
        """Copies of a sandbox, from its node."""
        wanted = await read_json(request, ForkRequest)
        return json_response(await self.forks.fork(request.path_params["sandbox_id"], wanted), 201)

    async def templates(self, _request: Request) -> Response:
        """All templates."""
        return json_response(self.catalogue.templates)

    async def template(self, request: Request) -> Response:
        """One template by id or name."""
        return json_response(await self.catalogue.template(request.path_params["ref"]))

    async def pools(self, _request: Request) -> Response:
        """All declared pools, whole targets."""
        return json_response(self.catalogue.pools)

    async def driven_pools(self, request: Request) -> Response:
        """What became of the declared SandboxWarmPools, at once or (`after`, `wait`) when that has changed."""
        after = _number(request, "after", int)
        wait = _number(request, "wait", float)
        return json_response(await self.driving.newer(int(after), wait))

    async def put_pool(self, request: Request) -> Response:
        """Declare, change or (target 0) remove a pool. Nodes are told their share at once."""
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
            endpoint("POST", "/v1/sandboxes/{sandbox_id}/fork", self.fork, ("api",)),
            endpoint("GET", "/v1/templates", self.templates, readers),
            endpoint("GET", "/v1/templates/{ref:path}", self.template, readers),
            endpoint("GET", "/v1/pools", self.pools, readers),
            endpoint("GET", "/v1/pools/driven", self.driven_pools, readers),
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
