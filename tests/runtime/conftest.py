"""One real engine for a whole module: the image and the golden are made once and kept in the cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from greenroom.config import Config, RoleSpec, VmConfig, default_cache_dir
from greenroom.runtime.engine import Golden
from greenroom.runtime.qemu import QemuRuntime
from greenroom.wire.messages import Size

SMALL = Size("small", 1, 512, 4096)


def spec_in(state: Path, **vm: object) -> RoleSpec:
    """Without a stock, unless `vm` asks for one, so that a test can count what it made itself."""
    settings = VmConfig(**{"stock_slots": 0, "stock_waiting": 0, **vm})  # type: ignore[arg-type]
    return RoleSpec(
        role="node",
        replica=0,
        state_dir=str(state),
        cache_dir=str(default_cache_dir()),
        config=Config(vm=settings),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QemuRuntime]:
    runtime = QemuRuntime(spec_in(tmp_path_factory.mktemp("engine")))
    yield runtime
    await runtime.close()
    assert not any(runtime.left().values()), runtime.left()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def golden(engine: QemuRuntime) -> Golden:
    return await engine.snapshot_golden("base", SMALL, lambda _step, _done: None)
