"""A disk's layers as QEMU tells of them, without a QEMU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.errors import RuntimeFailure
from greenroom.runtime import disks


def told(top: str, nodes: list[str], sets: dict[int, list[int]]) -> tuple[Any, Any, Any]:
    """The three answers that a chain is read from."""
    return (
        [{"device": "", "inserted": {"node-name": top}}],
        [{"node-name": name} for name in nodes],
        [{"fdset-id": number, "fds": [{"fd": fd} for fd in fds]} for number, fds in sets.items()],
    )


def test_a_new_vm_has_one_layer_of_its_own() -> None:
    nodes = ["disk3", "file3", "disk2", "file2", "disk1", "file1"]
    chain = disks.read(*told("disk3", nodes, {1: [5], 2: [6], 3: [7]}))
    assert (chain.layers, chain.top, chain.fds, chain.strays, chain.free) == ((3,), 3, {3: 7}, (), 4)


def test_numbers_may_have_gaps_and_what_is_above_the_top_is_astray() -> None:
    nodes = ["disk1", "disk2", "disk9", "disk11", "disk12", "file12"]
    sets = {1: [5], 2: [6], 9: [7, 8], 11: [9], 12: [10], disks.STATES: [11]}
    chain = disks.read(*told("disk11", nodes, sets))
    assert (chain.layers, chain.fds, chain.strays) == ((9, 11), {9: 7, 11: 9}, (12,))
    assert chain.free == 13


@pytest.mark.parametrize("top", ["", "overlay", "disk", "disk3x"])
def test_a_foreign_disk_is_refused(top: str) -> None:
    with pytest.raises(RuntimeFailure, match="not made of layers"):
        disks.read(*told(top, ["disk1", "disk2"], {}))


def test_a_layer_without_a_descriptor_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match="descriptors"):
        disks.read(*told("disk3", ["disk1", "disk2", "disk3"], {1: [5], 2: [6]}))


def test_who_may_write_a_file_is_seen_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    path.write_bytes(b"x" * 4096)
    reader = os.open(path, os.O_RDONLY)
    try:
        assert not disks.writable(os.getpid(), path.stat())
        writer = os.open(path, os.O_RDWR)
        assert disks.writable(os.getpid(), path.stat())
        os.close(writer)
        assert not disks.writable(os.getpid(), path.stat())
    finally:
        os.close(reader)


def test_what_a_snapshot_shares_does_not_count_as_the_vms(tmp_path: Path) -> None:
    (tmp_path / "overlay.qcow2").write_bytes(b"x" * 8192)
    (tmp_path / "overlay-4.qcow2").write_bytes(b"x" * 4096)
    (tmp_path / "qemu.log").write_bytes(b"x" * 4096)
    assert disks.own_bytes(tmp_path) == 12_288
    os.link(tmp_path / "overlay.qcow2", tmp_path / "snapshot-has-it")
    assert disks.own_bytes(tmp_path) == 4096


def test_a_vms_layers_keep_a_name_when_their_snapshot_is_deleted(tmp_path: Path) -> None:
    snapshot, own = tmp_path / "snapshot", tmp_path / "vm"
    snapshot.mkdir()
    own.mkdir()
    fds = []
    for number in (1, 2):
        (snapshot / f"layer-{number}").write_bytes(b"x" * 4096 * number)
        fds.append(os.open(snapshot / f"layer-{number}", os.O_RDONLY))
    try:
        disks.adopt_layers(own, fds)
        assert disks.own_bytes(own) == 0
        for path in snapshot.iterdir():
            path.unlink()
        assert disks.own_bytes(own) == 12_288
        assert disks.link(f"/proc/self/fd/{fds[0]}", tmp_path / "again")
        for path in (tmp_path / "again", *own.iterdir()):
            path.unlink()
        assert not disks.link(f"/proc/self/fd/{fds[0]}", tmp_path / "again")
    finally:
        for fd in fds:
            os.close(fd)
