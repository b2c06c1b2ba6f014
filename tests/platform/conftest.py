"""A whole platform as users start it (`greenroom up --detach`), for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.platform import Platform, running


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """One running platform with real microVMs, shared by the tests, with `greenroom env` applied."""
    with running(tmp_path_factory.mktemp("platform"), "--warm", "4") as made:
        yield made


@pytest.fixture
def sdk(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """The platform, with the environment that `greenroom env` prints; the SDK needs nothing else."""
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)
    for name, value in platform.env().items():
        monkeypatch.setenv(name, value)
    return platform
