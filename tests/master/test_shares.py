"""How a pool's target is divided: the properties of largest remainder, and that a split stays put."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.fleet.shares import split
from greenroom.master.shares import allocate, resettle

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)
targets = st.integers(0, 10_000)
weighted = st.dictionaries(names, st.integers(0, 1000), min_size=1, max_size=30)
equal = st.sets(names, min_size=1, max_size=30)


bounds = st.dictionaries(names, st.integers(0, 200) | st.none(), max_size=30)


@given(targets, weighted, bounds)
def test_nobody_gets_more_than_it_can_take(target, weights, most):
    shares = allocate(target, weights, most, "pool")
    assert shares.keys() == weights.keys()
    open_ = [name for name, weight in weights.items() if weight > 0]
    room = sum(target if most.get(name) is None else min(target, most[name]) for name in open_)
    assert sum(shares.values()) == min(target, room)
    assert all(most.get(name) is None or share <= most[name] for name, share in shares.items())
    assert all(share == 0 for name, share in shares.items() if not weights[name])


@given(targets, weighted, bounds, st.dictionaries(names, st.integers(0, 500), max_size=30), st.booleans())
def test_what_is_kept_comes_to_the_same_as_a_new_split(target, weights, most, before, may_move):
    due = allocate(target, weights, most, "pool")
    shares = resettle(target, weights, most, before, "pool", may_move=may_move)
    assert sum(shares.values()) == sum(due.values())
    assert shares.keys() == weights.keys()
    assert all(most.get(name) is None or share <= most[name] for name, share in shares.items())
    assert resettle(target, weights, most, shares, "pool", may_move=may_move) == shares


@given(targets, weighted, bounds, targets)
def test_a_scale_moves_nothing_between_nodes(target, weights, most, later):
    before = allocate(target, weights, most, "pool")
    after = resettle(later, weights, most, before, "pool", may_move=False)
    changes = [after[name] - before[name] for name in weights]
    assert all(change >= 0 for change in changes) or all(change <= 0 for change in changes)


def test_a_small_change_of_weight_moves_nothing():
    before = split(100, {"a": 1000, "b": 1000}, "pool")
    assert resettle(100, {"a": 1000, "b": 1150}, {}, before, "pool") == before
    assert resettle(100, {"a": 1000, "b": 2000}, {}, before, "pool") == {"a": 33, "b": 67}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 2}, [1, 1]),
        ({"a": 3, "b": 2}, [2, 3]),
        ({"a": 1}, [0, 1]),
        ({"a": 13, "b": 11}, [11, 13]),
        ({"a": 16, "b": 8}, [12, 12]),
    ],
    ids=["both on one", "one more on one", "a single one", "nearly even", "uneven"],
)
def test_a_split_is_made_anew_only_where_that_helps(before, after):
    target = sum(before.values())
    shares = resettle(target, {"a": 7, "b": 7}, {}, before, "pool")
    assert sorted(shares.values()) == after


def test_a_node_that_comes_gets_its_share():
    assert resettle(10, {"a": 1, "b": 1}, {}, {"a": 10}, "pool") == {"a": 5, "b": 5}
    assert resettle(10, {"a": 1, "b": 1}, {}, {"a": 10}, "pool", may_move=False) == {"a": 10, "b": 0}
