"""The README's example prints what the README says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.platform import Platform

pytestmark = [pytest.mark.vm, pytest.mark.compat]
README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_what_it_says(platform: Platform) -> None:
    text = README.read_text(encoding="utf-8")
    code, promised = re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, re.S)[0]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **platform.env()}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def plain(text: str) -> str:
        """Without what differs from run to run: the kernel's release and the start of the sandbox's id."""
        return re.sub(r"Linux \S+, i\w{4}…", "Linux …", text)

    assert plain(done.stdout) == plain(promised)
