"""The claim engine in process: real parts of a node, the rows they leave, and failures that count."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest

from greenroom.bench import claim_engine
from greenroom.bench.claim_engine import EngineRow
from greenroom.errors import RuntimeFailure
from greenroom.node.keeper import Keeper
from greenroom.wire.messages import ClaimRequest, Sandbox
from tests.bench.results import SIZE, Quiet

pytestmark = pytest.mark.slow


async def test_each_claim_is_in_the_journal_and_has_its_baselines(tmp_path: Path) -> None:
    meter = Quiet()
    found = await claim_engine.measure(tmp_path, "base", SIZE, 130, meter)
    assert found.runtime == "simulated"
    assert found.durable == found.claim_ms.n == meter.total == meter.advanced == 130
    assert [row.round for row in found.rows] == [1] * 100 + [2] * 30
    assert all(row.claim_ms and row.cpu_ms and row.transaction_ms and row.pop_ms for row in found.rows)
    assert len(found.to_transaction.rounds) == 2
    with sqlite3.connect(tmp_path / "journal.db") as db:
        states = dict(db.execute("SELECT state, count(*) FROM claims GROUP BY state").fetchall())
    db.close()
    assert states == {"ended": 230}, "the first hundred do not count"
    bare = sqlite3.connect(tmp_path / "bare.db")
    assert bare.execute("SELECT count(*) FROM claims WHERE state='running'").fetchone() == (230,)
    assert bare.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    bare.close()
    assert not logging.getLogger("greenroom").handlers
    assert logging.getLogger("greenroom").propagate


async def test_a_claim_that_fails_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Keeper.claim, 0

    async def claim(self: Keeper, request: ClaimRequest) -> Sandbox:
        nonlocal seen
        seen += 1
        if seen == 105:
            raise RuntimeFailure("the guest\ndid not come up")
        return await real(self, request)

    monkeypatch.setattr(Keeper, "claim", claim)
    found = await claim_engine.measure(tmp_path, "base", SIZE, 10, Quiet())
    assert (found.claim_ms.n, found.claim_ms.failed, found.durable) == (9, 1, 9)
    assert found.rows[4] == EngineRow(round=1, error="the guest did not come up")
    assert claim_engine.failures(found)[0][1].errors == {"the guest did not come up": 1}
    for table in claim_engine.tables(found):
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert [target.limit for target in claim_engine.targets(found)] == [0.2, 2.0]
