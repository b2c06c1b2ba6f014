"""Rounds: every attempt has its place, sides swap theirs, ratios stay within a round."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from greenroom.bench.rounds import by_round, ratio, share, turns
from greenroom.bench.summaries import Sample


class Row(msgspec.Struct, frozen=True):
    round: int
    value: float


def sample(row: Row) -> Sample:
    return Sample(row.value)


@given(st.integers(1, 200), st.data())
def test_the_shares_of_all_rounds_are_as_many_as_asked_for(count: int, data: st.DataObject) -> None:
    rounds = data.draw(st.integers(1, count))
    shares = [share(count, rounds, number) for number in range(1, rounds + 1)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(st.lists(st.integers(), min_size=1, max_size=4, unique=True), st.integers(1, 50))
def test_every_side_has_its_turn_and_first_and_last_swap(sides: list[int], number: int) -> None:
    now, then = turns(sides, number), turns(sides, number + 1)
    assert sorted(now) == sorted(then) == sorted(sides)
    assert (now[0], now[-1]) == (then[-1], then[0])


def test_a_ratio_divides_only_what_was_measured_in_the_same_round() -> None:
    slow = [Row(1, 20.0), Row(2, 200.0), Row(2, 220.0)]
    fast = [Row(1, 10.0), Row(2, 100.0), Row(3, 1.0)]
    assert by_round(slow, sample) == {1: [Sample(20.0)], 2: [Sample(200.0), Sample(220.0)]}
    found = ratio(slow, fast, sample)
    assert found.rounds == [2.0, 2.1, None]
