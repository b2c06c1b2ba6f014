"""What a node runs beside its VMs: bounded by the kernel, found again by its record, removed by a later run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.errors import SetupError
from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.companions import PARENT, Companions
from greenroom.runtime.slots import tag_of

GREEDY = """
import sys
sys.stdin.readline()
held = [bytearray(1 << 20) for _ in range(1 << 14)]
"""
"""Takes 16 GiB once it is told to."""


@pytest.fixture
def cgroups() -> Cgroups:
    if os.geteuid() != 0:
        pytest.skip("cgroups need root")
    return Cgroups.detect()


@contextlib.contextmanager
def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def of(home: Path, cgroups: Cgroups) -> Companions:
    return Companions(home, tag_of(home), cgroups)


def test_one_that_takes_more_than_it_may_is_killed_and_leaves_nothing(
    tmp_path: Path, cgroups: Cgroups
) -> None:
    companions = of(tmp_path, cgroups)
    with child(GREEDY) as process:
        companions.admit("greedy", process.pid, 64 << 20)
        (record,) = companions.recorded()
        assert cgroups.pids(record.cgroup) == {process.pid}
        process.communicate(b"\n", timeout=60)
        assert process.returncode == -signal.SIGKILL
    with child("input()") as process:
        # The next one of the same name takes its place.
        companions.admit("greedy", process.pid, 64 << 20)
        assert cgroups.pids(record.cgroup) == {process.pid}
        assert companions.clear() == {"processes": 1, "cgroups": 1}
    assert companions.recorded() == []
    assert companions.clear() == {"processes": 0, "cgroups": 0}
    assert not any(directory.exists() for directory in cgroups.directories(record.cgroup))


def test_what_a_dead_node_left_is_swept_by_its_record_and_nothing_else(
    tmp_path: Path, cgroups: Cgroups
) -> None:
    dead, other = tmp_path / "dead", tmp_path / "other"
    for home in (dead, other):
        home.mkdir()
    with child("input()") as left, child("input()") as alive:
        of(dead, cgroups).admit("egress", left.pid, 64 << 20)
        neighbour = of(other, cgroups)
        neighbour.admit("egress", alive.pid, 64 << 20)
        assert neighbour.sweep() == {"processes": 0, "cgroups": 0}, "it is in use"
        assert of(dead, cgroups).sweep() == {"processes": 1, "cgroups": 1}
        left.communicate(timeout=20)
        assert left.returncode == -signal.SIGKILL
        assert alive.poll() is None
        assert neighbour.clear() == {"processes": 1, "cgroups": 1}


def test_a_record_stands_before_its_cgroup_and_goes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Cgroups(2, {"unified": tmp_path / "cgroups"})
    companions = of(tmp_path, plain)

    def fails(path: str, _limits: object) -> None:
        assert [record.cgroup for record in companions.recorded()] == [path]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plain, "create", fails)
    with pytest.raises(SetupError, match="the egress process cannot be bounded"):
        companions.admit("egress", 1, 1 << 20)
    (record,) = companions.recorded()
    assert record.cgroup == f"{PARENT}/{tag_of(tmp_path)}-egress"
    of(tmp_path, plain).sweep()
    assert companions.recorded() == []
