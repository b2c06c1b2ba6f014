"""The lifecycle's order and arithmetic, on sides that answer at once; and a small run of the command on real VMs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest

from greenroom.bench import lifecycle, performance
from greenroom.bench.lifecycle import HeldRow, LifecyclePlan, LifecycleReport, Records, StepRow
from greenroom.bench.lifecycle_node import Mark, took
from greenroom.bench.lifecycle_sides import STEPS, Held, Side, SideName, Step, Took
from greenroom.bench.supply import spec_size
from greenroom.errors import RuntimeFailure, SetupError
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.engine import CaptureResult, Snapshot
from greenroom.runtime.namespaces import listing
from greenroom.runtime.slots import tag_of
from tests.bench.results import Quiet, conditions
from tests.bench.test_host_commands import DEADLINE, Command

PLAN = LifecyclePlan(template="base", size=spec_size(256), rounds=2, dirty_mib=64, forks=3)


class Pretended:
    """A side without a VM: takes no time, notes what it was asked, and can be made to fail at a step."""

    def __init__(self, name: SideName, ms: float, log: list[tuple[str, str]], fails: str = "") -> None:
        self.name: SideName = name
        self._ms, self._log, self._fails = ms, log, fails
        self.mib = 0

    def _note(self, what: str) -> None:
        self._log.append((self.name, what))
        if what == self._fails:
            raise RuntimeFailure("it was told to fail")

    def _took(self, step: Step) -> Took:
        self._note(step)
        answers = step in lifecycle.BROUGHT_BACK
        return Took(
            ms=2 * self._ms if answers else self._ms,
            answer_ms=self._ms if answers else None,
            stop_ms=10.0 + self.mib if step == "snapshot" else None,
            ram_mib=8.0 + self.mib,
            stages={"capture: stop": 3.0, "rest": 0.5},
        )

    async def begin(self) -> None:
        self._note("begin")
        self.mib = 0

    async def grow(self, mib: int) -> None:
        self.mib += mib

    async def snapshot(self) -> Took:
        return self._took("snapshot")

    async def start(self) -> Took:
        return self._took("start")

    async def held(self, children: int) -> Held:
        self._note("held")
        return Held(
            children=children, first_mib=20.0, paused_mib=20.0 + 17.0 * (children - 1), answered_mib=90.0
        )

    async def fork(self, children: int) -> Took:
        assert children == PLAN.forks
        return self._took("fork")

    async def pause(self) -> Took:
        return self._took("pause")

    async def resume(self) -> Took:
        return self._took("resume")

    async def rest(self) -> None:
        pass

    async def end(self) -> None:
        self._note("end")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SETTLE", 0.0)


async def measured(ours: str = "", bare: str = "") -> tuple[Records, list[tuple[str, str]]]:
    log: list[tuple[str, str]] = []
    sides: list[Side] = [Pretended("greenroom", 120.0, log, ours), Pretended("bare", 100.0, log, bare)]
    records = Records()
    await lifecycle.measure(sides, PLAN, records, Quiet())
    return records, log


def reported(records: Records) -> LifecycleReport:
    return lifecycle.summarise_run(conditions(), PLAN, records)


@pytest.mark.parametrize(("dirty", "sizes"), [(64, [4, 16, 64]), (96, [6, 24, 96]), (4, [1, 4]), (1, [1])])
def test_snapshots_are_taken_while_the_vm_grows(dirty: int, sizes: list[int]) -> None:
    assert msgspec.structs.replace(PLAN, dirty_mib=dirty).sizes == sizes


async def test_the_sides_take_turns_and_change_places() -> None:
    records, log = await measured()
    steps = [(row.round, row.step, row.side) for row in records.steps]
    assert len(steps) == PLAN.rounds * 2 * (len(PLAN.sizes) + len(STEPS) - 1)
    pairs = list(zip(steps[::2], steps[1::2], strict=True))
    assert all(one[:2] == two[:2] and {one[2], two[2]} == {"greenroom", "bare"} for one, two in pairs)
    for step in STEPS:
        first = {one[2] for one, _ in pairs if one[1] == step}
        assert first == {"greenroom", "bare"}, f"{step} is always begun by {first}"
    assert [row.dirty_mib for row in records.steps if row.step == "snapshot" and row.side == "bare"] == (
        PLAN.sizes * PLAN.rounds
    )
    assert [what for name, what in log if name == "bare"][-1] == "end"
    assert not any(row.error for row in records.steps)


async def test_ratios_targets_and_growth_are_those_of_the_rows() -> None:
    report = reported((await measured())[0])
    assert {(entry.step, entry.until): entry.ratio.overall for entry in report.ratios if entry.dirty_mib == 64} == {
        (step, until): pytest.approx(1.2)
        for step in STEPS
        for until in (("first answer", "end of the call") if step in lifecycle.BROUGHT_BACK else ("end of the call",))
    }  # fmt: skip
    values = {target.name: (target.value, target.verdict) for target in report.targets}
    assert len(values) == len(STEPS) + 2
    assert [verdict for _, verdict in values.values()] == ["met"] * len(values)
    assert values["lifecycle: the parent's stop with up to 16 MB written, p50"][0] == 26.0
    assert values["lifecycle: PSS of each further paused child"][0] == pytest.approx(17.0)
    growth = next(table for table in report.tables if table.title.startswith("A snapshot by dirty memory"))
    assert [row[:3] for row in growth.rows] == [
        ["4", "12.0", "14.0"],
        ["16", "24.0", "26.0"],
        ["64", "72.0", "74.0"],
    ]
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    assert report.failed == 0


async def test_what_fails_is_a_row_and_counts_once() -> None:
    records, _ = await measured(ours="fork")
    report = reported(records)
    assert report.failed == PLAN.rounds
    assert sum(summary.failed for _, summary in lifecycle.failures(report)) == PLAN.rounds
    forked = next(entry for entry in report.targets if "fork" in entry.name)
    assert (forked.value, forked.verdict) == (None, "not measured")


async def test_a_resume_after_a_pause_that_failed_is_not_measured() -> None:
    records, log = await measured(bare="pause")
    assert ("bare", "resume") not in log
    resumed = [row for row in records.steps if (row.side, row.step) == ("bare", "resume")]
    assert [row.error for row in resumed] == ["it had not been paused"] * PLAN.rounds
    ours = [row for row in records.steps if (row.side, row.step) == ("greenroom", "resume")]
    assert not any(row.error for row in ours)


async def test_vms_are_ended_when_a_round_cannot_begin() -> None:
    log: list[tuple[str, str]] = []
    sides: list[Side] = [Pretended("greenroom", 1.0, log), Pretended("bare", 1.0, log, "begin")]
    with pytest.raises(RuntimeFailure):
        await lifecycle.measure(sides, PLAN, Records(), Quiet())
    assert log[-2:] == [("greenroom", "end"), ("bare", "end")]


async def test_without_the_script_there_is_no_ratio_and_it_is_said() -> None:
    log: list[tuple[str, str]] = []
    records = Records()
    await lifecycle.measure([Pretended("greenroom", 1.0, log)], PLAN, records, Quiet())
    report = reported(records)
    assert report.ratios == []
    assert any("not run from a checkout" in note for note in report.notes)
    assert [target.verdict for target in report.targets if "over the bare" in target.name] == [
        "not measured"
    ] * len(STEPS)


async def test_every_target_has_a_cause_and_the_page_shows_the_report(tmp_path: Path) -> None:
    report = reported((await measured())[0])
    words = performance.read_words()
    assert all(words.cause(target.name) for target in report.targets)
    (tmp_path / "lifecycle.json").write_bytes(msgspec.json.encode(report))
    page = performance.page(words, performance.read(tmp_path, words), [])
    assert "| fork into 3 | first answer | greenroom |" in page


def test_one_child_does_not_tell_what_one_more_takes() -> None:
    assert Held(children=1, first_mib=20.0, paused_mib=20.0, answered_mib=40.0).further_mib is None
    assert msgspec.structs.replace(PLAN, forks=1).children == 2


def test_other_users_and_small_machines_are_told_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SetupError, match="fewer --forks"):
        msgspec.structs.replace(PLAN, forks=100_000).check()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match="as root"):
        PLAN.check()


def captured(pause_ms: float) -> CaptureResult:
    snapshot = Snapshot(
        name="s", kind="full", template="base", size=PLAN.size, golden="g", created_at=0.0, ram_bytes=3 << 20
    )
    return CaptureResult(snapshot=snapshot, pause_ms=pause_ms, stages={"stop": 2.0, "write": 30.0})


def test_a_call_is_taken_apart_by_what_the_engine_did() -> None:
    began = time.perf_counter()
    found = took(
        began,
        began + 1.0,
        [
            Mark(name="load", began=began, ended=began + 0.1),
            Mark(name="restore", began=began, ended=began + 0.3),
            Mark(name="introduce", began=began + 0.4, ended=began + 0.9, answered=began + 0.6),
        ],
    )
    assert found.ms == pytest.approx(1000)
    assert found.answer_ms == pytest.approx(600)
    assert found.stages == pytest.approx(
        {"load": 100, "restore": 200, "first answer": 200, "clock": 300, "rest": 200}
    )


def test_of_several_children_the_last_answer_counts() -> None:
    began = time.perf_counter()
    marks = [Mark(name="capture", began=began, ended=began + 0.1, captured=captured(9.0))]
    marks += [
        Mark(name="introduce", began=began + 0.2, ended=began + at + 0.1, answered=began + at)
        for at in (0.5, 0.8)
    ]
    found = took(began, began + 1.0, marks)
    assert found.answer_ms == pytest.approx(800)
    assert (found.stop_ms, found.ram_mib) == (9.0, 3.0)
    assert found.stages == pytest.approx(
        {"capture: stop": 2, "capture: write": 30, "first answer": 600, "clock": 100}
    )


def test_rows_outlive_their_file() -> None:
    row = StepRow(round=1, side="bare", step="fork", dirty_mib=4, took=Took(ms=1.0, answer_ms=1.0))
    held = HeldRow(round=1, side="bare", held=Held(children=2, first_mib=1, paused_mib=2, answered_mib=3))
    for each in (row, held):
        assert msgspec.json.decode(msgspec.json.encode(each), type=type(each)) == each


@pytest.mark.vm
@pytest.mark.long
def test_a_small_run_measures_every_step_of_both_sides(tmp_path: Path) -> None:
    command = Command(tmp_path)
    done = command.run(
        "lifecycle", "--rounds", "1", "--dirty", "8", "--forks", "2", "--json", str(command.json)
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(command.json.read_bytes(), type=LifecycleReport)
    assert report.failed == 0
    assert {(row.side, row.step) for row in report.steps} == {
        (side, step) for side in ("greenroom", "bare") for step in STEPS
    }
    for row in report.steps:
        assert row.took is not None
        if row.step in ("snapshot", "fork", "pause"):
            assert (row.took.ram_mib or 0) > row.dirty_mib
        if row.step in ("snapshot", "fork"):
            assert 0 < (row.took.stop_ms or 0) < row.took.ms
        if row.step in lifecycle.BROUGHT_BACK:
            assert 0 < (row.took.answer_ms or 0) <= row.took.ms
    for held in (row.held for row in report.held):
        assert held is not None
        assert 0 < (held.further_mib or 0) < held.answered_mib
    assert report.conditions.size.memory_mib == 256
    assert [target.verdict for target in report.targets].count("not measured") == 0
    assert all(table.title in done.stdout for table in report.tables)
    command.assert_clean()


@pytest.mark.vm
@pytest.mark.long
def test_an_interrupted_run_leaves_nothing_of_either_side(tmp_path: Path) -> None:
    command = Command(tmp_path)
    process = command.start("lifecycle", "--dirty", "8", "--forks", "2", "--json", str(command.json))
    timer = threading.Timer(DEADLINE, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        assert any("round 1 of" in line for line in process.stderr)
        (directory,) = command.scratch.iterdir()
        tags = [tag_of(place / "node-0") for place in (directory, directory / "bare")]
        assert any(listing(f"gr-{tags[1]}-"))
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    finally:
        timer.cancel()
    assert "Traceback" not in output + errors
    assert process.returncode == 130, errors
    assert not command.json.exists()
    for tag in tags:
        assert listing(f"gr-{tag}-") == []
        assert Cgroups.detect().children(f"greenroom/{tag}") == []
    command.assert_clean()
