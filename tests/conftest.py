"""What holds for all tests: those marked `vm` boot microVMs, which takes root."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs root where there is none, saying so."""
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="microVMs need root: namespaces, uids and cgroups")
    for item in items:
        if item.get_closest_marker("vm") is not None:
            item.add_marker(skip)
