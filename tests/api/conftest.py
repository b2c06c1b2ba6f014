"""One control plane for all tests of the api; each test has an owner, and so a world, of its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.cluster import Cluster, cluster, http
from tests.support.fake_node import FakeNode
from tests.support.role_process import RoleProcess


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running master, api and fake node."""
    with cluster(tmp_path_factory.mktemp("plane")) as made:
        made.master()
        made.api(domain="sbx.example.test:8700")
        made.node()
        yield made


@pytest.fixture
def node(plane: Cluster) -> Iterator[FakeNode]:
    """The fake node, well-behaved and well stocked; whatever a test does to it is undone."""
    plane.nodes[0].behave()
    yield plane.nodes[0]
    plane.nodes[0].behave()


@pytest.fixture
def api(plane: Cluster) -> RoleProcess:
    """The api process."""
    return plane.apis[0]


@pytest.fixture
def secret(plane: Cluster) -> str:
    """The API key of an owner that only this test has."""
    return plane.key()[1]


@pytest.fixture
def client(api: RoleProcess, secret: str) -> Iterator[httpx.Client]:
    """An HTTP client with that key."""
    with http(api, secret) as made:
        yield made
