"""Whose a signature is: as the guest's agent makes it, and nobody's when anything is different."""

from __future__ import annotations

from urllib.parse import quote, quote_from_bytes, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest import signing
from greenroom.node.signatures import owner_of
from greenroom.wire.messages import SignedUrl

TOKENS = [(f"i{number}", f"token-{number}") for number in range(5)]
texts = st.text(max_size=40)


def signed(
    path: str, operation: str = "read", user: str = "", by: str = "token-3", expiration: str | None = None
) -> str:
    """The query of a URL as E2B's clients make it."""
    arguments = {"path": path, "signature": signing.signature(path, operation, user, by, expiration)}
    if user:
        arguments["username"] = user
    if expiration is not None:
        arguments["signature_expiration"] = expiration
    return urlencode(arguments)


def owner(query: str, *operations: str) -> str | None:
    return owner_of(SignedUrl(query, operations or ("read",)), TOKENS)


@given(path=texts, user=texts, expiration=st.none() | st.integers(0, 10**11).map(str))
def test_what_the_agent_accepts_is_found(path: str, user: str, expiration: str | None) -> None:
    for operation in ("read", "write"):
        query = signed(path, operation, user, expiration=expiration)
        assert owner(query, operation) == "i3"
        assert owner(query, "read", "write") == "i3"
        assert owner(query, "write" if operation == "read" else "read") is None


@given(st.binary(max_size=30))
def test_a_path_that_is_no_text_is_read_as_the_agent_reads_it(path: bytes) -> None:
    made = signing.signature(path.decode("utf-8", "surrogateescape"), "read", "", "token-3", None)
    assert owner(f"path={quote_from_bytes(path)}&signature={quote(made, safe='')}") == "i3"


def test_an_expiry_that_is_over_is_the_agents_to_tell() -> None:
    assert owner(signed("/a", expiration="1")) == "i3"


@pytest.mark.parametrize(
    "query",
    [
        "",
        "path=/a",
        "path=/a&signature=",
        "path=/a&signature=v1_",
        "path=/a&signature=%00%ff",
        signed("/a", by="token-9"),
        signed("/a").replace("path=%2Fa", "path=%2Fb"),
        signed("/a") + "&username=root",
        signed("/a") + "&signature_expiration=1",
        signed("/a", expiration="1").replace("expiration=1", "expiration=2"),
        "signature=x&" + signed("/a"),
        signed("/" + "a" * 5000),
        "&".join(["x=1"] * 200) + "&" + signed("/a"),
    ],
)
def test_anything_else_is_nobodys(query: str) -> None:
    assert owner(query) is None


def test_of_a_repeated_argument_the_first_counts_as_in_the_agent() -> None:
    assert owner(signed("/a") + "&path=/b&signature=x") == "i3"


@given(st.text(max_size=100))
def test_no_query_is_an_error(query: str) -> None:
    assert owner(query, "read", "write") is None


def test_every_token_is_tried_whichever_matches() -> None:
    tried = []

    def tokens() -> object:
        for pair in TOKENS:
            tried.append(pair)
            yield pair

    assert owner_of(SignedUrl(signed("/a", by="token-0"), ("read",)), tokens()) == "i0"  # type: ignore[arg-type]
    assert tried == TOKENS
