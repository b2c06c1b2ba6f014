"""Built directories are whole or absent, and built once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from greenroom.images.cache import publish


def test_it_is_built_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(target: Path) -> None:
        built.append(target)
        (target / "file").write_text("x", encoding="utf-8")

    for _ in range(2):
        assert (publish(tmp_path / "thing", build) / "file").read_text(encoding="utf-8") == "x"
    assert len(built) == 1


def test_a_failed_build_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").touch()
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError):
        publish(tmp_path / "thing", fail)
    assert [entry.name for entry in tmp_path.iterdir()] == [".thing.lock"]
    assert publish(tmp_path / "thing", lambda _target: None).is_dir()


def test_what_a_killed_build_left_is_thrown_away(tmp_path: Path) -> None:
    leftover = tmp_path / ".thing.building"
    leftover.mkdir()
    (leftover / "half").touch()
    assert list(publish(tmp_path / "thing", lambda _target: None).iterdir()) == []


def test_builders_take_turns(tmp_path: Path) -> None:
    inside, built = threading.Event(), []
    waiting = threading.Event()

    def slow(_target: Path) -> None:
        inside.set()
        assert waiting.wait(10)
        built.append("first")

    def progress(step: str, _done: float | None) -> None:
        if "waiting for another builder" in step:
            waiting.set()

    first = threading.Thread(target=publish, args=(tmp_path / "thing", slow))
    first.start()
    assert inside.wait(10)
    publish(tmp_path / "thing", lambda _target: built.append("second"), progress)
    first.join()
    assert built == ["first"]
