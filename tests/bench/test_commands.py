"""`greenroom bench` for real: tiny runs on real microVMs, the shape of the file, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenroom.bench.claim import PARTS, ClaimReport
from greenroom.bench.claim_supply import STAGES
from greenroom.bench.restore import RestoreReport
from greenroom.config import default_cache_dir
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.namespaces import listing
from greenroom.runtime.slots import tag_of

DEADLINE = 240.0
"""Seconds for one command, which the first on a machine spends on building the guest's image."""


class Bench:
    """The command line with a temporary directory of its own, in which whatever it makes lies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scratch = root / "tmp"
        self.scratch.mkdir()
        self.json = root / "out.json"
        self.seen: set[Path] = set()

    def command(self, *arguments: str) -> list[str]:
        main = [sys.executable, "-m", "greenroom.cli.main"]
        return [*main, "--state-dir", str(self.root / "none"), "bench", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("GREENROOM", "E2B"))}
        environment |= {"TMPDIR": str(self.scratch), "GREENROOM_CACHE_DIR": str(default_cache_dir())}
        return subprocess.Popen(
            self.command(*arguments),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=DEADLINE)
        assert "Traceback" not in errors + output, errors
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def own_directory(self) -> Path:
        """The one directory of a run that goes on."""
        (found,) = self.scratch.iterdir()
        return found

    def assert_clean(self) -> None:
        """No directory of this test's runs is left, hence no record, and no process that works for them."""
        assert list(self.scratch.iterdir()) == []
        needle = str(self.scratch).encode()
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                for name in ("environ", "cmdline"):
                    try:
                        content = Path(f"/proc/{entry.name}/{name}").read_bytes()
                    except OSError:
                        continue
                    assert needle not in content, f"process {entry.name} is left"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.assert_clean()


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("microVMs need root: namespaces, uids and cgroups")


def assert_nothing_of(home: Path) -> None:
    """Nothing of the node whose home this was is on the host."""
    tag = tag_of(home)
    assert listing(f"gr-{tag}-") == []
    assert Cgroups.detect().children(f"greenroom/{tag}") == []
    blocks = [entry for entry in Path("/run/greenroom/uids").iterdir() if entry.name.isdigit()]
    assert not any(tag in entry.read_text(encoding="utf-8") for entry in blocks)


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read the command's error output up to a line with `text`; the deadline kills it."""
    timer = threading.Timer(DEADLINE, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if text in line:
                return
    finally:
        timer.cancel()
    pytest.fail(f"it ended before it said {text!r}")


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.usefixtures("as_root")
def test_restore_measures_both_sides(bench: Bench) -> None:
    done = bench.run(
        "restore", "--count", "2", "--parallel", "1,2", "--rounds", "2", "--starts", "1", "--json", str(bench.json)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(bench.json.read_bytes(), type=RestoreReport)
    assert report.failed == 0
    assert report.conditions.engine == "qemu"
    assert report.conditions.accelerator in ("kvm", "tcg")
    assert report.conditions.accelerator_reason
    assert report.conditions.load_after is not None
    assert len(report.restores) == 2 * 2 * 2 * 2
    assert len(report.batches) == 2 * 2 * 2
    assert len(report.starts) == 2 * 2
    for row in report.restores:
        stages, memory = row.stages, row.memory
        assert stages is not None
        assert memory is not None
        assert memory.pss_mib >= memory.private_mib > 0
        parts = (stages.prepare_ms, stages.process_ms, stages.load_ms)
        assert all(part is not None and part > 0 for part in parts)
        assert sum(part or 0 for part in parts) == pytest.approx(stages.total_ms)
    assert {(entry.side, entry.parallel) for entry in report.summaries} == {
        (side, parallel) for side in ("greenroom", "bare") for parallel in (1, 2)
    }
    order = [(row.round, row.parallel, row.side) for row in report.batches]
    assert order[:2] == [(1, 1, "greenroom"), (1, 1, "bare")]
    assert order[4:6] == [(2, 1, "bare"), (2, 1, "greenroom")]
    for cost in report.fence:
        assert cost.time.overall is not None
        assert len(cost.time.rounds) == len(cost.rate.rounds) == 2
    assert report.answer_ms.n == 4
    assert "What the fence costs" in done.stdout
    assert_nothing_of_any(done, report, bench)


def assert_nothing_of_any(
    done: subprocess.CompletedProcess[str], report: RestoreReport | ClaimReport, bench: Bench
) -> None:
    """After a whole run: no note of leftovers, figures for people, rows for programs."""
    assert "left" not in done.stderr
    assert report.conditions.cpu_model in done.stdout
    raw: dict[str, Any] = msgspec.json.decode(bench.json.read_bytes())
    assert raw["benchmark"] in ("restore", "claim")
    bench.assert_clean()


@pytest.mark.vm
@pytest.mark.long
@pytest.mark.usefixtures("as_root")
def test_an_interrupted_restore_leaves_nothing(bench: Bench) -> None:
    process = bench.start(
        "restore", "--count", "200", "--parallel", "2", "--rounds", "5", "--json", str(bench.json)
    )
    wait_for_line(process, "round 1")
    home = bench.own_directory() / "node-0"
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "stopping")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE)
    assert "Traceback" not in errors
    assert process.returncode == 130
    assert not bench.json.exists()
    assert_nothing_of(home)


@pytest.mark.vm
@pytest.mark.long
@pytest.mark.usefixtures("as_root")
def test_claim_measures_every_part(bench: Bench) -> None:
    done = bench.run("claim", "--quick", "--rounds", "2", "--warm", "1", "--json", str(bench.json))
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(bench.json.read_bytes(), type=ClaimReport)
    assert report.failed == 0
    assert tuple(report.plan.parts) == PARTS
    assert report.engine is not None
    assert report.engine.durable == report.engine.claim_ms.n == 200
    assert report.http is not None
    assert report.http.claim_ms.n == report.http.trivial_ms.n == 200
    platform = report.platform
    assert platform is not None
    assert (report.conditions.engine, platform.nodes, platform.pool_target) == ("qemu", 1, 1)
    assert report.conditions.accelerator_reason
    assert report.conditions.medium
    assert platform.supply is not None
    assert [row.supply for row in platform.supply.claims] == ["warm", "on_demand", "on_demand", "warm"]
    for row in platform.supply.claims:
        assert not row.error
        assert row.create_ms is not None
        assert row.command_ms is not None
        assert row.usable_ms == pytest.approx(row.create_ms + row.command_ms)
        assert set(STAGES) <= set(row.node_ms)
        assert row.clock_offset_ms is not None
        assert row.clock_error_ms is not None
    assert platform.supply.create_ratio.overall is not None
    assert platform.output is not None
    assert {side: summary.n for side, summary in platform.output.output_ms.items()} == {
        "platform": 2, "bare": 2, "introduced": 2,
    }  # fmt: skip
    assert all(summary.n == 2 for summary in platform.output.stages_ms.values())
    assert platform.patterns is not None
    assert [entry.outcomes["ok"] for entry in platform.patterns.summaries] == [3, 3, 3]
    assert platform.boot is not None
    assert platform.boot.boot_ms.n == platform.boot.restore_ms.n == 1
    assert [target.verdict for target in report.targets].count("not measured") == 0
    assert [table.title for table in report.tables][-1] == "Targets"
    assert all(table.title in done.stdout for table in report.tables)
    assert_nothing_of_any(done, report, bench)


@pytest.mark.slow
def test_a_part_without_vms_needs_no_platform(bench: Bench) -> None:
    done = bench.run("claim", "--part", "engine", "--claims", "20", "--json", str(bench.json))
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(bench.json.read_bytes(), type=ClaimReport)
    assert (report.platform, report.http) == (None, None)
    assert report.engine is not None
    assert report.engine.claim_ms.n == 20
    assert "simulated" in done.stdout


def test_a_part_that_does_not_exist_is_wrong_usage(bench: Bench) -> None:
    done = bench.run("claim", "--part", "engine", "--part", "bonnet")
    assert done.returncode == 2
    assert "--part bonnet: one of engine, http" in done.stderr


@pytest.mark.vm
@pytest.mark.long
@pytest.mark.usefixtures("as_root")
def test_an_interrupted_claim_stops_its_platform(bench: Bench) -> None:
    process = bench.start("claim", "--part", "supply", "--count", "1000", "--rounds", "1", "--warm", "1")
    wait_for_line(process, "round 1")
    home = bench.own_directory() / "state" / "node-0"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE)
    assert "Traceback" not in errors
    assert process.returncode == 128 + signal.SIGTERM
    assert_nothing_of(home)


@pytest.mark.parametrize("parallel", ["", "0", "1,1", "two", "1;2", "999"])
def test_lanes_that_make_no_sense_are_wrong_usage(bench: Bench, parallel: str) -> None:
    done = bench.run("restore", "--parallel", parallel)
    assert done.returncode == 2
    assert "--parallel" in done.stderr


@pytest.mark.usefixtures("as_root")
def test_more_vms_than_memory_is_said_before_anything_is_made(bench: Bench) -> None:
    done = bench.run("restore", "--count", "10000")
    assert done.returncode == 1
    assert "choose a smaller --count" in done.stderr


@pytest.mark.parametrize("which", ["restore", "claim"])
@pytest.mark.usefixtures("as_root")
def test_a_file_that_cannot_be_written_is_said_before_anything_is_made(bench: Bench, which: str) -> None:
    done = bench.run(which, "--count", "1", "--json", str(bench.root / "missing" / "out.json"))
    assert done.returncode == 1
    assert "there is no directory" in done.stderr


@pytest.mark.parametrize("which", ["restore", "claim"])
def test_help_has_examples(bench: Bench, which: str) -> None:
    done = bench.run(which, "--help")
    assert done.returncode == 0
    assert f"greenroom bench {which}" in done.stdout
