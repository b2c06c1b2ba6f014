"""Agents for the tests: one shared by those that only use it, fresh ones for those that change it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.harness import Agent, running_agent


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent without tokens, shared by the whole session."""
    with running_agent(tmp_path_factory.mktemp("agent") / "identity") as running:
        yield running


@pytest.fixture
def fresh_agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent of the test's own, straight from its start."""
    with running_agent(tmp_path / "identity") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that other users of the machine can enter."""
    place = tmp_path / "work"
    place.mkdir()
    for part in (place, *place.parents):
        if part.stat().st_mode & 0o001 == 0:
            part.chmod(part.stat().st_mode | 0o011)
    return place
