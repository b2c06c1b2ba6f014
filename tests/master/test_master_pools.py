"""A real master process drives the pools of fake nodes: what they are told, when, and what is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenroom.config import NodesConfig
from greenroom.errors import BadRequest, NodeUnavailable
from greenroom.master.declared import TEMPLATES, WARM_POOLS
from greenroom.store.records import StoredObject
from greenroom.wire.messages import DrivenPools, PoolName, PoolSpec, Size
from tests.support.cluster import QUICK, Cluster, cluster
from tests.support.fake_node import FakeNode

SMALL = Size("small", 1, 512, 4096)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Cluster]:
    """A master for which a node that is silent for long is alive."""
    settings = msgspec.structs.replace(QUICK, nodes=NodesConfig(heartbeat=0.05, lease=600.0))
    with cluster(tmp_path) as made:
        made.master(settings)
        yield made


def silence(*nodes: FakeNode) -> None:
    """No heartbeat comes from them any more, whose answer would tell them their pools."""
    for node in nodes:
        node.beat = 3600.0
        node.shares.clear()
        node.wait_registered()


def put(plane: Cluster, resource: str, name: str, spec: dict[str, Any], expect: int = 0) -> StoredObject:
    document = {"metadata": {"name": name, "namespace": "ns", "generation": expect + 1}, "spec": spec}
    raw = msgspec.Raw(msgspec.json.encode(document))
    stored = StoredObject(resource=resource, namespace="ns", name=name, document=raw)
    return plane.stored(lambda store: store.put_object(stored, expect))


def template(plane: Cluster, name: str = "t", **requests: str) -> StoredObject:
    container = {"name": "main", "image": "base", "resources": {"requests": requests}}
    return put(plane, TEMPLATES, name, {"podTemplate": {"spec": {"containers": [container]}}})


def driven(plane: Cluster, after: int = 0) -> DrivenPools:
    url = f"{plane.masters[0].url}/v1/pools/driven?after={after}&wait=20"
    return plane.call("api", "GET", url, DrivenPools, deadline=30.0)


def target(node: FakeNode) -> int:
    return sum(spec.target for spec in node.pools)


def test_a_declared_pool_is_told_to_nodes_between_heartbeats(plane: Cluster, node: FakeNode) -> None:
    other = plane.node("node-1")
    silence(node, other)
    before = driven(plane)
    assert before.pools == []
    template(plane)
    put(plane, WARM_POOLS, "p", {"replicas": 7, "sandboxTemplateRef": {"name": "t"}})
    [pool] = driven(plane, before.revision).pools
    assert (pool.key, pool.size, pool.desired) == (PoolName("base", "small"), SMALL, 7)
    assert (pool.observed_generation, pool.problem) == (1, "")
    # Beside the seven there are the five of the default pool.
    node.wait_until(lambda: target(node) == 6)
    other.wait_until(lambda: target(other) == 6)


def test_a_pool_without_its_template_says_so_until_that_comes(plane: Cluster, node: FakeNode) -> None:
    before = driven(plane)
    put(plane, WARM_POOLS, "p", {"replicas": 2, "sandboxTemplateRef": {"name": "t"}})
    found = driven(plane, before.revision)
    assert "there is no SandboxTemplate 't' in namespace 'ns'" in found.pools[0].problem
    template(plane, cpu="2")
    found = driven(plane, found.revision)
    assert (found.pools[0].key, found.pools[0].problem) == (PoolName("base", "medium"), "")
    node.wait_until(lambda: [spec.size.name for spec in node.pools] == ["medium", "small"])


def test_a_node_that_does_not_answer_is_told_again(plane: Cluster, node: FakeNode) -> None:
    silence(node)
    node.pools_error = NodeUnavailable("not now")
    calls = node.calls.count("PUT /v1/pools")
    url = f"{plane.masters[0].url}/v1/pools"
    pool = PoolSpec(template="base", size=SMALL, target=9)
    plane.call("operator", "PUT", url, PoolSpec, pool)
    node.wait_until(lambda: node.calls.count("PUT /v1/pools") >= calls + 2)
    node.pools_error = None
    node.wait_until(lambda: target(node) == 9)


def test_a_node_is_called_only_for_a_list_that_has_changed(plane: Cluster, node: FakeNode) -> None:
    silence(node)
    template(plane)
    before = driven(plane)
    put(plane, WARM_POOLS, "p", {"replicas": 2, "sandboxTemplateRef": {"name": "t"}})
    found = driven(plane, before.revision)
    node.wait_until(lambda: target(node) == 7)
    calls = node.calls.count("PUT /v1/pools")
    # Another generation that wants the same is told of to those who follow, and to no node.
    put(
        plane,
        WARM_POOLS,
        "p",
        {"replicas": 2, "sandboxTemplateRef": {"name": "t"}, "updateStrategy": {"type": "Recreate"}},
        expect=2,
    )
    assert driven(plane, found.revision).pools[0].observed_generation == 3
    assert node.calls.count("PUT /v1/pools") == calls


def test_the_polls_parameters_are_checked(plane: Cluster) -> None:
    with pytest.raises(BadRequest):
        plane.call("api", "GET", f"{plane.masters[0].url}/v1/pools/driven?after=x", DrivenPools)
