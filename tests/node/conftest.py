"""A node's inner parts around the simulated engine: no VM runs, every state is real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from greenroom.config import ClaimsConfig, Config, PoolsConfig, VmConfig
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.messages import ClaimRequest, Size

SMALL = Size("small", 1, 512, 4096)


@pytest.fixture
def config() -> Config:
    return Config(
        vm=VmConfig(engine="simulated"),
        claims=ClaimsConfig(queue_length=3, handover_deadline=5.0),
        pools=PoolsConfig(backoff_first=0.01, backoff_last=0.05),
    )


@pytest.fixture
def runtime() -> SimulatedRuntime:
    return SimulatedRuntime()


@pytest.fixture
async def warmer(runtime: SimulatedRuntime, config: Config, tmp_path: Path) -> AsyncIterator[Warmer]:
    async with Warmer(runtime, config, tmp_path) as made:
        yield made
    await runtime.close()


@pytest.fixture
async def keeper(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path
) -> AsyncIterator[Keeper]:
    journal = Journal(tmp_path / "journal.db")
    async with Keeper(name="node-0", runtime=runtime, warmer=warmer, journal=journal, config=config) as made:
        yield made
    journal.close()


@pytest.fixture
def ask() -> Callable[..., ClaimRequest]:
    """Builds a claim request; every argument replaces a default."""

    def build(key: str = "k1", **changes: object) -> ClaimRequest:
        fields: dict[str, object] = {"key": key, "template": "base", "size": SMALL, "ttl": 60.0, "wait": 5.0}
        return ClaimRequest(**{**fields, **changes})  # type: ignore[arg-type]

    return build
