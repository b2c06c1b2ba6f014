"""The cache is collected: what is old and unused goes, what anybody has open or asked for lately stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from greenroom.images.cache import publish
from greenroom.images.collect import collect, marker, note_use, open_files, unused

DAY = 86_400.0


def made(cache: Path, name: str, days_old: float) -> Path:
    directory = cache / name
    directory.mkdir()
    (directory / "file").write_text("x", encoding="utf-8")
    note_use(directory)
    then = time.time() - days_old * DAY
    os.utime(marker(directory), (then, then))
    os.utime(directory, (then, then))
    return directory


def test_what_was_not_asked_for_in_long_goes_with_its_marks(tmp_path: Path) -> None:
    old, new = made(tmp_path, "golden-old", 15), made(tmp_path, "golden-new", 13)
    assert collect(tmp_path, 14 * DAY) == ["golden-old"]
    assert not old.exists()
    assert not marker(old).exists()
    assert new.exists()


def test_what_a_process_has_open_stays_however_old(tmp_path: Path) -> None:
    held = made(tmp_path, "image-held", 99)
    with (held / "file").open("rb"):
        assert str(held / "file") in open_files(tmp_path)
        assert collect(tmp_path, DAY) == []
    assert collect(tmp_path, DAY) == ["image-held"]


@pytest.mark.parametrize("name", ["kvm-verdict.json", "blank-4096.qcow2", "somebody-elses", ".golden-x.lock"])
def test_what_is_not_of_its_kind_is_never_touched(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("x", encoding="utf-8")
    os.utime(path, (0, 0))
    assert collect(tmp_path, 0.0) == []
    assert path.exists()


def test_scraps_of_a_build_go_after_a_day(tmp_path: Path) -> None:
    for name in (".golden-a.building", ".damaged-image-b-1"):
        (tmp_path / name).mkdir()
    assert unused(tmp_path, [], time.time(), 0.0) == []
    assert len(unused(tmp_path, [], time.time() + 2 * DAY, 0.0)) == 2


def test_publishing_counts_as_use(tmp_path: Path) -> None:
    directory = publish(tmp_path / "rootfs-x", lambda target: (target / "f").touch())
    os.utime(directory, (0, 0))
    assert collect(tmp_path, DAY) == []
    os.utime(marker(directory), (0, 0))
    publish(tmp_path / "rootfs-x", lambda _target: None)
    assert collect(tmp_path, DAY) == []


def test_a_cache_that_is_not_there_is_fine(tmp_path: Path) -> None:
    assert collect(tmp_path / "none", 0.0) == []
