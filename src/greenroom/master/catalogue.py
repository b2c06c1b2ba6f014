"""Templates, pools and what else is declared, as the master uses them: read from the store once, and again when another
has written.

Claims look templates and quotas up here, so that none of them waits for the store. SQLite cannot call us when another
process commits; its `data_version` is a counter in shared memory, so asking it every 50 ms costs next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from greenroom.config import PoolsConfig
from greenroom.errors import BadRequest, GreenroomError, UnknownTemplate
from greenroom.fleet.warmpools import Templates
from greenroom.master.declared import Declarations
from greenroom.master.quotas import Quota
from greenroom.store.records import NodeRecord, Store
from greenroom.wire.ids import new_template_id
from greenroom.wire.messages import PoolSpec, Size, Template

_log = logging.getLogger(__name__)

BASE = "base"
"""Name of the template that is always there; E2B's SDKs ask for it when they are told no other."""
BASE_SIZE = Size("small", cpus=1, memory_mib=512, disk_mib=4096)
LOOK_EVERY = 0.05
"""Seconds between looks for another process's writes; a pool is to follow its declaration within 0.1 s."""


class Catalogue:
    """The store's templates, pools and node records, held in memory. Call `load` before anything else."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._version: int | None = None
        self.known = Templates()
        self.templates: list[Template] = []
        self.pools: list[PoolSpec] = []
        self.nodes: list[NodeRecord] = []
        self.declared = Declarations()
        """Objects of the Kubernetes dialect that pools are made from."""
        self.quotas: dict[str, list[Quota]] = {}
        """By namespace."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever something was read that may be other than before."""

    async def load(self) -> bool:
        """Read everything if another process has written since the last time; True if it was read."""
        version = await self._store.version()
        if version == self._version:
            return False
        await self._read()
        self._version = version
        return True

    async def _read(self) -> None:
        templates, pools = await self._store.templates(), await self._store.pools()
        self.nodes = await self._store.nodes()
        objects = [(await self._store.objects(resource))[1] for resource in Declarations.RESOURCES]
        self.templates, self.pools = templates, pools
        self.known = Templates(templates)
        self.declared.read([stored for kind in objects for stored in kind])
        self.quotas = self.declared.quotas()
        self.on_change()

    async def seed(self, config: PoolsConfig) -> None:
        """Make sure that the base template exists, and that its pool is what the settings say: the default one in a
        store without any pool, and the one that was asked for at this start in every store."""
        base = await self._store.add_template(
            Template(template_id=new_template_id(), name=BASE, size=BASE_SIZE, created_at=time.time())
        )
        declared = await self._store.pools()
        target = config.base_target
        if target is None and not declared:
            target = config.default_target
        before = next(
            (pool for pool in declared if (pool.template, pool.size) == (base.name, base.size)), None
        )
        if target is not None and target != (0 if before is None else before.target):
            warm = config.default_warm if before is None else before.warm
            await self._store.put_pool(PoolSpec(template=base.name, size=base.size, target=target, warm=warm))
        await self._read()

    async def template(self, ref: str) -> Template:
        """The template with this id or name, either with or without `:default`. Raises UnknownTemplate."""
        found = self.find(ref)
        if found is None and await self.load():
            found = self.find(ref)
        if found is None:
            raise UnknownTemplate(f"there is no template {ref!r}")
        return found

    def find(self, ref: str) -> Template | None:
        """The template with this id or name, if it is known."""
        return self.known.find(ref)

    async def put_pool(self, pool: PoolSpec) -> None:
        """Declare a pool, or remove it with a target of 0. Raises UnknownTemplate or BadRequest."""
        if pool.target < 0:
            raise BadRequest("target: a pool cannot have fewer than 0 members")
        if min(pool.size.cpus, pool.size.memory_mib, pool.size.disk_mib) < 1 or not pool.size.name:
            raise BadRequest("size: a name, and at least 1 cpu, 1 MiB of memory and 1 MiB of disk are needed")
        await self._store.put_pool(pool)
        await self._read()

    async def put_node(self, record: NodeRecord) -> None:
        """Write a node's record unless the store has it like this. Raises KeyConflict."""
        before = next((node for node in self.nodes if node.name == record.name), None)
        if before is not None and _place(before) == _place(record):
            return
        await self._store.put_node(record)
        self.nodes = await self._store.nodes()

    async def remove_node(self, name: str) -> None:
        """Forget a node's record."""
        await self._store.remove_node(name)
        self.nodes = await self._store.nodes()

    async def follow(self, changed: asyncio.Event) -> None:
        """Read again whenever another process has written, and set `changed`. Runs until it is cancelled."""
        told = False
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                if await self.load():
                    changed.set()
                told = False
            except GreenroomError as error:
                if not told:
                    _log.warning("the store cannot be read, going on with what is known: %s", error)
                told = True


def _place(record: NodeRecord) -> tuple[str, ...]:
    return (
        record.code,
        record.api_url,
        record.relay_host,
        str(record.relay_port),
        record.engine,
        record.accelerator,
    )
