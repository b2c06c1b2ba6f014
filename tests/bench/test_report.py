"""Conditions, files and failures."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from greenroom.bench import report as reports
from greenroom.bench.report import Conditions, Target
from greenroom.bench.summaries import Sample, summarise
from greenroom.errors import SetupError
from tests.bench.results import conditions


def test_conditions_say_where_and_when() -> None:
    found = conditions()
    assert found.cpus >= 1
    assert found.memory_mib > 0
    assert found.load_after is None
    assert found.cpu_model
    assert found.kernel
    after = reports.finish(found)
    assert after.load_after is not None
    assert msgspec.structs.replace(after, load_after=None) == found
    text = "\n".join(reports.conditions_lines(after))
    for part in (found.cpu_model, found.kernel, "simulated", "asked for by name", "512 MiB", "after"):
        assert part in text


def test_the_commit_is_told_only_of_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "src" / "greenroom"
    package.mkdir(parents=True)
    (package / "file.py").write_text("1\n", encoding="utf-8")
    assert reports._checkout(package) == (None, None)

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.invalid"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first", "--no-verify")
    commit, modified = reports._checkout(package)
    assert commit is not None
    assert len(commit) == 40
    assert modified is False
    (package / "file.py").write_text("2\n", encoding="utf-8")
    assert reports._checkout(package) == (commit, True)


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    place = tmp_path / "out.json"
    reports.check_writable(place)
    found = conditions()
    reports.write(place, found)
    assert msgspec.json.decode(place.read_bytes(), type=Conditions) == found
    assert list(tmp_path.iterdir()) == [place]


def test_a_file_that_cannot_be_written_is_named_before_and_after(tmp_path: Path) -> None:
    for place in (tmp_path / "missing" / "out.json", tmp_path):
        with pytest.raises(SetupError, match=str(place)):
            reports.check_writable(place)
    with pytest.raises(SetupError, match="cannot write"):
        reports.write(tmp_path / "missing" / "out.json", conditions())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0.00"),
        (0.000213, "0.000213"),
        (0.0124, "0.0124"),
        (0.25, "0.25"),
        (9.5, "9.50"),
        (12.34, "12.3"),
        (1234.5, "1234"),
    ],
)
def test_figures_are_short(value: float | None, text: str) -> None:
    assert reports.cell(value) == text


def test_the_medium_is_that_of_the_path(tmp_path: Path) -> None:
    assert " on " in reports.medium_of(tmp_path)
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    table = tmp_path / "mountinfo"
    table.write_text(f"29 1 {number} / /srv rw,relatime shared:1 - ext4 /dev/sdz rw\n", encoding="utf-8")
    assert reports.medium_of(tmp_path, table).startswith("ext4 on /dev/sdz")
    table.write_text("nonsense\n", encoding="utf-8")
    assert reports.medium_of(tmp_path, table) == "unknown"
    assert reports.medium_of(tmp_path / "missing") == "unknown"


@pytest.mark.parametrize(
    ("value", "verdict"), [(None, "not measured"), (0.2, "met"), (0.1, "met"), (0.21, "missed")]
)
def test_a_target_is_met_up_to_its_limit(value: float | None, verdict: str) -> None:
    target = Target(name="claim", value=value, limit=0.2, unit=" ms")
    assert target.verdict == verdict
    assert reports.target_table([target]).rows[0][-1] == verdict


@pytest.mark.parametrize(
    ("value", "verdict"), [(None, "not measured"), (1.2, "met"), (3.0, "met"), (1.19, "missed")]
)
def test_a_target_can_be_a_least(value: float | None, verdict: str) -> None:
    target = Target(name="ratio", value=value, limit=1.2, unit="", at_least=True)
    assert (target.verdict, target.aim) == (verdict, "≥ 1.2")


def test_each_reason_of_failures_is_a_line() -> None:
    summary = summarise([Sample(1.0), Sample(None, "b"), Sample(None, "a"), Sample(None, "b")])
    assert reports.failure_lines([("bare", summary)]) == [
        "bare: 1 of 4 failed: a",
        "bare: 2 of 4 failed: b",
    ]


def test_a_reason_is_one_short_line() -> None:
    assert reports.reason(SetupError("one\ntwo")) == "one two"
    assert reports.reason(OSError(2, "gone")).startswith("FileNotFoundError")
    assert len(reports.reason(SetupError("x" * 1000))) == 300
