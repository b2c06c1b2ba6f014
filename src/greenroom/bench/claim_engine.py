"""The claim engine alone: what a node does between a claim request and its answer, without HTTP and without a VM.

The node's own parts are at work (`Keeper`, `Warmer` with its pools and refill, `Journal` on a file), in this
process and on its event loop, and they log as a node does. Only the VM engine is the *simulated* one, with a
hand-over that takes no time: resuming a guest and giving it its identity are measured apart, on real VMs. A claim
counts from the call of `Keeper.claim` to its return, when all of it is in the journal. That is a commit in SQLite's
WAL with `synchronous=NORMAL`, so it outlives a SIGKILL of the node, though not a power cut, and neither would the VM.

Each claim has two baselines right beside it: the claim's final row written by one bare transaction to a file of the
same schema, settings and medium, and a member popped from a dict, which is what a claim would cost without a memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from greenroom.bench.report import (
    RATIO_COLUMNS,
    TAIL_COLUMNS,
    Meter,
    Table,
    Target,
    ratio_cells,
    reason,
    tail_cells,
)
from greenroom.bench.rounds import by_round
from greenroom.bench.summaries import Ratio, Sample, Summary, compare, summarise
from greenroom.config import Config, VmConfig
from greenroom.errors import GreenroomError, RuntimeFailure
from greenroom.node import journal as journals
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Vm
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.logs import JsonFormatter
from greenroom.wire.messages import ClaimRequest, PoolSpec, Size

ROUND = 100
"""Claims of a round, one right after the other; their sandboxes end after it."""
POOL = 128
"""Warm members; the pool is full again before each round, and being refilled in it."""
RESTORE_SECONDS = 0.008
"""Of a simulated restore: what a real one from a stock takes, two at a time; so refill intrudes as much as it would."""
FULL_DEADLINE = 30.0
"""Seconds for the simulated pool to be full again, which takes less than one."""
P50_LIMIT = 0.2
P99_LIMIT = 2.0
_Figure = Literal["claim_ms", "cpu_ms", "transaction_ms", "pop_ms"]


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One claim and what was measured right beside it, in milliseconds."""

    round: int
    claim_ms: float | None = None
    cpu_ms: float | None = None
    """CPU time of this process's one thread meanwhile: what a claim costs where others do not take the CPU away."""
    transaction_ms: float | None = None
    """One bare INSERT of the same row, committed."""
    pop_ms: float | None = None
    """One `dict.pop`, the two readings of the clock around it included."""
    error: str = ""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The claim engine beside its baselines."""

    runtime: Literal["simulated"] = "simulated"
    pool: int
    durable: int
    """Claims that a second connection found in the journal's file at the end; all of them, if all is well."""
    claim_ms: Summary
    cpu_ms: Summary
    transaction_ms: Summary
    pop_ms: Summary
    to_transaction: Ratio
    """Claim over bare transaction."""
    rows: list[EngineRow]


class Immediate(SimulatedRuntime):
    """The simulated engine with a hand-over that takes no time and gives way to nothing else."""

    async def start(self, vm: Vm) -> None:
        self._own(vm).state = "running"


class BareTable:
    """The journal's table without the journal: what one transaction of a claim's row costs."""

    def __init__(self, path: Path, journal: Path) -> None:
        """Rows are those of `journal`, which must exist; `path` is made, with the same schema."""
        journals.Journal(path).close()
        self._db = sqlite3.connect(path, isolation_level=None)
        journals.set_up(self._db)
        self._journal = sqlite3.connect(journal)
        columns = len(self._db.execute("PRAGMA table_info(claims)").fetchall())
        self._insert = f"INSERT INTO claims VALUES ({', '.join('?' * columns)})"  # noqa: S608 (a number of marks)

    def insert(self, key: str) -> float:
        """Milliseconds of one committed INSERT of the row that the claim has left in the journal.

        Raises RuntimeFailure when there is none, or it cannot be written.
        """
        try:
            row = self._journal.execute(
                "SELECT * FROM claims WHERE key=? AND state='running'", (key,)
            ).fetchone()
            if row is None:
                raise RuntimeFailure("the claim is not in the journal")
            began = time.perf_counter()
            self._db.execute(self._insert, row)
            return (time.perf_counter() - began) * 1000
        except sqlite3.DatabaseError as error:
            raise RuntimeFailure(f"the bare table cannot be written: {error}") from error

    def close(self) -> None:
        self._journal.close()
        self._db.close()


@contextlib.contextmanager
def logging_as_a_node(path: Path) -> Iterator[None]:
    """For the length of a block, Greenroom's lines go to a file in a role's form: a claim writes one."""
    logger = logging.getLogger("greenroom")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(JsonFormatter("node", 0))
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
        handler.close()


async def measure(directory: Path, template: str, size: Size, count: int, meter: Meter) -> EngineFigures:
    """`count` claims one after the other, with the journal in `directory`. Raises GreenroomError."""
    config = Config(vm=VmConfig(engine="simulated"))
    runtime = Immediate(restore_delay=RESTORE_SECONDS)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(logging_as_a_node(directory / "node.log"))
        journal = journals.Journal(directory / "journal.db")
        stack.callback(journal.close)
        bare = BareTable(directory / "bare.db", directory / "journal.db")
        stack.callback(bare.close)
        stack.push_async_callback(runtime.close)
        warmer = await stack.enter_async_context(Warmer(runtime, config, directory))
        keeper = await stack.enter_async_context(
            Keeper(name="bench", runtime=runtime, warmer=warmer, journal=journal, config=config)
        )
        await warmer.set_pools(
            [PoolSpec(template=template, size=size, target=POOL)], lambda _step, _done: None
        )
        await warmer.ready()
        meter.say(f"{count} claims in process, on the simulated engine")
        meter.begin(count)
        rows: list[EngineRow] = []
        durable = 0
        # Round 0 does not count: it brings code and SQLite's pages into memory.
        for number in range(1 + -(-count // ROUND)):
            await _full(warmer)
            alive: list[str] = []
            for index in range(ROUND if number == 0 else min(ROUND, count - len(rows))):
                request = ClaimRequest(key=f"bench-{number}-{index}", template=template, size=size, ttl=600.0)
                row = await _one(keeper, bare, request, number, alive)
                if number:
                    rows.append(row)
                    meter.advance()
            if number:
                durable += _running_in(directory / "journal.db")
            while alive:
                await keeper.release(alive.pop())
    return summarise_run(rows, durable)


async def _one(
    keeper: Keeper, bare: BareTable, request: ClaimRequest, number: int, alive: list[str]
) -> EngineRow:
    """One claim and its baselines."""
    try:
        began, cpu = time.perf_counter(), time.thread_time()
        sandbox = await keeper.claim(request)
        spent, claimed = (time.thread_time() - cpu) * 1000, (time.perf_counter() - began) * 1000
        alive.append(sandbox.sandbox_id)
        transaction = bare.insert(request.key)
        members = {request.key: sandbox}
        began = time.perf_counter()
        members.pop(request.key)
        popped = (time.perf_counter() - began) * 1000
    except GreenroomError as error:
        return EngineRow(round=number, error=reason(error))
    return EngineRow(round=number, claim_ms=claimed, cpu_ms=spent, transaction_ms=transaction, pop_ms=popped)


async def _full(warmer: Warmer) -> None:
    """Wait until the pool is full. Raises RuntimeFailure after FULL_DEADLINE."""
    end = time.monotonic() + FULL_DEADLINE
    while any(pool.warm < pool.target or pool.starting for pool in warmer.status()):
        if time.monotonic() > end:
            raise RuntimeFailure("the simulated pool is not full again in time")
        await asyncio.sleep(0.001)


def _running_in(path: Path) -> int:
    """Sandboxes that the journal's file tells of, asked through a connection of its own as a next node would."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("SELECT count(*) FROM claims WHERE state='running'").fetchone()[0])


def summarise_run(rows: list[EngineRow], durable: int) -> EngineFigures:
    """The figures over all rows."""

    def over(name: _Figure) -> Summary:
        return summarise(Sample(getattr(row, name), row.error) for row in rows)

    return EngineFigures(
        pool=POOL,
        durable=durable,
        claim_ms=over("claim_ms"),
        cpu_ms=over("cpu_ms"),
        transaction_ms=over("transaction_ms"),
        pop_ms=over("pop_ms"),
        to_transaction=compare(
            by_round(rows, lambda row: Sample(row.claim_ms, row.error)),
            by_round(rows, lambda row: Sample(row.transaction_ms, row.error)),
        ),
        rows=rows,
    )


def tables(figures: EngineFigures) -> list[Table]:
    """For people."""
    named = [
        ("claim", figures.claim_ms),
        ("CPU time in it", figures.cpu_ms),
        ("one bare transaction of its row", figures.transaction_ms),
        ("dict.pop", figures.pop_ms),
    ]
    return [
        Table(
            "Claim engine in process, commit included, simulated VMs, ms",
            ["", *TAIL_COLUMNS],
            [[name, *tail_cells(summary)] for name, summary in named],
        ),
        Table(
            "Claim engine over one bare transaction",
            RATIO_COLUMNS,
            [ratio_cells(figures.to_transaction)],
        ),
    ]


def targets(figures: EngineFigures) -> list[Target]:
    """What is aimed at."""
    return [
        Target(name="claim in process, p50", value=figures.claim_ms.p50, limit=P50_LIMIT, unit=" ms"),
        Target(name="claim in process, p99", value=figures.claim_ms.p99, limit=P99_LIMIT, unit=" ms"),
    ]


def failures(figures: EngineFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [("claim in process", figures.claim_ms)]
