"""JSON patches do what RFC 6902 says, bounded, and change nothing that they were given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.objects import copied, same
from greenroom.api.kube.patching.jsonpatch import OPERATIONS_LIMIT, apply_json_patch
from greenroom.api.kube.status import StatusError

RFC = {
    "A.1 add a member": ({"foo": "bar"}, [("add", "/baz", "qux")], {"baz": "qux", "foo": "bar"}),
    "A.2 add an element": (
        {"foo": ["bar", "baz"]},
        [("add", "/foo/1", "qux")],
        {"foo": ["bar", "qux", "baz"]},
    ),
    "A.3 remove a member": ({"baz": "qux", "foo": "bar"}, [("remove", "/baz")], {"foo": "bar"}),
    "A.4 remove an element": (
        {"foo": ["bar", "qux", "baz"]},
        [("remove", "/foo/1")],
        {"foo": ["bar", "baz"]},
    ),
    "A.5 replace": ({"baz": "qux", "foo": "bar"}, [("replace", "/baz", "boo")], {"baz": "boo", "foo": "bar"}),
    "A.6 move a value": (
        {"foo": {"bar": "baz", "waldo": "fred"}, "qux": {"corge": "grault"}},
        [("move", "/foo/waldo", "/qux/thud")],
        {"foo": {"bar": "baz"}, "qux": {"corge": "grault", "thud": "fred"}},
    ),
    "A.7 move an element": (
        {"foo": ["all", "grass", "cows", "eat"]},
        [("move", "/foo/1", "/foo/3")],
        {"foo": ["all", "cows", "eat", "grass"]},
    ),
    "A.8 test": ({"baz": "qux", "foo": ["a", 2]}, [("test", "/baz", "qux"), ("test", "/foo/1", 2)], None),
    "A.10 add a nested member": (
        {"foo": "bar"},
        [("add", "/child", {"x": {}})],
        {"foo": "bar", "child": {"x": {}}},
    ),
    "A.14 escapes": ({"/": 9, "~1": 10}, [("test", "/~01", 10)], None),
    "A.16 add an array": ({"foo": ["bar"]}, [("add", "/foo/-", ["abc"])], {"foo": ["bar", ["abc"]]}),
    "copy": ({"a": [1]}, [("copy", "/a", "/b"), ("add", "/b/-", 2)], {"a": [1], "b": [1, 2]}),
    "whole": ({"a": 1}, [("replace", "", {"b": 2})], {"b": 2}),
    "onto itself": ({"a": 1}, [("move", "/a", "/a")], {"a": 1}),
}
REFUSED = {
    "A.9 test": ({"baz": "qux"}, [("test", "/baz", "bar")]),
    "A.12 no parent": ({"foo": "bar"}, [("add", "/baz/bat", "qux")]),
    "A.15 text is no number": ({"/": 9, "~1": 10}, [("test", "/~01", "10")]),
    "true is not 1": ({"a": 1}, [("test", "/a", True)]),
    "remove nothing": ({}, [("remove", "/a")]),
    "replace nothing": ({}, [("replace", "/a", 1)]),
    "behind the end": ({"a": []}, [("add", "/a/1", 1)]),
    "leading zero": ({"a": [1, 2]}, [("remove", "/a/01")]),
    "negative": ({"a": [1, 2]}, [("remove", "/a/-1")]),
    "into itself": ({"a": {"b": 1}}, [("move", "/a", "/a/b")]),
    "below a scalar": ({"a": 1}, [("add", "/a/b", 1)]),
}


def operation(kind: str, path: str, value: Any = None) -> dict[str, Any]:
    """An operation of an RFC 6902 patch."""
    if kind in ("move", "copy"):
        return {"op": kind, "from": path, "path": value}
    return {"op": kind, "path": path, **({} if kind == "remove" else {"value": value})}


@pytest.mark.parametrize("name", RFC)
def test_patches_of_the_rfc(name: str) -> None:
    document, operations, wanted = RFC[name]
    before = copied(document)
    assert apply_json_patch(document, [operation(*each) for each in operations]) == (wanted or document)
    assert document == before


@pytest.mark.parametrize("name", REFUSED)
def test_patches_that_a_document_does_not_take(name: str) -> None:
    document, operations = REFUSED[name]
    before = copied(document)
    with pytest.raises(StatusError) as refused:
        apply_json_patch(document, [operation(*each) for each in operations])
    assert (refused.value.code, refused.value.reason) == (422, "Invalid")
    assert document == before


NO_PATCHES: dict[str, Any] = {
    "object": {},
    "text": ["x"],
    "op": [{"op": "grow", "path": ""}],
    "value": [{"op": "add", "path": "/a"}],
    "from": [{"op": "move", "path": "/a"}],
    "pointer": [{"op": "remove", "path": "a"}],
}


@pytest.mark.parametrize("patch", NO_PATCHES.values(), ids=NO_PATCHES)
def test_what_is_no_patch(patch: Any) -> None:
    with pytest.raises(StatusError) as refused:
        apply_json_patch({}, patch)
    assert refused.value.code == 400


def test_a_patch_is_bounded() -> None:
    with pytest.raises(StatusError) as refused:
        apply_json_patch({}, [{"op": "test", "path": "", "value": {}}] * (OPERATIONS_LIMIT + 1))
    assert refused.value.code == 413
    doubling = [{"op": "copy", "from": "/a", "path": "/a/-"}] * 60
    with pytest.raises(StatusError, match="copies too much"):
        apply_json_patch({"a": [1]}, doubling)


def test_a_patch_does_not_multiply_a_long_text() -> None:
    spread = [{"op": "copy", "from": "/a/0", "path": "/a/-"}] * 1000
    with pytest.raises(StatusError, match="copies too much"):
        apply_json_patch({"a": ["x" * 100_000]}, spread)
    assert len(apply_json_patch({"a": ["x"]}, spread)["a"]) == 1001


DOCUMENTS = st.recursive(
    st.integers(0, 3) | st.booleans() | st.none() | st.sampled_from(["x", "a/b", "m~n"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "a/b", "m~n", ""]), inner)
    ),
    max_leaves=12,
)


def difference(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """A patch from one document to another, made the plain way."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in old.keys() | new.keys():
            at = f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
            if name not in new:
                found.append(operation("remove", at))
            elif name not in old:
                found.append(operation("add", at, new[name]))
            else:
                found += difference(old[name], new[name], at)
        return found
    if isinstance(old, list) and isinstance(new, list):
        cut = [operation("remove", f"{path}/{n}") for n in range(len(old) - 1, len(new) - 1, -1)]
        kept = min(len(old), len(new))
        middle = [each for n in range(kept) for each in difference(old[n], new[n], f"{path}/{n}")]
        return cut + middle + [operation("add", f"{path}/-", value) for value in new[kept:]]
    return [] if same(old, new) else [operation("replace", path, new)]


@given(DOCUMENTS, DOCUMENTS)
def test_the_difference_of_two_documents_makes_one_of_the_other(old: Any, new: Any) -> None:
    before = copied(old)
    assert same(apply_json_patch(old, difference(old, new)), new)
    assert same(old, before)
