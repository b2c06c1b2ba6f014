"""Patterns of creates: when each is sent, from when it counts, and what class its end is."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.bench import claim_patterns
from greenroom.bench.claim_patterns import Outcome, PatternRow, outcome_of
from greenroom.errors import (
    BadRequest,
    InternalError,
    NodeUnavailable,
    OutcomeUnknown,
    PermanentError,
    PoolDry,
    RuntimeFailure,
    TemporaryError,
)
from greenroom.wire.tasks import spawn
from tests.bench.results import Quiet
from tests.support.waiting import until


class Scripted:
    """Stands in for a tenant: creates wait for `gate` when there is one; those in `failing` raise."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None
        self.failing: dict[int, Exception] = {}
        self.begun = 0
        self.alive: set[str] = set()
        self.most_at_once = 0
        self._now = 0

    async def create(self) -> str:
        number, self.begun = self.begun, self.begun + 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if number in self.failing:
                raise self.failing[number]
        finally:
            self._now -= 1
        self.alive.add(f"s{number}")
        return f"s{number}"

    async def end(self, sandbox_id: str) -> None:
        self.alive.remove(sandbox_id)

    async def run(
        self, pattern: claim_patterns.Pattern, count: int, every: float = 0.001
    ) -> list[PatternRow]:
        return await claim_patterns._run(self, pattern, count, every, Quiet())  # type: ignore[arg-type]


async def test_a_closed_loop_has_one_create_at_a_time_and_a_burst_all() -> None:
    scripted = Scripted()
    rows = await scripted.run("sequential", 4)
    assert scripted.most_at_once == 1
    assert [row.number for row in rows] == [0, 1, 2, 3]
    rows = await scripted.run("burst", 4)
    assert scripted.most_at_once == 4
    assert {row.due_s for row in rows} == {0.0}
    assert not scripted.alive


async def test_an_open_loop_sends_on_and_counts_from_when_a_create_was_due() -> None:
    scripted = Scripted()
    scripted.gate = asyncio.Event()
    running = spawn(scripted.run("staggered", 5, every=0.01), "staggered")
    await until(lambda: scripted.begun == 5)
    assert not scripted.alive, "none was answered, all were sent"
    scripted.gate.set()
    rows = await running
    assert [row.due_s for row in rows] == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04])
    assert all(row.sent_s >= row.due_s for row in rows)
    took = [row.ms or 0.0 for row in rows]
    assert took == sorted(took, reverse=True), "the first was due first and waited longest"


async def test_what_fails_is_a_row_of_its_class() -> None:
    scripted = Scripted()
    scripted.failing = {1: PoolDry("dry"), 2: InternalError("a bug")}
    rows = await scripted.run("burst", 4)
    found = claim_patterns.summarise_run(rows, 4, 200.0)
    (burst,) = found.summaries
    assert burst.outcomes == {"ok": 2, "rejected": 1, "failed": 1, "unknown": 0}
    assert burst.success == 0.5
    assert burst.create_ms.errors == {"dry": 1, "a bug": 1}
    assert not scripted.alive
    for table in claim_patterns.tables(found):
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_pattern_in_which_nothing_came_is_a_summary_too() -> None:
    row = PatternRow(pattern="burst", number=0, due_s=0.0, sent_s=0.001, outcome="rejected", error="dry")
    (found,) = claim_patterns.summarise_run([row], 1, 200.0).summaries
    assert (found.success, found.seconds, found.create_ms.n) == (0.0, 0.0, 0)


def no_answer() -> NodeUnavailable:
    try:
        raise NodeUnavailable("no answer") from ConnectionResetError()
    except NodeUnavailable as error:
        return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PoolDry("dry"), "rejected"),
        (TemporaryError("503"), "rejected"),
        (NodeUnavailable("no node is live"), "rejected"),
        (BadRequest("no"), "rejected"),
        (no_answer(), "unknown"),
        (OutcomeUnknown("lost"), "unknown"),
        (InternalError("bug"), "failed"),
        (PermanentError("500"), "failed"),
        (RuntimeFailure("no VM"), "failed"),
        (OSError(5, "io"), "failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_end_has_a_class(error: Exception, outcome: Outcome) -> None:
    assert outcome_of(error) == outcome
