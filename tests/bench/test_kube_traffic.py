"""Clients and watchers of the benchmarks, against the dialect's own front over storages in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from greenroom.api.kube.kinds import CLAIM, SANDBOX, WARM_POOL
from greenroom.api.kube.objects import Object, copied
from greenroom.bench import kube_client
from greenroom.bench.kube_client import TABLE, Kube, Refused, claim, sandbox
from greenroom.bench.kube_traffic import Tenant, Watched, burst
from greenroom.bench.kube_watchers import ANNOTATION, WatchersResult, WatchersSpec, mark
from greenroom.bench.processes import started
from greenroom.errors import NodeUnavailable
from tests.bench.results import Quiet
from tests.support.kube_server import KubeServer, kube_server
from tests.support.loops import eventually

_TIME = "2026-01-01T00:00:00Z"
READY = {
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Up", "message": "", "lastTransitionTime": _TIME}
    ]
}


def namespaced(obj: Object) -> Object:
    return {**obj, "metadata": {**obj["metadata"], "namespace": "default"}}


class StandIn:
    """What the platform would do: claims get a sandbox and are ready, pools fill at once."""

    def __init__(self, server: KubeServer) -> None:
        self.server = server
        self.launch = "warm"
        server.storages["sandboxclaims"].race = None
        self._task = asyncio.create_task(self._work(), name="stand-in")

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            for kind in ("sandboxclaims", "sandboxes", "sandboxwarmpools"):
                storage = self.server.storages[kind]
                for obj in list(storage.objects.values()):
                    self._look(kind, copied(obj))

    def _look(self, kind: str, obj: Object) -> None:
        if kind == "sandboxwarmpools":
            wanted = obj["spec"].get("replicas", 1)
            status = {"replicas": wanted, "readyReplicas": wanted}
        else:
            status = {**READY, "nodeName": "node-0", "sandboxID": f"i-{obj['metadata']['name']}"}
        if obj.get("status") == status:
            return
        if kind == "sandboxclaims":
            made = namespaced(sandbox(obj["metadata"]["name"], "base"))
            self.server.storages["sandboxes"].put(made)
        if kind == "sandboxes":
            obj["metadata"].setdefault("labels", {})[kube_client.LAUNCH] = self.launch
        self.server.storages[kind].put({**obj, "status": status})

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@contextlib.asynccontextmanager
async def platform() -> AsyncIterator[tuple[KubeServer, Kube]]:
    """A server whose objects become ready, and a client of it that was not entered yet."""
    async with kube_server() as server:
        stand_in = StandIn(server)
        try:
            yield server, Kube(server.url, "e2b_" + "0" * 40, "default")
        finally:
            await stand_in.close()


async def test_pools_claims_and_sandboxes_are_seen_to_be_ready() -> None:
    async with platform() as (server, kube), Tenant(kube) as tenant:
        assert await tenant.declare("pool", 3) > 0
        assert await tenant.declare("pool", 5) > 0
        assert server.storages["sandboxwarmpools"].objects[("default", "pool")]["spec"]["replicas"] == 5
        meter = Quiet()
        rows = await burst([f"c{n}" for n in range(6)], 3, lambda name: tenant.claim(name, "pool"), meter)
        assert (len(rows), meter.advanced) == (6, 6)
        assert all(row.ready_ms is not None and not row.error for row in rows)
        rows += [await tenant.sandbox("direct")]
        rows = await tenant.told(rows)
        await eventually(lambda: len(tenant.sandboxes.objects) == 7)
        assert {row.node for row in rows} == {"node-0"}
        assert {row.sandbox_id for row in rows} == {f"i-{row.name}" for row in rows}
        again = await tenant.claim("c0", "pool")
        assert "AlreadyExists" in again.error
        await tenant.clear()
        assert not server.storages["sandboxes"].objects
        assert not server.storages["sandboxclaims"].objects


async def test_what_was_refused_has_its_reason() -> None:
    async with platform() as (_, kube), kube:
        with pytest.raises(Refused) as refused:
            await kube.get(CLAIM, "nobody")
        assert (refused.value.code, refused.value.reason) == (404, "NotFound")
        made = await kube.create(CLAIM, claim("one", "pool"))
        assert made["metadata"]["name"] == "one"
        changed = await kube.merge(CLAIM, "one", {"metadata": {"labels": {"a": "b"}}})
        assert changed["metadata"]["labels"] == {"a": "b"}
        table = await kube.raw("GET", kube.path(CLAIM), headers={"Accept": TABLE})
        assert len(msgspec.json.decode(table)["rows"]) == 1
        await kube.delete(CLAIM, "one")
        assert (await kube.objects(CLAIM))["items"] == []


async def test_a_watch_that_ends_is_told_to_who_waits() -> None:
    async with platform() as (server, kube), kube, Watched(kube, SANDBOX) as watched:
        waiting = watched.expect("never", lambda obj: obj is not None)
        server.leave()
        with pytest.raises(NodeUnavailable, match="watch"):
            await waiting
        with pytest.raises(NodeUnavailable, match="watch"):
            await watched.until("never", lambda obj: obj is not None)


async def test_what_does_not_come_in_time_is_told() -> None:
    async with platform() as (_, kube), kube, Watched(kube, WARM_POOL) as watched:
        with pytest.raises(NodeUnavailable, match="sandboxwarmpool late"):
            await watched.until("late", lambda obj: obj is not None, deadline=0.01)


async def looked(tmp_path: Path, numbers: list[int], watchers: int = 4) -> WatchersResult:
    """What watchers make of marks with these numbers on each of two lanes."""
    async with kube_server() as server:
        place = tmp_path / "result"
        spec = WatchersSpec(
            url=server.url,
            target="/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes?watch=true",
            headers={"Authorization": "Bearer nobody"},
            count=watchers,
            decoding=2,
            lanes=2,
            marks=max(numbers),
            result=str(place),
        )
        async with started("watchers", "greenroom.bench.kube_watchers", spec, tmp_path):
            storage = server.storages["sandboxes"]
            for number in numbers:
                for lane in range(2):
                    annotations = {ANNOTATION: mark(lane, number)}
                    storage.put(namespaced(sandbox(f"lane{lane}", "base", annotations=annotations)))
                await asyncio.sleep(0)
            await eventually(place.exists)
            server.leave()
        return msgspec.json.decode(place.read_bytes(), type=WatchersResult)


async def test_watchers_find_every_mark_in_the_bytes(tmp_path: Path) -> None:
    found = await looked(tmp_path, list(range(1, 51)))
    assert (found.watchers, found.marks, found.lost) == (4, 4 * 100, 0)
    assert (found.doubled, found.broken, found.disordered) == (0, 0, 0)
    assert found.decoded == 2 * 100
    assert sum(found.histogram.values()) == found.marks
    assert found.p50_ms is not None


async def test_watchers_find_what_is_missing_and_what_comes_again(tmp_path: Path) -> None:
    found = await looked(tmp_path, [1, 2, 2, 4, 5])
    assert (found.marks, found.lost, found.doubled) == (4 * 2 * 4, 4 * 2, 4 * 2)
