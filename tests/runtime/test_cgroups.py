"""Which hierarchy is used, read from made-up mount tables; writing to a real one is in `test_qemu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.errors import SetupError
from greenroom.runtime.cgroups import Cgroups, Limits

LIMITS = Limits(memory=100 << 20, cpus=1.5, pids=64, cpu_shares=512)


def mounts(tmp_path: Path, text: str) -> Path:
    table = tmp_path / "mounts"
    table.write_text(text.replace("ROOT", str(tmp_path)), encoding="utf-8")
    return table


V1 = (
    "cgroup ROOT/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
    "cgroup ROOT/memory cgroup rw,memory 0 0\n"
    "cgroup ROOT/pids cgroup rw,pids 0 0\n"
)


def test_v1_wins_where_it_has_the_controllers(tmp_path: Path) -> None:
    found = Cgroups.detect(mounts(tmp_path, V1 + "cgroup2 ROOT/unified cgroup2 rw 0 0\n"))
    assert found.version == 1
    assert [path.parent.name for path in found.directories("x")] == ["cpu,cpuacct", "memory", "pids"]


def test_v2_is_used_where_it_has_them(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n", encoding="ascii")
    found = Cgroups.detect(mounts(tmp_path, "cgroup2 ROOT cgroup2 rw 0 0\n"))
    assert found.version == 2
    assert found.join_files("a/b") == [tmp_path / "a/b/cgroup.procs"]


@pytest.mark.parametrize(
    ("table", "missing"),
    [("", "cpu, memory, pids"), ("cgroup ROOT/memory cgroup rw,memory 0 0\n", "cpu, pids")],
)
def test_what_is_missing_is_named(tmp_path: Path, table: str, missing: str) -> None:
    with pytest.raises(SetupError, match=missing):
        Cgroups.detect(mounts(tmp_path, table))


def test_v2_without_a_controller_names_it(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n", encoding="ascii")
    with pytest.raises(SetupError, match="pids"):
        Cgroups.detect(mounts(tmp_path, "cgroup2 ROOT cgroup2 rw 0 0\n"))


def test_v2_passes_controllers_down_and_writes_every_bound(tmp_path: Path) -> None:
    cgroups = Cgroups(2, {"unified": tmp_path})
    cgroups.create("greenroom/tag/1", LIMITS)
    for place in (tmp_path, tmp_path / "greenroom", tmp_path / "greenroom/tag"):
        assert (place / "cgroup.subtree_control").read_text() == "+memory +cpu +pids\n"
    leaf = tmp_path / "greenroom/tag/1"
    assert not (leaf / "cgroup.subtree_control").exists()
    assert (leaf / "memory.max").read_text() == f"{100 << 20}\n"
    assert (leaf / "cpu.max").read_text() == "150000 100000\n"
    assert (leaf / "pids.max").read_text() == "64\n"


def test_v1_writes_every_bound(tmp_path: Path) -> None:
    cgroups = Cgroups(1, {name: tmp_path / name for name in ("memory", "cpu", "pids")})
    cgroups.create("greenroom/tag/1", LIMITS)
    assert (tmp_path / "memory/greenroom/tag/1/memory.limit_in_bytes").read_text() == f"{100 << 20}\n"
    assert (tmp_path / "cpu/greenroom/tag/1/cpu.cfs_quota_us").read_text() == "150000\n"
    assert (tmp_path / "pids/greenroom/tag/1/pids.max").read_text() == "64\n"


@pytest.mark.parametrize(
    ("cpus", "shares", "weight"),
    [
        (1, 1024, 100),
        (2, 2048, 200),
        (3, 3072, 300),
        (8, 8192, 800),
        (64, 65536, 6400),
        (1024, 262_144, 10000),
    ],
    ids=lambda value: str(value),
)
def test_all_guests_together_weigh_as_much_as_a_normal_cgroup_for_each_cpu(
    cpus: int, shares: int, weight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    v1 = Cgroups(1, {name: tmp_path / name for name in ("memory", "cpu", "pids")})
    v2 = Cgroups(2, {"unified": tmp_path / "unified"})
    (tmp_path / "unified").mkdir()
    for cgroups in (v1, v2):
        cgroups.create("greenroom/tag/1", LIMITS)
        cgroups.create("greenroom-services/tag-egress", LIMITS)
    assert (tmp_path / "cpu/greenroom/cpu.shares").read_text() == f"{shares}\n"
    assert (tmp_path / "unified/greenroom/cpu.weight").read_text() == f"{weight}\n"
    # VMs among themselves, and what is no VM, are none of it.
    assert (tmp_path / "cpu/greenroom/tag/1/cpu.shares").read_text() == "512\n"
    assert (tmp_path / "unified/greenroom/tag/1/cpu.weight").read_text() == "50\n"
    assert not (tmp_path / "cpu/greenroom-services/cpu.shares").exists()
    assert not (tmp_path / "unified/greenroom-services/cpu.weight").exists()


def test_the_weight_is_there_again_after_another_node_has_removed_the_parent(tmp_path: Path) -> None:
    cgroups = Cgroups(1, {name: tmp_path / name for name in ("memory", "cpu", "pids")})
    cgroups.create("greenroom/tag/1", LIMITS)
    shares = tmp_path / "cpu/greenroom/cpu.shares"
    before = shares.read_text()
    shares.unlink()
    cgroups.create("greenroom/tag/2", LIMITS)
    assert shares.read_text() == before


def test_killing_and_removing_what_is_not_there_is_fine(tmp_path: Path) -> None:
    cgroups = Cgroups(2, {"unified": tmp_path})
    assert cgroups.kill("greenroom/none") == 0
    assert cgroups.remove("greenroom/none") is False
    assert cgroups.children("greenroom/none") == []
