"""`greenroom bench kube`: its parts by name, its file, and nothing left of it when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from greenroom.bench.kube import KubeReport
from tests.bench.test_kube_world import processes_of
from tests.support.waiting import until_true

DEADLINE = 60.0


def start(scratch: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GREENROOM")}
    return subprocess.Popen(
        [sys.executable, "-m", "greenroom.cli.main", "bench", "kube", *arguments],
        env={**environment, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_part_alone_is_measured_shown_and_written(tmp_path: Path) -> None:
    scratch, place = tmp_path / "tmp", tmp_path / "kube.json"
    scratch.mkdir()
    process = start(scratch, "--quick", "--only", "pick", "--json", str(place))
    output, errors = process.communicate(timeout=DEADLINE)
    # Times of a busy machine may miss a target; nothing may fail.
    assert process.returncode in (0, 3), errors
    assert "choosing a node" in output
    found = msgspec.json.decode(place.read_bytes(), type=KubeReport)
    assert (found.benchmark, found.plan.parts, found.plan.quick) == ("kube", ["pick"], True)
    assert found.pick is not None
    assert (found.list, found.failed, found.problems) == (None, 0, {})
    assert found.conditions.engine == "simulated"
    assert list(scratch.iterdir()) == []


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path, "--only", "everything")
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert "drained" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_stopped_halfway_it_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "--quick", "--only", "list")
    with process:
        until_true(lambda: any("fleet_nodes" in words for words in processes_of(tmp_path)))
        process.send_signal(number)
        process.communicate(timeout=DEADLINE)
    until_true(lambda: processes_of(tmp_path) == [])
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert list(tmp_path.iterdir()) == []
