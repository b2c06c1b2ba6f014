"""Snapshots that users take of their sandboxes, and forks.

Both save a running VM, which goes on after a moment. A snapshot stays until it is deleted, and its id (which names
this node, like a sandbox's) can be used like a template's; a fork's is only the way from one VM to several, so it is
deleted as soon as they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

from greenroom.errors import (
    BadRequest,
    GreenroomError,
    RuntimeFailure,
    SnapshotDamaged,
    UnknownSnapshot,
)
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.residents import Live, unknown
from greenroom.runtime.engine import Runtime, Snapshot
from greenroom.wire.ids import new_snapshot_id
from greenroom.wire.messages import (
    MOST_FORKS,
    ClaimRequest,
    Fork,
    ForkList,
    ForkRequest,
    Sandbox,
    SnapshotInfo,
    SnapshotRequest,
)

_log = logging.getLogger(__name__)


class Branching:
    """Snapshots and forks of the keeper's sandboxes."""

    def __init__(self, keeper: Keeper, runtime: Runtime, journal: Journal) -> None:
        self._keeper = keeper
        self._runtime = runtime
        self._journal = journal
        self._known = journal.snapshots()

    def __len__(self) -> int:
        """How many snapshots there are."""
        return len(self._known)

    async def take(self, sandbox_id: str, request: SnapshotRequest) -> SnapshotInfo:
        """Save a running sandbox, which goes on. Raises UnknownSandbox, BadRequest for one that is paused."""
        live = await self._running(sandbox_id)
        snapshot_id = new_snapshot_id(self._keeper.code)
        captured = await self._capture(live, snapshot_id, memory=request.memory)
        info = SnapshotInfo(
            snapshot_id=snapshot_id,
            name=request.name,
            owner=live.owner,
            sandbox_id=sandbox_id,
            template=captured.template,
            size=live.sandbox.size,
            created_at=captured.created_at,
            memory=request.memory,
        )
        try:
            self._journal.save_snapshot(info)
        except BaseException:
            await asyncio.shield(self._keeper.forget(captured))
            raise
        self._known[snapshot_id] = info
        live.history.note(info.created_at, "a snapshot was taken", snapshot=snapshot_id)
        _log.info("snapshot %s of %s: %d bytes of memory", snapshot_id, sandbox_id, captured.ram_bytes)
        return info

    def list(self) -> list[SnapshotInfo]:
        """All of them, the newest first."""
        return sorted(self._known.values(), key=lambda info: (-info.created_at, info.snapshot_id))

    def get(self, snapshot_id: str) -> SnapshotInfo:
        """Raises UnknownSnapshot."""
        info = self._known.get(snapshot_id)
        if info is None:
            raise UnknownSnapshot(f"there is no snapshot {snapshot_id!r} on this node")
        return info

    async def delete(self, snapshot_id: str) -> None:
        """Remove a snapshot; sandboxes that started from it go on. Raises UnknownSnapshot."""
        self.get(snapshot_id)
        self._journal.drop_snapshot(snapshot_id)
        del self._known[snapshot_id]
        with contextlib.suppress(UnknownSnapshot):
            await self._runtime.delete_snapshot(snapshot_id)

    async def fork(self, sandbox_id: str, request: ForkRequest) -> ForkList:
        """Sandboxes that go on where this one stands, one for each key; each is provisional like any claim's.

        What this one is called, and what is declared of it, is its own.

        Raises UnknownSandbox, BadRequest, or what kept the sandbox from being saved; what kept a single one from being
        made stands in its place.
        """
        if not 1 <= len(request.keys) <= MOST_FORKS or len(set(request.keys)) != len(request.keys):
            raise BadRequest(f"count: 1 to {MOST_FORKS} forks can be made at once")
        for given, what in ((request.names, "names"), (request.declared, "declared")):
            if given and len(given) != len(request.keys):
                raise BadRequest(f"{what}: one for each fork, or none at all")
        live = await self._running(sandbox_id)
        name = f"fork-{sandbox_id}-{secrets.token_hex(4)}"
        # It lives as long as this call: nothing of it needs to be on the disk for good.
        captured = await self._capture(live, name, memory=True, durable=False)
        sandbox, inner = live.sandbox, live.inner

        async def source() -> Snapshot:
            return captured

        async def one(number: int, key: str) -> Fork:
            claim = ClaimRequest(
                key=key,
                template=sandbox.template,
                size=sandbox.size,
                ttl=request.ttl,
                metadata=sandbox.metadata,
                env=inner.env,
                owner=sandbox.owner,
                lifespan=sandbox.lifespan,
                network=sandbox.network,
                inbound=sandbox.inbound,
                name=request.names[number] if request.names else "",
                declared=request.declared[number] if request.declared else None,
            )
            try:
                return Fork(sandbox=await self._keeper.claim(claim, source))
            except GreenroomError as error:
                return Fork(error=error.message)

        try:
            await self._runtime.hold(captured)
            try:
                return ForkList(list(await asyncio.gather(*(one(*each) for each in enumerate(request.keys)))))
            finally:
                await asyncio.shield(self._runtime.let_go(captured))
        finally:
            await asyncio.shield(self._keeper.forget(captured))

    async def roll_back(self, sandbox_id: str, snapshot_id: str) -> Sandbox:
        """Let a sandbox go on from a snapshot that was taken of it. Raises what `Suspending.roll_back` does, BadRequest
        for a snapshot of another."""
        info = self.get(snapshot_id)
        if info.sandbox_id != sandbox_id:
            raise BadRequest(
                f"the snapshot {snapshot_id} was taken of another sandbox; create one from it instead"
            )
        snapshot = await self.snapshot_of(snapshot_id)
        try:
            return await self._keeper.roll_back(sandbox_id, snapshot)
        except (SnapshotDamaged, RuntimeFailure):
            # As a claim does: one that was deleted meanwhile is not damaged, it is not there.
            self.get(snapshot_id)
            raise

    async def _running(self, sandbox_id: str) -> Live:
        """The sandbox, once what is under way with it is over. Raises UnknownSandbox, BadRequest for a paused one."""
        live = self._keeper.known(sandbox_id)
        while live.life.phase in ("pausing", "resuming", "replacing"):
            await self._keeper.unoccupied(live)
        if live.ending:
            raise unknown(sandbox_id)
        if live.life.phase != "running":
            raise BadRequest(f"sandbox {sandbox_id} is paused; resume it first")
        return live

    async def _capture(self, live: Live, name: str, *, memory: bool, durable: bool = True) -> Snapshot:
        async with live.capturing:
            vm = live.vm
            if vm is None or live.ending:
                raise unknown(live.sandbox_id)
            try:
                if not memory:
                    await self._keeper.sync(live)
                result = await self._runtime.capture(vm, name, memory=memory, durable=durable)
            except GreenroomError:
                if live.ending:
                    raise unknown(live.sandbox_id) from None
                raise
        return result.snapshot

    async def snapshot_of(self, snapshot_id: str) -> Snapshot:
        """What the engine restores from. Raises UnknownSnapshot, SnapshotDamaged."""
        self.get(snapshot_id)
        try:
            return await self._runtime.snapshot(snapshot_id)
        except (SnapshotDamaged, UnknownSnapshot) as error:
            # One that was deleted meanwhile is not damaged, it is not there.
            self.get(snapshot_id)
            if isinstance(error, SnapshotDamaged):
                raise
            raise SnapshotDamaged(
                f"the snapshot {snapshot_id} cannot be used: its files are gone; delete it"
            ) from error
