"""`greenroom bench platform` and `density` for real: tiny runs, the shape of the file, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest

from greenroom.bench.density import DensityReport
from greenroom.bench.idle import IdleReport
from greenroom.config import default_cache_dir
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.namespaces import listing
from greenroom.runtime.slots import tag_of

DEADLINE = 240.0
"""Seconds for one command, which the first on a machine spends on building the guest's image."""


class Command:
    """The command line with a temporary directory of its own, in which whatever it makes lies."""

    def __init__(self, root: Path) -> None:
        self.scratch = root / "tmp"
        self.scratch.mkdir()
        self.settings = root / "settings"
        self.settings.mkdir()
        self.json = root / "out.json"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("GREENROOM", "E2B"))}
        environment |= {"TMPDIR": str(self.scratch), "GREENROOM_CACHE_DIR": str(default_cache_dir())}
        main = [sys.executable, "-m", "greenroom.cli.main", "--state-dir", str(self.settings), "bench"]
        return subprocess.Popen(
            [*main, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            output, errors = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it takes down what it has made
            output, errors = process.communicate()
            pytest.fail(f"not done within {DEADLINE:.0f} s: {errors[-2000:]}")
        assert "Traceback" not in output + errors
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def assert_clean(self) -> None:
        assert list(self.scratch.iterdir()) == []
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or [])
            assert process.pid == os.getpid() or str(self.scratch) not in words, words


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("microVMs need root: namespaces, uids and cgroups")


@pytest.mark.long
@pytest.mark.usefixtures("as_root")
def test_a_platform_at_rest_is_measured(command: Command) -> None:
    done = command.run("platform", "--minutes", "0.05", "--json", str(command.json))
    # The aims are for minutes of rest; over three seconds a start's last work may still count.
    assert done.returncode in (0, 3), done.stderr
    report = msgspec.json.decode(command.json.read_bytes(), type=IdleReport)
    assert done.returncode == (0 if report.within else 3)
    assert [cost.name for cost in report.roles] == ["master-0", "node-0", "api-0", "proxy-0", "supervisor"]
    envoys = next(cost for cost in report.roles if cost.name == "proxy-0")
    assert envoys.processes == 2
    assert report.total.pss_mib == pytest.approx(sum(cost.pss_mib for cost in report.roles))
    assert all(cost.rss_mib > cost.pss_mib > 0 for cost in [*report.roles, *report.baseline])
    assert len(report.baseline) == 6
    assert report.seconds >= 3.0
    assert "aim" in done.stdout
    command.assert_clean()


@pytest.mark.vm
@pytest.mark.long
@pytest.mark.usefixtures("as_root")
def test_a_small_pool_is_filled_and_asked(command: Command) -> None:
    done = command.run(
        "density", "--count", "4", "--claim", "2", "--alive", "1", "--seed", "5", "--json", str(command.json)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(command.json.read_bytes(), type=DensityReport)
    assert report.passed
    assert (report.reached, report.claims_right, report.left.total()) == (4, 2, 0)
    assert len(report.host.memories) == 4
    assert report.host.namespaces >= 4
    assert all(memory.pss_mib >= memory.private_mib > 0 for memory in report.host.memories)
    assert report.fill[-1].warm == 4
    assert [row.at for row in report.fill] == sorted(row.at for row in report.fill)
    assert len({row.machine_id for row in report.claims}) == 2
    assert {(row.mode, row.state) for row in report.held} == {
        (mode, state) for mode in ("cow", "copy") for state in ("paused", "answered")
    }
    assert report.conditions.size.memory_mib == 256
    command.assert_clean()


@pytest.mark.usefixtures("as_root")
def test_more_members_than_fit_are_refused_before_anything_is_made(command: Command) -> None:
    total = psutil.virtual_memory().total >> 20
    (command.settings / "config.toml").write_text(f"[pools]\nmemory_floor_mib = {total}\n", encoding="utf-8")
    done = command.run("density", "--count", "1")
    assert done.returncode == 1
    assert f"floor of {total} MiB" in done.stderr
    command.assert_clean()


@pytest.mark.vm
@pytest.mark.long
@pytest.mark.usefixtures("as_root")
def test_an_interrupted_fill_leaves_nothing(command: Command) -> None:
    process = command.start("density", "--count", "200", "--json", str(command.json))
    timer = threading.Timer(DEADLINE, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        assert any(" of 200 members" in line and line[0] != "0" for line in process.stderr)
        (directory,) = command.scratch.iterdir()
        tag = tag_of(directory / "state" / "node-0")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    finally:
        timer.cancel()
    assert "Traceback" not in output + errors
    assert process.returncode == 130
    assert not command.json.exists()
    assert listing(f"gr-{tag}-") == []
    assert Cgroups.detect().children(f"greenroom/{tag}") == []
    command.assert_clean()


@pytest.mark.parametrize("which", ["platform", "density"])
def test_help_has_examples(command: Command, which: str) -> None:
    done = command.run(which, "--help")
    assert done.returncode == 0
    assert f"greenroom bench {which}" in done.stdout


@pytest.mark.parametrize("which", ["platform", "density"])
def test_a_file_that_cannot_be_written_is_said_first(command: Command, which: str) -> None:
    few = ["--count", "1"] if which == "density" else []
    done = command.run(which, *few, "--json", str(command.scratch / "missing" / "out.json"))
    assert done.returncode == 1
    assert "there is no directory" in done.stderr
