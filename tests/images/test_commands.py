"""Outside tools: found, bounded, their failures told, and nothing of them left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from greenroom.errors import SetupError
from greenroom.images import commands


def test_output_comes_back() -> None:
    assert commands.run(["echo", "hello"], deadline=10) == "hello\n"
    assert commands.run(["cat"], stdin=b"given", deadline=10) == "given"


def test_a_failure_says_status_and_last_words() -> None:
    with pytest.raises(SetupError, match=r"sh failed with status 3: oh no"):
        commands.run(["sh", "-c", "echo oh no >&2; exit 3"], deadline=10)
    with pytest.raises(SetupError, match=r"status 4: late / words"):
        commands.follow(
            ["sh", "-c", "echo late >&2; echo words >&2; exit 4"], lambda _line: None, deadline=10
        )


def test_a_missing_tool_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.shutil, "which", lambda _tool, path=None: None)
    with pytest.raises(SetupError, match="apt-get install --no-install-recommends e2fsprogs"):
        commands.find("mke2fs")


def test_a_tool_past_its_deadline_is_ended_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(SetupError, match="longer than"):
        commands.run(["sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"], deadline=1)
    child = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    deadline = time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "a child of the tool outlives it"


def test_lines_are_followed_as_they_come() -> None:
    lines: list[str] = []
    commands.follow(["sh", "-c", "for i in 1 2 3; do echo I: $i >&2; done"], lines.append, deadline=10)
    assert lines == ["I: 1", "I: 2", "I: 3"]


def test_after_an_interrupt_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_interrupted", type(commands._interrupted)())
    commands.interrupt()
    with pytest.raises(SetupError, match="interrupted"):
        commands.run(["true"], deadline=5)
