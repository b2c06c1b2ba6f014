"""Merge patches do what RFC 7386 says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.objects import copied, same
from greenroom.api.kube.patching.mergepatch import apply_merge_patch

CASES: list[tuple[Any, Any, Any]] = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]
"""The test cases of the RFC's appendix A."""

DOCUMENTS = st.recursive(
    st.integers(0, 2) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=10,
)


@pytest.mark.parametrize(("target", "patch", "wanted"), CASES, ids=range(len(CASES)))
def test_the_cases_of_the_rfc(target: Any, patch: Any, wanted: Any) -> None:
    assert apply_merge_patch(target, patch) == wanted


def difference(old: Any, new: Any) -> Any:
    """The merge patch from one document to another."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return copied(new)
    found = {name: None for name in old if name not in new}
    for name, value in new.items():
        if name not in old or not same(old[name], value):
            found[name] = difference(old.get(name), value)
    return found


@given(DOCUMENTS, DOCUMENTS)
def test_the_difference_of_two_documents_makes_one_of_the_other(old: Any, new: Any) -> None:
    before = copied(old)
    patch = difference(old, new)
    assert same(apply_merge_patch(old, patch), new)
    assert same(apply_merge_patch(new, patch), new)
    assert same(old, before)
