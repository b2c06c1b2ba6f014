"""What writing a Sandbox does to the sandbox, and how its object tells of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from greenroom.api.kube.kinds import SANDBOX
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.instants import instant_text
from greenroom.api.kube.objects import Object, copied
from greenroom.api.kube.options import Deleting, Writing
from greenroom.api.kube.status import StatusError, status_of
from greenroom.api.kube.writing import Writer
from greenroom.errors import GreenroomError, NameTaken, PoolDry, QuotaExceeded
from greenroom.wire.messages import FOREVER
from tests.support.kube_fleet import World, record

KEY = ("default", "box")


def body(name: str = "box", *, metadata: Any = None, container: Any = None, **spec: Any) -> Any:
    containers = [{"name": "main", "image": "base", **(container or {})}]
    return {
        "apiVersion": SANDBOX.api_version,
        "kind": "Sandbox",
        "metadata": {"name": name, **(metadata or {})},
        "spec": {"podTemplate": {"spec": {"containers": containers}}, **spec},
    }, []


@pytest.fixture
def world() -> Iterator[World]:
    made = World().begin()
    yield made
    made.close()


@pytest.fixture
def writer(world: World) -> Writer:
    return Writer(world.sandboxes)


async def make(writer: Writer, **more: Any) -> Object:
    return (await writer.create("default", body(**more), Writing())).obj


def ready(obj: Object) -> tuple[str, str]:
    condition = next(each for each in obj["status"]["conditions"] if each["type"] == "Ready")
    return condition["status"], condition["reason"]


async def test_a_sandbox_is_made_and_found_at_once(world: World, writer: Writer) -> None:
    env = [{"name": "A", "value": "1"}]
    made = await make(writer, container={"env": env}, metadata={"labels": {"team": "a"}})
    assert ready(made) == ("True", "DependenciesReady")
    assert made["metadata"]["labels"]["team"] == "a"
    assert made["metadata"]["labels"]["sandbox.greenroom.dev/launch"] == "warm"
    request = world.fleet.calls[0][1]
    assert (request.owner, request.name, request.env, request.ttl) == ("default", "box", {"A": "1"}, FOREVER)
    assert request.key.startswith("auto-")
    assert await world.sandboxes.get(KEY) == made
    listing = await world.sandboxes.list("default")
    assert [row.object() for row in listing.objects] == [made]  # type: ignore[union-attr]
    assert (await world.sandboxes.list("other")).objects == []


async def test_resources_choose_the_size(world: World, writer: Writer) -> None:
    await make(writer, container={"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}})
    assert world.fleet.calls[0][1].size.name == "medium"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"container": {"image": "nothing"}}, "spec.podTemplate.spec.containers[0].image"),
        ({"container": {"image": ""}}, "spec.podTemplate.spec.containers[0].image"),
        (
            {"container": {"resources": {"requests": {"cpu": "900"}}}},
            "spec.podTemplate.spec.containers[0].resources",
        ),
        (
            {"container": {"env": [{"name": "A", "valueFrom": {}}]}},
            "spec.podTemplate.spec.containers[0].env[0].valueFrom",
        ),
        (
            {"container": {"envFrom": [{"secretRef": {"name": "s"}}]}},
            "spec.podTemplate.spec.containers[0].envFrom",
        ),
        (
            {"container": {"env": [{"name": "1=", "value": "x"}]}},
            "spec.podTemplate.spec.containers[0].env[0].name",
        ),
        ({"shutdownTime": "2020-01-01T00:00:00Z"}, "spec.shutdownTime"),
        ({"volumeClaimTemplates": [{"spec": {}}]}, "spec.volumeClaimTemplates"),
        ({"name": "iabcdabcdabcdabcdabc"}, "metadata.name"),
    ],
    ids=["image", "no-image", "size", "value-from", "env-from", "variable", "past", "volumes", "id"],
)
async def test_what_cannot_be_had_is_refused_before_anything_is_made(
    world: World, writer: Writer, given: Any, field: str
) -> None:
    with pytest.raises(StatusError) as refused:
        await make(writer, **given)
    assert (refused.value.code, refused.value.reason) == (422, "Invalid")
    assert [cause.field for cause in refused.value.causes] == [field]
    assert world.fleet.calls == []


async def test_unknown_templates_name_those_there_are(writer: Writer) -> None:
    with pytest.raises(StatusError, match='Not found: "nothing": templates are: base'):
        await make(writer, container={"image": "nothing"})


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (NameTaken("x"), 409, "AlreadyExists"),
        (PoolDry("dry", 3), 503, "PoolExhausted"),
        (QuotaExceeded("2 of 2 sandboxes"), 403, "Forbidden"),
    ],
    ids=["name", "dry", "quota"],
)
async def test_errors_of_the_platform(
    world: World, writer: Writer, error: GreenroomError, code: int, reason: str
) -> None:
    world.fleet.fails = error
    with pytest.raises(GreenroomError) as refused:
        await make(writer)
    told = status_of(refused.value)
    assert (told.code, told.reason) == (code, reason)
    assert (told.retry == 3) == (code == 503)
    assert (await world.sandboxes.list("")).objects == []


async def test_a_dry_run_checks_and_makes_nothing(world: World, writer: Writer) -> None:
    await writer.create("default", body(), Writing(dry_run=True))
    assert world.fleet.calls == []
    await make(writer)
    with pytest.raises(StatusError, match="already exists"):
        await writer.create("default", body(), Writing(dry_run=True))


async def test_what_has_no_effect_is_warned_of(writer: Writer) -> None:
    labels = {"labels": {"sandbox.greenroom.dev/node": "x"}}
    given = body(container={"command": ["sleep"]}, metadata=labels)
    given[0]["spec"]["podTemplate"]["spec"]["containers"].append({"name": "side", "image": "x"})
    outcome = await writer.create("default", given, Writing())
    assert outcome.obj["metadata"]["labels"]["sandbox.greenroom.dev/node"] == "node-1"
    assert any("sandbox.greenroom.dev/node is set by the platform" in text for text in outcome.warnings)
    assert any("only the first counts, not side" in text for text in outcome.warnings)
    assert "spec.podTemplate.spec: has no effect here: containers[0].command" in outcome.warnings


async def test_every_field_without_effect_is_named_once_in_one_line(writer: Writer) -> None:
    container = {
        "imagePullPolicy": "Always",
        "ports": [{"containerPort": 80}],
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": "v"}],
        "livenessProbe": {"exec": {}},
        "lifecycle": {"preStop": {}},
        "resources": {"requests": {"cpu": "1"}},
        "env": [{"name": "A", "value": "1"}],
        "args": [],
    }
    given = body(container=container)
    pod = given[0]["spec"]["podTemplate"]["spec"]
    pod |= {
        "serviceAccountName": "x",
        "hostNetwork": True,
        "imagePullSecrets": [{"name": "s"}],
        "runtimeClassName": "kata",
        "restartPolicy": "Never",
        "nodeSelector": {"a": "b"},
        "tolerations": [],
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "securityContext": {"a": 1},
    }
    outcome = await writer.create("default", given, Writing())
    (line,) = outcome.warnings
    lead, _, named = line.partition("here: ")
    assert lead == "spec.podTemplate.spec: has no effect "
    fields = (pod.keys() - {"containers", "tolerations"}) | {
        f"containers[0].{each}" for each in container.keys() - {"resources", "env", "args"}
    }
    assert set(named.split(", ")) == fields


async def test_the_line_is_bounded(writer: Writer) -> None:
    given = body()
    given[0]["spec"]["podTemplate"]["spec"] |= {f"field{number}": "x" * 99 for number in range(99)}
    (line,) = (await writer.create("default", given, Writing())).warnings
    assert line.endswith(", field23, …")


async def test_labels_of_the_platform_that_a_change_brings_are_warned_of(writer: Writer) -> None:
    made = await make(writer)
    merge = "application/merge-patch+json"
    patch: Any = {"metadata": {"labels": {"sandbox.greenroom.dev/node": "x", "team": "c"}}}
    outcome = await writer.patch(KEY, merge, (patch, []), Writing())
    assert outcome.warnings == ["metadata.labels: sandbox.greenroom.dev/node is set by the platform"]
    assert outcome.obj["metadata"]["labels"] == {**made["metadata"]["labels"], "team": "c"}
    patch = {"metadata": {"labels": {"team": "d"}}}
    assert (await writer.patch(KEY, merge, (patch, []), Writing())).warnings == []


async def test_the_operating_mode_pauses_and_resumes(world: World, writer: Writer) -> None:
    await make(writer)
    patch = {"spec": {"operatingMode": "Suspended"}}
    merge = "application/merge-patch+json"
    paused = (await writer.patch(KEY, merge, (patch, []), Writing())).obj
    assert paused["spec"]["operatingMode"] == "Suspended"
    assert ready(paused) == ("False", "SandboxSuspended")
    assert paused["metadata"]["generation"] == 2
    patch = {"spec": {"operatingMode": "Running"}}
    resumed = (await writer.patch(KEY, merge, (patch, []), Writing())).obj
    assert ready(resumed) == ("True", "DependenciesReady")
    assert [call for call, _ in world.fleet.calls if call != "declare"] == ["claim", "pause", "resume"]


async def test_a_sandbox_can_be_made_suspended(writer: Writer) -> None:
    made = await make(writer, operatingMode="Suspended")
    assert made["spec"]["operatingMode"] == "Suspended"
    assert made["status"]["phase"] == "Paused"


async def test_metadata_and_the_end_are_declared(world: World, writer: Writer) -> None:
    made = await make(writer)
    new = copied(made)
    at = instant_text(time.time() + 3600)
    new["metadata"]["labels"]["team"] = "b"
    new["metadata"]["finalizers"] = ["example.com/wait"]
    new["spec"]["shutdownTime"] = at
    kept = (await writer.update(KEY, (new, []), Writing())).obj
    assert kept["metadata"]["labels"]["team"] == "b"
    assert kept["spec"]["shutdownTime"] == at
    (row,) = (await world.sandboxes.list("")).objects
    declared = row.facts.listed.declared  # type: ignore[union-attr]
    assert declared.revision == 2
    assert instant_text(declared.shutdown_at) == at
    assert declared.retain
    assert b"sandbox.greenroom.dev" not in bytes(declared.document)
    assert "operatingMode" not in documents.document_of(row.facts.listed).sandbox["spec"]  # type: ignore[union-attr]
    # The version that was read before is another's now.
    with pytest.raises(StatusError, match="has been modified"):
        await writer.update(KEY, (new, []), Writing())
    again = (await writer.update(KEY, (copied(kept), []), Writing())).obj
    assert again["metadata"]["resourceVersion"] == kept["metadata"]["resourceVersion"]


async def test_a_change_of_state_is_no_conflict(world: World, writer: Writer) -> None:
    made = await make(writer)
    world.fleet.change(made["status"]["sandboxID"], metadata={"e2b": "x"})
    new = copied(made)
    new["metadata"]["labels"]["team"] = "b"
    assert (await writer.update(KEY, (new, []), Writing())).obj["metadata"]["labels"]["team"] == "b"


async def test_the_pod_template_stays(writer: Writer) -> None:
    made = copied(await make(writer))
    made["spec"]["podTemplate"]["spec"]["containers"][0]["image"] = "other"
    with pytest.raises(StatusError, match=r"spec\.podTemplate: Forbidden: field is immutable"):
        await writer.update(KEY, (made, []), Writing())


async def test_finalizers_hold_the_vm(world: World, writer: Writer) -> None:
    await make(writer, metadata={"finalizers": ["example.com/wait"]})
    going, gone = await writer.delete(KEY, Deleting())
    assert not gone
    assert going["metadata"]["deletionTimestamp"]
    assert len(world.node.sandboxes) == 1
    patch = {"metadata": {"finalizers": None}}
    await writer.patch(KEY, "application/merge-patch+json", (patch, []), Writing())
    assert world.node.sandboxes == {}
    assert await world.sandboxes.get(KEY) is None


async def test_one_that_was_to_be_deleted_at_its_end_goes_when_its_finalizer_does(
    world: World, writer: Writer
) -> None:
    made = await make(writer, metadata={"finalizers": ["example.com/wait"]}, shutdownPolicy="Delete")
    declared = world.fleet.calls[0][1].declared
    assert (declared.retain, declared.held) == (False, True)
    ended = {"state": "ended", "ended_at": time.time(), "end_reason": "it was killed"}
    world.fleet.change(made["status"]["sandboxID"], **ended)
    obj = await world.sandboxes.get(KEY)
    assert obj is not None
    assert obj["metadata"]["deletionTimestamp"] == instant_text(ended["ended_at"])
    await writer.patch(
        KEY, "application/merge-patch+json", ({"metadata": {"finalizers": None}}, []), Writing()
    )
    assert await world.sandboxes.get(KEY) is None


async def test_deleting_ends_the_vm_and_is_told(world: World, writer: Writer) -> None:
    made = await make(writer)
    watcher = world.sandboxes.cache.watch(int(made["metadata"]["resourceVersion"]), None, lambda: None)
    await writer.delete(KEY, Deleting())
    (change,) = watcher.take()
    seen = change.seen(None)
    assert seen is not None
    assert (seen[0], seen[1]["metadata"]["uid"]) == ("DELETED", made["metadata"]["uid"])
    assert int(seen[1]["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    with pytest.raises(StatusError, match="not found"):
        await writer.delete(KEY, Deleting())


async def test_one_of_the_other_dialect_is_seen_and_changed(world: World, writer: Writer) -> None:
    now = time.time()
    made = record(started_at=now, ends_at=now + 300, owner="team")
    world.node.put(made)
    key = ("team", made.sandbox_id)
    obj = await world.sandboxes.get(key)
    assert obj is not None
    assert obj["spec"]["shutdownTime"] == instant_text(now + 300)
    assert obj["spec"]["podTemplate"]["spec"]["containers"][0]["image"] == "base"
    patch = {"metadata": {"labels": {"mine": "yes"}}}
    merge = "application/merge-patch+json"
    kept = (await writer.patch(key, merge, (patch, []), Writing())).obj
    assert kept["metadata"]["labels"]["mine"] == "yes"
    assert kept["spec"] == obj["spec"]
    patch = {"spec": {"shutdownTime": None}}
    kept = (await writer.patch(key, merge, (patch, []), Writing())).obj
    assert "shutdownTime" not in kept["spec"]
    assert ("timeout", FOREVER) in world.fleet.calls


async def test_one_of_the_other_dialect_lives_as_long_as_it_is_told_here(
    world: World, writer: Writer
) -> None:
    now = time.time()
    made = record(started_at=now, ends_at=now + 60, owner="team")
    world.node.put(made)
    key, later = ("team", made.sandbox_id), instant_text(now + 3600)
    patch = {"spec": {"shutdownTime": later}}
    kept = (await writer.patch(key, "application/merge-patch+json", (patch, []), Writing())).obj
    assert kept["spec"]["shutdownTime"] == later
    assert [each for each in world.fleet.calls if each[0] == "timeout"] == [("timeout", FOREVER)]


async def test_a_time_out_that_the_other_dialect_gave_counts_where_it_is_earlier(
    world: World, writer: Writer
) -> None:
    now = time.time()
    at = instant_text(now + 3600)
    made = await make(writer, shutdownTime=at)
    for seconds, shown in ((60, instant_text(now + 60)), (7200, at)):
        world.fleet.change(made["status"]["sandboxID"], ends_at=now + seconds)
        obj = await world.sandboxes.get(KEY)
        assert obj is not None
        assert obj["spec"]["shutdownTime"] == shown


async def test_one_that_ended_is_kept_with_the_reason(world: World, writer: Writer) -> None:
    made = await make(writer)
    sandbox_id = made["status"]["sandboxID"]
    world.fleet.change(sandbox_id, state="ended", ended_at=time.time(), end_reason="its time was up")
    obj = await world.sandboxes.get(KEY)
    assert obj is not None
    assert ready(obj) == ("False", "SandboxExpired")
    assert [each["type"] for each in obj["status"]["conditions"]] == ["Ready", "Finished"]
    patch = {"spec": {"operatingMode": "Suspended"}}
    with pytest.raises(StatusError, match="the sandbox has ended"):
        await writer.patch(KEY, "application/merge-patch+json", (patch, []), Writing())
    patch = {"spec": {"shutdownTime": instant_text(time.time() + 60)}}
    with pytest.raises(StatusError, match="the sandbox has ended") as refused:
        await writer.patch(KEY, "application/merge-patch+json", (patch, []), Writing())
    assert refused.value.code == 409
    _, gone = await writer.delete(KEY, Deleting())
    assert gone


async def act(writer: Writer, subresource: str, /, **given: Any) -> Object:
    action = SANDBOX.action(subresource)
    assert action is not None
    return (await writer.act(KEY, action, (given, []), Writing())).obj


async def test_pause_and_resume_by_subresource(world: World, writer: Writer) -> None:
    await make(writer)
    assert ready(await act(writer, "pause")) == ("False", "SandboxSuspended")
    assert ready(await act(writer, "pause")) == ("False", "SandboxSuspended")
    at = instant_text(time.time() + 60)
    resumed = await act(writer, "resume", shutdownTime=at)
    assert resumed["spec"]["shutdownTime"] == at
    assert resumed["spec"]["operatingMode"] == "Running"
    with pytest.raises(StatusError, match="it has passed already"):
        await act(writer, "resume", shutdownTime="2020-01-01T00:00:00Z")
    # That is in the year 10000 by UTC, which no node writes down.
    with pytest.raises(StatusError, match="before the year 10000"):
        await act(writer, "resume", shutdownTime="9999-12-31T23:59:59-23:59")


async def test_forks_are_sandboxes_of_their_own(world: World, writer: Writer) -> None:
    await make(writer, metadata={"labels": {"team": "a"}, "finalizers": ["example.com/wait"]})
    answer = await act(writer, "fork", count=2, labels={"copy": "yes"})
    names = [each["name"] for each in answer["sandboxes"]]
    assert all(name.startswith("box-") for name in names)
    for each in answer["sandboxes"]:
        copy = await world.sandboxes.get(("default", each["name"]))
        assert copy is not None
        assert copy["metadata"]["uid"] == each["uid"]
        assert copy["metadata"]["labels"]["team"] == "a"
        assert copy["metadata"]["labels"]["copy"] == "yes"
        assert "finalizers" not in copy["metadata"]
    with pytest.raises(StatusError, match="count"):
        await act(writer, "fork", count=21)


async def test_a_snapshot_is_named(writer: Writer) -> None:
    await make(writer)
    taken = await act(writer, "snapshot", name="before")
    assert taken["snapshotID"] == "sn00a000000000000001"
    assert taken["name"] == "before"
    with pytest.raises(StatusError, match="a template has this name"):
        await act(writer, "snapshot", name="base")


async def test_others_are_made_from_a_snapshot_by_its_id_or_name_in_the_size_that_it_has(
    world: World, writer: Writer
) -> None:
    await make(writer)
    taken = await act(writer, "snapshot", name="before")
    for number, image in enumerate((taken["snapshotID"], "before")):
        await make(writer, name=f"twin{number}", container={"image": image})
        request = world.fleet.calls[-1][1]
        assert (request.snapshot, request.template) == (taken["snapshotID"], taken["snapshotID"])
    await make(
        writer, name="fits", container={"image": "before", "resources": {"limits": {"memory": "64Mi"}}}
    )
    assert world.fleet.calls[-1][1].size.name == "small"
    with pytest.raises(StatusError, match=r"the snapshot has 1 CPU and 512Mi memory, and cannot be made"):
        await make(writer, container={"image": "before", "resources": {"limits": {"memory": "2Gi"}}})
    with pytest.raises(StatusError, match="this namespace has no snapshot of that id or name"):
        await make(writer, container={"image": "after"})
