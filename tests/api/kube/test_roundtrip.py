"""Every field of every kind, through HTTP and the real storages: what is sent comes back, or is named here and why.

Objects are made from the schemas, so a field that is added to one is asked about here at once. Sandboxes and claims
are of a fake fleet, whose nodes keep their records in memory; templates, pools and quotas are in a real store.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.requests import Request

from greenroom.api.kube.kinds import (
    CLAIM,
    CORE,
    EVENT,
    INVENTORY,
    KINDS,
    NAMESPACE,
    QUOTA,
    SANDBOX,
    TEMPLATE,
    WARM_POOL,
    Kind,
)
from greenroom.api.kube.resources import Attempt
from greenroom.api.kube.rest import application
from greenroom.api.kube.stored.assembly import Stored
from greenroom.api.kube.validation import pruned
from greenroom.api.kube.versions import Clock
from greenroom.store.sqlite import SqliteStore
from greenroom.wire.serving import listen, serving_beside
from tests.support.kube_fleet import BASE, FakePools, World
from tests.support.loops import eventually
from tests.support.schema_values import full

WRITTEN = (SANDBOX, CLAIM, TEMPLATE, WARM_POOL, QUOTA)
SHOWN = (INVENTORY, NAMESPACE, EVENT)
LATER = "2036-01-01T00:00:00Z"
CONTAINER = "spec.podTemplate.spec.containers[]"

GIVEN: dict[str, Any] = {
    "metadata.name": "one",
    "metadata.generateName": "one-",
    "metadata.namespace": "default",
    "metadata.finalizers": ["example.com/hold"],
    f"{CONTAINER}.image": "base",
    f"{CONTAINER}.resources.requests": {"cpu": "1"},
    f"{CONTAINER}.resources.limits": {"memory": "512Mi"},
    "spec.shutdownTime": LATER,
    "spec.operatingMode": "Suspended",
    "spec.lifecycle.shutdownTime": LATER,
    "spec.warmPoolRef.name": "warm",
    "spec.replicas": 3,
    "spec.autoscaling": {"minReplicas": 2, "maxReplicas": 5},
    "spec.networkPolicy.egress[].to[].ipBlock": {"cidr": "8.8.0.0/16", "except": ["8.8.8.0/24"]},
    "spec.hard": {
        "count/sandboxes.agents.x-k8s.io": "3",
        "requests.cpu": "1500m",
        "requests.memory": "8Gi",
    },
}
"""Values that mean something, where any text would be refused."""

OF_THE_SERVER = {
    "metadata.uid": "the server gives it",
    "metadata.resourceVersion": "the server gives it",
    "metadata.generation": "the server counts",
    "metadata.creationTimestamp": "the server knows when",
    "metadata.deletionTimestamp": "only a DELETE sets it",
    "metadata.deletionGracePeriodSeconds": "only a DELETE sets it",
    "metadata.managedFields": "the server keeps account",
    "metadata.selfLink": "nobody uses it any more",
    "status": "computed",
}
"""Fields that may be sent, and in which what the server says comes back."""

_VOLUMES = (
    {"spec": {"accessModes": ["ReadWriteOnce"]}},
    "sandboxes have the disk of their size alone",
)
_VALUE_FROM = ({"fieldRef": {}}, "there are no Secrets, ConfigMaps or pod fields to take a value from")
_LABELS = ({"matchLabels": {}}, "sandboxes are not chosen by labels here")
REFUSED: dict[str, dict[str, tuple[Any, str]]] = {
    "Sandbox": {
        "spec.volumeClaimTemplates[]": _VOLUMES,
        f"{CONTAINER}.env[].valueFrom": _VALUE_FROM,
    },
    "SandboxTemplate": {
        "spec.volumeClaimTemplates[]": _VOLUMES,
        f"{CONTAINER}.env[].valueFrom": _VALUE_FROM,
        "spec.networkPolicy.ingress[]": ({"ports": []}, "who may connect cannot be chosen"),
        "spec.networkPolicy.egress[].ports[]": ({"port": 80}, "egress is by address; leave the ports out"),
        "spec.networkPolicy.egress[].to[].podSelector": _LABELS,
        "spec.networkPolicy.egress[].to[].namespaceSelector": _LABELS,
    },
    "SandboxClaim": {"spec.volumeClaimTemplates[]": _VOLUMES},
    "SandboxWarmPool": {},
    "ResourceQuota": {},
}
"""What is refused, because to leave it out would be unsafe or a surprise: a value, and the words of the refusal."""

NEVER: dict[str, dict[str, str]] = {
    "Sandbox": {
        "status.podIPs": "sandboxes are reached through the proxy",
        "status.service": "sandboxes are reached through the proxy",
        "status.serviceFQDN": "sandboxes are reached through the proxy",
    },
    "SandboxClaim": {"status.sandbox.podIPs": "sandboxes are reached through the proxy"},
    "SandboxTemplate": {},
    "SandboxWarmPool": {},
    "ResourceQuota": {},
    "NodeInventory": {
        "pools[].net": "all pools are in one network",
        "templates[].net": "all templates are in one network",
        "templates[].size": "nodes tell the names of their templates alone",
        "templates[].contentDigest": "nodes tell the names of their templates alone",
        "templates[].tenant": "templates are everybody's",
        "templates[].createdAt": "nodes tell the names of their templates alone",
        "templates[].cpuCount": "nodes tell the names of their templates alone",
        "templates[].memoryBytes": "nodes tell the names of their templates alone",
        "templates[].labels": "templates have none",
        "entries[].addr": "sandboxes are reached through the proxy",
    },
    "Namespace": {"spec.finalizers": "a namespace goes with what is in it"},
    "Event": {
        "involvedObject.fieldPath": "events are about whole objects",
        "involvedObject.resourceVersion": "events are made when they are read",
        "eventTime": "empty, as in events that count",
        "action": "the reason says it",
        "related": "events are about one object",
        "series": "events that happen again are told again",
    },
}
"""Fields of kubernetes-sigs/agent-sandbox and core/v1 that the schemas have and the platform never fills."""


def fitted(kind: Kind, value: Any, path: str = "") -> Any:
    """A value with every field, as the platform accepts it."""
    if path in GIVEN:
        return GIVEN[path]
    refused = REFUSED[kind.name]
    if isinstance(value, dict):
        fields = {name: (f"{path}.{name}" if path else name, each) for name, each in value.items()}
        return {
            name: fitted(kind, each, where)
            for name, (where, each) in fields.items()
            if where not in refused and f"{where}[]" not in refused
        }
    if isinstance(value, list):
        return [fitted(kind, each, f"{path}[]") for each in value]
    return value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All scalars in a value, by path."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from leaves(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for number, each in enumerate(value):
            yield from leaves(each, f"{path}[{number}]")
    else:
        yield path, value


def known(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """All fields that a schema names, down to those that have none themselves."""
    if "items" in schema:
        yield from known(schema["items"], f"{path}[]")
    elif properties := schema.get("properties"):
        for name, each in properties.items():
            yield from known(each, f"{path}.{name}" if path else name)
    else:
        yield path.removesuffix("[]")


def filled(value: Any, path: str = "") -> Iterator[str]:
    """All fields with something in them."""
    if isinstance(value, dict) and value:
        yield path
        for name, each in value.items():
            yield from filled(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        yield path
        for each in value:
            yield from filled(each, f"{path}[]")
    elif value not in (None, "", [], {}):
        yield path


def under(path: str, places: dict[str, Any]) -> bool:
    """Whether a path is one of these, or within one."""
    return any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in places)


class Served:
    """All kinds behind one server."""

    def __init__(self, world: World, client: httpx.AsyncClient) -> None:
        self.world = world
        self.client = client

    async def create(self, kind: Kind, obj: Any) -> httpx.Response:
        """POST an object."""
        return await self.client.post(path_of(kind), json=obj)

    async def get(self, kind: Kind, name: str = "one") -> Any:
        """An object; it is as the list has it."""
        got = (await self.client.get(f"{path_of(kind)}/{name}")).json()
        items = (await self.client.get(path_of(kind))).json()["items"]
        assert [each for each in items if each["metadata"]["name"] == name] == [got]
        return got


def path_of(kind: Kind) -> str:
    return f"{kind.prefix}{'/namespaces/default' if kind.namespaced else ''}/{kind.plural}"


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async def admit(_request: Request, _attempt: Attempt) -> None:
        """Everybody may do everything."""

    world = World(pools=FakePools(envVarsInjectionPolicy="Overrides")).begin()
    world.node.counted(2)
    store = await SqliteStore.open(tmp_path / "store.db")
    await store.add_template(BASE)
    stored = Stored(store, world.live.view, Clock(7))
    app = application([*world.storages(), *stored.storages()], admit)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        stack.enter_context(contextlib.closing(world))
        await stack.enter_async_context(stored.running())
        await eventually(lambda: stored.ready)
        url = await stack.enter_async_context(serving_beside(app, listen("127.0.0.1", 0)))
        client = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False)
        yield Served(world, await stack.enter_async_context(client))


def whole(kind: Kind) -> dict[str, Any]:
    """An object with every field that may be sent."""
    obj: dict[str, Any] = fitted(kind, full(kind.schema))
    return {**obj, "apiVersion": kind.api_version, "kind": kind.name}


def same(kind: Kind, sent: dict[str, Any], got: dict[str, Any]) -> None:
    """What was sent is there, but for what is the server's."""
    told = dict(leaves(got))
    missing = {
        path: (value, told.get(path))
        for path, value in leaves(sent)
        if not under(path, OF_THE_SERVER) and told.get(path) != value
    }
    assert missing == {}, kind.name


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
async def test_what_is_sent_comes_back(served: Served, kind: Kind) -> None:
    sent = whole(kind)
    made = await served.create(kind, sent)
    assert made.status_code == 201, made.text
    same(kind, sent, made.json())
    got = await served.get(kind)
    same(kind, sent, got)
    # Nothing is in it that its schema does not know, and what the server says it says itself.
    assert pruned(got, kind.schema) == (got, [])
    assert not {"deletionTimestamp", "selfLink"} & set(got["metadata"])
    assert got["metadata"]["uid"] != sent["metadata"]["uid"]
    changed = {**got, "metadata": {**got["metadata"], "annotations": {"note": "two"}}}
    updated = await served.client.put(f"{path_of(kind)}/one", json=changed)
    assert updated.status_code == 200, updated.text
    same(kind, {**sent, "metadata": {**sent["metadata"], "annotations": {"note": "two"}}}, updated.json())
    assert await served.get(kind) == updated.json()


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_every_field_is_sent_or_named_as_refused(kind: Kind) -> None:
    sent = set(filled(whole(kind))) | {path for path, _ in leaves(whole(kind))}
    for path in known(kind.schema):
        assert path in sent or under(path, REFUSED[kind.name]) or under(path, OF_THE_SERVER), path


@pytest.mark.parametrize(
    ("kind", "path"),
    [(kind, path) for kind in WRITTEN for path in REFUSED[kind.name]],
    ids=lambda value: value.name if isinstance(value, Kind) else value,
)
async def test_what_is_refused_is_told_by_name(served: Served, kind: Kind, path: str) -> None:
    value, words = REFUSED[kind.name][path]
    obj = whole(kind)
    place: Any = obj
    *way, last = path.replace("[]", ".0").split(".")
    for step, after in zip(way, [*way[1:], last], strict=True):
        begun: Any = [] if after == "0" else {}
        place = place[int(step)] if isinstance(place, list) else place.setdefault(step, begun)
    if isinstance(place, list):
        place.append(value)
    else:
        place[last] = value
    refused = await served.create(kind, obj)
    assert refused.status_code == 422, refused.text
    (cause,) = refused.json()["details"]["causes"]
    named = path.removesuffix("[]").replace("[]", "[0]")
    assert cause["field"] == named
    assert words in cause["message"]


@pytest.mark.parametrize("kind", [*WRITTEN, *SHOWN], ids=lambda kind: kind.name)
async def test_every_field_that_the_platform_fills_is_filled_and_no_other(served: Served, kind: Kind) -> None:
    assert {each.name for each in (*KINDS, *CORE)} == {each.name for each in (*WRITTEN, *SHOWN)}
    for each in (SANDBOX, CLAIM, QUOTA) if kind in SHOWN else (kind,):
        obj = whole(each)
        obj["metadata"] |= {"name": f"one-{each.singular}" if kind in SHOWN else "one"}
        assert (await served.create(each, obj)).status_code == 201
    objects = (await served.client.get(path_of(kind))).json()["items"]
    there = {path for obj in objects for path in filled(obj)}
    # Numbers and conditions may be of any value.
    there |= {
        path.replace("[0]", "[]") for obj in objects for path, value in leaves(obj) if value in (0, False)
    }
    own = [path for path in known(kind.schema) if path.startswith("status") or kind in SHOWN]
    own = [path for path in own if not path.startswith("metadata.")]
    without = [path for path in own if path not in there and not path.startswith("status.conditions[]")]
    assert sorted(without) == sorted(path for path in own if under(path, NEVER[kind.name]))
    for obj in objects:
        assert pruned(obj, kind.schema) == (obj, [])
