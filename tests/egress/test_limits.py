"""The bucket: never more than its rate allows, never less than it promises."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.egress.limits import Bucket


@settings(deadline=None)
@given(st.lists(st.floats(0, 3), max_size=200), st.floats(0.5, 50), st.floats(1, 50))
def test_no_more_than_the_burst_and_the_rate(pauses: list[float], rate: float, burst: float) -> None:
    bucket, now, taken = Bucket(rate, burst), 100.0, 0
    for pause in pauses:
        now += pause
        taken += bucket.take(now)
        assert taken <= burst + rate * (now - 100.0) + 1e-6


@settings(deadline=None)
@given(st.floats(0.5, 50), st.integers(1, 50))
def test_whoever_keeps_to_the_rate_is_never_held_up(rate: float, burst: int) -> None:
    bucket = Bucket(rate, burst)
    assert all(bucket.take(0.0) for _ in range(burst))
    assert not bucket.take(0.0)
    assert all(bucket.take(number * 1.0001 / rate) for number in range(1, 50))


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = Bucket(10, 1)
    assert bucket.take(5.0)
    assert not bucket.take(5.0)
    assert not bucket.take(1.0)
