"""Built directories are whole or absent, and built once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.errors import SetupError
from greenroom.images.cache import damage_of, publish


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
    made = publish(tmp_path / "thing", lambda _target: None)
    assert [path.name for path in made.iterdir()] == ["manifest.json"]


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


def build(target: Path) -> None:
    (target / "small").write_bytes(b"content")
    with (target / "sparse").open("wb") as stream:
        stream.seek(5 << 20)
        stream.write(b"far out")
        stream.truncate(9 << 20)


@pytest.mark.parametrize("name", ["small", "sparse", "manifest.json"])
@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "grow", "empty"])
def test_what_was_damaged_is_built_anew(tmp_path: Path, name: str, harm: str) -> None:
    made = publish(tmp_path / "thing", build)
    good = {path.name: path.read_bytes() for path in made.iterdir()}
    path = made / name
    content = path.read_bytes()
    match harm:
        case "truncate":
            path.write_bytes(content[:-1])
        case "flip":
            place = len(content) - 1 if name == "small" else 5 << 20 if name == "sparse" else 20
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        case "remove":
            path.unlink()
        case "grow":
            path.write_bytes(content + b"x")
        case "empty":
            path.write_bytes(b"")
    if name == "manifest.json" and harm in ("flip", "grow"):
        # It may still be readable; then it says something else than the files do, or the same.
        assert damage_of(made) or path.read_bytes() != content
    else:
        assert damage_of(made)
    told: list[str] = []
    again = publish(tmp_path / "thing", build, lambda step, _done: told.append(step))
    assert {path.name: path.read_bytes() for path in again.iterdir()} == good or harm in ("flip", "grow")
    assert damage_of(again) == ""
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".damaged")] == []


@settings(max_examples=20, deadline=None)
@given(blocks=st.lists(st.sampled_from([b"", b"x", b"\0" * 4096, b"y" * 5000]), max_size=6))
def test_a_digest_does_not_depend_on_where_the_holes_are(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes]
) -> None:
    place = tmp_path_factory.mktemp("holes")

    def sparse(target: Path) -> None:
        with (target / "file").open("wb") as stream:
            for number, block in enumerate(blocks):
                stream.seek(number * (700 << 10))
                stream.write(block)

    made = publish(place / "thing", sparse)
    content = (made / "file").read_bytes()
    (made / "file").write_bytes(content)
    assert damage_of(made) == ""


def test_nobody_else_may_enter_what_is_private(tmp_path: Path) -> None:
    made = publish(tmp_path / "thing", build)
    assert made.stat().st_mode & 0o077 == 0
    made.chmod(0o755)
    assert publish(tmp_path / "thing", build).stat().st_mode & 0o077 == 0
    assert publish(tmp_path / "open", build, mode=0o755).stat().st_mode & 0o777 == 0o755


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    def full(_target: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(SetupError, match=r"No space left on device.*--cache-dir"):
        publish(tmp_path / "thing", full)
