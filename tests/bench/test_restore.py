"""The restore benchmark with engines made of nothing: every attempt is a row, every VM is ended."""

from __future__ import annotations

import os

import pytest

from greenroom.bench import restore
from greenroom.bench.restore import Contender, Records, RestorePlan, RestoreReport, Side, StartRow
from greenroom.bench.stages import Stages, memory_of
from greenroom.errors import RuntimeFailure, SetupError
from tests.bench.results import SIZE, Quiet, conditions


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "SETTLE", 0.0)


class Engine:
    """Restores numbers, each of which takes `ms`; every one in `failing` fails."""

    def __init__(self, ms: float, failing: frozenset[int] = frozenset()) -> None:
        self.ms = ms
        self.failing = failing
        self.made = 0
        self.alive: set[int] = set()
        self.stopped: list[int] = []

    async def restore(self) -> tuple[int, Stages]:
        number, self.made = self.made, self.made + 1
        if number in self.failing:
            raise RuntimeFailure("no slot\nis free")
        self.alive.add(number)
        return number, Stages.between(0.0, 0.25 * self.ms / 1000, None, self.ms / 1000)

    async def stop(self, number: int) -> None:
        self.alive.remove(number)
        self.stopped.append(number)

    def contender(self, side: Side) -> Contender[int]:
        return Contender(side, self.restore, lambda _number: os.getpid(), self.stop)


def plan(count: int, rounds: int = 2) -> RestorePlan:
    return RestorePlan(template="base", size=SIZE, count=count, parallel=[2], rounds=rounds, starts=1)


async def measured(fenced: Engine, bare: Engine, count: int) -> RestoreReport:
    records, meter = Records(), Quiet()
    for number in (1, 2):
        await fenced.contender("greenroom").batch(records, count, 2, number, meter)
        await bare.contender("bare").batch(records, count, 2, number, meter)
    assert meter.advanced == 4 * count
    records.starts.append(StartRow(round=1, parallel=2, error="the guest agent did not answer"))
    return restore.summarise_run(conditions(), plan(count), records, 1 << 20, 1 << 10)


async def test_failed_restores_are_rows_and_the_rest_is_ended() -> None:
    fenced, bare = Engine(30.0, frozenset({0, 4})), Engine(10.0)
    report = await measured(fenced, bare, 4)
    assert not fenced.alive
    assert not bare.alive
    assert (len(fenced.stopped), len(bare.stopped)) == (6, 8)
    assert [(row.restored, row.failed) for row in report.batches] == [(3, 1), (4, 0), (3, 1), (4, 0)]
    assert len(report.restores) == 16
    mine, base = report.summaries
    assert (mine.total_ms.attempts, mine.total_ms.failed) == (8, 2)
    assert mine.total_ms.errors == {"no slot is free": 2}
    assert base.total_ms.failed == 0
    assert report.failed == 3
    assert dict(restore.failures(report))["first answer"].failed == 1


async def test_the_fence_costs_the_ratio_of_the_sides() -> None:
    report = await measured(Engine(30.0), Engine(10.0), 3)
    (cost,) = report.fence
    assert cost.time.overall == pytest.approx(3.0)
    assert cost.time.rounds == pytest.approx([3.0, 3.0])
    assert len(cost.rate.rounds) == 2
    mine = report.summaries[0]
    assert mine.prepare_ms.p50 == pytest.approx(7.5)
    assert mine.pss_mean_mib is not None
    tables = restore.tables(report)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


async def test_a_border_that_was_not_seen_leaves_the_whole() -> None:
    report = await measured(Engine(30.0), Engine(10.0), 1)
    mine = report.summaries[0]
    assert mine.total_ms.n == 2
    assert mine.process_ms.n == mine.load_ms.n == 0
    assert mine.load_ms.failed == 2


async def test_a_side_of_which_nothing_came_up_has_no_figure() -> None:
    report = await measured(Engine(30.0, frozenset(range(10))), Engine(10.0), 2)
    (cost,) = report.fence
    assert cost.time.overall is None
    assert cost.rate.rounds == [None, None]
    assert report.summaries[0].per_second.failed == 2


def test_memory_of_a_process_is_read() -> None:
    found = memory_of(os.getpid())
    assert found.pss_mib >= found.private_mib > 1
    with pytest.raises(OSError, match="No such"):
        memory_of(2**22 + 1)


def test_what_the_machine_cannot_do_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match="root"):
        plan(1).check()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SetupError, match="smaller --count"):
        plan(10_000_000).check()
