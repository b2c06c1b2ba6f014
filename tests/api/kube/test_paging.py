"""Pages follow each other without gap or repetition, and tokens are only those that the server made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.paging import Token, cut, decoded, encoded, limit_of, too_old
from greenroom.api.kube.status import StatusError

KEYS = st.tuples(st.sampled_from(["", "a", "b"]), st.text(alphabet="abc", min_size=1, max_size=3))


@given(st.lists(KEYS, unique=True).map(sorted), st.integers(1, 5))
def test_pages_make_the_list(keys: list[tuple[str, str]], limit: int) -> None:
    objects = [{"metadata": {"namespace": ns, "name": name}} for ns, name in keys]
    found, after = [], None
    while True:
        page = cut(objects, 7, limit, after)
        found += page.objects
        assert page.metadata["resourceVersion"] == "7"
        assert page.metadata.get("remainingItemCount", 0) == len(objects) - len(found)
        if "continue" not in page.metadata:
            break
        token = decoded(page.metadata["continue"])
        assert token.version == 7
        after = token.after
    assert found == objects
    assert cut(objects, 7, 0).objects == objects


@given(st.integers(-1, 2**60), KEYS)
def test_tokens_survive(version: int, after: tuple[str, str]) -> None:
    assert decoded(encoded(Token(version, after))) == Token(version, after)


@given(st.text(max_size=60))
def test_other_texts_are_no_tokens(text: str) -> None:
    with pytest.raises(StatusError) as refused:
        decoded(text)
    assert refused.value.code == 400


def test_an_old_token_tells_how_to_go_on() -> None:
    failure = too_old(Token(5, ("n", "x")))
    assert (failure.code, failure.reason) == (410, "Expired")
    assert decoded(failure.continue_token) == Token(-1, ("n", "x"))


def test_limits() -> None:
    assert [limit_of(each) for each in (None, "", "0", "500")] == [0, 0, 0, 500]
    for text in ("-1", "x", "1e3", "9" * 30, "0" * 20 + "9" * 5000, "٣"):
        with pytest.raises(StatusError):
            limit_of(text)
