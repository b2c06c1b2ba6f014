"""A whole platform for one measurement: real master, api and node daemons as processes, with simulated VMs.

Everything lies in one directory: credentials, the SQLite store, a state directory for each node. Several nodes share a
process (`fleet_nodes`), which is why a fleet of 200 fits onto a small machine. The world is entered, measured and left;
nothing of it outlives the block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil

from greenroom.bench.fleet_nodes import FleetSpec, Hold
from greenroom.bench.kube_client import Kube
from greenroom.bench.processes import Running, started
from greenroom.bench.report import Table, cell
from greenroom.config import Config, NodesConfig, PoolsConfig, RoleSpec, SimulatedConfig, VmConfig
from greenroom.errors import NodeUnavailable, RuntimeFailure
from greenroom.master.catalogue import BASE, BASE_SIZE
from greenroom.store.keys import create_api_key
from greenroom.store.sqlite import SqliteStore
from greenroom.wire import credentials
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import Declared, MasterStatus, NodeInfo, NodeStatus, SandboxList

LOOK = 0.02
"""Seconds between two looks at something that nobody tells of."""
JOIN_DEADLINE = 120.0
"""Seconds for all nodes to be seen."""
OWNER = "default"
"""Owner of the API key, and so the namespace in which is measured."""

DECLARED: Any = {
    "sandbox": {
        "metadata": {
            "generation": 1,
            "labels": {"app": "agent"},
            "managedFields": [
                {
                    "manager": "kubectl-create",
                    "operation": "Update",
                    "apiVersion": "agents.x-k8s.io/v1beta1",
                    "time": "2026-01-01T00:00:00Z",
                    "fieldsType": "FieldsV1",
                    "fieldsV1": {
                        "f:metadata": {"f:labels": {".": {}, "f:app": {}}},
                        "f:spec": {"f:podTemplate": {"f:spec": {"f:containers": {}}}},
                    },
                }
            ],
        },
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "agent", "image": "base"}]}}},
    }
}
"""What is declared of every other sandbox that nodes hold from the beginning: what kubectl leaves of a small one."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How large a world is and how fast its nodes make members."""

    nodes: int
    per_process: int = 50
    rate: float = 0.0
    """Members a second on each node; 0 makes each at once."""
    variation: float = 0.3
    """Of the time between two (see `config.SimulatedConfig`)."""
    seed: int = 1
    apis: int = 1
    heartbeat: float = 1.0
    """Seconds between a node's heartbeats."""
    hold: int = 0
    """Sandboxes that each node has from the beginning."""
    owners: tuple[str, ...] = (OWNER,)

    def text(self) -> str:
        """In words, for notes."""
        speed = f"{self.rate:g} members/s each" if self.rate else "members made at once"
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} with simulated VMs ({speed})"


def config_of(shape: Shape) -> Config:
    """Settings of every role. Whatever is not about simulated VMs is as users have it."""
    return Config(
        vm=VmConfig(engine="simulated"),
        simulated=SimulatedConfig(rate=shape.rate, variation=shape.variation, seed=shape.seed),
        # The next member is asked for while one is being made, so that none waits for a turn of the event loop. More
        # would make each take longer, and a node tell of a rate that it does not have.
        pools=PoolsConfig(default_target=0, refill_parallel=2),
        nodes=NodesConfig(heartbeat=shape.heartbeat, lease=max(6.0, 6 * shape.heartbeat)),
    )


class World:
    """See the module. Use as an async context manager."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        """`directory` is made; it must not be there yet."""
        self.shape = shape
        self.state = directory
        self.config = config_of(shape)
        self.keys: dict[str, str] = {}
        """By owner, the secret of its API key."""
        self.apis: list[Running] = []
        self.fleet: list[Running] = []
        self._stack = contextlib.AsyncExitStack()
        self.master: Running
        self.operator: RoleClient

    async def __aenter__(self) -> World:
        try:
            await self._enter()
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _enter(self) -> None:
        self.state.mkdir(parents=True, mode=0o700)
        credentials.ensure(self.state / "secrets")
        await self._make_keys()
        enter = self._stack.enter_async_context
        self.master = await enter(self._role("master", 0))
        masters = [self.master.url]
        self.operator = await enter(RoleClient(credentials.own_token(self.state / "secrets", "operator")))
        for replica in range(self.shape.apis):
            self.apis.append(await enter(self._role("api", replica, master_urls=masters)))
        await self._start_fleet(masters)
        await self.joined()

    async def _make_keys(self) -> None:
        store = await SqliteStore.open(self.state / "store.db")
        try:
            for owner in self.shape.owners:
                _, self.keys[owner] = await create_api_key(store, "bench", owner)
        finally:
            await store.close()

    def _spec(self, role: Any, replica: int, **fields: Any) -> RoleSpec:
        return RoleSpec(
            role=role,
            replica=replica,
            state_dir=str(self.state),
            cache_dir=str(self.state / "cache"),
            domain="localhost",
            config=self.config,
            **fields,
        )

    def _role(
        self, role: str, replica: int, **fields: Any
    ) -> contextlib.AbstractAsyncContextManager[Running]:
        spec = self._spec(role, replica, **fields)
        return started(spec.name, f"greenroom.{role}", spec, self.state)

    async def _start_fleet(self, masters: list[str]) -> None:
        specs = [self._spec("node", n, master_urls=masters) for n in range(self.shape.nodes)]
        step = self.shape.per_process
        starting = [
            self._stack.enter_async_context(
                started(
                    f"fleet-{first // step}",
                    "greenroom.bench.fleet_nodes",
                    FleetSpec(nodes=specs[first : first + step], hold=self._hold()),
                    self.state,
                )
            )
            for first in range(0, len(specs), step)
        ]
        # Whoever did start is on the stack by the time that somebody's failure is told.
        for found in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            self.fleet.append(found)
        self._stack.callback(self._end_fleet)

    def _end_fleet(self) -> None:
        for running in self.fleet:
            running.tell_to_end()

    def _hold(self) -> Hold | None:
        if not self.shape.hold:
            return None
        return Hold(
            count=self.shape.hold,
            template=BASE,
            size=BASE_SIZE,
            owner=self.shape.owners[0],
            declared=Declared(document=msgspec.Raw(msgspec.json.encode(DECLARED)), retain=True),
        )

    def check(self) -> None:
        """Raise RuntimeFailure when one of the processes has ended."""
        for running in (self.master, *self.apis, *self.fleet):
            if running.ended:
                raise RuntimeFailure(f"{running.name} ended by itself: {running.log()}")

    async def nodes(self) -> list[NodeInfo]:
        """The nodes as the master knows them."""
        status = await self.operator.call("GET", f"{self.master.url}/v1/status", MasterStatus)
        return status.nodes

    async def joined(self) -> None:
        """Wait until the master knows all nodes and has heard of each. Raises NodeUnavailable."""
        ends = time.monotonic() + JOIN_DEADLINE
        while True:
            live = sum(info.live for info in await self.nodes())
            if live == self.shape.nodes:
                return
            self.check()
            if time.monotonic() > ends:
                raise NodeUnavailable(f"only {live} of {self.shape.nodes} nodes were seen in time")
            await asyncio.sleep(LOOK)

    async def statuses(self) -> list[NodeStatus]:
        """What each node says of itself, asked one by one."""
        return [
            await self.operator.call("GET", f"{info.status.api_url}/v1/status", NodeStatus)
            for info in await self.nodes()
        ]

    async def sandboxes(self) -> dict[str, SandboxList]:
        """By node, the sandboxes that it has in its own words."""
        return {
            info.status.name: await self.operator.call(
                "GET", f"{info.status.api_url}/v1/sandboxes", SandboxList
            )
            for info in await self.nodes()
        }

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, by what used it; `client` is this process."""
        groups = {"master": [self.master], "api": self.apis, "nodes": self.fleet}
        found = {name: sum(_cpu(each.pid) for each in running) for name, running in groups.items()}
        return {**found, "client": _cpu(os.getpid())}

    def client(self, api: int = 0, owner: str = "") -> Kube:
        """A client of one of the apis; to be entered."""
        name = owner or self.shape.owners[0]
        return Kube(self.apis[api].url, self.keys[name], name)


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def cpu_ms_each(before: Mapping[str, float], after: Mapping[str, float], count: int) -> dict[str, float]:
    """Milliseconds of CPU time that each of `count` took, by what used it."""
    return {name: (after[name] - before[name]) * 1000 / count for name in before}


def cpu_table(cpu_ms: Mapping[str, float]) -> Table:
    """What `cpu_ms_each` found, for people."""
    together = cell(sum(cpu_ms.values()))
    row = ["ms", *(cell(each) for each in cpu_ms.values()), together]
    return Table("CPU time of each", ["", *cpu_ms, "together"], [row])


def stock_of(statuses: Sequence[NodeStatus]) -> list[int]:
    """By node, its warm members of all pools."""
    return [sum(pool.warm for pool in status.pools) for status in statuses]


def spread_limit(counts: Sequence[int]) -> float:
    """What no node of a burst may have more of: the larger of the mean rounded up and 1.2 times the mean."""
    mean = sum(counts) / len(counts)
    return max(float(-(-sum(counts) // len(counts))), 1.2 * mean)
