"""Signatures are those that the published SDK makes, and open nothing else."""

from __future__ import annotations

import pytest
from e2b.sandbox.signature import get_signature
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest.errors import AgentError
from greenroom.guest.signing import authorize_file, signature

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(TEXT, st.sampled_from(["read", "write"]), TEXT, TEXT.filter(bool))
def test_ours_are_the_sdks(path: str, operation: str, user: str, token: str) -> None:
    theirs = get_signature(path, operation, user, token)  # type: ignore[arg-type]
    assert signature(path, operation, user, token, None) == theirs["signature"]
    timed = get_signature(path, operation, user, token, 600)  # type: ignore[arg-type]
    expiration = str(timed["expiration"])
    assert signature(path, operation, user, token, expiration) == timed["signature"]
    arguments = {
        "path": path,
        "username": user,
        "signature": timed["signature"],
        "signature_expiration": expiration,
    }
    authorize_file({}, arguments, operation, token)


@given(TEXT, TEXT, TEXT, TEXT)
def test_anything_else_is_refused(path: str, user: str, given_signature: str, expiration: str) -> None:
    arguments = {
        "path": path, "username": user, "signature": given_signature, "signature_expiration": expiration,
    }  # fmt: skip
    with pytest.raises(AgentError) as refused:
        authorize_file({}, arguments, "read", "the token")
    assert refused.value.status == 401


@given(TEXT, TEXT)
def test_an_expiration_must_be_a_number(path: str, expiration: str) -> None:
    right = signature(path, "read", "", "token", expiration)
    arguments = {"path": path, "signature": right, "signature_expiration": expiration}
    try:
        late = int(expiration) >= 4_000_000_000
    except ValueError:
        late = False
    if not late:
        with pytest.raises(AgentError):
            authorize_file({}, arguments, "read", "token")
