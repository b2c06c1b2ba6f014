"""Metadata follows Kubernetes' rules, on create and on update."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube import objectmeta
from greenroom.api.kube.objectmeta import (
    ANNOTATIONS_LIMIT,
    generated_name,
    name_problem,
    prepare_create,
    prepare_update,
    qualified_problem,
    update_violations,
    value_problem,
    violations,
)

NOW = datetime(2026, 12, 1, 8, 30, tzinfo=UTC)
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}


def fields(namespaced: bool = True, **metadata: Any) -> list[str]:
    whole = {"name": "box", **({"namespace": "default"} if namespaced else {}), **metadata}
    return [cause.field for cause in violations(whole, namespaced=namespaced)]


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"name": ""}, "metadata.name"),
        ({"name": "Box"}, "metadata.name"),
        ({"name": "a" * 254}, "metadata.name"),
        ({"name": "box\n"}, "metadata.name"),
        ({"namespace": ""}, "metadata.namespace"),
        ({"namespace": "a.b"}, "metadata.namespace"),
        ({"generateName": "Box-"}, "metadata.generateName"),
        ({"labels": {"a b": "c"}}, "metadata.labels"),
        ({"labels": {"a": "b c"}}, "metadata.labels"),
        ({"labels": {"a": "b" * 64}}, "metadata.labels"),
        ({"annotations": {"a/b/c": ""}}, "metadata.annotations"),
        ({"annotations": {"a": "b" * ANNOTATIONS_LIMIT}}, "metadata.annotations"),
        ({"finalizers": ["plain"]}, "metadata.finalizers[0]"),
        ({"finalizers": [f"a.b/{n}" for n in range(65)]}, "metadata.finalizers"),
        (
            {"ownerReferences": [{**OWNER, "uid": ""}]},
            "metadata.ownerReferences[0].uid",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_refused(metadata: dict[str, Any], field: str) -> None:
    assert fields(**metadata) == [field]


def test_what_is_accepted() -> None:
    assert fields(labels={"app.kubernetes.io/name": "x", "b": ""}, annotations={"UPPER": "any thing"}) == []
    assert fields(finalizers=["example.com/keep", "foregroundDeletion"], generateName="box-") == []
    assert fields(namespaced=False) == []
    assert fields(namespaced=False, namespace="default") == ["metadata.namespace"]


def test_one_owner_manages_and_none_is_named_twice() -> None:
    owner = {**OWNER, "controller": True}
    assert fields(ownerReferences=[owner]) == []
    assert fields(ownerReferences=[owner, {**owner, "uid": "v"}]) == ["metadata.ownerReferences"]
    assert fields(ownerReferences=[owner, {**owner, "controller": False}]) == ["metadata.ownerReferences[1]"]


@given(st.from_regex(r"[a-z]([-a-z0-9]{0,300}[a-z0-9])?-?", fullmatch=True))
def test_generated_names_are_names(prefix: str) -> None:
    name = generated_name(prefix)
    assert name_problem(name) == ""
    assert name.startswith(prefix[:58])


@given(st.text(max_size=80))
def test_rules_answer_for_any_text(text: str) -> None:
    assert (qualified_problem(text) == "") <= (text.isascii() and text != "")
    assert (value_problem(text) == "") <= text.isascii()


def test_a_create_gets_what_the_server_gives() -> None:
    claimed = {"uid": "mine", "resourceVersion": "5", "deletionTimestamp": "x", "generation": 9}
    obj = {"metadata": {"name": "box", **claimed}}
    prepare_create(obj, uid="u-1", now=NOW)
    assert obj["metadata"] == {
        "name": "box",
        "uid": "u-1",
        "creationTimestamp": "2026-12-01T08:30:00Z",
        "generation": 1,
    }


def test_an_update_cannot_change_what_the_server_gave() -> None:
    old = {
        "metadata": {"name": "box", "namespace": "n", "uid": "u", "generation": 3, "creationTimestamp": "t"}
    }
    new: dict[str, Any] = {
        "metadata": {"name": "box", "namespace": "n", "generation": 7, "deletionTimestamp": "x"}
    }
    prepare_update(new, old)
    assert new == old
    new["metadata"] |= {"uid": "v", "name": "other", "namespace": "m"}
    prepare_update(new, old)
    found = [cause.field for cause in update_violations(new, old)]
    assert found == ["metadata.name", "metadata.namespace", "metadata.uid"]


def test_no_finalizer_comes_to_an_object_that_is_going() -> None:
    old = {"metadata": {"deletionTimestamp": "t", "finalizers": ["a.b/x", "a.b/y"]}}
    assert update_violations({"metadata": {"finalizers": ["a.b/x"]}}, old) == []
    found = update_violations({"metadata": {"finalizers": ["a.b/x", "a.b/z"]}}, old)
    assert "no new finalizers can be added" in found[0].message


def test_limits_are_as_documented() -> None:
    assert (objectmeta.NAME_LIMIT, objectmeta.LABEL_LIMIT, ANNOTATIONS_LIMIT) == (253, 63, 262_144)
