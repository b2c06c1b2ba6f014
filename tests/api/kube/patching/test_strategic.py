"""Strategic merge patches merge lists as the schema says, and know their directives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube.kinds import CLAIM
from greenroom.api.kube.objects import copied
from greenroom.api.kube.patching.strategic import apply_strategic_patch
from greenroom.api.kube.schemas.building import integer, keyed, mapping, record, text, unique
from greenroom.api.kube.status import StatusError
from tests.support.schema_values import values

ITEM = record("", {"name": text(""), "value": text(""), "more": mapping("")}, required=("name",))
SCHEMA = record(
    "",
    {
        "items": keyed("", ITEM, "name"),
        "names": unique("", {"type": "string"}),
        "plain": {"type": "array", "items": {"type": "string"}},
        "labels": mapping(""),
        "count": integer(""),
    },
)


def item(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


A, B, C = item("a", value="1"), item("b", value="2"), item("c")
CASES: dict[str, tuple[Any, Any, Any]] = {
    "maps merge, null removes": (
        {"labels": {"x": "1", "y": "2"}, "count": 1},
        {"labels": {"y": None, "z": "3"}, "count": 2},
        {"labels": {"x": "1", "z": "3"}, "count": 2},
    ),
    "items merge by key": (
        {"items": [A, B]},
        {"items": [item("b", value="9"), C]},
        {"items": [A, item("b", value="9"), C]},
    ),
    "an item goes": ({"items": [A, B]}, {"items": [item("a", **{"$patch": "delete"})]}, {"items": [B]}),
    "a list is replaced": ({"items": [A, B]}, {"items": [C, {"$patch": "replace"}]}, {"items": [C]}),
    "an item is replaced": (
        {"items": [item("a", more={"k": "v"})]},
        {"items": [item("a", value="3", **{"$patch": "replace"})]},
        {"items": [item("a", value="3")]},
    ),
    "a map is replaced": (
        {"labels": {"x": "1"}},
        {"labels": {"$patch": "replace", "y": "2"}},
        {"labels": {"y": "2"}},
    ),
    "a map goes": ({"labels": {"x": "1"}, "count": 1}, {"labels": {"$patch": "delete"}}, {"count": 1}),
    "sets unite": ({"names": ["a", "b"]}, {"names": ["b", "c"]}, {"names": ["a", "b", "c"]}),
    "what leaves a set": (
        {"names": ["a", "b"]},
        {"$deleteFromPrimitiveList/names": ["a"], "names": ["c"]},
        {"names": ["b", "c"]},
    ),
    "order of a set": ({"names": ["a", "b"]}, {"$setElementOrder/names": ["b", "a"]}, {"names": ["b", "a"]}),
    "order of items": (
        {"items": [A, B]},
        {"$setElementOrder/items": [item("c"), item("b"), item("a")], "items": [C]},
        {"items": [C, B, A]},
    ),
    "what the order does not name keeps its place": (
        {"items": [A, B, item("x")]},
        {"$setElementOrder/items": [item("b"), item("c")], "items": [C]},
        {"items": [A, B, item("x"), C]},
    ),
    "other lists are replaced": ({"plain": ["a", "b"]}, {"plain": ["c"]}, {"plain": ["c"]}),
    "keys that are retained": (
        {"labels": {"x": "1", "y": "2"}},
        {"labels": {"$retainKeys": ["x", "z"], "z": "3"}},
        {"labels": {"x": "1", "z": "3"}},
    ),
    "null removes a list": ({"items": [A], "names": ["a"]}, {"items": None, "names": None}, {}),
    "new maps lose their nulls": ({}, {"labels": {"x": None, "y": "1"}}, {"labels": {"y": "1"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_patch_makes_of_an_object(name: str) -> None:
    target, patch, wanted = CASES[name]
    before = copied(target), copied(patch)
    assert apply_strategic_patch(target, patch, SCHEMA) == wanted
    assert (target, patch) == before


@pytest.mark.parametrize(
    "patch",
    [
        [],
        {"$patch": "shake"},
        {"items": ["a"]},
        {"items": [{"value": "1"}]},
        {"$setElementOrder/items": 1},
        {"labels": {"$retainKeys": "x"}},
    ],
    ids=["list", "directive", "scalar", "no-key", "order", "retain"],
)
def test_what_is_no_strategic_patch(patch: Any) -> None:
    with pytest.raises(StatusError) as refused:
        apply_strategic_patch({"items": [A]}, patch, SCHEMA)
    assert refused.value.code == 400


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_an_object_is_a_patch_to_itself_and_a_patch_twice_is_a_patch_once(data: st.DataObject) -> None:
    target, patch = data.draw(values(CLAIM.schema)), data.draw(values(CLAIM.schema))
    assert apply_strategic_patch({}, target, CLAIM.schema) == target
    assert apply_strategic_patch(target, target, CLAIM.schema) == target
    once = apply_strategic_patch(target, patch, CLAIM.schema)
    assert apply_strategic_patch(once, patch, CLAIM.schema) == once


@given(st.lists(st.sampled_from("abcd"), unique=True), st.lists(st.sampled_from("abcd"), unique=True))
def test_lists_by_key_are_united_like_dictionaries(ours: list[str], theirs: list[str]) -> None:
    target = {"items": [item(name, value="old", more={"k": "v"}) for name in ours]}
    patch = {"items": [item(name, value="new") for name in theirs]}
    found = apply_strategic_patch(target, patch, SCHEMA)
    model = {name: item(name, value="old", more={"k": "v"}) for name in ours}
    for name in theirs:
        model[name] = {**model.get(name, {}), **item(name, value="new")}
    assert found["items"] == list(model.values())
