"""Refill takes turns."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from greenroom.node.refill import allot


def test_pools_take_turns() -> None:
    assert allot({"a": 3, "b": 1}, budget=3) == ["a", "b", "a"]


def test_the_round_begins_behind_the_pool_served_last() -> None:
    assert allot({"a": 5, "b": 5, "c": 5}, budget=1, after="a") == ["b"]


@given(
    st.dictionaries(st.text(min_size=1, max_size=2), st.integers(0, 9), max_size=5),
    st.integers(-2, 20),
    st.none() | st.text(max_size=2),
)
def test_nothing_over_want_or_budget_and_nothing_left_unused(
    wants: dict[str, int], budget: int, after: str | None
) -> None:
    granted = Counter(allot(wants, budget, after))
    assert all(granted[name] <= wants[name] for name in granted)
    assert granted.total() == min(max(0, budget), sum(wants.values()))


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=2), st.integers(1, 20))
def test_no_pool_is_two_ahead_of_one_that_still_wants(wants: dict[str, int], budget: int) -> None:
    granted = Counter(allot(wants, budget))
    for name in wants:
        for other in wants:
            if granted[other] < wants[other]:
                assert granted[name] <= granted[other] + 1
