"""The stored kinds over a real store: what two processes see of each other, conflicts, statuses, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.api.kube.live.claims import Found
from greenroom.api.kube.options import Deleting, Writing
from greenroom.api.kube.status import StatusError
from greenroom.api.kube.stored import following
from greenroom.api.kube.stored.assembly import Stored
from greenroom.api.kube.versions import Clock
from greenroom.api.kube.writing import Writer
from greenroom.errors import TemporaryError
from greenroom.fleet.view import View
from greenroom.store.sqlite import SqliteStore
from greenroom.wire.changes import Beat, Counted, Gone, Put, Whole
from greenroom.wire.messages import (
    DrivenPool,
    DrivenPools,
    Listed,
    PoolCounts,
    PoolName,
    PoolSpec,
    Size,
    Template,
)
from tests.support.loops import eventually

SMALL = Size("small", 1, 512, 4096)
ME = Writing(manager="me")
GROUP = "extensions.agents.x-k8s.io/v1beta1"


def template(name: str = "py", image: str = "base", **container: Any) -> dict[str, Any]:
    first = {"name": "main", "image": image, **container}
    return {
        "apiVersion": GROUP,
        "kind": "SandboxTemplate",
        "metadata": {"name": name},
        "spec": {"podTemplate": {"spec": {"containers": [first]}}},
    }


def pool(name: str = "pool", replicas: int = 2, ref: str = "py", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": GROUP,
        "kind": "SandboxWarmPool",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": ref}, **spec},
    }


def quota(hard: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": hard},
    }


class Process:
    """What an api process has of it: a store of its own on the one file, a view, the storages, writers."""

    def __init__(self, store: SqliteStore, tag: int) -> None:
        self.store = store
        self.view = View()
        self.stored = Stored(store, self.view, Clock(tag))
        self.templates = Writer(self.stored.templates)
        self.pools = Writer(self.stored.pools)
        self.quotas = Writer(self.stored.quotas)

    async def create(self, obj: dict[str, Any], namespace: str = "a") -> dict[str, Any]:
        writers = {
            "SandboxTemplate": self.templates,
            "SandboxWarmPool": self.pools,
            "ResourceQuota": self.quotas,
        }
        outcome = await writers[obj["kind"]].create(namespace, (obj, []), ME)
        return outcome.obj

    def node(self, *pools: PoolCounts, sandboxes: tuple[Listed, ...] = ()) -> None:
        """One node with these."""
        self.view.join("aaaa", "node-0", 1.0)
        whole = Whole(stream="aaaa-1", seq=1, sandboxes=list(sandboxes), pools=list(pools))
        assert self.view.apply("aaaa", whole, 2.0)
        assert self.view.apply("aaaa", Beat(stream="aaaa-1", seq=1, head=1), 2.0)

    def status(self, name: str = "pool", namespace: str = "a") -> dict[str, Any]:
        found = self.stored.pools.object((namespace, name))
        assert found is not None
        return found["status"]  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def process(path: Path, tag: int = 1) -> AsyncIterator[Process]:
    store = await SqliteStore.open(path / "store.db")
    try:
        made = Process(store, tag)
        await store.add_template(Template(template_id="t1", name="base", size=SMALL, created_at=1.0))
        async with made.stored.running():
            await eventually(lambda: made.stored.ready)
            yield made
    finally:
        await store.close()


def counts(warm: int, starting: int = 0) -> PoolCounts:
    return PoolCounts(template="base", size="small", target=9, warm=warm, starting=starting, waiting=0)


async def test_what_one_process_wrote_another_reads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following.Following.__init__, "__kwdefaults__", {"every": 3600.0})
    async with process(tmp_path) as one, process(tmp_path, 2) as other:
        key = ("a", "pool")
        for storage, obj in ((other.stored.templates, template("pool")), (other.stored.pools, pool())):
            made = await one.create(obj)
            found = await storage.get(key)
            assert found is not None
            assert found["metadata"]["uid"] == made["metadata"]["uid"]
            assert len((await storage.list("a")).objects) == 1
        await one.create(template())
        assert (await other.stored.pool("a", "pool")).template["metadata"]["name"] == "py"
        await one.pools.delete(key, Deleting())
        again = await other.create(pool())
        shown = await one.stored.pools.get(key)
        assert shown is not None
        assert shown["metadata"]["uid"] == again["metadata"]["uid"]


async def test_while_the_store_cannot_be_read_what_is_known_is_answered(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.create(template())

        async def broken() -> None:
            raise TemporaryError("the disk is gone")

        one.stored.templates.look = broken
        assert await one.stored.templates.get(("a", "py")) is not None
        assert len((await one.stored.templates.list("")).objects) == 1


async def test_another_process_sees_what_is_written_changed_and_removed(tmp_path: Path) -> None:
    async with process(tmp_path) as one, process(tmp_path, 2) as other:
        made = await one.create(template())
        seen = other.stored.templates
        await eventually(lambda: seen.object(("a", "py")) is not None)
        shown = seen.object(("a", "py"))
        assert shown is not None
        assert shown["spec"] == made["spec"]
        assert shown["metadata"]["uid"] == made["metadata"]["uid"]
        # The version is this process's own, the revision in it is everybody's.
        assert shown["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]
        assert shown["metadata"]["resourceVersion"][-6:] == made["metadata"]["resourceVersion"][-6:]
        watch = seen.cache.watch(seen.cache.version, None, lambda: None)
        await one.templates.patch(
            ("a", "py"), "application/merge-patch+json", ({"metadata": {"labels": {"x": "1"}}}, []), ME
        )
        await one.templates.delete(("a", "py"), Deleting())
        await eventually(lambda: seen.object(("a", "py")) is None)
        assert [each.seen(None)[0] for each in watch.take()][-1] == "DELETED"  # type: ignore[index]


async def test_who_writes_by_what_another_has_changed_meanwhile_is_told(tmp_path: Path) -> None:
    async with process(tmp_path) as one, process(tmp_path, 2) as other:
        made = await one.create(template())
        await eventually(lambda: other.stored.templates.object(("a", "py")) is not None)
        old = other.stored.templates.object(("a", "py"))
        assert old is not None
        changed = {**made, "metadata": {**made["metadata"], "labels": {"by": "one"}}}
        await one.templates.update(("a", "py"), (changed, []), ME)
        # The other has not looked since.
        stale = {**old, "metadata": {**old["metadata"], "labels": {"by": "other"}}}
        with pytest.raises(StatusError) as told:
            await other.stored.templates.replace(stale, old, dry_run=False)
        assert told.value.reason == "Conflict"
        # Its own store call has brought it up to date, and a patch without a version is tried again.
        outcome = await other.templates.patch(
            ("a", "py"), "application/merge-patch+json", ({"metadata": {"labels": {"also": "1"}}}, []), ME
        )
        assert outcome.obj["metadata"]["labels"] == {"by": "one", "also": "1"}


async def test_one_name_is_made_once_by_two_processes(tmp_path: Path) -> None:
    async with process(tmp_path) as one, process(tmp_path, 2) as other:
        results = await asyncio.gather(
            *(each.create(template()) for each in (one, other)), return_exceptions=True
        )
        refused = [each for each in results if isinstance(each, StatusError)]
        assert [each.reason for each in refused] == ["AlreadyExists"]


async def test_what_came_again_under_its_name_is_another(tmp_path: Path) -> None:
    async with process(tmp_path) as one, process(tmp_path, 2) as other:
        await one.create(template())
        seen = other.stored.templates
        await eventually(lambda: seen.object(("a", "py")) is not None)
        watch = seen.cache.watch(seen.cache.version, None, lambda: None)
        await one.templates.delete(("a", "py"), Deleting())
        await one.create(template())
        types: list[str] = []

        def took() -> bool:
            types.extend(each.seen(None)[0] for each in watch.take())  # type: ignore[index]
            return types == ["DELETED", "ADDED"]

        await eventually(took)


async def test_finalizers_hold_an_object_until_they_are_gone(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.create({**pool(), "metadata": {"name": "pool", "finalizers": ["example.com/hold"]}})
        going, gone = await one.pools.delete(("a", "pool"), Deleting())
        assert not gone
        assert going["metadata"]["deletionTimestamp"]
        await one.pools.patch(
            ("a", "pool"), "application/merge-patch+json", ({"metadata": {"finalizers": []}}, []), ME
        )
        assert one.stored.pools.object(("a", "pool")) is None
        assert (await one.store.objects("sandboxwarmpools.extensions.agents.x-k8s.io"))[1] == []


async def test_nothing_is_written_for_a_status_or_a_change_that_is_none(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.create(template())
        await one.create(pool())
        before, _ = await one.store.objects("sandboxwarmpools.extensions.agents.x-k8s.io")
        one.node(counts(2))
        await eventually(lambda: one.status()["readyReplicas"] == 2)
        current = one.stored.pools.object(("a", "pool"))
        assert current is not None
        await one.pools.update(("a", "pool"), ({**current, "status": {"replicas": 77}}, []), ME)
        after, _ = await one.store.objects("sandboxwarmpools.extensions.agents.x-k8s.io")
        assert before == after
        assert one.status()["readyReplicas"] == 2


async def test_a_change_of_the_status_is_no_conflict_for_who_changes_the_spec(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.create(template())
        made = await one.create(pool())
        one.node(counts(1))
        await eventually(lambda: one.status()["readyReplicas"] == 1)
        outcome = await one.pools.update(
            ("a", "pool"), ({**made, "spec": {**made["spec"], "replicas": 5}}, []), ME
        )
        assert outcome.obj["metadata"]["generation"] == 2
        assert outcome.obj["status"]["observedGeneration"] == 2


async def test_pools_of_one_key_and_the_declared_one_share_its_members(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.store.put_pool(PoolSpec(template="base", size=SMALL, target=10))
        await one.create(template())
        await one.create(template("other", "t1:default"), "b")
        await one.create(pool(replicas=20))
        await one.create(pool(replicas=10, ref="other"), "b")
        one.node(counts(40, 4))
        # The store does not tell a process of what it wrote itself; the declared pool is another's.
        one.stored.catalogue.learn(await one.store.templates(), await one.store.pools())
        one.stored.pools.changed([])
        await eventually(lambda: one.status()["readyReplicas"] == 20)
        assert one.status("pool", "b")["readyReplicas"] == 10
        assert one.status()["replicas"] + one.status("pool", "b")["replicas"] == 33


async def test_a_watch_is_told_of_every_status_and_only_of_those_that_differ(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.create(template())
        await one.create(pool(replicas=3))
        one.node(counts(0))
        await eventually(lambda: one.status()["readyReplicas"] == 0)
        cache = one.stored.pools.cache
        watch = cache.watch(cache.version, None, lambda: None)
        seen: list[int] = []
        for number in range(1, 4):
            assert one.view.apply("aaaa", Counted(stream="aaaa-1", seq=1 + number, pool=counts(number)), 3.0)
            await eventually(lambda number=number: one.status()["readyReplicas"] == number)  # type: ignore[misc]
        seen = [each.after["status"]["readyReplicas"] for each in watch.take() if each.after is not None]
        assert seen == [1, 2, 3]


async def test_a_pool_without_its_template_waits_for_it(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        made = await one.create(pool())
        assert made["status"]["conditions"][0]["reason"] == "TemplateNotFound"
        with pytest.raises(
            StatusError, match=r'sandboxtemplates\.extensions\.agents\.x-k8s\.io "py" not found'
        ):
            await one.stored.pool("a", "pool")
        with pytest.raises(StatusError, match='"none" not found'):
            await one.stored.pool("a", "none")
        await one.create(template())
        await eventually(lambda: one.status()["conditions"][0]["reason"] == "Filling")
        found = await one.stored.pool("a", "pool")
        assert isinstance(found, Found)
        assert found.keys == (("base", SMALL),)
        assert found.keeps


async def test_whether_a_pool_is_to_have_members_at_all(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.create(template())
        await one.create(pool("none", replicas=0))
        await one.create(pool("never", replicas=2, autoscaling={"maxReplicas": 0}))
        await one.create(pool("some", replicas=0, autoscaling={"maxReplicas": 2}))
        found = [(await one.stored.pool("a", name)).keeps for name in ("none", "never", "some")]
        assert found == [False, False, True]


async def test_a_pool_without_a_template_still_shows_its_members_and_no_word_of_their_room(
    tmp_path: Path,
) -> None:
    async with process(tmp_path) as one:
        await one.create(pool())
        driven = DrivenPool(
            namespace="a",
            name="pool",
            key=PoolName("base", "small"),
            targets=[2],
            desired=2,
            unplaced=0,
            observed_generation=1,
        )
        one.stored.driven.learn(DrivenPools(1, [driven]))
        one.node(counts(2))
        await eventually(lambda: one.status()["readyReplicas"] == 2)
        assert [each["type"] for each in one.status()["conditions"]] == ["Ready", "Progressing"]


async def test_until_the_leader_has_seen_a_new_template_members_are_of_the_one_before(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.create(template(resources={"requests": {"cpu": "2"}}))
        await one.create(pool(replicas=2))
        told = DrivenPool(
            namespace="a",
            name="pool",
            key=PoolName("base", "small"),
            targets=[2],
            desired=2,
            observed_generation=1,
        )
        one.stored.driven.learn(DrivenPools(1, [told]))
        one.node(counts(2))
        await eventually(lambda: one.status()["readyReplicas"] == 2)
        found = await one.stored.pool("a", "pool")
        assert [size.name for _, size in found.keys] == ["small", "medium"]


async def test_a_pool_full_of_older_members_has_none_of_those_that_others_keep(tmp_path: Path) -> None:
    """Its template has become what Greenroom's own pool has, too."""
    async with process(tmp_path) as one:
        await one.store.put_pool(PoolSpec(template="base", size=SMALL, target=4))
        one.stored.catalogue.learn(await one.store.templates(), await one.store.pools())
        await one.create(template())
        await one.create(pool(replicas=1))
        driven = DrivenPool(
            namespace="a",
            name="pool",
            key=PoolName("base", "small"),
            old_keys=[PoolName("base", "medium")],
            targets=[1, 0],
            desired=1,
            observed_generation=1,
        )
        one.stored.driven.learn(DrivenPools(1, [driven]))
        older = PoolCounts(template="base", size="medium", target=1, warm=1, starting=0, waiting=0)
        one.node(counts(4, 1), older)
        await eventually(lambda: one.status()["readyReplicas"] == 1)
        status = one.status()
        assert (status["replicas"], status["desiredReplicas"]) == (1, 1)
        settled = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
        assert settled["Progressing"] == ("False", "Filled")


async def test_what_the_leader_says_of_a_pool(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        await one.create(template(resources={"requests": {"cpu": "2"}}))
        await one.create(pool(replicas=1, autoscaling={"minReplicas": 1, "maxReplicas": 9}))
        driven = DrivenPool(
            namespace="a",
            name="pool",
            key=PoolName("base", "medium"),
            old_keys=[PoolName("base", "small")],
            targets=[3, 4],
            desired=7,
            unplaced=2,
            observed_generation=1,
        )
        one.stored.driven.learn(DrivenPools(1, [driven]))
        one.node(counts(3))
        await eventually(lambda: one.status()["readyReplicas"] == 3)
        texts = {each["type"]: each["message"] for each in one.status()["conditions"]}
        assert texts == {
            "Ready": "3 of 7 are ready, 0 are being made",
            "Progressing": "3 of 7 are ready, 0 are being made",
            "Unplaced": "no node has room for 2 of them",
        }
        found = await one.stored.pool("a", "pool")
        assert [(name, size.name) for name, size in found.keys] == [("base", "small"), ("base", "medium")]


@pytest.mark.parametrize(
    ("container", "field", "text"),
    [
        ({"image": "nope"}, "spec.podTemplate.spec.containers[0].image", "templates are: base"),
        (
            {"image": "base", "resources": {"requests": {"cpu": "900"}}},
            "spec.podTemplate.spec.containers[0].resources",
            "2xlarge",
        ),
        (
            {"image": "base", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
            "spec.podTemplate.spec.containers[0].env[0].valueFrom",
            "give the value",
        ),
    ],
    ids=["image", "size", "env"],
)
async def test_templates_that_nothing_could_be_made_of_are_refused(
    tmp_path: Path, container: dict[str, Any], field: str, text: str
) -> None:
    async with process(tmp_path) as one:
        with pytest.raises(StatusError) as told:
            await one.create(template(**container))
        assert told.value.code == 422
        assert [cause.field for cause in told.value.causes] == [field]
        assert text in told.value.message


async def test_a_template_that_was_made_a_moment_ago_by_another_is_known(tmp_path: Path) -> None:
    async with process(tmp_path) as one, process(tmp_path, 2) as other:
        await other.store.add_template(Template(template_id="t2", name="new", size=SMALL, created_at=2.0))
        assert (await one.create(template(image="new")))["metadata"]["name"] == "py"


async def test_autoscaling_has_bounds_in_order(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        with pytest.raises(StatusError, match=r"spec\.autoscaling\.minReplicas"):
            await one.create(pool(autoscaling={"minReplicas": 4, "maxReplicas": 3}))
        await one.create(template())
        made = await one.create(pool(autoscaling={"maxReplicas": 1}))
        assert made["status"]["conditions"][0]["message"].startswith("0 of 1 ")
        assert made["status"]["desiredReplicas"] == 1


def sandbox(number: int, **changes: Any) -> Listed:
    fields: dict[str, Any] = {
        "sandbox_id": f"iaaaa{number:015d}",
        "template": "base",
        "size": SMALL,
        "state": "running",
        "started_at": 1.0,
        "ends_at": 2.0,
        "node": "node-0",
        "owner": "a",
    }
    return Listed(**fields | changes)


async def test_a_quota_shows_what_its_namespace_has(tmp_path: Path) -> None:
    async with process(tmp_path) as one:
        hard = {"count/sandboxes.agents.x-k8s.io": "3", "requests.cpu": "4", "requests.memory": "2Gi"}
        await one.create(quota(hard))
        one.node(sandboxes=(sandbox(1), sandbox(2, state="paused"), sandbox(3, owner="b")))

        def used() -> dict[str, str]:
            found = one.stored.quotas.object(("a", "q"))
            assert found is not None
            return found["status"]["used"]  # type: ignore[no-any-return]

        await eventually(lambda: used()["requests.cpu"] == "2")
        assert used() == {
            "count/sandboxes.agents.x-k8s.io": "2",
            "requests.cpu": "2",
            "requests.memory": "1Gi",
        }
        assert one.view.apply("aaaa", Put(stream="aaaa-1", seq=2, sandbox=sandbox(4)), 3.0)
        await eventually(lambda: used()["requests.memory"] == "1536Mi")
        for number, seq in ((1, 3), (2, 4), (4, 5)):
            gone = Gone(stream="aaaa-1", seq=seq, sandbox_id=sandbox(number).sandbox_id)
            assert one.view.apply("aaaa", gone, 3.0)
        await eventually(lambda: used()["count/sandboxes.agents.x-k8s.io"] == "0")
        assert used()["requests.memory"] == "0"


@pytest.mark.parametrize(
    ("hard", "text"),
    [
        ({"pods": "3"}, "supported values"),
        ({"requests.cpu": "-1"}, "greater than or equal to 0"),
        ({"count/sandboxes.agents.x-k8s.io": "1500m"}, "whole number"),
    ],
    ids=["key", "negative", "half"],
)
async def test_quotas_that_cannot_be_kept_are_refused(
    tmp_path: Path, hard: dict[str, str], text: str
) -> None:
    async with process(tmp_path) as one:
        with pytest.raises(StatusError) as told:
            await one.create(quota(hard))
        assert told.value.code == 422
        assert text in told.value.message
