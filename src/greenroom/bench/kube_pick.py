"""How long it takes to choose a node, and to find a sandbox, in the view that every api and master has in memory.

A view and a warm index are filled as a stream of changes fills them: so many nodes, so many sandboxes on each, and
stocks of members that differ. Then nodes are picked for claims of which some are always on their way; the oldest is
settled as its node tells of new numbers. That runs in a process of its own (`python -m greenroom.bench.kube_pick
SPEC.json`): a million entries are a gigabyte, which no other part should have around.

The baseline is one look-up in a dictionary of as many keys, timed in the same loop in turns.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
import tracemalloc
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from greenroom.bench.processes import answer_of, answering
from greenroom.bench.report import Meter, Table, Target, cell
from greenroom.bench.summaries import Sample, Summary, divide, summarise
from greenroom.fleet.view import View
from greenroom.fleet.warm import WarmIndex
from greenroom.wire.changes import Whole
from greenroom.wire.ids import new_sandbox_id
from greenroom.wire.messages import Listed, PoolCounts, Size

SHAPES = ((26, 100), (26, 2000), (200, 2000), (2000, 500))
"""Nodes, and sandboxes on each."""
QUICK_SHAPES = ((4, 25), (8, 50))
LOOKUPS = (200, 2000)
"""The shape in which sandboxes are looked up."""
WARM = 50
"""Most warm members of a node; each begins with a number between 1 and this."""
UNDER_WAY = 20
"""Claims that are picked for and not settled yet, at any time."""
TRACED = 2000
"""Picks whose allocations are traced, which makes each many times slower; they are not timed."""
P50_LIMIT = 20.0
"""Microseconds."""
FLAT_LIMIT = 1.5
"""Of the slowest shape's median over the fastest's. Timing itself wavers by a tenth; linear would be a hundred."""
DEADLINE = 600.0
"""Seconds for one shape."""
_SIZE = Size("small", 1, 512, 4096)
_POOL = ("base", "small")
_OWNER = "default"


class PickSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One shape."""

    nodes: int
    entries: int
    picks: int
    seed: int = 1


class PickRow(msgspec.Struct, frozen=True, kw_only=True):
    """One shape's figures, in microseconds."""

    nodes: int
    entries: int
    """On each node."""
    fill_s: float
    """Seconds to fill the view, frames decoded before."""
    pick_us: Summary
    peak_bytes: Summary
    """Bytes that are allocated within a pick, at most at a time."""
    kept_blocks: float
    """Objects that are allocated more after all picks than before, for each: none stay."""
    by_id_us: Summary
    by_name_us: Summary
    dict_us: Summary
    """The baseline."""


class PickFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All shapes."""

    rows: list[PickRow]
    flatness: float | None
    """The slowest shape's median over the fastest's."""


def _sandbox(code: str, node: str, number: int) -> Listed:
    return Listed(
        sandbox_id=new_sandbox_id(code),
        template="base",
        size=_SIZE,
        state="running",
        started_at=1.7e9 + number,
        ends_at=1.8e9 + number,
        node=node,
        owner=_OWNER,
        name=f"{code}-{number}",
    )


def filled(nodes: int, entries: int, stock: random.Random) -> tuple[View, WarmIndex, list[str], float]:
    """A view and an index of such a fleet, the ids in it, and the seconds that the filling took."""
    warm = WarmIndex()
    view = View(warm)
    ids: list[str] = []
    spent = 0.0
    for number in range(nodes):
        code, name = f"{number:04d}", f"node-{number}"
        sandboxes = [_sandbox(code, name, each) for each in range(entries)]
        ids += [sandbox.sandbox_id for sandbox in sandboxes]
        counts = PoolCounts(
            template=_POOL[0],
            size=_POOL[1],
            target=WARM,
            warm=stock.randint(1, WARM),
            starting=0,
            waiting=0,
        )
        whole = Whole(stream=f"{code}-bench", seq=1, sandboxes=sandboxes, pools=[counts])
        begun = time.perf_counter()
        view.join(code, name, 0.0)
        warm.admit(code, True)
        view.apply(code, whole, 0.0)
        spent += time.perf_counter() - begun
    return view, warm, ids, spent


def _timed(attempts: int, work: Callable[[int], object]) -> Summary:
    """Microseconds of each of so many calls."""
    clock = time.perf_counter_ns
    samples: list[Sample] = []
    for number in range(attempts):
        begun = clock()
        found = work(number)
        took = clock() - begun
        samples.append(Sample(took / 1000) if found is not None else Sample(None, "nothing was found"))
    return summarise(samples)


class Burst:
    """Claims that come one after the other, some always on their way."""

    def __init__(self, warm: WarmIndex, chosen: random.Random) -> None:
        self._warm = warm
        self._chosen = chosen
        self._under_way: deque[str] = deque()

    def timed(self, picks: int) -> Summary:
        """Microseconds of each of so many picks."""
        pick, clock = self._warm.pick, time.perf_counter_ns
        took = array("d", bytes(8 * picks))
        for number in range(picks):
            begun = clock()
            node = pick(_POOL)
            took[number] = (clock() - begun) / 1000 if node is not None else -1.0
            self._after(node)
        return summarise(Sample(each) if each >= 0 else Sample(None, "no node was picked") for each in took)

    def traced(self, picks: int) -> Summary:
        """Bytes of each of so many picks, at most at a time."""
        samples: list[Sample] = []
        tracemalloc.start()
        try:
            for _ in range(picks):
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                node = self._warm.pick(_POOL)
                _, peak = tracemalloc.get_traced_memory()
                samples.append(Sample(float(peak - before)))
                self._after(node)
        finally:
            tracemalloc.stop()
        return summarise(samples)

    def _after(self, node: str | None) -> None:
        """A claim goes to its node; the oldest one's node tells how many members it has now."""
        if node is not None:
            self._under_way.append(node)
        if len(self._under_way) > UNDER_WAY or node is None:
            oldest = self._under_way.popleft()
            self._warm.told(oldest, _POOL, self._chosen.randint(1, WARM))
            self._warm.settle(oldest, _POOL)


def one(spec: PickSpec) -> PickRow:
    """Measure one shape, in this process."""
    chosen = random.Random(spec.seed)  # noqa: S311
    view, warm, ids, fill_s = filled(spec.nodes, spec.entries, chosen)
    gc.collect()
    wanted = [chosen.choice(ids) for _ in range(spec.picks)]
    names = [view.get(each).sandbox.name for each in wanted]  # type: ignore[union-attr]
    baseline = dict.fromkeys(ids, 0)
    burst = Burst(warm, chosen)
    before = sys.getallocatedblocks()
    pick_us = burst.timed(spec.picks)
    gc.collect()
    kept = sys.getallocatedblocks() - before
    return PickRow(
        nodes=spec.nodes,
        entries=spec.entries,
        fill_s=fill_s,
        pick_us=pick_us,
        peak_bytes=burst.traced(min(TRACED, spec.picks)),
        kept_blocks=max(0.0, kept / spec.picks),
        by_id_us=_timed(spec.picks, lambda number: view.get(wanted[number])),
        by_name_us=_timed(spec.picks, lambda number: view.named(_OWNER, names[number])),
        dict_us=_timed(spec.picks, lambda number: baseline.get(wanted[number])),
    )


async def measure(directory: Path, quick: bool, meter: Meter) -> PickFigures:
    """Every shape, each in a process of its own."""
    shapes = QUICK_SHAPES if quick else SHAPES
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    meter.begin(len(shapes))
    rows: list[PickRow] = []
    for nodes, entries in shapes:
        meter.say(f"choosing among {nodes} nodes × {entries} sandboxes")
        spec = PickSpec(nodes=nodes, entries=entries, picks=500 if quick else 20_000)
        name = f"pick-{nodes}-{entries}"
        rows.append(await answer_of(name, "greenroom.bench.kube_pick", spec, directory, PickRow, DEADLINE))
        meter.advance()
    return put_together(rows)


def put_together(rows: list[PickRow]) -> PickFigures:
    """The figures over all shapes."""
    medians = [row.pick_us.p50 for row in rows if row.pick_us.p50 is not None]
    return PickFigures(rows=rows, flatness=divide(max(medians, default=None), min(medians, default=None)))


def targets(figures: PickFigures) -> list[Target]:
    """What was aimed at."""
    made = [
        Target(
            name=f"choosing a node of {row.nodes} × {row.entries}, p50",
            value=row.pick_us.p50,
            limit=P50_LIMIT,
            unit=" µs",
        )
        for row in figures.rows
    ]
    made.append(
        Target(
            name="choosing a node: slowest shape over fastest, p50",
            value=figures.flatness,
            limit=FLAT_LIMIT,
            unit="",
        )
    )
    # Both look-ups are measured in every shape; what was aimed at is the one with most sandboxes on a node.
    most = max(figures.rows, key=lambda row: ((row.nodes, row.entries) == LOOKUPS, row.nodes * row.entries))
    for what, found in (("id", most.by_id_us), ("name", most.by_name_us)):
        made.append(
            Target(
                name=f"look-up by {what} in {most.nodes} × {most.entries}, p50",
                value=found.p50,
                limit=P50_LIMIT,
                unit=" µs",
            )
        )
    return made


def tables(figures: PickFigures) -> list[Table]:
    """For people."""
    shapes = [f"{row.nodes} × {row.entries}" for row in figures.rows]
    sides = ("pick_us", "by_id_us", "by_name_us", "dict_us")
    return [
        Table(
            "Choosing a node and finding a sandbox in the view, µs: p50 (p99)",
            ["nodes × sandboxes", "n", "choose", "by id", "by name", "baseline: dict.get"],
            [
                [
                    shape,
                    str(row.pick_us.n),
                    *(f"{cell(getattr(row, side).p50)} ({cell(getattr(row, side).p99)})" for side in sides),
                ]
                for shape, row in zip(shapes, figures.rows, strict=True)
            ],
        ),
        Table(
            "What a choice allocates",
            ["nodes × sandboxes", "bytes at most, p50", "p99", "objects kept", "filling the view, s"],
            [
                [
                    shape,
                    cell(row.peak_bytes.p50),
                    cell(row.peak_bytes.p99),
                    cell(row.kept_blocks),
                    cell(row.fill_s),
                ]
                for shape, row in zip(shapes, figures.rows, strict=True)
            ],
        ),
    ]


def failures(figures: PickFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [
        (f"{what} in {row.nodes} × {row.entries}", found)
        for row in figures.rows
        for what, found in (
            ("choosing", row.pick_us),
            ("look-up by id", row.by_id_us),
            ("look-up by name", row.by_name_us),
        )
    ]


if __name__ == "__main__":
    sys.exit(answering(sys.argv[1:], PickSpec, one))
