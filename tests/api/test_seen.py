"""What an api sees of the fleet without asking: what was done a moment ago, through any api; nodes that are away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from greenroom.api import seen as module
from greenroom.api.seen import Seen
from greenroom.config import PoolsConfig, VmConfig
from greenroom.errors import NodeUnavailable
from greenroom.wire import credentials
from greenroom.wire.calling import RoleClient
from greenroom.wire.changes import Position
from greenroom.wire.messages import NodeList
from tests.fleet.test_following import Node
from tests.fleet.test_view import sandbox
from tests.support.cluster import QUICK, Cluster, cluster, http
from tests.support.role_process import RoleProcess
from tests.support.waiting import until, until_true

SIMULATED = msgspec.structs.replace(
    QUICK, pools=PoolsConfig(default_target=4), vm=VmConfig(engine="simulated", uid_base=330_000)
)


class Two:
    """Two apis over a real node on the simulated engine, and a client of one owner at each."""

    def __init__(self, plane: Cluster) -> None:
        self.plane = plane
        self.master = plane.master(SIMULATED)
        self.node = plane.stack.enter_context(
            RoleProcess(plane.spec("node", config=SIMULATED, master_urls=[self.master.url]))
        )
        secret = plane.key()[1]
        self.clients = [plane.stack.enter_context(http(plane.api(SIMULATED), secret)) for _ in range(2)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with cluster(tmp_path_factory.mktemp("two")) as plane:
        yield Two(plane)


def states(client: httpx.Client) -> dict[str, str]:
    answer = client.get("/v2/sandboxes")
    assert answer.status_code == 200, answer.text
    return {entry["sandboxID"]: entry["state"] for entry in answer.json()}


@pytest.mark.parametrize("other", [0, 1], ids=["the same api", "another api"])
def test_what_was_done_is_in_the_next_list(two: Two, other: int) -> None:
    for _ in range(15):
        one, two_ = two.clients[0], two.clients[other]
        made = one.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600})
        sandbox_id = made.json()["sandboxID"]
        assert states(two_) == {sandbox_id: "running"}
        assert one.post(f"/sandboxes/{sandbox_id}/pause").status_code == 204
        assert states(two_) == {sandbox_id: "paused"}
        assert one.post(f"/v2/sandboxes/{sandbox_id}/connect", json={"timeout": 600}).status_code == 201
        assert states(two_) == {sandbox_id: "running"}
        before = two_.get("/v2/sandboxes").json()[0]["endAt"]
        assert one.post(f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 900}).status_code == 204
        assert two_.get("/v2/sandboxes").json()[0]["endAt"] > before
        assert one.delete(f"/sandboxes/{sandbox_id}").status_code == 204
        assert states(two_) == {}
        assert two_.get(f"/sandboxes/{sandbox_id}").status_code == 404


def test_a_list_says_what_each_sandboxs_page_says(two: Two) -> None:
    client = two.clients[0]
    made = [
        client.post("/v2/sandboxes", json={"templateID": "base", "metadata": {"n": str(number)}}).json()
        for number in range(3)
    ]
    listed = {entry["sandboxID"]: entry for entry in client.get("/sandboxes").json()}
    assert set(listed) == {entry["sandboxID"] for entry in made}
    for sandbox_id, entry in listed.items():
        page = client.get(f"/sandboxes/{sandbox_id}").json()
        assert entry.items() <= page.items()
        assert client.delete(f"/sandboxes/{sandbox_id}").status_code == 204


def test_a_node_that_was_started_anew_is_seen_anew(tmp_path: Path) -> None:
    with cluster(tmp_path) as plane:
        two = Two(plane)
        one, other = two.clients
        assert one.post("/v2/sandboxes", json={"templateID": "base"}).status_code == 201
        assert len(states(other)) == 1
        assert two.node.stop() == 0
        again = plane.spec("node", config=SIMULATED, master_urls=[two.master.url])
        two.node = plane.stack.enter_context(RoleProcess(again))
        # Nothing simulated outlives its node.
        until_true(lambda: other.get("/v2/sandboxes").status_code == 200)
        assert states(other) == {}
        made = one.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
        assert states(other) == {made: "running"}


def test_no_node_is_asked_for_a_list(plane: Cluster) -> None:
    with http(plane.apis[0], plane.key()[1]) as client:
        made = client.post("/v2/sandboxes", json={"templateID": "base"})
        assert made.status_code == 201
        node = plane.nodes[0]
        node.calls.clear()
        for path in ("/sandboxes", "/v2/sandboxes"):
            assert [entry["sandboxID"] for entry in client.get(path).json()] == [made.json()["sandboxID"]]
        assert node.calls == []


def test_a_list_waits_for_a_node_that_is_read_again(plane: Cluster) -> None:
    """E2B's clients do not see that a node's stream broke off for a moment."""
    node = plane.nodes[0]
    owner = plane.key("waits")[1]
    with http(plane.apis[0], owner) as client:
        made = node.add(owner="waits")
        node.list_error = NodeUnavailable("for a moment")
        node.list_error = None
        assert [entry["sandboxID"] for entry in client.get("/v2/sandboxes").json()] == [made.sandbox_id]


async def test_a_view_that_is_behind_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    credentials.ensure(tmp_path)
    node, dead = Node("aaaa", tmp_path), Node("bbbb", tmp_path)
    node.log.put(sandbox(1))
    async with RoleClient(credentials.own_token(tmp_path, "api")) as client:
        seen = Seen(client)
        async with node.run():
            nodes = [node.info(), dead.info(live=False)]
            seen.learn(NodeList(1, nodes))
            await until(lambda: "aaaa" not in seen.view.partial())
            found, missing = await seen.of_owner("me", nodes)
            assert [each.sandbox_id for each in found] == [sandbox(1).sandbox_id]
            assert missing == ["node-bbbb"]
            # An answer showed more than has come.
            client.heard(Position(node.log.position.stream, 2))
            found, missing = await seen.of_owner("me", nodes)
            assert [each.sandbox_id for each in found] == [sandbox(1).sandbox_id]
            assert missing == ["node-aaaa", "node-bbbb"]
            node.log.drop(sandbox(1).sandbox_id)
            assert await seen.of_owner("me", nodes) == ([], ["node-bbbb"])
            assert await seen.of_owner("you", nodes) == ([], ["node-bbbb"])
        begun = time.monotonic()
        with pytest.raises(NodeUnavailable, match="node-aaaa cannot be read"):
            await seen.of_owner("me", nodes)
        assert time.monotonic() - begun >= 0.05
        await seen.close()


async def test_an_entry_is_encoded_once(tmp_path: Path) -> None:
    credentials.ensure(tmp_path)
    node = Node("aaaa", tmp_path)
    node.log.put(sandbox(1))
    async with RoleClient(credentials.own_token(tmp_path, "api")) as client, node.run():
        seen = Seen(client)
        seen.learn(NodeList(1, [node.info()]))
        (entry,), _ = await seen.of_owner("me", [node.info()])
        made: list[str] = []

        def make(each: object) -> bytes:
            made.append(repr(each))
            return b"text"

        encoders = {"base": ("t", make)}
        assert [seen.encoded([entry], encoders) for _ in range(3)] == [[b"text"]] * 3
        assert len(made) == 1
        assert seen.owner_of(entry.sandbox_id) == "me"
        assert seen.owner_of("iaaaa" + "9" * 15) is None
        # One that the view no longer has is still answered.
        node.log.drop(entry.sandbox_id)
        await until(lambda: len(seen.view) == 0)
        assert seen.encoded([entry], encoders) == [b"text"]
        assert len(made) == 2
        await seen.close()
