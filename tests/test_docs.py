"""What the documents list is what there is: the table of supported calls, and the complaints with their tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.wire.podsizes import SIZES
from tests.support import walks

ROOT = Path(__file__).parents[1]
COMPLAINTS = ROOT / "docs" / "complaints.md"
REFERENCE = re.compile(r"\b[A-Za-z][\w-]*(?:/[\w-]+)?#\d+")
CITES = re.compile(rf"^(?:{REFERENCE.pattern}(?:, )?)+: ")
COLLECTED = """
E2B#1381 code-interpreter#147 E2B#879 E2B#873 E2B#1055 E2B#1005 E2B#1128 E2B#1726 code-interpreter#181 E2B#339 E2B#412
E2B#1418 E2B#1155 E2B#884 E2B#736 E2B#582 E2B#817 E2B#1031 E2B#1034 E2B#1074 E2B#1352 mitos-run/mitos#774 E2B#927
E2B#1158 infra#1434 infra#2270 infra#864 infra#469 E2B#239 infra#1984 infra#1582 infra#974 E2B#1180 E2B#685 E2B#650
BitMiracle-AI/Dormice#74 TencentCloud/CubeSandbox#408 openkruise/agents#651 computesdk#574 fastclaw#118
oc-xiaoju/uncaged#69
"""
"""What was found in the issue trackers of E2B and of servers that speak its API."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    text = COMPLAINTS.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def cited() -> dict[str, set[str]]:
    """The complaints that each test's docstring begins with, by `path::name`."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                begin = CITES.match(ast.get_docstring(node) or "")
                if begin is not None:
                    found[f"{path.relative_to(ROOT)}::{node.name}"] = set(REFERENCE.findall(begin[0]))
    return found


def test_the_table_of_supported_calls_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "tables.py"), "--check"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_readme_shows_of_kubectl_is_part_of_the_walk() -> None:
    walk = walks.steps((ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8"))
    shown = walks.steps((ROOT / "README.md").read_text(encoding="utf-8"))
    shown = [step for step in shown if step.command.startswith("kubectl")]
    assert len(shown) > 1
    printed = {step.command: "\n".join(step.printed).strip() for step in walk}
    assert [printed.get(step.command) for step in shown] == [
        "\n".join(step.printed).strip() for step in shown
    ]


def test_the_table_of_sizes_is_the_one_that_holds() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    units = {"Mi": 1, "Gi": 1024}
    listed = [
        (name, int(cpus), *(int(amount[:-2]) * units[amount[-2:]] for amount in (memory, disk)))
        for name, cpus, memory, disk in re.findall(
            r"^\| (\w+) \| (\d+) \| (\d+[MG]i) \| (\d+[MG]i) \|$", page, re.M
        )
    ]
    assert listed == [(size.name, size.cpus, size.memory_mib, size.disk_mib) for size in SIZES]


def test_every_test_of_a_complaint_is_listed_with_it_and_every_listed_one_is_there() -> None:
    listed: dict[str, set[str]] = {}
    for _, issues, _, tests in rows("Tested"):
        named = re.findall(r"`(tests/[^`]+)`", tests)
        assert named, f"{issues} has no test"
        for test in named:
            listed.setdefault(test, set()).update(REFERENCE.findall(issues))
    found = cited()
    assert listed.keys() == found.keys()
    for test, issues in found.items():
        assert issues <= listed[test], test
    for _, issues, _, tests in rows("Tested"):
        told = {issue for test in re.findall(r"`(tests/[^`]+)`", tests) for issue in found[test]}
        assert told == set(REFERENCE.findall(issues))


def test_no_complaint_is_forgotten() -> None:
    tested = {issue for row in rows("Tested") for issue in REFERENCE.findall(row[1])}
    for complaint, issues, instead in rows("Not to be tested here"):
        assert complaint
        assert instead
        assert set(REFERENCE.findall(issues)) <= tested
    assert tested == set(COLLECTED.split())


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target
