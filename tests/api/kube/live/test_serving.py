"""Over HTTP: long lists come in pieces and are what short ones are; a collection goes at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from starlette.requests import Request

from greenroom.api.kube import rest
from greenroom.api.kube.resources import Attempt
from greenroom.wire.serving import listen, serving_beside
from tests.support.kube_fleet import World, record

PATH = "/apis/agents.x-k8s.io/v1beta1"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
PARTIAL = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"


@pytest.fixture
def world() -> World:
    return World(nodes=2).begin()


@pytest_asyncio.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async def admit(_request: Request, _attempt: Attempt) -> None:
        """Everybody may do everything."""

    app = rest.application(world.storages(), admit)
    async with serving_beside(app, listen("127.0.0.1", 0)) as url:
        with contextlib.closing(world):
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as made:
                yield made


def fill(world: World, count: int) -> None:
    for number in range(count):
        node = world.fleet.nodes[number % 2]
        node.put(record(f"i{node.code}{number:015d}", owner=f"o{number % 3}", launch="warm"))


@pytest.mark.parametrize(
    ("accept", "include"),
    [
        ("application/json", ""),
        (TABLE, ""),
        (TABLE, "Object"),
        (TABLE, "None"),
        (PARTIAL, ""),
    ],
    ids=["object", "table", "whole", "cells", "partial"],
)
async def test_a_list_in_pieces_is_the_list(
    world: World,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    accept: str,
    include: str,
) -> None:
    fill(world, 1100)
    query = {"includeObject": include} if include else {}
    monkeypatch.setattr(rest, "STREAMED", 0)
    streamed = await client.get(f"{PATH}/sandboxes", headers={"Accept": accept}, params=query)
    monkeypatch.setattr(rest, "STREAMED", 1 << 30)
    whole = await client.get(f"{PATH}/sandboxes", headers={"Accept": accept}, params=query)
    assert "content-length" not in streamed.headers
    assert "content-length" in whole.headers
    one, other = streamed.json(), whole.json()
    rows = one.get("rows", one.get("items"))
    assert len(rows) == 1100
    for each in (one, other):
        for row in each.get("rows", ()):
            row["cells"].pop()  # its age
    assert one == other
    # By pages it is the same again.
    pages: list[object] = []
    params = {"limit": "400", **query}
    while True:
        page = (await client.get(f"{PATH}/sandboxes", headers={"Accept": accept}, params=params)).json()
        for row in page.get("rows", ()):
            row["cells"].pop()
        pages += page.get("rows", page.get("items"))
        if not page["metadata"].get("continue"):
            break
        params["continue"] = page["metadata"]["continue"]
    assert pages == rows


async def test_a_partial_list_says_so(world: World, client: httpx.AsyncClient) -> None:
    fill(world, 4)
    world.fleet.nodes[1].lose()
    for path in (
        f"{PATH}/sandboxes",
        "/api/v1/namespaces",
        "/apis/sandbox.greenroom.dev/v1beta1/nodeinventories",
    ):
        answer = await client.get(path)
        assert answer.headers["x-greenroom-partial"] == "node-2"
        assert "node-2" in answer.headers["warning"]
    assert len((await client.get(f"{PATH}/sandboxes")).json()["items"]) == 4


async def test_a_collection_is_deleted_at_once(world: World, client: httpx.AsyncClient) -> None:
    fill(world, 300)
    answer = await client.delete(f"{PATH}/namespaces/o1/sandboxes")
    assert answer.status_code == 200
    assert len(answer.json()["items"]) == 100
    left = (await client.get(f"{PATH}/sandboxes")).json()["items"]
    assert len(left) == 200
    assert {each["metadata"]["namespace"] for each in left} == {"o0", "o2"}
    dry = await client.delete(f"{PATH}/namespaces/o2/sandboxes", params={"dryRun": "All"})
    assert dry.status_code == 200
    assert len((await client.get(f"{PATH}/namespaces/o2/sandboxes")).json()["items"]) == 100


async def test_events_of_one_object_are_found_by_fields(world: World, client: httpx.AsyncClient) -> None:
    fill(world, 30)
    obj = (await client.get(f"{PATH}/namespaces/o1/sandboxes")).json()["items"][3]
    fields = (
        f"involvedObject.name={obj['metadata']['name']},involvedObject.namespace=o1,"
        f"involvedObject.kind=Sandbox,involvedObject.uid={obj['metadata']['uid']},source!=kubelet"
    )
    answer = await client.get("/api/v1/namespaces/o1/events", params={"fieldSelector": fields})
    (event,) = answer.json()["items"]
    assert event["reason"] == "Created"
    fields = f"spec.operatingMode=Running,status.phase=Running,status.nodeName={obj['status']['nodeName']}"
    found = (await client.get(f"{PATH}/sandboxes", params={"fieldSelector": fields})).json()["items"]
    assert len(found) == 15


async def test_a_watch_begins_with_the_state_and_goes_on(world: World, client: httpx.AsyncClient) -> None:
    fill(world, 600)
    query = {"watch": "1", "sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
    async with client.stream(
        "GET", f"{PATH}/sandboxes", params={**query, "allowWatchBookmarks": "true"}
    ) as answer:
        lines = answer.aiter_lines()
        first = [json.loads(await anext(lines)) for _ in range(601)]
        assert [each["type"] for each in first] == ["ADDED"] * 600 + ["BOOKMARK"]
        world.node.put(record(f"i{world.node.code}{'9' * 15}"))
        assert json.loads(await anext(lines))["type"] == "ADDED"
        world.node.gone(f"i{world.node.code}{'9' * 15}")
        assert json.loads(await anext(lines))["type"] == "DELETED"
