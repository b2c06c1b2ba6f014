"""E2B's published JavaScript package, unmodified, against `greenroom up`: tests/js/tour.mjs, run by node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.platform import Platform

pytestmark = [pytest.mark.vm, pytest.mark.compat, pytest.mark.slow]

JS = Path(__file__).parents[1] / "js"
NODE = Path(sys.executable).parent / "node"
TESTS = re.compile(r"^test\('", re.MULTILINE)


@pytest.fixture
def node() -> Path:
    """The node of the virtual environment, with the SDK installed beside the tour."""
    if not NODE.exists():
        pytest.skip(f"{NODE} is not there: `scripts/setup.sh dev` installs it")
    if not (JS / "node_modules" / "e2b").is_dir():
        pytest.skip("the npm package e2b could not be installed: `scripts/setup.sh dev` tries again")
    return NODE


@pytest.mark.timeout(600)
def test_the_tour_by_the_javascript_sdk(node: Path, sdk: Platform) -> None:
    """E2B#1158: the JavaScript files API sent no routing headers, which broke one address for all sandboxes."""
    tour = JS / "tour.mjs"
    done = subprocess.run(
        [str(node), "--test-reporter=tap", str(tour)],
        env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, check=False, timeout=590,
    )  # fmt: skip
    passed = re.findall(r"^ok \d+ - (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len(passed) == len(TESTS.findall(tour.read_text(encoding="utf-8")))
    assert "# SKIP" not in done.stdout
