"""What a role counts and times, and how it tells: one registry a process, served as text under `/metrics`.

Counters and histograms are module-level constants of the role's `metrics` module, as prometheus-client means
them to be; what can be read off the parts at any time (pools, the relay, the node table) is read when it is
asked for (`reading`), so it costs nothing before. Labels have few values by design: never an id, never an owner.

What is observed on the way of a claim costs about a microsecond each: `child` remembers the series of a set of
label values, because finding it anew costs more than counting.

Every metric is listed in docs/observability.md, and a test compares that list with what the roles expose.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from greenroom.errors import GreenroomError, InternalError, OutcomeUnknown, RuntimeFailure

M = TypeVar("M", bound=MetricWrapperBase)
Rows = Iterable[tuple[Sequence[str], float]]
"""Label values and the number they have."""

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
READERS = ("metrics", "operator")
"""Callers that may read metrics."""
BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0),
)
"""Seconds: from a queue that is not there to a hand-over that took all the time it may."""

# The time at which each series was born would double what a scrape reads, and tells nothing here.
disable_created_metrics()  # type: ignore[no-untyped-call]
REGISTRY = CollectorRegistry()
"""Everything this process counts."""
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """A counter of this process; its name ends with `_total`."""
    return Counter(name, text, labels, registry=REGISTRY)


class _QuickHistogram(Histogram):
    """prometheus-client looks for the bucket from the first on; a claim has a dozen observations."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count `amount` seconds."""
        self._sum.inc(amount)
        self._buckets[bisect.bisect_left(self._upper_bounds, amount)].inc(1)


def histogram(name: str, text: str, labels: Sequence[str] = ()) -> Histogram:
    """A histogram of this process, in seconds."""
    return _QuickHistogram(name, text, labels, registry=REGISTRY, buckets=BUCKETS)


@functools.lru_cache(maxsize=4096)
def _child(metric: MetricWrapperBase, values: tuple[str, ...]) -> Any:
    return metric.labels(*values)


def child(metric: M, *values: str) -> M:
    """The series of `metric` with these label values."""
    return _child(metric, values)  # type: ignore[no-any-return]


def outcome_of(error: BaseException | None) -> str:
    """How something ended: `ok`, `rejected` (asked wrongly, or no room), `failed` (our fault) or `unknown`."""
    if error is None:
        return "ok"
    if isinstance(error, OutcomeUnknown | asyncio.CancelledError):
        return "unknown"
    if isinstance(error, InternalError | RuntimeFailure) or not isinstance(error, GreenroomError):
        return "failed"
    return "rejected"


class Outcome:
    """A block whose end is counted by its outcome, the last label, and timed if there is a histogram for it."""

    __slots__ = ("_begun", "_counter", "_seconds", "_values")

    def __init__(self, counted: Counter, *values: str, seconds: Histogram | None = None) -> None:
        self._counter = counted
        self._values = values
        self._seconds = seconds
        self._begun = 0.0

    def __enter__(self) -> Outcome:
        self._begun = time.perf_counter()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        values = (*self._values, outcome_of(error))
        child(self._counter, *values).inc()
        if self._seconds is not None:
            child(self._seconds, *values).observe(time.perf_counter() - self._begun)


def gauges(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """A gauge as it stands now."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def counts(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """A counter that somebody else keeps, as it stands now; its name ends with `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


class _Reading(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


@contextlib.contextmanager
def reading(read: Callable[[], Iterable[Metric]]) -> Iterator[None]:
    """For the length of a block, `read` is called for each scrape, and what it returns is told."""
    reader = _Reading(read)
    REGISTRY.register(reader)
    try:
        yield
    finally:
        REGISTRY.unregister(reader)


More = Callable[[], Awaitable[bytes]]
"""Further metrics in the same format, from elsewhere."""


async def exposition(more: More | None = None) -> bytes:
    """Everything, in the text format 0.0.4 (`CONTENT_TYPE`)."""
    own = generate_latest(REGISTRY)
    return own if more is None else own + await more()
