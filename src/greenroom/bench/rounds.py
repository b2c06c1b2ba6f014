"""Rounds: sides that are measured by turns, so that all of them meet the same machine; no I/O and no clock.

A machine that grows busier halfway through a run would favour whoever was measured first. So a run is cut into
rounds, each has every side in it, and the sides change places from one round to the next; ratios are made within
a round (`summaries.compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from greenroom.bench.summaries import Ratio, Sample, compare


class InRound(Protocol):
    """A row that knows its round."""

    @property
    def round(self) -> int: ...


T = TypeVar("T")
R = TypeVar("R", bound=InRound)


def share(count: int, rounds: int, number: int) -> int:
    """Of `count` attempts those in the round with this number (from 1); the first rounds take what is left over."""
    whole, over = divmod(count, rounds)
    return whole + (number <= over)


def turns(sides: Sequence[T], number: int) -> Sequence[T]:
    """The sides in the order in which round `number` (from 1) measures them."""
    return sides if number % 2 else sides[::-1]


def by_round(rows: Iterable[R], sample: Callable[[R], Sample]) -> dict[int, list[Sample]]:
    """The samples of each round."""
    found: dict[int, list[Sample]] = {}
    for row in rows:
        found.setdefault(row.round, []).append(sample(row))
    return found


def ratio(figures: Iterable[R], baseline: Iterable[R], sample: Callable[[R], Sample]) -> Ratio:
    """The figures' medians over the baseline's, within each round."""
    return compare(by_round(figures, sample), by_round(baseline, sample))
