"""A fresh master per test: what it remembers and whom it calls alive is what these tests are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from greenroom.wire.messages import ClaimRequest, Sandbox, Size
from tests.support.cluster import Cluster, cluster
from tests.support.fake_node import FakeNode


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Cluster]:
    """A running master, no nodes."""
    with cluster(tmp_path) as made:
        made.master()
        yield made


@pytest.fixture
def node(plane: Cluster) -> FakeNode:
    """A fake node that the master knows."""
    return plane.node()


@pytest.fixture
def claim(plane: Cluster) -> Callable[..., Sandbox]:
    """Claims a sandbox as an api does."""

    def send(key: str, **changes: object) -> Sandbox:
        fields = {
            "key": key,
            "template": "base",
            "size": Size("small", 1, 512, 4096),
            "ttl": 60.0,
            "wait": 0.5,
        }
        request = ClaimRequest(**fields | changes)
        return plane.call("api", "POST", f"{plane.masters[0].url}/v1/claims", Sandbox, request)

    return send
