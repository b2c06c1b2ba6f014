"""What the parts of `bench kube` make of their rows, and the instruments that they measure with."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import msgspec
import pytest

from greenroom.bench import (
    kube,
    kube_burst,
    kube_grid,
    kube_pick,
    kube_scale,
    kube_serial,
    kube_store,
    kube_watch,
    performance_plots,
)
from greenroom.bench.kube import KubePlan, KubeReport
from greenroom.bench.kube_client import claim, launch_of, ready, sandbox
from greenroom.bench.kube_list import Memory
from greenroom.bench.kube_store import Observer
from greenroom.bench.kube_traffic import ClaimRow, served_once, warm_count
from greenroom.bench.kube_watchers import BUCKET_MS, WatchersResult, share_of
from greenroom.bench.kube_world import Shape
from greenroom.bench.report import Table
from greenroom.bench.summaries import Sample, summarise
from greenroom.errors import RuntimeFailure
from tests.bench.results import SIZE, Quiet, conditions

CPU = {"master": 1.0, "api": 2.0, "nodes": 1.5, "client": 0.5}


def even(tables: list[Table] | tuple[Table, ...]) -> bool:
    """Whether every row of every table has as many cells as the table has columns."""
    return all(len(row) == len(table.columns) for table in tables for row in table.rows)


def rows_of(count: int, **fields: str) -> list[ClaimRow]:
    return [
        ClaimRow(
            name=f"c{number}",
            answered_ms=2.0,
            ready_ms=3.0 + number,
            sandbox_id=f"i{number}",
            node=f"node-{number % 2}",
            **{"launch": "warm", **fields},
        )
        for number in range(count)
    ]


async def test_picks_and_lookups_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    meter = Quiet()
    found = await kube_pick.measure(tmp_path / "pick", True, meter)
    assert [(row.nodes, row.entries) for row in found.rows] == list(kube_pick.QUICK_SHAPES)
    assert meter.advanced == len(found.rows)
    for row in found.rows:
        assert (row.pick_us.n, row.pick_us.failed) == (500, 0)
        assert (row.by_id_us.n, row.by_name_us.n, row.dict_us.n) == (500, 500, 500)
    assert even(kube_pick.tables(found))
    assert len(kube_pick.targets(found)) == len(found.rows) + 3
    assert all(not summary.failed for _, summary in kube_pick.failures(found))


def test_who_was_served_twice_or_cold_is_counted() -> None:
    rows = [
        *rows_of(3),
        ClaimRow(name="again", ready_ms=1.0, sandbox_id="i0", launch="cold"),
        ClaimRow(name="failed", sandbox_id="i9", error="503 PoolExhausted"),
    ]
    assert served_once(rows) == 2
    assert warm_count(rows) == 3


def test_bursts_have_their_targets_by_kind() -> None:
    for kind in ("spread", "burst", "drained"):
        plan = kube_burst.plan_of(kind, quick=False)
        found = kube_burst.put_together(
            plan, rows_of(plan.claims), [Sample(0.3)], 1.0, CPU, [5, 5], held=plan.claims
        )
        assert even(kube_burst.tables(found))
        names = [target.name for target in kube_burst.targets(found)]
        assert any("served once" in name for name in names)
        assert any("warm" in name for name in names)
        doubled = kube_burst.put_together(
            plan, rows_of(plan.claims), [Sample(0.3)], 1.0, CPU, [5, 5], held=plan.claims + 1
        )
        missed = {entry.name for entry in kube_burst.targets(doubled) if entry.verdict == "missed"}
        assert any("served once" in name for name in missed)
    drained = kube_burst.plan_of("drained", quick=False)
    assert kube_burst.queue_limit_ms(drained) == pytest.approx(240.0)
    spread = kube_burst.plan_of("spread", quick=False)
    assert (spread.pool, spread.shape.nodes, spread.claims, spread.directly) == (130, 26, 100, True)


def test_serial_claims_beside_their_baseline() -> None:
    shape = Shape(nodes=2, rate=50.0)
    found = kube_serial.put_together(shape, 4, 0.3, CPU, rows_of(4), [Sample(0.5)] * 4)
    assert (found.warm, found.once, found.fluid_s) == (4, 4, 0.04)
    assert found.to_bare == pytest.approx(9.0)
    assert even(kube_serial.tables(found))
    assert {target.verdict for target in kube_serial.targets(found)} == {"met"}
    late = kube_serial.put_together(shape, 4, 0.6, CPU, rows_of(4, launch="cold"), [])
    assert [target.verdict for target in kube_serial.targets(late)] == ["met", "met", "missed", "missed"]


def test_the_grid_tells_whether_it_is_flat() -> None:
    cells = [kube_grid.cell_of(pool, 5, rows_of(pool), 1.0) for pool in (2, 6)]
    found = kube_grid.GridFigures(shape=Shape(nodes=2), cells=cells, flatness=kube_grid.flatness(cells))
    assert found.flatness["5"] == pytest.approx(5.5 / 3.5)
    assert [target.verdict for target in kube_grid.targets(found)] == ["missed"]
    assert even(kube_grid.tables(found))


def scaled(**fields: object) -> kube_scale.ScaleFigures:
    clean = kube_scale.ScaleFigures(
        shape=Shape(nodes=2),
        count=4,
        filled_s=1.0,
        emptied_s=1.0,
        members_left=0,
        created_ms=summarise([Sample(1.0)]),
        created_s=1.0,
        deleted_s=1.0,
        finalized=1,
        seen_deleting=1,
        stuck=0,
        objects_left=0,
        sandboxes_left=0,
        name_again=True,
        problems=[],
    )
    return msgspec.structs.replace(clean, **fields)


@pytest.mark.parametrize("field", ["members_left", "objects_left", "sandboxes_left", "stuck"])
def test_what_is_left_is_not_clean(field: str) -> None:
    assert kube_scale.clean(scaled())
    assert {target.verdict for target in kube_scale.targets(scaled())} == {"met"}
    assert not kube_scale.clean(scaled(**{field: 1}))
    assert "missed" in {target.verdict for target in kube_scale.targets(scaled(**{field: 1}))}
    assert even(kube_scale.tables(scaled()))


def result(**fields: object) -> WatchersResult:
    plain = WatchersResult(
        watchers=2,
        marks=20,
        lost=0,
        doubled=0,
        broken=0,
        decoded=10,
        disordered=0,
        bytes=1000,
        pieces=10,
        p50_ms=1.0,
        p99_ms=1.0,
        max_ms=1.0,
        histogram={3: 19, 9: 1},
    )
    return msgspec.structs.replace(plain, **fields)


def test_watchers_of_several_processes_are_added_up() -> None:
    crowd = kube_watch.crowd_of([result(), result(lost=2)], 200.0, 0.1, sent=11, failed=1)
    assert (crowd.watchers, crowd.came, crowd.expected) == (4, 40, 40)
    assert crowd.lost == 0, "a change that was refused is none that was lost"
    assert (crowd.p50_ms, crowd.max_ms) == (4 * BUCKET_MS, 10 * BUCKET_MS)
    figures = kube_watch.put_together(Shape(nodes=2, apis=2), [], [], crowd)
    assert even(kube_watch.tables(figures))
    lost = kube_watch.crowd_of([result(lost=3)], 200.0, 0.1, sent=10, failed=0)
    targets = kube_watch.targets(msgspec.structs.replace(figures, crowd=lost))
    assert [entry.verdict for entry in targets if entry.name.endswith("lost")] == ["missed"]


def test_a_share_of_a_histogram_is_its_buckets_end() -> None:
    assert share_of({}, 0.5) is None
    assert share_of({0: 99, 7: 1}, 0.5) == BUCKET_MS
    assert share_of({0: 99, 7: 1}, 1.0) == 8 * BUCKET_MS


async def test_what_others_write_to_a_store_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA journal_mode=WAL")
    other.execute("CREATE TABLE things (name TEXT)")
    async with Observer(path) as observer:
        observer.look()
        other.execute("SELECT count(*) FROM things").fetchone()
        observer.look()
        assert (observer.commits, observer.frames) == (0, 0)
        other.execute("INSERT INTO things VALUES ('one')")
        observer.look()
        assert observer.commits == 1
        assert observer.frames >= 1
        assert observer.rows() == {"things": 1}
    other.close()


def test_a_store_with_more_in_it_than_is_accounted_for_misses() -> None:
    plan = kube_store.plan_of("seed", quick=False)
    assert (plan.sandboxes, plan.pools, plan.shape.nodes, len(plan.shape.owners)) == (3000, 5, 3, 3)
    nothing = kube_store.Written(seconds=5.0, commits=0, frames=0, heartbeats=15)
    done = summarise([Sample(1.0)])
    found = kube_store.StoreFigures(
        plan=plan,
        resting=nothing,
        working=nothing,
        created_ms=done,
        deleted_ms=done,
        created=1,
        deleted=1,
        rows={"nodes": 3, "objects": 10},
        accounted={"nodes": 3, "objects": 10},
    )
    assert {target.verdict for target in kube_store.targets(found)} == {"met"}
    assert even(kube_store.tables(found))
    more = msgspec.structs.replace(found, rows={"nodes": 3, "sandboxes": 3000})
    assert [target.verdict for target in kube_store.targets(more)] == ["met", "met", "missed"]


def test_the_peak_of_a_processs_memory_is_seen() -> None:
    memory = Memory(os.getpid())
    memory.begin()
    block = bytearray(os.urandom(1)) * (48 << 20)
    del block
    assert memory.growth() > 30
    memory.begin()
    assert memory.growth() < 30
    with pytest.raises(RuntimeFailure, match="cannot be reset"):
        Memory(2**22 + 1).begin()


def test_what_is_read_from_objects() -> None:
    made = sandbox("a", "base", finalizers=["x/y"])
    assert made["metadata"] == {"name": "a", "finalizers": ["x/y"]}
    assert not ready(made)
    made["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    assert ready(made)
    assert launch_of(made) == ""
    made["metadata"]["labels"] = {"sandbox.greenroom.dev/launch": "warm"}
    assert launch_of(made) == "warm"
    assert claim("b", "pool")["spec"] == {"warmPoolRef": {"name": "pool"}, "warmPolicy": "prefer"}


def test_a_report_passes_only_when_all_was_measured_and_met() -> None:
    plan = KubePlan(template="base", size=SIZE, parts=["serial"], quick=True)
    serial = kube_serial.put_together(Shape(nodes=2, rate=50.0), 4, 0.3, CPU, rows_of(4), [Sample(0.5)])
    report = kube.put_together(KubeReport(conditions=conditions(), plan=plan, serial=serial))
    assert report.passed
    assert report.tables[-1].title == "Targets"
    assert any("simulated" in note for note in report.notes)
    again = msgspec.json.decode(msgspec.json.encode(report), type=KubeReport)
    assert again == report
    broken = kube.put_together(msgspec.structs.replace(report, problems={"watch": "404: no such path"}))
    assert not broken.passed
    assert broken.failed == 1


def test_claims_and_watches_are_drawn(tmp_path: Path) -> None:
    cells = [kube_grid.cell_of(pool, 5, rows_of(pool), 1.0) for pool in (2, 6)]
    grid = kube_grid.GridFigures(shape=Shape(nodes=2), cells=cells, flatness={})
    rows = [kube_watch.SeenRow(op="create", replica=0, paused=False, ms=float(n)) for n in range(1, 4)]
    crowd = kube_watch.crowd_of([result()], 200.0, 0.1, sent=10, failed=0)
    watch = kube_watch.put_together(Shape(nodes=2, apis=2), rows, [], crowd)
    raw = msgspec.json.decode(msgspec.json.encode({"grid": grid, "watch": watch}))
    made = performance_plots.draw(tmp_path, {"kube.json": raw})
    assert [picture.file for picture in made] == ["kube-claims.svg", "kube-watch.svg"]
    assert "4 watchers" not in (text := (tmp_path / "kube-watch.svg").read_text(encoding="utf-8"))
    assert "2 watchers, 200 events/s aimed at" in text
    assert performance_plots.draw(tmp_path, {"kube.json": {"pick": {}}}) == []
