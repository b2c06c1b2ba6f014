"""docs/kubernetes.md, followed to the letter: its commands succeed, and print what it says they print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import walks
from tests.support.kubectl import KUBECTL
from tests.support.platform import Platform

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on this machine")
PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
WALK = PAGE.partition("\n## From nothing to a claimed sandbox\n")[2].partition("\n## ")[0]
REFUSED = ("kubectl create -f job.yaml", '"Asleep"')
"""Commands that are there to show how they fail."""


def environment(state: Path, programs: Path, engine: str) -> dict[str, str]:
    """A shell's, in which the platform is this one on free ports."""
    state.mkdir(mode=0o700)
    settings = f'[vm]\nengine = "{engine}"\n[proxy]\nport = 0\nkube_port = 0\ndrain = 0.5\n'
    (state / "config.toml").write_text(settings, encoding="utf-8")
    programs.mkdir()
    assert KUBECTL is not None
    (programs / "kubectl").symlink_to(KUBECTL)
    for name, module in (("python", ""), ("greenroom", " -m greenroom.cli.main")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    return {
        **kept,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(state.parent),
        "GREENROOM_STATE_DIR": str(state),
    }


@pytest.mark.parametrize(
    "engine", ["simulated", pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.slow])]
)
def test_the_walk_is_what_happens(engine: str, tmp_path: Path) -> None:
    steps = [step for step in walks.steps(WALK) if engine != "simulated" or step.note != "needs microVMs"]
    assert len(steps) > 15
    for name, text in walks.files(WALK).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    state = tmp_path / "state"
    shell = environment(state, tmp_path / "bin", engine)
    try:
        done = walks.run(steps, tmp_path, shell)
    finally:
        Platform(state).down()
    for step, (status, printed) in zip(steps, done, strict=True):
        refused = any(part in step.command for part in REFUSED)
        assert (status != 0) == refused, (step.command, printed)
        if "<<" not in step.command or engine != "simulated":
            assert walks.shape(printed) == walks.shape(step.printed), step.command
    assert Platform(state).leftovers() == {}
