"""kubectl itself works against the dialect: its output is what it would be against Kubernetes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.kube_server import KUBECTL, Kubectl, KubeServer, kube_server, sandbox

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on this machine")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with kube_server() as running:
        yield running


@pytest.fixture
def kubectl(server: KubeServer, tmp_path: Path) -> Kubectl:
    return Kubectl(server.url, tmp_path)


def pool(replicas: int = 2, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxWarmPool",
        "metadata": {"name": "warm", "labels": labels},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": "base"}},
    }


async def test_what_there_is_and_what_it_means(kubectl: Kubectl) -> None:
    resources = await kubectl.run("api-resources", "--no-headers")
    assert "swp" in resources
    assert "nodeinventories" in resources
    explained = await kubectl.run("explain", "swp.spec")
    assert "replicas" in explained
    assert "How many sandboxes are kept ready." in explained
    assert "Server Version: v1.32.0" in await kubectl.run("version")


async def test_apply_get_describe_label_annotate_delete(kubectl: Kubectl, server: KubeServer) -> None:
    assert "sandbox.agents.x-k8s.io/box created" in await kubectl.run("apply", "-f", "-", given=sandbox())
    assert "unchanged" in await kubectl.run("apply", "-f", "-", given=sandbox())
    changed = await kubectl.run("apply", "-f", "-", given=sandbox(operatingMode="Suspended"))
    assert "sandbox.agents.x-k8s.io/box configured" in changed
    lines = (await kubectl.run("get", "sandboxes")).splitlines()
    assert lines[0].split() == ["NAME", "READY", "REASON", "AGE"]
    assert lines[1].split()[0] == "box"
    server.storages["events"].put(
        {
            "metadata": {"name": "box.1", "namespace": "default"},
            "involvedObject": {"kind": "Sandbox", "name": "box", "namespace": "default"},
            "reason": "Claimed",
            "message": "from the warm pool",
            "type": "Normal",
        }
    )
    described = await kubectl.run("describe", "sandbox", "box")
    assert "Operating Mode:" in described
    assert "Suspended" in described
    assert "labeled" in await kubectl.run("label", "sandbox", "box", "team=a")
    assert "annotated" in await kubectl.run("annotate", "sandbox", "box", "note=hello")
    assert "box" in await kubectl.run("get", "sbx", "-l", "team=a", "-o", "name")
    assert "No resources found" in await kubectl.run("get", "sbx", "-l", "team!=a")
    assert 'sandbox.agents.x-k8s.io "box" deleted' in await kubectl.run("delete", "sandbox", "box")
    assert "NotFound" in await kubectl.run("get", "sandbox", "box", status=1)


async def test_pools_scale_patch_wait_and_show_their_columns(kubectl: Kubectl, server: KubeServer) -> None:
    await kubectl.run("create", "-f", "-", given=pool())
    assert "scaled" in await kubectl.run("scale", "swp", "warm", "--replicas=5")
    assert "patched" in await kubectl.run(
        "patch", "swp", "warm", "--type=merge", "-p", '{"spec":{"replicas":6}}'
    )
    replace = '[{"op":"replace","path":"/spec/replicas","value":7}]'
    assert "patched" in await kubectl.run("patch", "swp", "warm", "--type=json", "-p", replace)
    status = '{"status":{"readyReplicas":7,"desiredReplicas":7,"conditions":[]}}'
    await kubectl.run("patch", "swp", "warm", "--subresource=status", "--type=merge", "-p", status)
    shown = (await kubectl.run("get", "swp", "warm", "--no-headers")).split()
    assert shown[:3] == ["warm", "7", "7"]
    waited = await kubectl.run(
        "wait", "swp/warm", "--for=jsonpath={.status.readyReplicas}=7", "--timeout=20s"
    )
    assert "condition met" in waited
    assert server.storages["sandboxwarmpools"].objects[("default", "warm")]["metadata"]["generation"] == 4


async def test_server_side_apply_diff_and_conflicts(kubectl: Kubectl) -> None:
    apply = ("apply", "--server-side", "-f", "-")
    assert "serverside-applied" in await kubectl.run(*apply, "--field-manager=one", given=pool(2, team="a"))
    told = await kubectl.run(*apply, "--field-manager=two", given=pool(3), status=1)
    assert 'conflict with "one": .spec.replicas' in told
    forced = (*apply, "--field-manager=two", "--force-conflicts")
    assert "serverside-applied" in await kubectl.run(*forced, given=pool(3))
    difference = await kubectl.run(
        "diff", "--server-side", "--field-manager=two", "-f", "-", given=pool(4), status=1
    )
    assert "-  replicas: 3" in difference
    assert "+  replicas: 4" in difference
    left = json.loads(await kubectl.run("get", "swp", "warm", "-o", "json", "--show-managed-fields"))
    assert left["spec"]["replicas"] == 3
    assert {each["manager"] for each in left["metadata"]["managedFields"]} == {"one", "two"}


async def test_what_is_wrong_is_told(kubectl: Kubectl) -> None:
    told = await kubectl.run("apply", "-f", "-", given=sandbox(operatingMod="Running"), status=1)
    assert 'unknown field "spec.operatingMod"' in told
    told = await kubectl.run("apply", "-f", "-", given=sandbox(operatingMode="Sleeping"), status=1)
    assert (
        'spec.operatingMode: Unsupported value: "Sleeping": supported values: "Running", "Suspended"' in told
    )
    told = await kubectl.run("apply", "--validate=warn", "-f", "-", given=sandbox(operatingMod="Running"))
    assert 'Warning: unknown field "spec.operatingMod"' in told
    assert "created (server dry run)" in await kubectl.run(
        "create", "--dry-run=server", "-f", "-", given=sandbox("other")
    )
    assert "AlreadyExists" in await kubectl.run("create", "-f", "-", given=sandbox(), status=1)


async def test_a_watch_shows_what_comes(kubectl: Kubectl, server: KubeServer) -> None:
    watching = await kubectl.start("get", "sbx", "--watch", "--no-headers", "-o", "name")
    assert watching.stdout is not None
    try:
        async with asyncio.timeout(30):
            for name in ("one", "two"):
                await kubectl.run("create", "-f", "-", given=sandbox(name))
                assert await watching.stdout.readline() == f"sandbox.agents.x-k8s.io/{name}\n".encode()
    finally:
        watching.kill()
        await watching.wait()
    assert len(server.storages["sandboxes"].objects) == 2


async def test_long_lists_come_in_pages(kubectl: Kubectl, server: KubeServer) -> None:
    for number in range(7):
        obj = sandbox(f"b{number}")
        obj["metadata"]["namespace"] = "default"
        server.storages["sandboxes"].put(obj)
    shown = await kubectl.run("get", "sbx", "--chunk-size=3", "-o", "name")
    assert len(shown.split()) == 7
    assert sum(attempt.verb == "list" for attempt in server.attempts) == 3


async def test_waiting_for_a_condition_and_for_the_end(kubectl: Kubectl, server: KubeServer) -> None:
    storage = server.storages["sandboxes"]
    await kubectl.run("create", "-f", "-", given=sandbox())
    waiting = await kubectl.start("wait", "sandbox/box", "--for=condition=Ready", "--timeout=30s")
    assert waiting.stdout is not None
    async with asyncio.timeout(30):
        await server.watched.wait()
        ready = {"type": "Ready", "status": "True", "reason": "Running", "message": ""}
        condition = {**ready, "lastTransitionTime": "2026-12-01T00:00:00Z"}
        storage.put({**storage.objects[("default", "box")], "status": {"conditions": [condition]}})
        assert b"condition met" in await waiting.stdout.read()
    assert await waiting.wait() == 0
    shown = (await kubectl.run("get", "sbx", "box", "--no-headers")).split()
    assert shown[1:3] == ["True", "Running"]
    assert "deleted" in await kubectl.run("delete", "sbx", "--all")
    assert await kubectl.run("get", "all") == "No resources found in default namespace.\n"


async def test_strategic_patches_are_what_kubectl_sends_by_itself(
    kubectl: Kubectl, server: KubeServer
) -> None:
    await kubectl.run("create", "-f", "-", given=sandbox())
    more = {"spec": {"podTemplate": {"spec": {"containers": [{"name": "side", "image": "tools"}]}}}}
    assert "patched" in await kubectl.run("patch", "sbx", "box", "-p", json.dumps(more))
    kept = server.storages["sandboxes"].objects[("default", "box")]["spec"]["podTemplate"]["spec"][
        "containers"
    ]
    assert [each["name"] for each in kept] == ["main", "side"]


async def test_nodes_and_namespaces_are_looked_at_only(kubectl: Kubectl, server: KubeServer) -> None:
    server.storages["nodeinventories"].put(
        {
            "metadata": {"name": "n1"},
            "node": "n1",
            "address": "10.0.0.1:7777",
            "reachable": True,
            "pools": [{"warm": 2}, {"warm": 3}],
            "entries": [{"name": "default/box"}],
        }
    )
    server.storages["namespaces"].put({"metadata": {"name": "default"}, "status": {"phase": "Active"}})
    assert (await kubectl.run("get", "nodeinventories", "-o", "wide", "--no-headers")).split()[:5] == [
        "n1",
        "true",
        "1",
        "5",
        "10.0.0.1:7777",
    ]
    assert (await kubectl.run("get", "ns", "--no-headers")).split()[:2] == ["default", "Active"]
    assert "MethodNotAllowed" in await kubectl.run("delete", "nodeinventory", "n1", status=1)
