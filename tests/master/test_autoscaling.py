"""How many members the claims of a pool ask for."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from greenroom.master.autoscaling import ALPHA, DECAY, PATIENCE, ArrivalRate, Scale


def test_a_rate_rises_by_a_part_of_each_bin_and_falls_slowly() -> None:
    rate = ArrivalRate(0.0)
    for number in range(10):
        rate.arrived(number / 10)
    assert rate.rate(0.9) == 0.0, "the bin is not over"
    assert math.isclose(rate.rate(1.0), ALPHA * 10)
    assert math.isclose(rate.rate(1.0 + DECAY), ALPHA * 10 / math.e)


def test_a_steady_rate_is_found() -> None:
    rate = ArrivalRate(0.0)
    for number in range(1, 1000):
        rate.arrived(number / 20)
    assert math.isclose(rate.rate(50.0), 20.0, rel_tol=0.1)


def test_a_pool_grows_at_once_and_shrinks_when_less_has_been_enough_for_long() -> None:
    scale = Scale()
    assert scale.want(0.0, None, 2, 50, 0.0) == 2
    assert scale.want(10.0, 1.0, 2, 50, 1.0) == 20
    assert scale.want(100.0, 1.0, 2, 50, 2.0) == 50
    assert scale.want(1.0, 1.0, 2, 50, 3.0) == 50
    assert scale.want(5.0, 1.0, 2, 50, 4.0) == 50
    assert scale.want(1.0, 1.0, 2, 50, 3.0 + PATIENCE) == 10, "what was needed in between"
    assert scale.want(1.0, 1.0, 2, 50, 4.0 + PATIENCE) == 10
    assert scale.want(1.0, 1.0, 2, 50, 4.0 + 2 * PATIENCE) == 2


def test_claims_on_an_empty_pool_that_has_made_no_member_yet_bring_one() -> None:
    scale = Scale()
    assert scale.want(0.0, None, 0, 5, 0.0) == 0
    assert scale.want(0.3, None, 0, 5, 1.0) == 1
    assert scale.want(0.3, 10.0, 0, 5, 2.0) == 5


def test_other_bounds_hold_at_once() -> None:
    scale = Scale()
    assert scale.want(100.0, 1.0, 0, 50, 0.0) == 50
    assert scale.want(100.0, 1.0, 0, 20, 1.0) == 20
    assert scale.want(0.0, 1.0, 30, 40, 2.0) == 30


@given(
    st.integers(0, 20),
    st.integers(0, 50),
    st.lists(st.tuples(st.floats(0, 200), st.none() | st.floats(0, 5), st.floats(0, 100)), max_size=20),
)
def test_it_stays_within_its_bounds(
    least: int, more: int, steps: list[tuple[float, float | None, float]]
) -> None:
    scale, now = Scale(), 0.0
    for rate, seconds, pause in steps:
        now += pause
        wanted = scale.want(rate, seconds, least, least + more, now)
        assert least <= wanted <= least + more
