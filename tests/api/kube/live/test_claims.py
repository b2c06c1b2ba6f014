"""A claim is answered when its sandbox is there, belongs to it, and goes with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from greenroom.api.kube.kinds import CLAIM
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.instants import instant_text
from greenroom.api.kube.objectmeta import value_problem
from greenroom.api.kube.objects import Object
from greenroom.api.kube.options import Deleting, Writing
from greenroom.api.kube.status import StatusError
from greenroom.api.kube.stored.pools import selector_of
from greenroom.api.kube.writing import Writer
from greenroom.wire.messages import Network
from greenroom.wire.podsizes import SIZES
from tests.support.kube_fleet import FakePools, World

KEY = ("default", "job")
SMALL, MEDIUM = SIZES[:2]
MERGE = "application/merge-patch+json"


def body(*, metadata: Any = None, **spec: Any) -> Any:
    return {
        "apiVersion": CLAIM.api_version,
        "kind": "SandboxClaim",
        "metadata": {"name": "job", **(metadata or {})},
        "spec": {"warmPoolRef": {"name": "warm"}, **spec},
    }, []


@pytest.fixture
def world() -> Iterator[World]:
    made = World().begin()
    yield made
    made.close()


async def make(world: World, **more: Any) -> Object:
    return (await Writer(world.claims).create("default", body(**more), Writing())).obj


async def sandbox(world: World) -> Object:
    found = await world.sandboxes.get(KEY)
    assert found is not None
    return found


async def test_a_claim_and_its_sandbox_know_each_other(world: World) -> None:
    extra = {"labels": {"app": "x"}, "annotations": {"note": "y"}}
    claim = await make(world, additionalPodMetadata=extra, metadata={"labels": {"own": "z"}})
    assert claim["status"]["sandbox"] == {"name": "job"}
    assert claim["metadata"]["labels"] == {"own": "z"}
    made = await sandbox(world)
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == (
        "SandboxClaim",
        claim["metadata"]["uid"],
        True,
    )
    labels = made["metadata"]["labels"]
    assert (labels["agents.x-k8s.io/claim-uid"], labels["app"]) == (claim["metadata"]["uid"], "x")
    assert made["metadata"]["annotations"] == {"note": "y"}
    request = world.fleet.calls[0][1]
    assert (request.template, request.size.name, request.warm) == ("base", "small", "prefer")


async def test_a_pools_selector_finds_its_sandboxes_and_no_other(world: World) -> None:
    await make(world)
    label = selector_of("warm").partition("=")
    assert (await sandbox(world))["metadata"]["labels"][label[0]] == label[2] == "warm"
    for forged in ("warm", "other"):
        patch = {"metadata": {"labels": {label[0]: forged}}}
        await Writer(world.sandboxes).patch(KEY, MERGE, (patch, []), Writing())
        assert (await sandbox(world))["metadata"]["labels"][label[0]] == "warm"
    alone = {
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "metadata": {"name": "alone", "labels": {label[0]: "warm"}},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "base"}]}}},
    }
    made = await Writer(world.sandboxes).create("default", (alone, []), Writing())
    assert label[0] not in made.obj["metadata"]["labels"]
    with pytest.raises(StatusError, match="is set by the platform"):
        await make(world, metadata={"name": "second"}, additionalPodMetadata={"labels": {label[0]: "x"}})


@pytest.mark.parametrize(
    "name", ["p", "p.q", "a" * 63, "a" * 64, "b." * 100 + "c", "a" * 49 + "." * 3 + "b" * 99]
)
def test_a_pools_label_is_a_labels_value(name: str) -> None:
    value = documents.pool_label(name)
    assert not value_problem(value)
    assert (value == name) == (len(name) <= 63)
    assert documents.pool_label(name + "x") != value


async def test_its_end_is_the_sandboxs(world: World) -> None:
    at = instant_text(time.time() + 60)
    life = {"shutdownTime": at, "shutdownPolicy": "Retain", "ttlSecondsAfterFinished": 30}
    await make(world, lifecycle=life, warmPolicy="require")
    request = world.fleet.calls[0][1]
    assert request.warm == "require"
    assert (request.declared.retain, request.declared.retain_for) == (True, 30.0)
    assert instant_text(request.declared.shutdown_at) == at
    assert (await sandbox(world))["spec"]["shutdownTime"] == at
    patch = {"spec": {"lifecycle": {"shutdownTime": None, "shutdownPolicy": "Delete"}}}
    kept = (await Writer(world.claims).patch(KEY, MERGE, (patch, []), Writing())).obj
    assert "shutdownTime" not in kept["spec"]["lifecycle"]
    assert "shutdownTime" not in (await sandbox(world))["spec"]
    (row,) = (await world.claims.list("")).objects
    assert not row.facts.listed.declared.retain  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pools", "given", "field", "text"),
    [
        (FakePools(), {"warmPoolRef": {"name": "none"}}, "spec.warmPoolRef.name", "not found"),
        (FakePools(), {"env": [{"name": "A", "value": "1"}]}, "spec.env", "Disallowed"),
        (FakePools(), {"volumeClaimTemplates": [{"spec": {}}]}, "spec.volumeClaimTemplates", "disk"),
        (
            FakePools(networkPolicy={"egress": [{"ports": [{"port": 443}]}]}),
            {},
            "spec.warmPoolRef.name",
            "leave the ports out",
        ),
        (
            FakePools(),
            {"lifecycle": {"shutdownTime": "2020-01-01T00:00:00Z"}},
            "spec.lifecycle.shutdownTime",
            "passed",
        ),
    ],
    ids=["pool", "env", "volumes", "network", "past"],
)
async def test_what_cannot_be_had_is_refused(pools: FakePools, given: Any, field: str, text: str) -> None:
    world = World(pools=pools).begin()
    with pytest.raises(StatusError, match=text) as refused:
        await make(world, **given)
    assert (refused.value.code, [cause.field for cause in refused.value.causes]) == (422, [field])
    assert world.fleet.calls == []
    world.close()


@pytest.mark.parametrize(
    ("policy", "added", "env"),
    [
        ("Allowed", "B", {"A": "1", "B": "2"}),
        ("Overrides", "A", {"A": "2"}),
    ],
    ids=["allowed", "overrides"],
)
async def test_the_template_says_what_env_a_claim_may_bring(policy: str, added: str, env: Any) -> None:
    pools = FakePools(envVarsInjectionPolicy=policy)
    first = pools.template["spec"]["podTemplate"]["spec"]["containers"][0]
    first["env"] = [{"name": "A", "value": "1"}]
    world = World(pools=pools).begin()
    await make(world, env=[{"name": added, "value": "2"}])
    assert world.fleet.calls[0][1].env == env
    shown = (await sandbox(world))["spec"]["podTemplate"]["spec"]["containers"][0]["env"]
    assert {each["name"]: each["value"] for each in shown} == env
    world.close()


async def test_allowed_does_not_replace() -> None:
    pools = FakePools(envVarsInjectionPolicy="Allowed")
    pools.template["spec"]["podTemplate"]["spec"]["containers"][0]["env"] = [{"name": "A", "value": "1"}]
    world = World(pools=pools).begin()
    with pytest.raises(StatusError, match="the template has A already"):
        await make(world, env=[{"name": "A", "value": "2"}])
    world.close()


async def test_the_templates_network_is_the_sandboxs() -> None:
    world = World(pools=FakePools(networkPolicy={"egress": []})).begin()
    await make(world)
    assert world.fleet.calls[0][1].network == Network(deny_out=["0.0.0.0/0"])
    world.close()


async def test_the_end_of_one_that_has_ended_does_not_move(world: World) -> None:
    await make(world)
    sandbox_id = (await sandbox(world))["status"]["sandboxID"]
    world.fleet.change(sandbox_id, state="ended", ended_at=time.time(), end_reason="its time was up")
    patch: Any = {"spec": {"lifecycle": {"shutdownTime": instant_text(time.time() + 60)}}}
    with pytest.raises(StatusError, match="has ended") as refused:
        await Writer(world.claims).patch(KEY, MERGE, (patch, []), Writing())
    assert refused.value.code == 409
    patch = {"metadata": {"labels": {"a": "b"}}}
    kept = (await Writer(world.claims).patch(KEY, MERGE, (patch, []), Writing())).obj
    assert kept["metadata"]["labels"]["a"] == "b"


async def test_both_go_together(world: World) -> None:
    await make(world)
    await Writer(world.claims).delete(KEY, Deleting())
    assert await world.sandboxes.get(KEY) is None
    await make(world)
    await Writer(world.sandboxes).delete(KEY, Deleting())
    assert await world.claims.get(KEY) is None
    assert world.node.sandboxes == {}


async def test_an_orphaned_sandbox_stays(world: World) -> None:
    await make(world)
    _, gone = await Writer(world.claims).delete(KEY, Deleting(orphan=True))
    assert gone
    assert await world.claims.get(KEY) is None
    left = await sandbox(world)
    assert "ownerReferences" not in left["metadata"]
    assert "agents.x-k8s.io/claim-uid" not in left["metadata"]["labels"]


async def test_a_finalizer_of_either_holds_both(world: World) -> None:
    await make(world, metadata={"finalizers": ["example.com/wait"]})
    await Writer(world.sandboxes).delete(KEY, Deleting())
    assert (await sandbox(world))["metadata"]["deletionTimestamp"]
    claim = await world.claims.get(KEY)
    assert claim is not None
    assert claim["metadata"]["deletionTimestamp"]
    patch = {"metadata": {"finalizers": None}}
    await Writer(world.claims).patch(KEY, MERGE, (patch, []), Writing())
    assert world.node.sandboxes == {}


async def test_a_sandboxs_finalizer_holds_its_claim(world: World) -> None:
    await make(world)
    patch: Object = {"metadata": {"finalizers": ["example.com/wait"]}}
    await Writer(world.sandboxes).patch(KEY, MERGE, (patch, []), Writing())
    await Writer(world.claims).delete(KEY, Deleting())
    assert await world.claims.get(KEY) is not None
    await Writer(world.sandboxes).patch(KEY, MERGE, ({"metadata": {"finalizers": None}}, []), Writing())
    assert world.node.sandboxes == {}


async def test_the_wish_does_not_change(world: World) -> None:
    await make(world)
    patch = {"spec": {"warmPolicy": "never"}}
    with pytest.raises(StatusError, match=r"spec\.warmPolicy: Forbidden: field is immutable"):
        await Writer(world.claims).patch(KEY, MERGE, (patch, []), Writing())


async def test_the_key_with_a_warm_member_comes_first(world: World) -> None:
    world.node.counted(0)
    await make(world)
    assert world.fleet.calls[0][1].size.name == "small"


async def test_one_of_the_old_template_shows_what_it_has() -> None:
    """The template asks for more by now, and has gained a variable, which is set at the handing over."""
    pools = FakePools()
    first = pools.template["spec"]["podTemplate"]["spec"]["containers"][0]
    first |= {"resources": {"requests": {"cpu": "2"}}, "env": [{"name": "A", "value": "1"}]}
    pools.keys = [("base", SMALL), ("base", MEDIUM)]
    world = World(pools=pools).begin()
    world.node.counted(1)
    await make(world)
    assert world.fleet.calls[0][1].size == SMALL
    (container,) = (await sandbox(world))["spec"]["podTemplate"]["spec"]["containers"]
    assert container == {
        "name": "main",
        "image": "base",
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}},
        "env": [{"name": "A", "value": "1"}],
    }
    world.close()


async def test_one_of_the_new_template_shows_what_was_written() -> None:
    pools = FakePools()
    first = pools.template["spec"]["podTemplate"]["spec"]["containers"][0]
    first |= {"resources": {"limits": {"cpu": "2"}}}
    pools.keys = [("base", MEDIUM)]
    world = World(pools=pools).begin()
    await make(world)
    (container,) = (await sandbox(world))["spec"]["podTemplate"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"cpu": "2"}}
    world.close()


async def test_a_pool_that_is_declared_with_none_is_not_waited_for() -> None:
    pools = FakePools()
    pools.keeps = False
    world = World(pools=pools).begin()
    with pytest.raises(
        StatusError, match=r"SandboxWarmPool 'warm' is declared with 0 sandboxes.*kubectl scale"
    ) as told:
        await make(world, warmPolicy="require")
    assert (told.value.code, told.value.reason, told.value.retry) == (503, "PoolExhausted", None)
    assert world.fleet.calls == []
    await make(world)
    assert world.fleet.calls[0][1].pool == "warm"
    world.close()


async def test_watchers_of_both_kinds_see_both(world: World) -> None:
    watched = world.claims.cache.watch(world.claims.cache.version, None, lambda: None)
    await make(world)
    await Writer(world.claims).delete(KEY, Deleting())
    assert [change.type_for(None) for change in watched.take()] == ["ADDED", "DELETED"]


async def test_a_claims_event_is_about_both(world: World) -> None:
    claim = await make(world)
    events = [row.object() for row in world.events.rows("default")]
    assert [each["reason"] for each in events] == ["Claimed", "Claimed"]
    assert {each["involvedObject"]["kind"] for each in events} == {"Sandbox", "SandboxClaim"}
    uids = {each["involvedObject"]["kind"]: each["involvedObject"]["uid"] for each in events}
    assert uids["SandboxClaim"] == claim["metadata"]["uid"]
    await Writer(world.claims).delete(KEY, Deleting())
    assert [row.object()["reason"] for row in world.events.rows("")] == ["Killed"]
