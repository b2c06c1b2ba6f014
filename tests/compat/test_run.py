"""The report of the SDK's own tests: what counts as passed, and what is said of the rest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "compat" / "run.py"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compat_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(test: str, outcome: str = "passed", why: str = "") -> dict[str, object]:
    return {"test": f"tests/sync/{test}", "outcome": outcome, "seconds": 1.0, "why": why}


def test_only_what_passed_counts_and_the_rest_has_its_reason(run: ModuleType) -> None:
    rows = [
        row("a.py::test_one"),
        row("a.py::test_two", "failed", "assert 1 | 2"),
        row("b.py::test_three", "skipped", "no `reason`"),
        row("template_sync/test_build.py::test_four", "failed", "anything"),
    ]
    page = run.report({"9.9": rows}, "Some machine.")
    assert "## With e2b 9.9: 1 of 4 pass" in page
    assert "| sync/a.py | 1 | 1 |" in page
    assert "| sync/b.py | 0 | 1 |" in page
    assert "- `assert 1 / 2` (1)\n  - sync/a.py::test_two" in page
    assert "- `no 'reason'` (1)\n  - sync/b.py::test_three" in page
    assert "- Template builds are not there yet. (1)" in page


def test_the_list_of_tests_that_need_a_server_is_the_one_that_was_measured(run: ModuleType) -> None:
    wanted = run.needing()
    assert len(wanted) == 372
    assert all(test.startswith(run.FOLDERS) for test in wanted)


def test_every_written_reason_is_of_a_test_that_there_is(run: ModuleType) -> None:
    wanted = run.needing()
    for entry in run.reasons():
        for pattern in entry["tests"]:
            assert any(run.fnmatch.fnmatch(test, pattern) for test in wanted), pattern


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--sdk", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "is no checkout of the E2B SDK" in done.stderr
    assert "Traceback" not in done.stderr
