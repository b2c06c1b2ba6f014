"""Bodies are bounded before they are built, and repeated keys are told by their paths."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.decoding import BODY_LIMIT, DEPTH_LIMIT, VALUE_LIMIT, decoded, decoded_object
from greenroom.api.kube.status import StatusError

NUMBERS = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_json_comes_out_as_it_went_in(value: object) -> None:
    assert decoded(json.dumps(value).encode()) == (value, [])


def test_repeated_keys_are_named_and_the_last_counts() -> None:
    body = b'{"a": 1, "spec": {"x": 1, "x": 2, "l": [{"y": 1, "y": 1, "y": 3}]}, "a": 5}'
    assert decoded(body) == ({"a": 5, "spec": {"x": 2, "l": [{"y": 3}]}}, ["a", "spec.x", "spec.l[0].y"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'"\xff"',
        b"[1] 2",
        b"[" * 5000,
        b"[" * (DEPTH_LIMIT + 1) + b"]" * (DEPTH_LIMIT + 1),
        b"[" + b"1," * (VALUE_LIMIT + 1) + b"1]",
        b"9" * 5000,
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-32-le"),
        b'{"a": "\\ud800"}',
        b'{"\\uDFFF": 1}',
    ],
    ids=[
        *("empty", "open", "word", "nan", "huge", "bytes", "two", "deep-open", "deep", "many", "digits"),
        *("utf-16", "utf-32", "surrogate", "surrogate-key"),
    ],
)
def test_what_is_no_json_or_too_much_of_it_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(StatusError) as refused:
        decoded(body)
    assert (refused.value.code, refused.value.reason) == (400, "BadRequest")


def test_pairs_of_surrogates_are_one_character() -> None:
    assert decoded(b'"\\ud83d\\ude00"') == ("\U0001f600", [])


@pytest.mark.parametrize(
    "piece",
    [b'\\"', b'"', b"\\", b'"\\', b'\\""', b'"a'],
    ids=["escape", "quote", "slash", "open", "both", "text"],
)
def test_a_body_is_read_once_however_its_texts_are_cut(piece: bytes) -> None:
    # A search that begins anew behind every quote would take hours for this.
    with pytest.raises(StatusError):
        decoded((piece * BODY_LIMIT)[:BODY_LIMIT])


def test_depth_is_not_counted_within_texts() -> None:
    assert decoded(json.dumps("[" * 500 + '\\"{').encode())[0] == "[" * 500 + '\\"{'


def test_a_large_body_is_refused_by_its_size() -> None:
    with pytest.raises(StatusError) as refused:
        decoded(b" " * (BODY_LIMIT + 1))
    assert refused.value.code == 413


def test_an_object_is_needed() -> None:
    with pytest.raises(StatusError, match="a JSON object is needed"):
        decoded_object(b"[]")
