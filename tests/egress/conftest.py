"""The stand-in internet for the tests of this folder that dial."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.internet import Internet


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    made = Internet(tmp_path_factory.mktemp("internet"))
    yield made
    made.close()
