"""The dialect over HTTP: verbs, versions, subresources, watches, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from greenroom.api.kube import status
from greenroom.api.kube.objects import copied
from greenroom.api.kube.openapi2 import ANSWERED, PROTOBUF
from greenroom.api.kube.watching import INITIAL_END
from greenroom.errors import PoolDry
from tests.support.kube_server import KubeServer, kube_server

BOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes"
EVERYWHERE = "/apis/agents.x-k8s.io/v1beta1/sandboxes"
POOLS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxwarmpools"
NODES = "/apis/sandbox.greenroom.dev/v1beta1/nodeinventories"
MERGE = {"content-type": "application/merge-patch+json"}
APPLY = {"content-type": "application/apply-patch+yaml"}
TABLE = {"accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with kube_server(watches=2) as running:
        yield running


def box(name: str = "box", *, generate: str = "", **metadata: Any) -> dict[str, Any]:
    named = {"generateName": generate} if generate else {"name": name}
    return {
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "metadata": {**named, **metadata},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "base"}]}}},
    }


def pool(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxWarmPool",
        "metadata": {"name": "warm"},
        "spec": {"sandboxTemplateRef": {"name": "base"}, **spec},
    }


def failed(response: httpx.Response) -> tuple[int, str]:
    """Code and reason of a refusal."""
    body = response.json()
    assert body["kind"] == "Status", body
    assert body["code"] == response.status_code
    return body["code"], body["reason"]


class Lines:
    """The events of a watch."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, str, dict[str, Any]]:
        """Type, name and object of the next event."""
        async with asyncio.timeout(20):
            event = json.loads(await anext(self._lines))
        return event["type"], event["object"].get("metadata", {}).get("name", ""), event["object"]


async def test_an_object_through_its_life(server: KubeServer) -> None:
    http = server.client
    made = await http.post(BOXES, json=box(), params={"fieldManager": "me"})
    assert made.status_code == 201
    obj = made.json()
    assert obj["spec"]["operatingMode"] == "Running"
    assert (obj["metadata"]["namespace"], obj["metadata"]["generation"]) == ("default", 1)
    assert obj["metadata"]["managedFields"][0]["manager"] == "me"
    assert (await http.get(f"{BOXES}/box")).json() == obj
    obj["spec"]["operatingMode"] = "Suspended"
    put = await http.put(f"{BOXES}/box", json=obj)
    assert put.status_code == 200
    assert put.json()["metadata"]["generation"] == 2
    assert failed(await http.put(f"{BOXES}/box", json=obj)) == (409, "Conflict")
    gone = await http.delete(f"{BOXES}/box")
    assert (gone.status_code, gone.json()["status"]) == (200, "Success")
    assert failed(await http.get(f"{BOXES}/box")) == (404, "NotFound")
    assert failed(await http.delete(f"{BOXES}/box")) == (404, "NotFound")


async def test_writes_that_change_nothing_make_no_version(server: KubeServer) -> None:
    http = server.client
    first = (await http.post(BOXES, json=box())).json()
    again = await http.put(f"{BOXES}/box", json=first)
    assert again.json() == first
    same = await http.patch(f"{BOXES}/box", json={"spec": {"operatingMode": "Running"}}, headers=MERGE)
    assert same.json() == first


async def test_names_are_generated_until_one_is_free(
    server: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = server.client
    await http.post(BOXES, json=box("box-1"))
    names = iter(["box-1", "box-2"])
    monkeypatch.setattr("greenroom.api.kube.objectmeta.generated_name", lambda _prefix: next(names))
    made = await http.post(BOXES, json=box(generate="box-"))
    assert made.json()["metadata"]["name"] == "box-2"
    monkeypatch.setattr("greenroom.api.kube.objectmeta.generated_name", lambda _prefix: "box-1")
    refused = await http.post(BOXES, json=box(generate="box-"))
    assert failed(refused) == (409, "AlreadyExists")
    assert refused.headers["retry-after"] == "1"


async def test_a_patch_without_a_version_is_tried_again_and_one_with_it_is_not(server: KubeServer) -> None:
    http, storage = server.client, server.storages["sandboxes"]
    await http.post(BOXES, json=box())

    def faster() -> None:
        other = copied(storage.objects[("default", "box")])
        other["metadata"].setdefault("labels", {})["other"] = "x"
        storage.put(other)

    storage.race = faster
    done = await http.patch(f"{BOXES}/box", json={"metadata": {"labels": {"mine": "y"}}}, headers=MERGE)
    assert done.json()["metadata"]["labels"] == {"other": "x", "mine": "y"}
    version = done.json()["metadata"]["resourceVersion"]
    patch = {"metadata": {"resourceVersion": version, "labels": {"mine": "z"}}}
    storage.race = faster
    assert failed(await http.patch(f"{BOXES}/box", json=patch, headers=MERGE)) == (409, "Conflict")


async def test_finalizers_hold_what_is_going(server: KubeServer) -> None:
    http = server.client
    await http.post(BOXES, json=box(finalizers=["example.com/keep"]))
    going = await http.delete(f"{BOXES}/box")
    assert going.status_code == 200
    assert going.json()["metadata"]["deletionTimestamp"]
    assert (await http.delete(f"{BOXES}/box")).json() == going.json()
    more = {"metadata": {"finalizers": ["example.com/keep", "example.com/more"]}}
    assert failed(await http.patch(f"{BOXES}/box", json=more, headers=MERGE)) == (422, "Invalid")
    await http.patch(f"{BOXES}/box", json={"metadata": {"finalizers": []}}, headers=MERGE)
    assert failed(await http.get(f"{BOXES}/box")) == (404, "NotFound")


async def test_preconditions_and_dry_runs(server: KubeServer) -> None:
    http = server.client
    dry = {"dryRun": "All"}
    assert (await http.post(BOXES, json=box(), params=dry)).status_code == 201
    assert failed(await http.get(f"{BOXES}/box")) == (404, "NotFound")
    made = (await http.post(BOXES, json=box())).json()
    assert (await http.delete(f"{BOXES}/box", params=dry)).status_code == 200
    patch = {"spec": {"operatingMode": "Suspended"}}
    tried = await http.patch(f"{BOXES}/box", json=patch, headers=MERGE, params=dry)
    assert tried.json()["spec"]["operatingMode"] == "Suspended"
    assert (await http.get(f"{BOXES}/box")).json() == made
    for condition in ({"uid": "other"}, {"resourceVersion": "999"}):
        refused = await http.request("DELETE", f"{BOXES}/box", json={"preconditions": condition})
        assert failed(refused) == (409, "Conflict")
    right = {"uid": made["metadata"]["uid"], "resourceVersion": made["metadata"]["resourceVersion"]}
    assert (await http.request("DELETE", f"{BOXES}/box", json={"preconditions": right})).status_code == 200


async def test_status_is_written_apart(server: KubeServer) -> None:
    http = server.client
    made = (await http.post(BOXES, json={**box(), "status": {"phase": "Mine"}})).json()
    assert "status" not in made
    both = {"spec": {"operatingMode": "Suspended"}, "status": {"phase": "Running"}}
    left = (await http.patch(f"{BOXES}/box/status", json=both, headers=MERGE)).json()
    assert (left["spec"]["operatingMode"], left["status"]) == ("Running", {"phase": "Running"})
    assert left["metadata"]["generation"] == 1
    assert left["metadata"]["managedFields"][-1]["subresource"] == "status"
    right = (await http.patch(f"{BOXES}/box", json={**both, "status": None}, headers=MERGE)).json()
    assert (right["spec"]["operatingMode"], right["status"]) == ("Suspended", {"phase": "Running"})


async def test_scale(server: KubeServer) -> None:
    http = server.client
    await http.post(POOLS, json=pool())
    scale = (await http.get(f"{POOLS}/warm/scale")).json()
    assert (scale["kind"], scale["apiVersion"], scale["spec"]) == ("Scale", "autoscaling/v1", {"replicas": 1})
    scale["spec"]["replicas"] = 4
    assert (await http.put(f"{POOLS}/warm/scale", json=scale)).json()["spec"] == {"replicas": 4}
    assert failed(await http.put(f"{POOLS}/warm/scale", json=scale)) == (409, "Conflict")
    patched = await http.patch(f"{POOLS}/warm/scale", json={"spec": {"replicas": 9}}, headers=MERGE)
    assert patched.json()["spec"] == {"replicas": 9}
    assert (await http.get(f"{POOLS}/warm")).json()["spec"]["replicas"] == 9
    few = await http.patch(f"{POOLS}/warm/scale", json={"spec": {"replicas": -1}}, headers=MERGE)
    assert failed(few) == (422, "Invalid")


async def test_a_body_without_its_kind_is_what_the_path_says(server: KubeServer) -> None:
    given = box()
    del given["kind"], given["apiVersion"]
    made = await server.client.post(BOXES, json=given)
    assert (made.status_code, made.json()["kind"]) == (201, "Sandbox")
    assert made.json()["apiVersion"] == "agents.x-k8s.io/v1beta1"


async def test_a_quota_that_goes_is_answered_and_other_kinds_by_a_status(server: KubeServer) -> None:
    http, quotas = server.client, "/api/v1/namespaces/default/resourcequotas"
    made = await http.post(quotas, json={"metadata": {"name": "q"}, "spec": {"hard": {"requests.cpu": "4"}}})
    assert made.status_code == 201
    assert (await http.delete(f"{quotas}/q")).json() == made.json()
    assert failed(await http.get(f"{quotas}/q")) == (404, "NotFound")
    await http.post(BOXES, json=box())
    assert (await http.delete(f"{BOXES}/box")).json()["kind"] == "Status"


async def test_what_is_no_json_is_told_what_to_do(server: KubeServer) -> None:
    sent = {"content-type": "application/vnd.kubernetes.protobuf"}
    refused = await server.client.post(BOXES, content=b"k8s\x00", headers=sent)
    assert failed(refused) == (415, "UnsupportedMediaType")
    assert "use kubectl apply -f" in refused.json()["message"]


async def test_a_caller_that_sees_some_is_shown_these(server: KubeServer) -> None:
    storage = server.storages["namespaces"]
    for name in ("a", "b", "c"):
        await storage.create({"metadata": {"name": name, "uid": name}}, dry_run=False)
    server.visible = frozenset({"a", "c", "elsewhere"})
    listed = (await server.client.get("/api/v1/namespaces")).json()["items"]
    assert [each["metadata"]["name"] for each in listed] == ["a", "c"]
    query = {
        "watch": "1",
        "timeoutSeconds": "1",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
    }
    told = await server.client.get("/api/v1/namespaces", params={**query, "allowWatchBookmarks": "true"})
    events = [json.loads(line) for line in told.text.splitlines()]
    assert [each["object"]["metadata"].get("name") for each in events if each["type"] == "ADDED"] == [
        "a",
        "c",
    ]


async def test_actions(server: KubeServer) -> None:
    http, storage = server.client, server.storages["sandboxes"]
    await http.post(BOXES, json=box())
    paused = await http.post(f"{BOXES}/box/pause")
    assert (paused.status_code, paused.json()["spec"]["operatingMode"]) == (201, "Suspended")
    forked = await http.post(f"{BOXES}/box/fork", json={"kind": "SandboxForkOptions", "count": 2})
    assert forked.json()["kind"] == "SandboxForkResult"
    assert storage.acted == [("pause", {}), ("fork", {"kind": "SandboxForkOptions", "count": 2})]
    assert failed(await http.post(f"{BOXES}/box/fork", json={"count": 0})) == (422, "Invalid")
    assert failed(await http.post(f"{BOXES}/box/fork", json={"kind": "Other"})) == (400, "BadRequest")
    assert failed(await http.post(f"{BOXES}/none/pause")) == (404, "NotFound")
    assert failed(await http.get(f"{BOXES}/box/pause")) == (405, "MethodNotAllowed")


async def test_an_apply_creates_conflicts_and_takes(server: KubeServer) -> None:
    http = server.client

    async def apply(manager: str, replicas: int, **params: str) -> httpx.Response:
        params["fieldManager"] = manager
        return await http.patch(
            f"{POOLS}/warm", content=json.dumps(pool(replicas=replicas)), headers=APPLY, params=params
        )

    assert (await apply("one", 2)).status_code == 201
    assert (await apply("one", 2)).json()["metadata"]["resourceVersion"] == "1"
    refused = await apply("two", 3)
    assert failed(refused) == (409, "Conflict")
    assert refused.json()["details"]["causes"][0]["field"] == ".spec.replicas"
    assert (await apply("two", 3, force="true")).json()["spec"]["replicas"] == 3
    nobody = await http.patch(f"{POOLS}/warm", content=json.dumps(pool()), headers=APPLY)
    assert failed(nobody) == (422, "Invalid")


async def test_an_apply_that_creates_is_asked_about_as_a_create(server: KubeServer) -> None:
    path, how = f"{BOXES}/box", {"params": {"fieldManager": "me"}, "headers": APPLY}
    server.refused["create"] = status.forbidden(status.Subject("agents.x-k8s.io", "sandboxes"), "not yours")
    assert failed(await server.client.patch(path, json=box(), **how)) == (403, "Forbidden")  # type: ignore[arg-type]
    assert failed(await server.client.get(path)) == (404, "NotFound")
    del server.refused["create"]
    assert (await server.client.patch(path, json=box(), **how)).status_code == 201  # type: ignore[arg-type]
    server.refused["create"] = status.forbidden(status.Subject("agents.x-k8s.io", "sandboxes"), "not yours")
    assert (await server.client.patch(path, json=box(), **how)).status_code == 200  # type: ignore[arg-type]


async def test_pages_are_of_one_version_until_it_is_forgotten(server: KubeServer) -> None:
    http, storage = server.client, server.storages["sandboxes"]
    for number in range(5):
        storage.put(box(f"b{number}", namespace="default"))
    first = (await http.get(EVERYWHERE, params={"limit": "2"})).json()
    assert first["metadata"]["remainingItemCount"] == 3
    storage.put(box("b00", namespace="default"))
    await http.delete(f"{BOXES}/b3")
    after = {"limit": "9", "continue": first["metadata"]["continue"]}
    rest = (await http.get(EVERYWHERE, params=after)).json()
    assert [each["metadata"]["name"] for each in rest["items"]] == ["b2", "b3", "b4"]
    assert rest["metadata"] == {"resourceVersion": first["metadata"]["resourceVersion"]}
    storage.cache.restart(storage.cache.version + 1)
    late = await http.get(EVERYWHERE, params=after)
    assert failed(late) == (410, "Expired")
    on = {"continue": late.json()["metadata"]["continue"]}
    left = (await http.get(EVERYWHERE, params=on)).json()
    assert [each["metadata"]["name"] for each in left["items"]] == ["b2", "b4"]


async def test_lists_are_selected_and_of_a_version(server: KubeServer) -> None:
    http, storage = server.client, server.storages["sandboxes"]
    storage.put(box("a", namespace="default", labels={"l": "x"}))
    storage.put(box("b", namespace="other", labels={"l": "y"}))

    async def names(url: str = EVERYWHERE, **params: str) -> list[str]:
        return [each["metadata"]["name"] for each in (await http.get(url, params=params)).json()["items"]]

    assert await names() == ["a", "b"]
    assert await names(BOXES) == ["a"]
    assert await names(labelSelector="l in (y,z)") == ["b"]
    assert await names(fieldSelector="metadata.namespace!=default") == ["b"]
    assert await names(resourceVersion="1", resourceVersionMatch="Exact") == ["a"]
    assert failed(await http.get(EVERYWHERE, params={"fieldSelector": "spec.x=1"})) == (400, "BadRequest")
    table = (await http.get(EVERYWHERE, headers=TABLE)).json()
    assert (table["kind"], [row["cells"][0] for row in table["rows"]]) == ("Table", ["a", "b"])


async def test_deletecollection_takes_what_is_selected(server: KubeServer) -> None:
    http, storage = server.client, server.storages["sandboxes"]
    for name, label in (("a", "x"), ("b", "x"), ("c", "y")):
        storage.put(box(name, namespace="default", labels={"l": label}))
    gone = await http.delete(BOXES, params={"labelSelector": "l=x"})
    assert [each["metadata"]["name"] for each in gone.json()["items"]] == ["a", "b"]
    assert [key[1] for key in storage.objects] == ["c"]


async def test_a_watch_begins_with_the_state_and_goes_on(server: KubeServer) -> None:
    http, storage = server.client, server.storages["sandboxes"]
    storage.put(box("a", namespace="default", labels={"l": "x"}))
    params = {
        "watch": "true",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
        "labelSelector": "l=x",
    }
    async with http.stream("GET", BOXES, params=params) as response:
        lines = Lines(response)
        assert (await lines.next())[:2] == ("ADDED", "a")
        kind, _, mark = await lines.next()
        assert (kind, mark["metadata"]["annotations"]) == ("BOOKMARK", {INITIAL_END: "true"})
        storage.put(box("b", namespace="default", labels={"l": "y"}))
        storage.put(box("a", namespace="default", labels={"l": "y"}))
        assert (await lines.next())[:2] == ("DELETED", "a")
        storage.put(box("b", namespace="default", labels={"l": "x"}))
        kind, name, obj = await lines.next()
        assert (kind, name, obj["metadata"]["resourceVersion"]) == ("ADDED", "b", "4")
    params = {"watch": "1", "resourceVersion": "2", "timeoutSeconds": "30"}
    async with http.stream("GET", EVERYWHERE, params=params, headers=TABLE) as response:
        lines = Lines(response)
        tables = [(await lines.next())[2] for _ in range(2)]
        assert [bool(each["columnDefinitions"]) for each in tables] == [True, False]


async def test_watches_end_when_the_server_leaves_or_loses_its_history(server: KubeServer) -> None:
    http, storage = server.client, server.storages["sandboxes"]
    storage.put(box("a", namespace="default"))
    for end in (server.leave, lambda: storage.cache.restart(9)):
        async with http.stream("GET", BOXES, params={"watch": "true"}) as response:
            lines = response.aiter_lines()
            async with asyncio.timeout(20):
                assert json.loads(await anext(lines))["type"] == "ADDED"
                end()
                assert [line async for line in lines] == []
    assert storage.cache.statistics()["watchers"] == 0
    assert failed(await http.get(BOXES, params={"watch": "true", "resourceVersion": "1"})) == (410, "Expired")


async def test_too_many_watches_of_one_caller_are_refused_until_one_ends(server: KubeServer) -> None:
    http = server.client
    watching = {"watch": "true", "sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
    watching["allowWatchBookmarks"] = "true"
    open_lines: list[AsyncIterator[str]] = []
    async with contextlib.AsyncExitStack() as stack:
        for path in (BOXES, POOLS):
            response = await stack.enter_async_context(http.stream("GET", path, params=watching))
            open_lines.append(response.aiter_lines())
            await anext(open_lines[-1])
        assert failed(await http.get(NODES, params=watching)) == (429, "TooManyRequests")
        assert (await http.get(BOXES)).status_code == 200
        # One that cannot begin is none.
        assert failed(await http.get(BOXES, params={"watch": "1", "fieldSelector": "x=y"})) == (
            400,
            "BadRequest",
        )
    server.leave()

    async def again() -> bool:
        async with http.stream("GET", NODES, params=watching) as response:
            return response.status_code == 200

    async with asyncio.timeout(20):
        while not await again():
            pass


async def test_what_is_refused(server: KubeServer) -> None:
    http = server.client
    await http.post(BOXES, json=box())
    obj = (await http.get(f"{BOXES}/box")).json()
    unversioned = copied(obj)
    del unversioned["metadata"]["resourceVersion"]
    elsewhere = box(namespace="other")
    cases = [
        (await http.post(BOXES, json=box()), (409, "AlreadyExists")),
        (await http.post(BOXES, json=elsewhere), (400, "BadRequest")),
        (await http.post(BOXES, json={**box(), "kind": "Pod"}), (400, "BadRequest")),
        (await http.post(BOXES, json={"metadata": {"name": "x"}}), (422, "Invalid")),
        (await http.post(BOXES, json=[]), (400, "BadRequest")),
        (
            await http.post(BOXES, content=b"{", headers={"content-type": "application/json"}),
            (400, "BadRequest"),
        ),
        (
            await http.post(BOXES, content=b"a: 1", headers={"content-type": "text/yaml"}),
            (415, "UnsupportedMediaType"),
        ),
        (await http.post(BOXES, json=box("Box")), (422, "Invalid")),
        (await http.post(BOXES, json=box(name=5)), (422, "Invalid")),  # type: ignore[arg-type]
        (await http.post(BOXES, json=box("b"), params={"dryRun": "Some"}), (422, "Invalid")),
        (await http.post(BOXES, json=box("b"), params={"fieldValidation": "x"}), (400, "BadRequest")),
        (
            await http.post(BOXES, json={**box("b"), "x": 1}, params={"fieldValidation": "Strict"}),
            (400, "BadRequest"),
        ),
        (await http.post(BOXES, content=b" " * (2 << 20)), (413, "RequestEntityTooLarge")),
        (await http.put(f"{BOXES}/box", json=unversioned), (422, "Invalid")),
        (await http.put(f"{BOXES}/other", json=obj), (400, "BadRequest")),
        (await http.patch(f"{BOXES}/box", json={}), (415, "UnsupportedMediaType")),
        (await http.patch(f"{BOXES}/box", json=5, headers=MERGE), (400, "BadRequest")),
        (await http.get(BOXES, headers={"accept": "application/yaml"}), (406, "NotAcceptable")),
        (await http.get(BOXES, params={"continue": "x"}), (400, "BadRequest")),
        (await http.post(EVERYWHERE, json=box("b")), (405, "MethodNotAllowed")),
        (await http.post(NODES, json={}), (405, "MethodNotAllowed")),
        (await http.get("/apis/none/v1"), (404, "NotFound")),
        (await http.get("/nowhere"), (404, "NotFound")),
    ]
    assert [failed(response) for response, _ in cases] == [wanted for _, wanted in cases]
    warned = await http.post(BOXES, json={**box("b"), "x": 1})
    assert warned.headers["warning"] == '299 - "unknown field \\"x\\""'


async def test_the_caller_is_asked_about_and_errors_from_below_are_statuses(server: KubeServer) -> None:
    http, storage = server.client, server.storages["sandboxes"]
    await http.post(f"{BOXES}/box/pause")
    asked = server.attempts[-1]
    told = (asked.verb, asked.part, asked.namespace, asked.name)
    assert told == ("create", "pause", "default", "box")
    server.refusal = status.forbidden(status.Subject("agents.x-k8s.io", "sandboxes"), "not yours")
    for path in (BOXES, f"{BOXES}/box", "/apis", "/version", "/openapi/v3", f"{BOXES}?watch=true"):
        assert failed(await http.get(path)) == (403, "Forbidden"), path
    # Who may not do it is told so before the body is looked at.
    for method, path in (
        ("POST", BOXES),
        ("PUT", f"{BOXES}/box"),
        ("DELETE", f"{BOXES}/box"),
        ("DELETE", BOXES),
    ):
        assert failed(await http.request(method, path, content=b"{" * 99)) == (403, "Forbidden"), method
    server.refusal = None

    def dry() -> None:
        raise PoolDry("no warm sandbox came free", 2)

    storage.race = dry
    refused = await http.post(BOXES, json=box())
    assert failed(refused) == (503, "PoolExhausted")
    assert refused.headers["retry-after"] == "2"


async def test_patches_do_not_make_an_object_larger_than_one_may_be(server: KubeServer) -> None:
    http = server.client
    await http.post(BOXES, json=box())
    path, sizes = f"{BOXES}/box", []
    for number in range(4):
        more = {"apiVersion": "v1", "kind": "Pod", "name": "p" * 600_000, "uid": str(number)}
        owners = (await http.get(path)).json()["metadata"].get("ownerReferences", [])
        answer = await http.patch(
            path,
            json=[{"op": "add", "path": "/metadata/ownerReferences", "value": owners}] * (not owners)
            + [{"op": "add", "path": "/metadata/ownerReferences/-", "value": more}],
            headers={"content-type": "application/json-patch+json"},
        )
        sizes.append(answer.status_code)
    assert sizes == [200, 200, 413, 413]
    assert failed(answer) == (413, "RequestEntityTooLarge")
    assert (await http.delete(path)).status_code == 200


async def test_health_discovery_and_description(server: KubeServer) -> None:
    http = server.client
    for path in ("/healthz", "/livez", "/readyz"):
        assert (await http.get(path)).text == "ok"
    server.ready = False
    assert failed(await http.get("/readyz")) == (503, "ServiceUnavailable")
    assert (await http.get("/apis/agents.x-k8s.io")).json()["kind"] == "APIGroup"
    accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    told = await http.get("/apis", headers={"accept": f"{accept},application/json"})
    assert told.headers["content-type"] == accept
    assert (await http.get("/apis")).json()["kind"] == "APIGroupList"
    second = await http.get("/openapi/v2", headers={"accept": PROTOBUF})
    assert second.headers["content-type"] == ANSWERED
    again = await http.get(
        "/openapi/v2", headers={"accept": PROTOBUF, "if-none-match": second.headers["etag"]}
    )
    assert again.status_code == 304
    assert (await http.get("/openapi/v2")).json()["swagger"] == "2.0"
    assert failed(await http.get("/openapi/v2", headers={"accept": "text/html"})) == (406, "NotAcceptable")
    index = (await http.get("/openapi/v3")).json()["paths"]
    for each in index.values():
        document = await http.get(each["serverRelativeURL"])
        assert document.json()["openapi"] == "3.0.0"
        again = await http.get(each["serverRelativeURL"], headers={"if-none-match": document.headers["etag"]})
        assert again.status_code == 304
