"""A whole control plane of real processes: master, api, node on the simulated engine, and proxy."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from greenroom.config import LogsConfig, PoolsConfig, ProxyConfig, VmConfig
from tests.support.cluster import QUICK, Cluster, cluster
from tests.support.role_process import RoleProcess

LOUD = msgspec.structs.replace(
    QUICK,
    logs=LogsConfig(level="debug"),
    pools=PoolsConfig(default_target=2),
    vm=VmConfig(engine="simulated", uid_base=320_000),
    proxy=ProxyConfig(port=0, drain=1.0),
)


class Fleet:
    """The roles, by name."""

    def __init__(self, plane: Cluster) -> None:
        self.plane = plane
        self.master = plane.master(LOUD)
        masters = [self.master.url]
        self.node = plane.stack.enter_context(
            RoleProcess(plane.spec("node", config=LOUD, master_urls=masters))
        )
        self.api = plane.api(LOUD)
        spec = plane.spec("proxy", config=LOUD, master_urls=masters, api_urls=[self.api.url])
        self.proxy = plane.stack.enter_context(RoleProcess(spec))

    @property
    def internal(self) -> dict[str, str]:
        """Addresses of the roles' own listeners."""
        proxy = (self.proxy.spec.home / "internal.url").read_text(encoding="ascii").strip()
        return {"master": self.master.url, "node": self.node.url, "api": self.api.url, "proxy": proxy}

    def logs(self) -> dict[str, list[str]]:
        """The lines that each wrote so far."""
        roles = {"master": self.master, "node": self.node, "api": self.api, "proxy": self.proxy}
        return {name: role.log.splitlines() for name, role in roles.items()}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fleet for all tests of this folder; each makes an owner of its own."""
    with cluster(tmp_path_factory.mktemp("fleet")) as plane:
        yield Fleet(plane)
