"""The page of all benchmarks: what is missing is said, targets have causes, pictures are drawn of what there is."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.bench import idle, performance, performance_plots
from greenroom.bench import report as reports
from greenroom.bench.idle import IdlePlan, IdleSample
from greenroom.bench.idle_host import Usage
from greenroom.bench.performance import Result, Section, Stored, Words, markdown
from greenroom.bench.performance_plots import values
from greenroom.bench.report import Table, Target
from greenroom.errors import SetupError
from tests.bench.results import conditions

SECTION = Section(file="claim.json", title="Claims", command="greenroom bench claim", text="Some.")
WORDS = Words(
    intro="Words.",
    section=[SECTION],
    reference=[],
    causes={"claim": "it is slow", "claim engine": "it copies"},
)


def claim_file() -> dict[str, Any]:
    """What a claim run leaves, as far as a page looks at it."""
    rows = [{"claim_ms": 0.1 * number, "transaction_ms": 0.04, "pop_ms": None} for number in range(1, 9)]
    patterns = [
        {"pattern": pattern, "outcome": outcome, "ms": 100.0 + number}
        for pattern in ("sequential", "burst")
        for number, outcome in enumerate(("ok", "ok", "rejected"))
    ]
    return {
        "benchmark": "claim",
        "conditions": msgspec.to_builtins(conditions()),
        "tables": [{"title": "Engine", "columns": ["", "p50"], "rows": [["claim", "0.10"]]}],
        "targets": [{"name": "claim engine, p50", "value": 0.3, "limit": 0.2, "unit": " ms"}],
        "engine": {"rows": rows},
        "platform": {"patterns": {"rows": patterns}},
    }


def idle_file() -> idle.IdleReport:
    def usage(cpu: float) -> Usage:
        return Usage(processes=1, threads=1, pss_mib=30.0, private_mib=29.0, rss_mib=40.0, cpu_s=cpu)

    samples = [IdleSample(at=60.0 * n, groups={"node-0": usage(n), "envoy": usage(0.0)}) for n in range(2)]
    return idle.summarise_run(conditions(), IdlePlan(seconds=60.0), samples, samples)


def put(directory: Path, name: str, content: object) -> None:
    (directory / name).write_bytes(msgspec.json.encode(content))


def test_the_words_are_whole_and_every_target_of_ours_has_a_cause() -> None:
    words = performance.read_words()
    files = [section.file for section in words.section]
    assert len(set(files)) == len(files)
    assert {reference.section for reference in words.reference} <= set(files)
    for reference in words.reference:
        assert all(len(row) == len(reference.columns) for row in reference.rows)
    for target in idle.targets(idle_file()):
        assert words.cause(target.name)


def test_a_cause_is_found_by_the_longest_beginning() -> None:
    assert WORDS.cause("claim engine, p50") == "it copies"
    assert WORDS.cause("claim over HTTP") == "it is slow"
    assert WORDS.cause("restore") == ""


def test_files_without_any_result_make_no_page(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="make bench"):
        performance.read(tmp_path, WORDS)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "not measured in this run"),
        (b"", "the benchmark failed"),
        (b"{", "another version, or broken"),
        (b"[]", "another version, or broken"),
        (b'{"benchmark": "claim", "tables": 7}', "another version, or broken"),
        (b'{"benchmark": "restore"}', "another version, or broken"),
        (b'{"benchmark": "slow_medium"}', "another version, or broken"),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / SECTION.file).write_bytes(content)
    found = performance.read_one(tmp_path, SECTION)
    assert problem in found.problem
    assert problem in performance.page(WORDS, [found], [])


def test_a_page_has_conditions_tables_and_what_falls_short(tmp_path: Path) -> None:
    put(tmp_path, "claim.json", claim_file())
    page = performance.page(WORDS, performance.read(tmp_path, WORDS), [])
    assert conditions().kernel in page
    assert "| claim | 0.10 |" in page
    assert "| claim engine, p50 | ≤ 0.2 ms | 0.30 ms | **missed** |" in page
    assert "- **claim engine, p50**: it copies" in page


def test_a_missed_target_without_a_cause_says_so() -> None:
    target = Target(name="other", value=2.0, limit=1.0, unit="")
    result = Result(section=SECTION, stored=Stored(targets=[target]))
    assert "**other**: the cause is not known yet" in performance.page(WORDS, [result], [])


def test_all_of_our_files_are_read_as_they_are_written(tmp_path: Path) -> None:
    reports.write(tmp_path / "platform.json", idle_file())
    words = performance.read_words()
    found = {result.section.file: result for result in performance.read(tmp_path, words)}
    assert found["platform.json"].stored.tables == idle_file().tables
    assert found["density.json"].problem
    page = performance.page(words, list(found.values()), [])
    # A second of each minute is 1.67 % of a core, within the aim.
    assert "| idle platform: CPU of all processes | ≤ 2 % of a core | 1.67 % of a core | met |" in page


def test_scripts_files_become_tables(tmp_path: Path) -> None:
    put(
        tmp_path,
        "bare_loop.json",
        {"benchmark": "bare_loop", "count": 4, "per_second": {"1": 20.0}, "best": 20.0},
    )
    spent = {"seconds": 2.0, "loading_seconds": 1.0, "bytes_from_medium": 1 << 20, "count": 3}
    put(
        tmp_path,
        "slow_medium.json",
        {
            "benchmark": "slow_medium", "mib_per_second": 20, "one_sequential_read_seconds": 1.5,
            "slower_by_seconds": 1.7, "fast": spent, "slow": spent, "slow_with_another_fill_beside": spent,
            "other_golden_meanwhile": {"restores": 5, "p50_ms": 70.0, "max_ms": 90.0},
        },
    )  # fmt: skip
    words = performance.read_words()
    page = performance.page(words, performance.read(tmp_path, words), [])
    assert "| VMs/s | 20.0 | 20.0 |" in page
    assert "| slow medium: slower than the fast one by | ≤ 1.5 s | 1.70 s | **missed** |" in page


@given(st.lists(st.lists(st.text(max_size=8), min_size=2, max_size=2), max_size=4))
def test_no_cell_breaks_a_table(rows: list[list[str]]) -> None:
    lines = markdown(Table("T", ["a", "b"], rows)).split("\n")
    assert len(lines) == 4 + len(rows)
    for line in lines[2:]:
        assert line.replace("\\|", "").count("|") == 3


def test_a_page_is_written_with_its_pictures(tmp_path: Path) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir()
    put(results, "claim.json", claim_file())
    reports.write(results / "platform.json", idle_file())
    stale = out / performance.PICTURES / "gone.svg"
    stale.parent.mkdir(parents=True)
    stale.touch()
    words = performance.read_words()
    place, pictures = performance.write(out, words, performance.read(results, words))
    assert [picture.file for picture in pictures] == ["claims.svg", "platform.svg"]
    page = place.read_text(encoding="utf-8")
    for picture in pictures:
        file = out / performance.PICTURES / picture.file
        assert f"]({performance.PICTURES}/{picture.file})" in page
        assert ET.parse(file).getroot().tag.endswith("svg")  # noqa: S314
        drawn = file.read_bytes()
    assert not stale.exists()
    performance.write(out, words, performance.read(results, words))
    assert file.read_bytes() == drawn, "the same figures make the same picture"


def test_a_picture_of_a_fill_has_all_three_panels(tmp_path: Path) -> None:
    raw = {
        "fill": [{"at": float(n), "warm": 4 * n, "available_mib": 9000.0 - n} for n in range(5)],
        "host": {"memories": [{"pss_mib": 16.0 + n / 10} for n in range(5)]},
        "held": [
            {
                "mode": "cow",
                "state": "paused",
                "alive": 2,
                "memory_mib": 256,
                "pss_mib": 17.0,
                "available_mib": 18.0,
            }
        ],
    }
    made = performance_plots.draw(tmp_path, {"density.json": raw})
    assert [picture.file for picture in made] == ["density.svg", "memory.svg"]
    text = (tmp_path / "density.svg").read_text(encoding="utf-8")
    for title in ("Paused members", "MemAvailable, GiB", "Members by PSS (5 alive)"):
        assert title in text


@pytest.mark.parametrize("raw", [{}, {"fill": [], "host": None, "held": None}, {"engine": {"rows": []}}])
def test_nothing_is_drawn_of_nothing(tmp_path: Path, raw: dict[str, Any]) -> None:
    files = ("claim.json", "restore.json", "density.json", "platform.json")
    assert performance_plots.draw(tmp_path, dict.fromkeys(files, raw)) == []


def test_without_matplotlib_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SetupError, match=r"scripts/setup\.sh bench"):
        performance_plots.draw(tmp_path, {})


def test_the_command_makes_the_page_and_says_what_was_not_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "greenroom.cli.main", "bench", "report"]
    command += ["--results", str(tmp_path), "--out", str(tmp_path / "page")]
    empty = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert empty.returncode == 1
    assert "make bench" in empty.stderr
    reports.write(tmp_path / "platform.json", idle_file())
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "platform.json: shown" in done.stdout
    assert "density.json: not measured in this run" in done.stdout
    page = (tmp_path / "page" / "performance.md").read_text(encoding="utf-8")
    assert "## A platform at rest" in page
    assert (tmp_path / "page" / "performance" / "platform.svg").exists()


def test_figures_are_picked_by_what_their_rows_say() -> None:
    rows = [{"side": "a", "ms": 1.0}, {"side": "b", "ms": 2.0}, {"side": "a", "ms": None}, {"side": "a"}]
    assert values(rows, "ms", side="a") == [1.0]
    assert values({"not": "rows"}, "ms") == []
    assert performance_plots.steps([3.0, 1.0]) == ([1.0, 3.0], [50.0, 100.0])
