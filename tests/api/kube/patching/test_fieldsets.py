"""Sets of fields survive being written and read, and say what differs between objects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube.kinds import CLAIM, SANDBOX
from greenroom.api.kube.patching.fieldsets import (
    MEMBER,
    Malformed,
    compared,
    decoded,
    encoded,
    flattened,
    shown,
    within,
    without,
)
from tests.support.schema_values import values

POD = {"spec": {"podTemplate": {"spec": {"containers": [{"name": "a", "ports": [{"containerPort": 80}]}]}}}}


def test_what_of_an_object_can_be_owned() -> None:
    obj = {
        "metadata": {"labels": {"a": "1"}, "finalizers": ["x/y"], "annotations": {}},
        "spec": {"operatingMode": "Running", **POD["spec"], "volumeClaimTemplates": [{"spec": {}}]},
    }
    container = ("f:spec", "f:podTemplate", "f:spec", "f:containers", 'k:{"name":"a"}')
    port = (*container, "f:ports", 'k:{"containerPort":80,"protocol":"TCP"}')
    assert flattened(obj, SANDBOX.schema) == {
        ("f:metadata", "f:labels", "f:a"): "1",
        ("f:metadata", "f:finalizers", 'v:"x/y"'): "x/y",
        ("f:metadata", "f:annotations"): {},
        ("f:spec", "f:operatingMode"): "Running",
        container: MEMBER,
        (*container, "f:name"): "a",
        port: MEMBER,
        (*port, "f:containerPort"): 80,
        ("f:spec", "f:volumeClaimTemplates"): [{"spec": {}}],
    }


def test_the_tree_has_dots_where_a_path_is_in_the_set_and_within_it_others_are() -> None:
    tree = {"f:spec": {"f:list": {'k:{"name":"a"}': {".": {}, "f:name": {}, "f:x": {}}}, "f:y": {}}}
    fields = decoded(tree)
    assert fields == {
        ("f:spec", "f:list", 'k:{"name":"a"}'),
        ("f:spec", "f:list", 'k:{"name":"a"}', "f:name"),
        ("f:spec", "f:list", 'k:{"name":"a"}', "f:x"),
        ("f:spec", "f:y"),
    }
    assert encoded(fields) == tree


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_sets_survive_being_written(data: st.DataObject) -> None:
    fields = frozenset(flattened(data.draw(values(CLAIM.schema)), CLAIM.schema))
    assert decoded(encoded(fields)) == fields


ELEMENTS = st.sampled_from(["f:a", "f:b", 'k:{"x":1}', 'v:"y"'])


@given(st.frozensets(st.lists(ELEMENTS, min_size=1, max_size=4).map(tuple), max_size=8))
def test_any_set_of_paths_survives(fields: frozenset[tuple[str, ...]]) -> None:
    assert decoded(encoded(fields)) == fields
    assert within(fields) >= fields


MALFORMED: dict[str, Any] = {
    "list": [],
    "leaf": {"f:a": 1},
    "plain": {"a": {}},
    "kind": {"x:a": {}},
    "keys": {"k:[]": {}},
    "json": {"v:{": {}},
}


@pytest.mark.parametrize("tree", MALFORMED.values(), ids=MALFORMED)
def test_trees_that_are_none(tree: Any) -> None:
    with pytest.raises(Malformed):
        decoded(tree)


def test_trees_are_bounded() -> None:
    tree: dict[str, Any] = {}
    for _ in range(70):
        tree = {"f:a": tree}
    with pytest.raises(Malformed, match="too many"):
        decoded(tree)


def test_items_have_their_keys_once() -> None:
    with pytest.raises(Malformed, match="has no name"):
        flattened({"spec": {"podTemplate": {"spec": {"containers": [{}]}}}}, SANDBOX.schema)
    twice = {"metadata": {"finalizers": ["a", "a"]}}
    with pytest.raises(Malformed, match="two items"):
        flattened(twice, SANDBOX.schema)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_differences_are_what_has_to_be_taken_and_given(data: st.DataObject) -> None:
    old, new = (flattened(data.draw(values(CLAIM.schema)), CLAIM.schema) for _ in range(2))
    changed, gone = compared(old, new)
    model = {path: value for path, value in old.items() if path not in gone}
    model |= {path: new[path] for path in changed}
    assert model == new
    assert compared(old, old) == (frozenset(), frozenset())


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_taking_paths_away_leaves_the_others(data: st.DataObject) -> None:
    obj = data.draw(values(CLAIM.schema))
    whole = flattened(obj, CLAIM.schema)
    gone = frozenset(data.draw(st.sets(st.sampled_from(sorted(whole)), max_size=3))) if whole else frozenset()
    left = without(obj, CLAIM.schema, gone, frozenset())
    expected = {path for path in whole if not any(path[:n] in gone for n in range(1, len(path) + 1))}
    # Items of lists cannot lose their keys and still be the same item.
    if not any(element.startswith("k:") for path in gone for element in path[:-1]):
        assert flattened(left, CLAIM.schema).keys() == expected


def test_paths_as_errors_spell_them() -> None:
    assert shown(("f:spec", "f:env", 'k:{"b":2,"a":"x"}', "f:v")) == '.spec.env[a="x",b=2].v'
    assert shown(("f:finalizers", 'v:"x/y"')) == '.finalizers[="x/y"]'
