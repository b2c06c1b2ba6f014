"""`greenroom bench faults` for real: a few kills on real microVMs, and an interruption; neither leaves anything."""

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

from greenroom.bench.faults_records import CheckRow, KillRow, RequestRow, Verdict
from greenroom.config import default_cache_dir
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.namespaces import listing
from greenroom.runtime.slots import tag_of

pytestmark = [pytest.mark.vm, pytest.mark.fault, pytest.mark.long]
DEADLINE = 270.0


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command with `root` as the place for everything that it makes."""
    (root / "tmp").mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GREENROOM", "E2B"))}
    environment |= {"TMPDIR": str(root / "tmp"), "GREENROOM_CACHE_DIR": str(default_cache_dir())}
    command = [sys.executable, "-m", "greenroom.cli.main", "bench", "faults", "--out", str(root / "out")]
    return subprocess.Popen(
        [*command, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_nothing_left(root: Path) -> None:
    assert list((root / "tmp").iterdir()) == []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        assert process.pid == os.getpid() or str(root / "tmp") not in words, words


def rows(path: Path, kind: type[msgspec.Struct]) -> list[msgspec.Struct]:
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]


def test_three_kills_lose_nothing(tmp_path: Path) -> None:
    process = start(
        tmp_path, "--kills", "3", "--load", "2", "--held", "3", "--warm", "2", "--seed", "3",
        "--json", str(tmp_path / "verdict.json"),
    )  # fmt: skip
    output, errors = process.communicate(timeout=DEADLINE)
    assert "Traceback" not in output + errors
    assert process.returncode == 0, output + errors
    assert_nothing_left(tmp_path)
    out = tmp_path / "out"
    verdict = msgspec.json.decode((out / "verdict.json").read_bytes(), type=Verdict)
    assert verdict == msgspec.json.decode((tmp_path / "verdict.json").read_bytes(), type=Verdict)
    assert verdict.passed
    assert (verdict.kills, verdict.plan.seed, verdict.left.total()) == (3, 3, 0)
    assert verdict.command_s.n == verdict.up_s.n >= 1
    kills = rows(out / "kills.jsonl", KillRow)
    assert len({row.pid for row in kills if isinstance(row, KillRow)}) == 3
    requests = [row for row in rows(out / "requests.jsonl", RequestRow) if isinstance(row, RequestRow)]
    assert {"create", "ask", "kill"} <= {row.op for row in requests if row.outcome == "ok"}
    checks = [row for row in rows(out / "checks.jsonl", CheckRow) if isinstance(row, CheckRow)]
    # One sandbox was there all along, and was seen after each kill that was waited for.
    witness = next(row.sandbox for row in requests if row.op == "create" and row.outcome == "ok")
    seen = [row for row in checks if row.sandbox == witness and row.expected == "alive"]
    assert len(seen) >= 1 + verdict.up_s.n
    assert {(row.listed, row.answer) for row in seen} == {(True, "same")}
    assert "passed" in output


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "--kills", "1000", "--load", "2", "--held", "3", "--warm", "1")
    timer = threading.Timer(DEADLINE, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        assert any(line.startswith("kill 1 ") for line in process.stderr), "it ended before the first kill"
        (directory,) = (tmp_path / "tmp").iterdir()
        tag = tag_of(directory / "state" / "node-0")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    finally:
        timer.cancel()
    assert "Traceback" not in output + errors
    assert process.returncode == 128 + signal.SIGINT
    assert_nothing_left(tmp_path)
    assert listing(f"gr-{tag}-") == []
    assert Cgroups.detect().children(f"greenroom/{tag}") == []
    assert (tmp_path / "out" / "kills.jsonl").read_bytes()
    assert not (tmp_path / "out" / "verdict.json").exists()
