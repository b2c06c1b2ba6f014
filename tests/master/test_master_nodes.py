"""A real master process and its node table, pools and templates."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import threading
import time

import httpx
import msgspec
import pytest

from greenroom.config import PoolsConfig
from greenroom.errors import BadRequest, Forbidden, KeyConflict, NodeUnavailable, NotFound, UnknownTemplate
from greenroom.store.sqlite import SCHEMA
from greenroom.wire.messages import MasterStatus, NodeList, PoolSpec, Registered, Size, Template
from tests.support.cluster import QUICK
from tests.support.role_process import RoleProcess

SMALL = Size("small", 1, 512, 4096)


def nodes(plane, after: int = 0, wait: float = 0) -> NodeList:
    url = f"{plane.masters[0].url}/v1/nodes?after={after}&wait={wait}"
    return plane.call("proxy", "GET", url, NodeList, deadline=40.0)


def test_a_new_cluster_has_the_base_template_and_its_pool(plane):
    url = plane.masters[0].url
    [template] = plane.call("api", "GET", f"{url}/v1/templates", list[Template])
    assert (template.name, template.size) == ("base", SMALL)
    assert plane.call("operator", "GET", f"{url}/v1/templates/base:default", Template) == template
    assert plane.call("operator", "GET", f"{url}/v1/templates/{template.template_id}", Template) == template
    with pytest.raises(UnknownTemplate):
        plane.call("api", "GET", f"{url}/v1/templates/ns/base", Template)
    [pool] = plane.call("operator", "GET", f"{url}/v1/pools", list[PoolSpec])
    assert pool == PoolSpec(template="base", size=SMALL, target=5)


def test_a_second_master_adds_nothing(plane):
    second = plane.master(msgspec.structs.replace(QUICK, pools=PoolsConfig(default_target=9)))
    statuses = [
        plane.call("operator", "GET", f"{master.url}/v1/status", MasterStatus)
        for master in (plane.masters[0], second)
    ]
    assert statuses[0] == statuses[1]
    assert [pool.target for pool in statuses[0].pools] == [5]


def test_pools_are_divided_and_follow_changes(plane, node):
    other = plane.node("node-1")

    def shares() -> list[int]:
        return sorted(
            sum(share.target for share in answer.pools)
            for entry in (node, other)
            for answer in entry.shares.values()
        )

    node.wait_until(lambda: shares() == [2, 3])
    url = f"{plane.masters[0].url}/v1/pools"
    pool = PoolSpec(template="base:default", size=SMALL, target=8, warm="running")
    assert plane.call("operator", "PUT", url, PoolSpec, pool).template == "base"
    node.wait_until(lambda: shares() == [4, 4])
    assert {answer.pools[0].warm for answer in node.shares.values()} == {"running"}
    other.stop()
    node.wait_until(lambda: [share.target for share in node.shares[plane.masters[0].url].pools] == [8])
    plane.call("operator", "PUT", url, PoolSpec, msgspec.structs.replace(pool, target=0))
    node.wait_until(lambda: node.shares[plane.masters[0].url].pools == [])
    assert plane.call("operator", "GET", url, list[PoolSpec]) == []


def test_a_pool_is_checked(plane):
    url = f"{plane.masters[0].url}/v1/pools"
    pool = PoolSpec(template="base", size=SMALL, target=-1)
    with pytest.raises(BadRequest, match="target"):
        plane.call("operator", "PUT", url, PoolSpec, pool)
    with pytest.raises(BadRequest, match="size"):
        plane.call("operator", "PUT", url, PoolSpec, {"template": "base", "size": ["", 1, 1, 1], "target": 1})
    wrong = msgspec.structs.replace(pool, target=1, size=Size("none", 0, 512, 4096))
    with pytest.raises(BadRequest, match="size"):
        plane.call("operator", "PUT", url, PoolSpec, wrong)
    unknown = msgspec.structs.replace(pool, target=1, template="nothing")
    with pytest.raises(UnknownTemplate):
        plane.call("operator", "PUT", url, PoolSpec, unknown)
    with pytest.raises(Forbidden):
        plane.call("api", "PUT", url, PoolSpec, pool)


def test_a_long_poll_answers_when_a_node_comes_and_when_its_lease_ends(plane):
    before = nodes(plane)
    assert before.nodes == []
    answers: list[NodeList] = []

    def poll() -> None:
        answers.append(nodes(plane, before.revision, 30))

    waiting = threading.Thread(target=poll)
    waiting.start()
    node = plane.node()
    waiting.join(20)
    [answer] = answers
    assert [(info.status.name, info.live) for info in answer.nodes] == [("node-0", True)]
    node.heartbeats = False
    dead = nodes(plane, answer.revision, 30)
    assert [info.live for info in dead.nodes] == [False]
    node.heartbeats = True
    assert [info.live for info in nodes(plane, dead.revision, 30).nodes] == [True]


def test_a_long_poll_without_news_ends_after_its_wait(plane, node):
    revision = nodes(plane).revision
    began = time.monotonic()
    assert nodes(plane, revision, 0.2).revision == revision
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("query", ["after=x", "after=-1", "wait=nan", "wait=inf", "wait=-1", "after=1e3"])
def test_the_polls_parameters_are_checked(plane, query):
    with pytest.raises(BadRequest):
        plane.call("api", "GET", f"{plane.masters[0].url}/v1/nodes?{query}", NodeList)


def test_a_node_code_belongs_to_one_node_on_every_master(plane, node):
    second = plane.master()
    thief = msgspec.structs.replace(node.status(), name="node-9")
    for master in (plane.masters[0], second):
        with pytest.raises(KeyConflict):
            plane.call("node", "POST", f"{master.url}/v1/nodes/register", Registered, thief)


def test_a_heartbeat_must_match(plane, node):
    url = plane.masters[0].url
    unknown = msgspec.structs.replace(node.status(), name="node-9", code="zzzz")
    with pytest.raises(NotFound):
        plane.call("node", "POST", f"{url}/v1/nodes/node-9/heartbeat", Registered, unknown)
    with pytest.raises(BadRequest):
        plane.call("node", "POST", f"{url}/v1/nodes/node-8/heartbeat", Registered, node.status())


def test_a_restarted_master_knows_its_nodes_at_once(plane, node):
    before = nodes(plane)
    node.heartbeats = False
    assert plane.masters[0].stop(signal.SIGKILL) == -signal.SIGKILL
    plane.masters[0] = plane.master()
    after = nodes(plane)
    assert [(info.status.code, info.live) for info in after.nodes] == [(node.code, True)]
    assert after.revision > before.revision
    dead = nodes(plane, after.revision, 30)
    assert [info.live for info in dead.nodes] == [False]


def test_a_node_registered_with_one_master_is_known_to_the_other(plane, node):
    second = plane.master()
    url = f"{second.url}/v1/nodes"
    found = plane.call("api", "GET", url, NodeList)
    assert [info.status.name for info in found.nodes] == ["node-0"]
    plane.masters.remove(second)
    plane.node("node-1")
    later = plane.call("api", "GET", f"{url}?after={found.revision}&wait=20", NodeList, deadline=30.0)
    while [info.status.name for info in later.nodes] != ["node-0", "node-1"]:
        later = plane.call("api", "GET", f"{url}?after={later.revision}&wait=20", NodeList, deadline=30.0)


def test_only_a_dead_node_is_forgotten(plane, node):
    url = f"{plane.masters[0].url}/v1/nodes/node-0"
    with pytest.raises(KeyConflict):
        plane.call("operator", "DELETE", url, type(None))
    revision = nodes(plane).revision
    node.stop()
    assert [info.live for info in nodes(plane, revision, 30).nodes] == [False]
    plane.call("operator", "DELETE", url, type(None))
    assert nodes(plane).nodes == []
    with pytest.raises(NotFound):
        plane.call("operator", "DELETE", url, type(None))


def test_a_leaving_master_lets_its_pollers_go(plane):
    revision = nodes(plane).revision

    def poll() -> None:
        # It may not have arrived yet; then it is refused, which is as good: nobody is kept waiting.
        with contextlib.suppress(NodeUnavailable):
            nodes(plane, revision, 30)

    waiting = threading.Thread(target=poll)
    waiting.start()
    began = time.monotonic()
    assert plane.masters[0].stop() == 0
    waiting.join(20)
    assert not waiting.is_alive()
    assert time.monotonic() - began < 4.0


def test_credentials_are_needed(plane):
    url = plane.masters[0].url
    with httpx.Client(trust_env=False) as client:
        assert client.get(f"{url}/healthz").json() == {"ok": True}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}):
            assert client.get(f"{url}/v1/nodes", headers=headers).status_code == 401
        assert client.get(f"{url}/nothing").status_code == 401
        assert client.delete(f"{url}/v1/pools").status_code == 401


def test_a_newer_store_stops_the_master_with_one_line(plane, tmp_path):
    store = tmp_path / "newer"
    store.mkdir()
    connection = sqlite3.connect(store / "store.db")
    connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()
    spec = msgspec.structs.replace(plane.spec("master"), state_dir=str(store))
    (store / "secrets").symlink_to(plane.state / "secrets")
    role = RoleProcess(spec)
    role.start()
    with pytest.raises(AssertionError, match="did not get ready"):
        role.wait_ready()
    assert role.process.wait(20) == 78
    (told,) = map(msgspec.json.decode, role.log.splitlines())
    assert (told["level"], told["role"]) == ("critical", "master")
    assert told["message"].startswith("the store")
