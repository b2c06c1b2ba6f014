"""Ids carry their home and have the form that E2B's clients can split."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.wire import ids


def test_a_sandbox_id_names_its_node() -> None:
    code = ids.new_node_code()
    made = ids.new_sandbox_id(code)
    assert re.fullmatch(r"i[a-z0-9]{19}", made)
    assert ids.node_code_of(made) == code


def test_a_snapshot_id_names_its_node_and_is_no_sandbox_id() -> None:
    code = ids.new_node_code()
    made = ids.new_snapshot_id(code)
    assert ids.is_snapshot_id(made)
    assert not ids.is_sandbox_id(made)
    assert ids.node_code_of(made) == code


@given(st.text(max_size=24))
def test_other_texts_are_no_ids(text: str) -> None:
    assert ids.is_sandbox_id(text) == bool(re.fullmatch(r"i[a-z0-9]{19}", text, re.ASCII))


@pytest.mark.parametrize(
    "text", ["", "i", "i" + "a" * 18, "i" + "a" * 20, "j" + "a" * 19, "i" + "A" * 19, "i" + "a" * 19 + "\n"]
)
def test_no_node_in_a_malformed_id(text: str) -> None:
    with pytest.raises(ValueError, match="not the id of a sandbox or snapshot"):
        ids.node_code_of(text)
