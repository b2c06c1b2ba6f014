"""Whatever a client sends, a write ends in an object that keeps the rules, or in a refusal that says why."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube import objectmeta
from greenroom.api.kube.kinds import WARM_POOL
from greenroom.api.kube.negotiation import APPLY_PATCH, JSON_PATCH, MERGE_PATCH, PATCHES, STRATEGIC_PATCH
from greenroom.api.kube.objects import copied
from greenroom.api.kube.options import Deleting, Writing
from greenroom.api.kube.status import StatusError
from greenroom.api.kube.validation import violations
from greenroom.api.kube.writing import ATTEMPTS, Writer, names_version
from tests.support.memory_storage import MemoryStorage
from tests.support.schema_values import values

NOW = datetime(2026, 12, 1, tzinfo=UTC)
KEY = ("default", "warm")
ME = Writing(manager="me")


def made() -> tuple[MemoryStorage, Writer]:
    """A storage with a pool, and a writer of it."""
    storage = MemoryStorage(WARM_POOL)
    writer = Writer(storage, lambda: NOW)
    asyncio.run(writer.create("default", (pool(), []), ME))
    return storage, writer


def pool(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": WARM_POOL.api_version,
        "kind": "SandboxWarmPool",
        "metadata": {"name": "warm"},
        "spec": {"sandboxTemplateRef": {"name": "base"}, **spec},
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "warm", "a/b", "default"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "metadata",
                    "spec",
                    "status",
                    "name",
                    "labels",
                    "finalizers",
                    "managedFields",
                    "replicas",
                    "$patch",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
OPERATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "op": st.sampled_from(["add", "remove", "replace", "copy", "move", "test"]),
            "path": st.sampled_from(
                ["", "/metadata", "/metadata/name", "/spec", "/spec/replicas", "/status", "/x/0"]
            ),
            "from": st.sampled_from(["", "/spec", "/metadata/labels"]),
            "value": JSON,
        }
    ),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PATCHES), JSON | OPERATIONS, st.sampled_from(["", "status"]))
def test_any_patch_is_refused_or_leaves_an_object_that_keeps_the_rules(
    media: str, patch: Any, part: str
) -> None:
    storage, writer = made()
    before = copied(storage.objects[KEY])
    if media == APPLY_PATCH and isinstance(patch, dict):
        patch = {"apiVersion": WARM_POOL.api_version, "kind": "SandboxWarmPool", **patch}
    try:
        asyncio.run(writer.patch(KEY, media, (patch, []), ME, part))
    except StatusError as refused:
        if not 400 <= refused.code < 500:
            raise
        assert storage.objects[KEY] == before
    left = storage.objects[KEY]
    assert violations(left, WARM_POOL.schema) == []
    assert objectmeta.violations(left["metadata"], namespaced=True) == []
    for name in ("name", "namespace", "uid", "creationTimestamp"):
        assert left["metadata"][name] == before["metadata"][name]
    if part == "status":
        assert left["spec"] == before["spec"]
    else:
        assert "status" not in left


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_any_body_is_refused_or_makes_an_object_that_keeps_the_rules(body: Any) -> None:
    storage = MemoryStorage(WARM_POOL)
    if isinstance(body, dict):
        body = {**pool(), **body}
    try:
        asyncio.run(Writer(storage).create("default", (body, []), ME))
    except StatusError as refused:
        if not 400 <= refused.code < 500:
            raise
    for obj in storage.objects.values():
        assert violations(obj, WARM_POOL.schema) == []


@settings(max_examples=60, deadline=None)
@given(
    values(WARM_POOL.schema["properties"]["spec"]), st.sampled_from(["merge", "strategic", "apply", "json"])
)
def test_every_kind_of_patch_can_set_the_same_spec(spec: dict[str, Any], how: str) -> None:
    storage, writer = made()
    options, media, patch = ME, MERGE_PATCH, {"spec": spec}
    if how == "strategic":
        media = STRATEGIC_PATCH
    elif how == "apply":
        options, media, patch = Writing(manager="me", force=True), APPLY_PATCH, {**pool(), "spec": spec}
    body: Any = [{"op": "replace", "path": "/spec", "value": spec}] if how == "json" else patch
    asyncio.run(writer.patch(KEY, JSON_PATCH if how == "json" else media, (body, []), options))
    left = storage.objects[KEY]["spec"]
    assert {name: left[name] for name in spec if name != "updateStrategy"} == {
        name: value for name, value in spec.items() if name != "updateStrategy"
    }
    assert left["replicas"] == spec.get("replicas", 1)


def test_a_write_gives_up_when_others_are_always_faster() -> None:
    storage, writer = made()
    tries: list[int] = []

    def faster() -> None:
        tries.append(1)
        storage.put(copied(storage.objects[KEY]))
        storage.race = faster

    storage.race = faster
    with pytest.raises(StatusError, match="the object has been modified"):
        asyncio.run(writer.patch(KEY, MERGE_PATCH, ({"spec": {"replicas": 9}}, []), ME))
    assert len(tries) == ATTEMPTS
    with pytest.raises(StatusError):
        asyncio.run(writer.delete(KEY, Deleting()))
    assert KEY in storage.objects


def test_which_patches_name_a_version() -> None:
    assert names_version(MERGE_PATCH, {"metadata": {"resourceVersion": "1"}})
    assert not names_version(MERGE_PATCH, {"spec": {}})
    assert names_version(JSON_PATCH, [{"op": "test", "path": "/metadata/resourceVersion", "value": "1"}])
    assert not names_version(JSON_PATCH, {"path": "/metadata/resourceVersion"})
