"""What the api does when parts of the fleet are away: dead nodes, masters that go and come, restarts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from greenroom.api.nodes import Fleet
from greenroom.config import Config
from greenroom.errors import NodeUnavailable
from greenroom.wire.calling import RoleClient
from greenroom.wire.messages import NodeList
from tests.support.cluster import Cluster, cluster, http

DEADLINE = 20.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the test's own, nothing running yet."""
    with cluster(tmp_path) as made:
        yield made


def until(read: Callable[[], httpx.Response], wanted: Callable[[httpx.Response], bool]) -> httpx.Response:
    """Read until the answer is the wanted one; a table that is long-polled arrives when it arrives."""
    ends = time.monotonic() + DEADLINE
    while True:
        response = read()
        if wanted(response):
            return response
        assert time.monotonic() < ends, response.text
        time.sleep(0.02)


def create(client: httpx.Client) -> str:
    response = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600})
    assert response.status_code == 201, response.text
    return response.json()["sandboxID"]


def test_a_dead_node_is_named_and_its_sandboxes_are_left_out(fleet):
    fleet.master()
    first, second = fleet.node("node-0", warm=2), fleet.node("node-1", warm=1)
    with http(fleet.api(), fleet.key()[1]) as client:
        made = [create(client) for _ in range(3)]
        on_second = next(iter(second.sandboxes))
        whole = client.get("/v2/sandboxes")
        assert {entry["sandboxID"] for entry in whole.json()} == set(made)
        assert "x-greenroom-partial" not in whole.headers
        second.stop()
        # Until its lease ends it should be alive: then a list without it would be a lie.
        seen = client.get("/v2/sandboxes")
        assert seen.status_code == 503 or seen.headers["x-greenroom-partial"] == "node-1"
        partial = until(lambda: client.get("/v2/sandboxes"), lambda answer: answer.status_code == 200)
        assert partial.headers["x-greenroom-partial"] == "node-1"
        assert {entry["sandboxID"] for entry in partial.json()} == set(first.sandboxes)
        assert client.get("/sandboxes").headers["x-greenroom-partial"] == "node-1"
        gone = client.get(f"/sandboxes/{on_second}")
        assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/timeout"),
            ("POST", "/pause"),
            ("POST", "/connect"),
        ):
            told = client.request(method, f"/sandboxes/{on_second}{path}", json={"timeout": 9})
            assert told.status_code in (503, 504)
            assert "127.0.0.1" not in told.text, "where a node is concerns no client"
            assert "the node" in told.json()["message"]
        fleet.call("operator", "DELETE", f"{fleet.masters[0].url}/v1/nodes/node-1", type(None))
        forgotten = until(
            lambda: client.get("/v2/sandboxes"), lambda answer: "x-greenroom-partial" not in answer.headers
        )
        assert forgotten.status_code == 200
        assert client.get(f"/sandboxes/{on_second}").status_code == 404


def test_sandboxes_are_reachable_without_any_master(fleet):
    master = fleet.master()
    node = fleet.node()
    with http(fleet.api(), fleet.key()[1]) as client:
        sandbox_id = create(client)
        master.stop()
        detail = client.get(f"/sandboxes/{sandbox_id}")
        assert detail.status_code == 200
        assert len(detail.json()["templateID"]) == 20
        assert client.post(f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 9}).status_code == 204
        assert client.post(f"/v2/sandboxes/{sandbox_id}/connect").status_code == 200
        assert [entry["sandboxID"] for entry in client.get("/v2/sandboxes").json()] == [sandbox_id]
        assert client.delete(f"/sandboxes/{sandbox_id}").status_code == 204
        refused = client.post("/v2/sandboxes", json={"templateID": "base"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["message"].startswith("the master cannot be reached")
        # An id of a node that was never heard of: nobody can be asked now.
        assert client.get("/sandboxes/i" + "0" * 19).status_code == 503
        assert not node.sandboxes


def test_the_next_master_is_asked_when_one_is_gone(fleet):
    first, _second = fleet.master(), fleet.master()
    fleet.node()
    with http(fleet.api(), fleet.key("me")[1]) as client:
        create(client)
        first.stop(signal.SIGKILL)
        create(client)
        # The node table comes from the other master as well: a node that only this one hears of is found.
        fleet.masters.pop(0)
        sandbox = fleet.node("node-1").add(owner="me")
        assert client.get(f"/sandboxes/{sandbox.sandbox_id}").status_code == 200


async def test_every_master_is_asked_whichever_is_followed_meanwhile():
    """The node table turns away from a dead master at the same moment: the one that lives was then left out."""
    asked = []
    fleet = Fleet(RoleClient("token"), ["first", "second", "third"], Config())

    async def ask(master):
        asked.append(master)
        fleet._master = (fleet._master + 1) % 3
        if master != "third":
            raise NodeUnavailable("it is dead")
        return master

    assert await fleet._any_master(ask) == "third"
    assert asked == ["first", "second", "third"]


def test_an_api_that_starts_before_everything_else(fleet):
    master = fleet.master()
    url = master.url
    port = int(url.rsplit(":", 1)[1])
    master.stop()
    with http(fleet.api(master_urls=[url]), fleet.key()[1]) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v2/sandboxes").status_code == 503
        assert client.get("/templates").status_code == 503
        fleet.masters.clear()
        fleet.master(port=port)
        fleet.node()
        until(
            lambda: client.post("/v2/sandboxes", json={"templateID": "base"}), lambda a: a.status_code == 201
        )
        assert len(client.get("/v2/sandboxes").json()) == 1


def test_a_sandbox_on_a_node_that_has_just_come(fleet):
    fleet.master()
    fleet.node("node-0")
    with http(fleet.api(), fleet.key("me")[1]) as client:
        create(client)
        node = fleet.node("node-1")
        sandbox = node.add(owner="me")
        assert client.get(f"/sandboxes/{sandbox.sandbox_id}").status_code == 200
        table = fleet.call("api", "GET", f"{fleet.masters[0].url}/v1/nodes", NodeList)
        assert len(table.nodes) == 2


def test_an_api_needs_a_master(fleet):
    with pytest.raises(AssertionError, match="at least one master"):
        fleet.api(master_urls=[])
