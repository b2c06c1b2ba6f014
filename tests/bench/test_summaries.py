"""The arithmetic, by property: nothing is dropped, nothing depends on order, figures stay within the values."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from greenroom.bench.summaries import Ratio, Sample, compare, divide, percentile, rate, summarise

values = st.floats(min_value=0.001, max_value=1e6, allow_nan=False)
successes = values.map(Sample)
failures = st.sampled_from(["pool dry", "no answer", ""]).map(lambda error: Sample(None, error))
samples = st.lists(st.one_of(successes, failures), max_size=40)
rounds = st.dictionaries(st.integers(1, 5), st.lists(st.one_of(successes, failures), max_size=6), max_size=5)


@given(samples)
def test_every_attempt_is_counted_once(attempts: list[Sample]) -> None:
    found = summarise(attempts)
    assert found.attempts == len(attempts)
    assert found.n + found.failed == found.attempts
    assert sum(found.errors.values()) == found.failed
    assert (found.min is None) == (found.p50 is None) == (found.p95 is None) == (found.max is None)
    assert (found.p50 is None) == (found.n == 0)


@given(samples.flatmap(lambda made: st.tuples(st.just(made), st.permutations(made))))
def test_the_order_of_attempts_does_not_matter(both: tuple[list[Sample], list[Sample]]) -> None:
    assert summarise(both[0]) == summarise(both[1])


@given(st.lists(values, min_size=1, max_size=40))
def test_figures_are_ordered_and_within_the_values(found: list[float]) -> None:
    summary = summarise(map(Sample, found))
    assert summary.min is not None
    assert summary.p50 is not None
    assert summary.p95 is not None
    assert summary.max is not None
    assert min(found) == summary.min <= summary.p50 <= summary.p95 <= summary.max == max(found)
    assert summary.p50 == pytest.approx(statistics.median(found))


@given(st.lists(values, min_size=1, max_size=40), st.lists(failures, max_size=10))
def test_failures_change_the_counts_and_no_figure(found: list[float], failed: list[Sample]) -> None:
    alone, mixed = summarise(map(Sample, found)), summarise([*failed, *map(Sample, found)])
    assert (alone.min, alone.p50, alone.p95, alone.max) == (mixed.min, mixed.p50, mixed.p95, mixed.max)
    assert mixed.failed == len(failed)


@given(st.lists(values, min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_is_never_a_smaller_value(found: list[float], one: float, other: float) -> None:
    ordered = sorted(found)
    low, high = sorted((one, other))
    assert ordered[0] <= percentile(ordered, low) <= percentile(ordered, high) <= ordered[-1]


@given(values, st.integers(1, 20), st.floats(0, 1))
def test_equal_values_have_that_percentile(value: float, times: int, share: float) -> None:
    assert percentile([value] * times, share) == value


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([10.0, 20.0], 0.25) == 12.5
    assert percentile([float(n) for n in range(101)], 0.95) == 95.0


@pytest.mark.parametrize(("ordered", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_what_has_no_percentile_is_refused(ordered: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"percentile|share"):
        percentile(ordered, share)


@given(rounds, st.floats(1.5, 100))
def test_a_side_that_is_slower_by_a_factor_has_that_ratio(
    base: dict[int, list[Sample]], factor: float
) -> None:
    assume(any(sample.value is not None for made in base.values() for sample in made))
    slower = {
        number: [Sample(None if s.value is None else s.value * factor, s.error) for s in made]
        for number, made in base.items()
    }
    found = compare(slower, base)
    assert found.overall == pytest.approx(factor)
    assert len(found.rounds) == len(base)
    assert all(ratio is None or ratio == pytest.approx(factor) for ratio in found.rounds)


@given(rounds, rounds)
def test_the_overall_ratio_lies_among_those_of_the_rounds(
    figures: dict[int, list[Sample]], base: dict[int, list[Sample]]
) -> None:
    found = compare(figures, base)
    if found.overall is None:
        assert found.low is None
        assert found.high is None
    else:
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.overall <= found.high


def test_a_machine_that_slows_down_between_rounds_does_not_move_the_ratio() -> None:
    figures = {1: [Sample(2.0)], 2: [Sample(20.0)] * 5, 3: [Sample(200.0)]}
    base = {1: [Sample(1.0)] * 5, 2: [Sample(10.0)], 3: [Sample(100.0)] * 3}
    assert compare(figures, base).overall == 2.0


def test_a_round_that_one_side_lost_has_no_ratio() -> None:
    found = compare({1: [Sample(2.0)], 2: [Sample(None, "gone")]}, {1: [Sample(1.0)], 2: [Sample(1.0)]})
    assert found == Ratio(overall=2.0, rounds=[2.0, None])
    assert (found.low, found.high) == (2.0, 2.0)


def test_nothing_is_divided_by_nothing() -> None:
    assert divide(1.0, 0.0) is None
    assert divide(None, 1.0) is None
    assert rate(3, 0.0) is None
    assert rate(3, 2.0) == 1.5
    empty = compare({}, {})
    assert (empty.overall, empty.low, empty.high) == (None, None, None)
