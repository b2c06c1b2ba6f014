"""The arithmetic of the benchmarks: samples in, summaries and ratios out; no I/O and no clock.

A failed attempt is a sample too. It carries an error instead of a value, so it is counted wherever its figures
would have been and can be dropped by nobody.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """One attempt: its value in the summary's unit, or None and the reason why there is none."""

    value: float | None
    error: str = ""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of `attempts` attempts. The figures are of the `n` that succeeded, None when none did."""

    attempts: int
    failed: int
    n: int
    min: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    errors: dict[str, int] = {}
    """How often each reason made an attempt fail."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One side's median over the baseline's, round by round, and the median of the rounds.

    Only what was measured side by side is divided: a machine that grows busier between two rounds moves both
    sides of each and so no ratio. How far the rounds lie apart is how much a single one is worth here. None
    where a side has no figure.
    """

    overall: float | None
    rounds: list[float | None]

    @property
    def low(self) -> float | None:
        """The smallest of the rounds."""
        return min((value for value in self.rounds if value is not None), default=None)

    @property
    def high(self) -> float | None:
        """The largest of the rounds."""
        return max((value for value in self.rounds if value is not None), default=None)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted values lie, linear between the two nearest.

    This is definition 7 of Hyndman and Fan (1996), the one of NumPy and R: 0 gives the minimum, 0.5 the median,
    1 the maximum. Raises ValueError for no values or a share outside of 0 to 1.
    """
    if not ordered:
        raise ValueError("no values have no percentile")
    if not 0 <= share <= 1:
        raise ValueError(f"a share lies between 0 and 1, not at {share}")
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    low, high = ordered[below], ordered[math.ceil(position)]
    # Rounding must not carry an interpolated value past its neighbours.
    return min(high, max(low, low + (high - low) * (position - below)))


def summarise(samples: Iterable[Sample]) -> Summary:
    """Count the samples and describe the values of those that succeeded, in their own unit."""
    values: list[float] = []
    errors: Counter[str] = Counter()
    for sample in samples:
        if sample.value is None:
            errors[sample.error or "no reason was given"] += 1
        else:
            values.append(sample.value)
    failed = errors.total()
    if not values:
        return Summary(attempts=failed, failed=failed, n=0, errors=dict(errors))
    values.sort()
    return Summary(
        attempts=len(values) + failed,
        failed=failed,
        n=len(values),
        min=values[0],
        p50=percentile(values, 0.5),
        p95=percentile(values, 0.95),
        p99=percentile(values, 0.99),
        max=values[-1],
        errors=dict(errors),
    )


def rate(count: int, seconds: float) -> float | None:
    """Things a second; None when no time has passed."""
    return count / seconds if seconds > 0 else None


def divide(figure: float | None, baseline: float | None) -> float | None:
    """`figure` over `baseline`; None where either is missing or the baseline is not above zero."""
    if figure is None or baseline is None or baseline <= 0:
        return None
    return figure / baseline


def compare(figures: Mapping[int, Sequence[Sample]], baseline: Mapping[int, Sequence[Sample]]) -> Ratio:
    """The ratio between two sides, whose samples are given by round."""

    def median(samples: Iterable[Sample]) -> float | None:
        return summarise(samples).p50

    rounds = [
        divide(median(figures.get(number, ())), median(baseline.get(number, ())))
        for number in sorted({*figures, *baseline})
    ]
    return Ratio(overall=median(Sample(ratio) for ratio in rounds), rounds=rounds)
