"""`python -m greenroom.bench.kube_watchers SPEC.json`: many watchers in one process, who look at bytes.

A thousand clients that decoded every event would be what is measured. So each of these reads its stream as it comes and
looks for *marks*: a sender has put a lane, a number and a time into an annotation, and within a lane numbers go up by
one. A number that is missing was lost, one that comes again was sent twice. The time is of the machine's monotonic
clock, so a mark also tells how long it was on its way. A few of them decode every line as well, as an informer does.

It is ready once every watch has begun, writes what it has seen to a file when all marks have come to all, and else when
it is told to end.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from array import array
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from greenroom.bench.summaries import percentile
from greenroom.wire.serving import Ready, raise_file_limit, tell_ready

ANNOTATION = "bench.greenroom.dev/mark"
BUCKET_MS = 0.25
"""Milliseconds of one bucket of the times."""
BUCKETS = 80_000
"""Twenty seconds; what takes longer is in the last."""
_MARK = re.compile(rb'bench\.greenroom\.dev/mark":\s?"(\d+)\.(\d+)\.(\d+)"')
_CONNECTING = 50
"""Connections that are made at the same time."""


def mark(lane: int, number: int) -> str:
    """The annotation's value, made right before it is sent."""
    return f"{lane}.{number}.{time.monotonic_ns()}"


class WatchersSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to watch and what to expect."""

    url: str
    target: str
    """Path and query of the watch."""
    headers: dict[str, str]
    count: int
    decoding: int
    """Of them, those that decode as well."""
    lanes: int
    marks: int
    """In each lane; numbered from 1."""
    result: str
    """Path of the file that is written at the end."""


class WatchersResult(msgspec.Struct, frozen=True, kw_only=True):
    """What all watchers of one process have seen together."""

    watchers: int
    marks: int
    lost: int
    """Marks that a watcher should have got and has not."""
    doubled: int
    """Marks that came again, or out of order."""
    broken: int
    """Streams that ended before all had come."""
    decoded: int
    disordered: int
    """Decoded events whose version was not above the one before."""
    bytes: int
    pieces: int
    """Reads, over all connections: how many marks come together says how far they are coalesced."""
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    histogram: dict[int, int]
    """Marks by bucket of `BUCKET_MS`."""


class Histogram:
    """Times in buckets: hundreds of thousands a second are counted, none is kept."""

    def __init__(self) -> None:
        self._counts = array("q", bytes(8 * BUCKETS))

    def add(self, milliseconds: float) -> None:
        """Count one."""
        self._counts[min(BUCKETS - 1, max(0, int(milliseconds / BUCKET_MS)))] += 1

    def counts(self) -> dict[int, int]:
        """Those buckets that have any."""
        return {index: count for index, count in enumerate(self._counts) if count}


def share_of(counts: dict[int, int], share: float) -> float | None:
    """The time, in milliseconds, by which this share of all had come; the upper bound of its bucket."""
    total = sum(counts.values())
    if not total:
        return None
    # The same definition as everywhere, on the numbers of the buckets.
    place = percentile(range(total), share)
    seen = 0
    for index in sorted(counts):
        seen += counts[index]
        if seen > place:
            return (index + 1) * BUCKET_MS
    return None


class Totals:
    """What the watchers of this process add up."""

    def __init__(self, spec: WatchersSpec) -> None:
        self.spec = spec
        self.histogram = Histogram()
        self.marks = self.doubled = self.broken = self.decoded = self.disordered = 0
        self.bytes = self.pieces = 0
        self.begun = self.complete = 0
        self.changed = asyncio.Event()


class Watcher(asyncio.Protocol):
    """One watch, read as bytes."""

    def __init__(self, totals: Totals, request: bytes, *, decodes: bool) -> None:
        self._totals = totals
        self._request = request
        self._decodes = decodes
        self._rest = b""
        self._begun = self._done = False
        self._version = 0
        self.seen = [0] * totals.spec.lanes
        """By lane, the last number."""
        self.lost = 0
        self._left = totals.spec.lanes * totals.spec.marks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        # uvloop's transports are none of asyncio's classes.
        cast("asyncio.WriteTransport", transport).write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream is over."""
        if self._left > 0:
            self._totals.broken += 1
            self._totals.changed.set()

    def data_received(self, data: bytes) -> None:
        """Look for marks in whole lines; the rest waits for more."""
        totals = self._totals
        if self._done:
            return
        totals.bytes += len(data)
        totals.pieces += 1
        if not self._begun:
            self._begin(self._rest + data)
            return
        whole, end, rest = (self._rest + data if self._rest else data).rpartition(b"\n")
        self._rest = rest
        if end:
            self._look(whole)

    def _begin(self, data: bytes) -> None:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            self._rest = data
            return
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise SystemExit(f"the api answered a watch with {head.splitlines()[0]!r}")
        self._begun, self._rest = True, b""
        self._totals.begun += 1
        self._totals.changed.set()
        if rest:
            self.data_received(rest)

    def _look(self, lines: bytes) -> None:
        totals, seen = self._totals, self.seen
        now = time.monotonic_ns()
        for lane, number, sent in _MARK.findall(lines):
            place, n = int(lane), int(number)
            before = seen[place]
            if n <= before:
                totals.doubled += 1
                continue
            self.lost += n - before - 1
            seen[place] = n
            totals.marks += 1
            totals.histogram.add((now - int(sent)) / 1e6)
            self._left -= n - before
        if self._decodes:
            self._decode(lines)
        if self._left <= 0:
            self._done = True
            totals.complete += 1
            totals.changed.set()

    def _decode(self, lines: bytes) -> None:
        # Between them are the lengths of the transfer coding's chunks.
        for line in lines.split(b"\n"):
            if line.startswith(b"{"):
                event = msgspec.json.decode(line, type=dict[str, Any])
                version = int(event["object"]["metadata"]["resourceVersion"])
                self._totals.decoded += 1
                self._totals.disordered += version <= self._version and event["type"] != "BOOKMARK"
                self._version = version

    @property
    def missing(self) -> int:
        """Marks that were skipped, or have not come."""
        return self.lost + sum(self._totals.spec.marks - number for number in self.seen)


def _request(spec: WatchersSpec) -> bytes:
    lines = [f"GET {spec.target} HTTP/1.1", "Host: api", "Accept: application/json"]
    lines += [f"{name}: {value}" for name, value in spec.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def _run(spec: WatchersSpec) -> None:
    loop = asyncio.get_running_loop()
    totals = Totals(spec)
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, ending, totals)
    host, _, port = spec.url.removeprefix("http://").rpartition(":")
    request = _request(spec)
    watchers = [Watcher(totals, request, decodes=number < spec.decoding) for number in range(spec.count)]
    for first in range(0, spec.count, _CONNECTING):
        some = watchers[first : first + _CONNECTING]
        made = (
            loop.create_connection(lambda watcher=watcher: watcher, host, int(port))  # type: ignore[misc]
            for watcher in some
        )
        await asyncio.gather(*made)
    await _until(totals, ending, lambda: totals.begun >= spec.count)
    tell_ready(Ready(url="-", detail={"watchers": spec.count}))
    await _until(totals, ending, lambda: totals.complete + totals.broken >= spec.count)
    place = Path(spec.result)
    temporary = place.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(_result(totals, watchers)))
    temporary.replace(place)
    await ending.wait()


def _end(ending: asyncio.Event, totals: Totals) -> None:
    ending.set()
    totals.changed.set()


async def _until(totals: Totals, ending: asyncio.Event, done: Any) -> None:
    while not (done() or ending.is_set()):
        totals.changed.clear()
        if done():
            return
        await totals.changed.wait()


def _result(totals: Totals, watchers: list[Watcher]) -> WatchersResult:
    counts = totals.histogram.counts()
    return WatchersResult(
        watchers=len(watchers),
        marks=totals.marks,
        lost=sum(watcher.missing for watcher in watchers),
        doubled=totals.doubled,
        broken=totals.broken,
        decoded=totals.decoded,
        disordered=totals.disordered,
        bytes=totals.bytes,
        pieces=totals.pieces,
        p50_ms=share_of(counts, 0.5),
        p99_ms=share_of(counts, 0.99),
        max_ms=share_of(counts, 1.0),
        histogram=counts,
    )


def main(arguments: list[str]) -> int:
    """Exit status 0 at a normal end."""
    if len(arguments) != 1:
        print("usage: python -m greenroom.bench.kube_watchers SPEC.json", file=sys.stderr)
        return 2
    raise_file_limit()
    uvloop.run(_run(msgspec.json.decode(Path(arguments[0]).read_bytes(), type=WatchersSpec)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
