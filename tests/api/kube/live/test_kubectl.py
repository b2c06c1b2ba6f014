"""kubectl against synthesized kinds: what it prints, and what becomes of the sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.requests import Request

from greenroom.api.kube.resources import Attempt
from greenroom.api.kube.rest import application
from greenroom.wire.serving import listen, serving_beside
from tests.support.kube_fleet import World
from tests.support.kube_server import KUBECTL, Kubectl, sandbox

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on this machine")


class Server:
    """The kinds of a world on a loopback port."""

    def __init__(self) -> None:
        self.world = World(nodes=2).begin()
        self.watched = asyncio.Event()
        self.app = application(self.world.storages(), self._admit)
        self.url = ""

    async def _admit(self, _request: Request, attempt: Attempt) -> None:
        if attempt.verb == "watch":
            self.watched.set()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    async with serving_beside(made.app, listen("127.0.0.1", 0)) as made.url:
        with contextlib.closing(made.world):
            yield made
            for farewell in made.app.state.on_leave:
                farewell()


@pytest.fixture
def kubectl(server: Server, tmp_path: Path) -> Kubectl:
    return Kubectl(server.url, tmp_path)


def claim(name: str = "job") -> dict[str, Any]:
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxClaim",
        "metadata": {"name": name},
        "spec": {"warmPoolRef": {"name": "warm"}},
    }


async def test_a_sandboxs_life(kubectl: Kubectl, server: Server) -> None:
    assert "sandbox.agents.x-k8s.io/box created" in await kubectl.run("apply", "-f", "-", given=sandbox())
    assert "unchanged" in await kubectl.run("apply", "-f", "-", given=sandbox())
    lines = (await kubectl.run("get", "sandboxes", "-o", "wide")).splitlines()
    assert lines[0].split() == ["NAME", "READY", "REASON", "NODE", "ID", "AGE"]
    assert lines[1].split()[:4] == ["box", "True", "DependenciesReady", "node-2"]
    changed = await kubectl.run("apply", "-f", "-", given=sandbox(operatingMode="Suspended"))
    assert "sandbox.agents.x-k8s.io/box configured" in changed
    assert "SandboxSuspended" in await kubectl.run("get", "sbx", "box")
    assert "labeled" in await kubectl.run("label", "sandbox", "box", "team=a")
    assert "annotated" in await kubectl.run("annotate", "sandbox", "box", "note=hello")
    assert "box" in await kubectl.run("get", "sbx", "-l", "team=a", "-o", "name")
    assert "box" in await kubectl.run("get", "sbx", "--field-selector=status.phase=Paused", "-o", "name")
    assert "No resources found" in await kubectl.run("get", "sbx", "-l", "team!=a")
    told = await kubectl.run("create", "-f", "-", given=sandbox(), status=1)
    assert "AlreadyExists" in told
    described = await kubectl.run("describe", "sandbox", "box")
    for text in ("Operating Mode:", "Suspended", "Created", "a warm one was handed over"):
        assert text in described
    assert 'sandbox.agents.x-k8s.io "box" deleted' in await kubectl.run("delete", "sandbox", "box")
    assert "NotFound" in await kubectl.run("get", "sandbox", "box", status=1)
    assert all(not node.sandboxes for node in server.world.fleet.nodes)
    events = await kubectl.run("get", "events", "-o", "custom-columns=REASON:.reason")
    assert "Killed" in events


async def test_a_claim_is_ready_and_goes_with_its_sandbox(kubectl: Kubectl) -> None:
    assert "sandboxclaim.extensions.agents.x-k8s.io/job created" in await kubectl.run(
        "create", "-f", "-", given=claim()
    )
    waited = await kubectl.run("wait", "sandboxclaim/job", "--for=condition=Ready", "--timeout=20s")
    assert "condition met" in waited
    shown = (await kubectl.run("get", "sandboxclaims", "--no-headers")).split()
    assert shown[:4] == ["job", "True", "job", "DependenciesReady"]
    owner = await kubectl.run("get", "sbx", "job", "-o", "jsonpath={.metadata.ownerReferences[0].kind}")
    assert owner == "SandboxClaim"
    assert "deleted" in await kubectl.run("delete", "sandboxclaim", "job", "--cascade=foreground")
    assert "No resources found" in await kubectl.run("get", "sbx")


async def test_server_side_apply_and_diff(kubectl: Kubectl) -> None:
    apply = ("apply", "--server-side", "-f", "-")
    assert "serverside-applied" in await kubectl.run(*apply, "--field-manager=one", given=sandbox())
    given = sandbox(operatingMode="Suspended")
    difference = await kubectl.run(
        "diff", "--server-side", "--field-manager=one", "-f", "-", given=given, status=1
    )
    assert "-  operatingMode: Running" in difference
    assert "+  operatingMode: Suspended" in difference
    assert "serverside-applied" in await kubectl.run(*apply, "--field-manager=one", given=given)
    left = json.loads(await kubectl.run("get", "sbx", "box", "-o", "json", "--show-managed-fields"))
    assert left["spec"]["operatingMode"] == "Suspended"
    assert [each["manager"] for each in left["metadata"]["managedFields"]] == ["one"]


async def test_a_watch_shows_what_comes_and_what_the_platform_does(kubectl: Kubectl, server: Server) -> None:
    watching = await kubectl.start("get", "sbx", "--watch", "--no-headers", "--output-watch-events")
    assert watching.stdout is not None
    try:
        async with asyncio.timeout(30):
            await server.watched.wait()
            await kubectl.run("create", "-f", "-", given=sandbox())
            line = (await watching.stdout.readline()).decode().split()
            assert line[:4] == ["ADDED", "box", "True", "DependenciesReady"]
            node = next(node for node in server.world.fleet.nodes if node.sandboxes)
            (sandbox_id,) = node.sandboxes
            server.world.fleet.change(sandbox_id, state="paused")
            line = (await watching.stdout.readline()).decode().split()
            assert line[:4] == ["MODIFIED", "box", "False", "SandboxSuspended"]
            node.gone(sandbox_id)
            line = (await watching.stdout.readline()).decode().split()
            assert line[:2] == ["DELETED", "box"]
    finally:
        watching.kill()
        await watching.wait()


async def test_a_node_that_cannot_be_read_is_named(kubectl: Kubectl, server: Server) -> None:
    await kubectl.run("create", "-f", "-", given=sandbox())
    server.world.fleet.nodes[1].lose()
    shown = await kubectl.run("get", "sbx")
    assert "box" in shown
    assert "Warning: not all that is on these nodes, or not its latest state, is listed: node-2" in shown


async def test_all_go_at_once(kubectl: Kubectl, server: Server) -> None:
    for number in range(40):
        await kubectl_create(server, f"b{number}")
    assert "deleted" in await kubectl.run("delete", "sbx", "--all")
    assert "No resources found" in await kubectl.run("get", "sbx")


async def kubectl_create(server: Server, name: str) -> None:
    obj = sandbox(name)
    obj["metadata"]["namespace"] = "default"
    await server.world.sandboxes.create(obj, dry_run=False)


async def test_nodes_and_namespaces(kubectl: Kubectl, server: Server) -> None:
    server.world.node.counted(3)
    shown = (await kubectl.run("get", "nodeinventories", "-o", "wide", "--no-headers")).splitlines()
    assert [line.split()[0] for line in shown] == ["node-1", "node-2"]
    inventory = json.loads(await kubectl.run("get", "nodeinventory", "node-1", "-o", "json"))
    assert inventory["pools"] == [{"template": "base", "size": "small", "warm": 3, "target": 5}]
    assert inventory["reachable"] is True
    assert (await kubectl.run("get", "ns", "--no-headers")).split()[:2] == ["default", "Active"]
