"""A pool whose members are kept running, on real microVMs: somebody each before they count as warm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from greenroom.config import Config, RoleSpec, default_cache_dir
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.qemu import QemuRuntime
from greenroom.wire.messages import ClaimRequest, PoolSpec, Size
from tests.support.shell import sh
from tests.support.waiting import until

pytestmark = pytest.mark.vm
SMALL = Size("small", 1, 512, 4096)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[QemuRuntime]:
    runtime = QemuRuntime(
        RoleSpec(role="node", replica=0, state_dir=str(tmp_path), cache_dir=str(default_cache_dir()))
    )
    yield runtime
    await runtime.close()
    assert not any(runtime.left().values())


async def test_running_members_are_somebody_before_they_count_and_change_hands_quickly(
    engine: QemuRuntime, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal.db")
    async with (
        Warmer(engine, Config(), tmp_path) as warmer,
        Keeper(name="n", runtime=engine, warmer=warmer, journal=journal, config=Config()) as keeper,
    ):
        pool = PoolSpec(template="base", size=SMALL, target=2, warm="running")
        await warmer.set_pools([pool], lambda _step, _done: None)
        await warmer.ready()
        await until(lambda: warmer.status()[0].warm == 2, deadline=120)
        seen = []
        for vm, _ in list(warmer._members.values()):
            result = await sh(vm, "cat /etc/machine-id; hostname; cat /proc/sys/kernel/random/uuid")
            seen.append(result.out.split())
        assert len(seen[0]) == 3
        assert not set(seen[0]) & set(seen[1])
        sandbox = await keeper.claim(ClaimRequest(key="k", template="base", size=SMALL, ttl=60.0))
        await keeper.confirm(sandbox.sandbox_id)
        live = keeper.lookup(sandbox.sandbox_id)
        assert live is not None
        after = (await sh(live.vm, "hostname; echo $E2B_SANDBOX_ID", token=sandbox.token)).out.split()
        assert after == [sandbox.sandbox_id, sandbox.sandbox_id]
        # What the node measured is true to within half a round trip, which a busy machine makes long.
        assert sandbox.clock_offset_ms is not None
        assert sandbox.clock_error_ms is not None
        assert abs(sandbox.clock_offset_ms) < 50 + sandbox.clock_error_ms
    journal.close()
