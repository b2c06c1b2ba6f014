"""Processes that an earlier controller may have left, and the binary."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from greenroom.proxy.envoy import Record, find_binary, kill_leftover, started_at
from greenroom.proxy.files import EnvoyFiles


class Leftover:
    """A process that looks like an Envoy of `files`, and its record."""

    def __init__(self, files: EnvoyFiles, record: Path, *, cwd: Path, argument: str) -> None:
        self.files, self.record = files, record
        code = "import sys, time; print(flush=True); time.sleep(600)"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, argument], cwd=cwd, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.note(started_at(self.process.pid) or 0)

    def note(self, started: int) -> None:
        self.record.write_bytes(msgspec.json.encode(Record(self.process.pid, started)))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def files(tmp_path: Path) -> EnvoyFiles:
    made = EnvoyFiles(tmp_path / "home", None)
    made.prepare()
    return made


@pytest.fixture
def left(files: EnvoyFiles, tmp_path: Path) -> Iterator[Leftover]:
    leftover = Leftover(files, tmp_path / "record", cwd=files.directory, argument="bootstrap.json")
    yield leftover
    leftover.end()


def test_leftover_is_killed(left: Leftover) -> None:
    assert kill_leftover(left.files, left.record)
    assert left.process.wait() == -9


def test_another_process_with_the_same_pid_is_spared(left: Leftover) -> None:
    left.note((started_at(left.process.pid) or 0) + 1)
    assert not kill_leftover(left.files, left.record)
    assert left.process.poll() is None


@pytest.mark.parametrize(("elsewhere", "argument"), [(True, "bootstrap.json"), (False, "other.json")])
def test_process_of_another_home_or_program_is_spared(
    files: EnvoyFiles, tmp_path: Path, elsewhere: bool, argument: str
) -> None:
    cwd = tmp_path if elsewhere else files.directory
    other = Leftover(files, tmp_path / "record", cwd=cwd, argument=argument)
    try:
        assert not kill_leftover(files, other.record)
        assert other.process.poll() is None
    finally:
        other.end()


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"pid": 999999999, "started": 1}'])
def test_no_usable_record_means_nothing_to_kill(
    files: EnvoyFiles, tmp_path: Path, content: bytes | None
) -> None:
    record = tmp_path / "record"
    if content is not None:
        record.write_bytes(content)
    assert not kill_leftover(files, record)


def test_binary_of_the_installed_package_is_found() -> None:
    assert os.access(find_binary(), os.X_OK)


def test_start_time_of_no_process_is_none() -> None:
    assert started_at(999_999_999) is None


def test_files_are_replaced_and_closed_to_others(files: EnvoyFiles) -> None:
    for content in (b"one", b"two"):
        files.write("xds/x.json", content)
        path = files.directory / "xds" / "x.json"
        assert path.read_bytes() == content
        assert not path.stat().st_mode & 0o077
    assert [entry.name for entry in (files.directory / "xds").iterdir()] == ["x.json"]
