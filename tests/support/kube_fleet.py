"""A fleet for the synthesized kinds: a real view, fed by the frames of nodes that keep their sandboxes in memory."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection
from typing import Any

import msgspec

from greenroom.api.kube.live.claims import Found, SandboxClaimStorage
from greenroom.api.kube.live.events import EventStorage
from greenroom.api.kube.live.inventories import InventoryStorage
from greenroom.api.kube.live.namespaces import NamespaceStorage
from greenroom.api.kube.live.observing import Live
from greenroom.api.kube.live.operating import Operating
from greenroom.api.kube.live.sandboxes import SandboxStorage
from greenroom.api.kube.objects import Object
from greenroom.api.kube.status import not_found
from greenroom.api.kube.versions import Clock
from greenroom.api.nodes import NodeTable
from greenroom.errors import (
    AlreadyPaused,
    GreenroomError,
    NameTaken,
    StaleObject,
    UnknownSandbox,
    UnknownSnapshot,
    UnknownTemplate,
)
from greenroom.fleet.view import View
from greenroom.wire.changes import Beat, Counted, Gone, Put, Whole
from greenroom.wire.messages import (
    ClaimRequest,
    DeclaredChange,
    Fork,
    ForkList,
    ForkRequest,
    Listed,
    NodeInfo,
    NodeList,
    NodeStatus,
    PauseRequest,
    PoolCounts,
    Resumed,
    Sandbox,
    Size,
    SnapshotInfo,
    SnapshotRequest,
    Template,
    TimeoutRequest,
    listed,
)

SMALL = Size("small", cpus=1, memory_mib=512, disk_mib=4096)
BASE = Template(template_id="0" * 20, name="base", size=SMALL, created_at=1.0)


def record(sandbox_id: str = "in00a000000000000001", **more: Any) -> Listed:
    """A record of a running sandbox."""
    given: dict[str, Any] = {
        "sandbox_id": sandbox_id,
        "template": "base",
        "size": SMALL,
        "state": "running",
        "started_at": 1_700_000_000.0,
        "ends_at": 1_700_000_300.0,
        "node": "n1",
        "owner": "default",
        **more,
    }
    return Listed(**given)


class FakeNode:
    """A node's stream, applied to a view as it is made. `follow` as `Following` would read it."""

    def __init__(self, view: View, code: str, name: str) -> None:
        self.view = view
        self.code = code
        self.name = name
        self.stream = f"{code}run1"
        self.seq = 0
        self.sandboxes: dict[str, Listed] = {}
        self.cut = False
        view.join(code, name, time.time())

    def whole(self) -> None:
        """Its stream begins, with all there is."""
        self.cut = False
        told = Whole(stream=self.stream, seq=self.seq, sandboxes=list(self.sandboxes.values()))
        assert self.view.apply(self.code, told, time.time())
        assert self.view.apply(self.code, Beat(stream=self.stream, seq=self.seq, head=self.seq), time.time())

    def lose(self) -> None:
        """Its stream breaks off."""
        self.cut = True
        self.view.lost(self.code, time.time())

    def put(self, sandbox: Listed) -> None:
        """A sandbox is there, or another."""
        self.sandboxes[sandbox.sandbox_id] = listed(sandbox)
        self._apply(Put(stream=self.stream, seq=self._next(), sandbox=listed(sandbox)))

    def gone(self, sandbox_id: str) -> None:
        """A sandbox is no more."""
        del self.sandboxes[sandbox_id]
        self._apply(Gone(stream=self.stream, seq=self._next(), sandbox_id=sandbox_id))

    def counted(self, warm: int, target: int = 5) -> None:
        """Its pool of the base template has so many warm."""
        pool = PoolCounts(template="base", size="small", target=target, warm=warm, starting=0, waiting=0)
        self._apply(Counted(stream=self.stream, seq=self._next(), pool=pool))

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def _apply(self, frame: Any) -> None:
        if not self.cut:
            assert self.view.apply(self.code, frame, time.time())


class FakeSight:
    """See `Sight`."""

    def __init__(self) -> None:
        self.view = View()

    async def current(self) -> list[str]:
        await asyncio.sleep(0)
        nodes = self.view.nodes()
        return sorted(nodes[code].name for code in self.view.partial())

    async def caught_up(self, codes: Collection[str]) -> bool:
        await asyncio.sleep(0)
        return True


class FakeFleet:
    """See `Platform`. `fails` is raised by the next claim; `calls` names what was asked for."""

    def __init__(self, *, nodes: int = 1) -> None:
        self.seen = FakeSight()
        self.nodes = [FakeNode(self.seen.view, f"n00{chr(97 + n)}", f"node-{n + 1}") for n in range(nodes)]
        self.calls: list[tuple[str, Any]] = []
        self.fails: GreenroomError | None = None
        self.known = [BASE]
        self.kept: list[SnapshotInfo] = []
        self._numbers = itertools.count(1)

    def node_of(self, sandbox_id: str) -> FakeNode:
        return next(node for node in self.nodes if node.code == sandbox_id[1:5])

    async def table(self) -> NodeTable:
        infos = [
            NodeInfo(
                status=NodeStatus(
                    name=node.name,
                    code=node.code,
                    api_url=f"http://{node.name}:1",
                    relay_host="h",
                    relay_port=1,
                    engine="simulated",
                ),
                live=True,
                last_seen=time.time(),
            )
            for node in self.nodes
        ]
        return NodeTable.of(NodeList(1, infos))

    async def template(self, ref: str) -> Template:
        for each in self.known:
            if ref in (each.name, each.template_id):
                return each
        raise UnknownTemplate(f"there is no template {ref!r}")

    async def templates(self) -> list[Template]:
        return self.known

    async def claim(self, request: ClaimRequest) -> Sandbox:
        self.calls.append(("claim", request))
        await asyncio.sleep(0)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        if self.seen.view.named(request.owner, request.name) is not None:
            raise NameTaken("the name is taken")
        number = next(self._numbers)
        return self._new(self.nodes[number % len(self.nodes)], number, request)

    def _new(self, node: FakeNode, number: int, request: ClaimRequest) -> Sandbox:
        now = time.time()
        return Sandbox(
            sandbox_id=f"i{node.code}{number:015d}",
            template=request.template,
            size=request.size,
            state="running",
            started_at=now,
            ends_at=now + request.ttl,
            node=node.name,
            owner=request.owner,
            name=request.name,
            declared=request.declared,
            launch="warm",
            confirm_by=now + 20,
        )

    async def confirm(self, sandbox: Sandbox) -> Sandbox:
        confirmed = msgspec.structs.replace(sandbox, confirm_by=None)
        self.node_of(sandbox.sandbox_id).put(confirmed)
        return confirmed

    def _there(self, sandbox_id: str) -> Listed:
        found = self.node_of(sandbox_id).sandboxes.get(sandbox_id)
        if found is None:
            raise UnknownSandbox(f"there is no sandbox {sandbox_id!r}")
        return found

    def change(self, sandbox_id: str, **fields: Any) -> Sandbox:
        """A sandbox becomes another, as its node would have it."""
        now = msgspec.structs.replace(self._there(sandbox_id), **fields)
        self.node_of(sandbox_id).put(now)
        return Sandbox(**{name: getattr(now, name) for name in Listed.__struct_fields__})

    async def delete(self, sandbox_id: str, *, ended: bool = False) -> None:
        self.calls.append(("delete", sandbox_id))
        await asyncio.sleep(0)
        there = self._there(sandbox_id)
        if not ended and there.state == "ended":
            raise UnknownSandbox("it has ended")
        if not ended and there.declared is not None and there.declared.held:
            self.change(sandbox_id, state="ended", ended_at=time.time(), end_reason="it was killed")
        else:
            self.node_of(sandbox_id).gone(sandbox_id)

    async def declare(self, sandbox_id: str, change: DeclaredChange) -> Listed:
        self.calls.append(("declare", change))
        await asyncio.sleep(0)
        now = self._there(sandbox_id)
        if change.expect != (0 if now.declared is None else now.declared.revision):
            raise StaleObject("it has been changed")
        declared = msgspec.structs.replace(change.declared, revision=change.expect + 1)
        return listed(self.change(sandbox_id, declared=declared))

    async def pause(self, sandbox_id: str, request: PauseRequest) -> Sandbox:
        self.calls.append(("pause", sandbox_id))
        if self._there(sandbox_id).state == "paused":
            raise AlreadyPaused("it is paused")
        return self.change(sandbox_id, state="paused")

    async def resume(self, sandbox_id: str, ttl: float, *, memory: bool = True) -> Resumed:
        self.calls.append(("resume", ttl))
        return Resumed(self.change(sandbox_id, state="running", ends_at=time.time() + ttl), resumed=True)

    async def set_timeout(self, sandbox_id: str, request: TimeoutRequest) -> Sandbox:
        self.calls.append(("timeout", request.ttl))
        return self.change(sandbox_id, ends_at=time.time() + request.ttl)

    async def fork(self, sandbox_id: str, request: ForkRequest) -> ForkList:
        self.calls.append(("fork", request))
        parent = self._there(sandbox_id)
        forks: list[Fork] = []
        for place, key in enumerate(request.keys):
            wish = ClaimRequest(
                key=key,
                template=parent.template,
                size=parent.size,
                ttl=request.ttl,
                owner=parent.owner,
                name=request.names[place],
                declared=request.declared[place],
            )
            forks.append(Fork(sandbox=self._new(self.node_of(sandbox_id), next(self._numbers), wish)))
        return ForkList(forks)

    async def snapshot(self, owner: str, ref: str) -> SnapshotInfo:
        for each in self.kept:
            if each.owner == owner and ref in (each.snapshot_id, each.name):
                return each
        raise UnknownSnapshot(f"there is no snapshot {ref!r}")

    async def take_snapshot(self, sandbox_id: str, request: SnapshotRequest) -> SnapshotInfo:
        parent = self._there(sandbox_id)
        taken = SnapshotInfo(
            snapshot_id="sn00a000000000000001",
            name=request.name,
            owner=parent.owner,
            sandbox_id=sandbox_id,
            template=parent.template,
            size=parent.size,
            created_at=1_700_000_100.0,
            memory=True,
        )
        self.kept.append(taken)
        return taken


class FakePools:
    """See `Pools`: one pool, `warm` in every namespace."""

    def __init__(self, **spec: Any) -> None:
        self.template: Object = {
            "metadata": {"name": "tools"},
            "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "base"}]}}, **spec},
        }
        self.keys = [("base", SMALL)]
        self.keeps = True

    async def pool(self, namespace: str, name: str) -> Found:
        if name != "warm":
            raise not_found(SandboxClaimStorage.kind.subject(name))
        return Found(self.template, self.keys, self.keeps)


class World:
    """All synthesized kinds over a fake fleet."""

    def __init__(self, *, nodes: int = 1, pools: FakePools | None = None, tag: int = 7) -> None:
        self.fleet = FakeFleet(nodes=nodes)
        self.live = Live(self.fleet.seen.view, Clock(tag))
        self.operating = Operating(self.fleet, self.live, wait=10.0, resume_ttl=300.0)
        current = self.operating.current
        self.sandboxes = SandboxStorage(self.operating)
        self.claims = SandboxClaimStorage(self.operating, pools or FakePools())
        self.events = EventStorage(self.live, current)
        self.namespaces = NamespaceStorage(self.live, current)
        self.inventories = InventoryStorage(self.live, current, lambda code: f"http://{code}:80")

    @property
    def node(self) -> FakeNode:
        return self.fleet.nodes[0]

    def begin(self) -> World:
        """All nodes are read."""
        for node in self.fleet.nodes:
            node.whole()
        return self

    def close(self) -> None:
        self.live.close()

    def storages(self) -> list[Any]:
        return [self.sandboxes, self.claims, self.events, self.namespaces, self.inventories]
