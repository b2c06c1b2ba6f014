"""The shell around the pools, on the simulated engine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import Config
from greenroom.errors import NodeUnavailable, PoolDry
from greenroom.node.headroom import Headroom
from greenroom.node.refill import allot
from greenroom.node.warmer import Warmer, own_memory_mib
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.messages import PoolSpec, PoolStatus, Size
from greenroom.wire.tasks import spawn
from tests.support.waiting import until

SMALL = Size("small", 1, 512, 4096)


def quiet(_step: str, _done: float | None) -> None:
    """Progress that nobody watches."""


def spec(target: int, warm: str = "paused") -> PoolSpec:
    return PoolSpec(template="base", size=SMALL, target=target, warm=warm)  # type: ignore[arg-type]


def only(warmer: Warmer) -> PoolStatus:
    (status,) = warmer.status()
    return status


async def test_a_declared_pool_fills_up_to_its_target(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    await warmer.set_pools([spec(3)], quiet)
    await until(lambda: only(warmer).warm == 3)
    assert len(runtime.vms) == 3
    assert {vm.state for vm in runtime.vms.values()} == {"paused"}


async def test_members_kept_running_have_an_identity_before_they_count(
    warmer: Warmer, runtime: SimulatedRuntime
) -> None:
    await warmer.set_pools([spec(2, "running")], quiet)
    await until(lambda: only(warmer).warm == 2)
    ids = [vm.identity.machine_id for vm in runtime.vms.values() if vm.identity is not None]
    assert len(set(ids)) == 2
    assert {vm.state for vm in runtime.vms.values()} == {"running"}


async def test_changing_how_members_wait_replaces_them(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    await warmer.set_pools([spec(2)], quiet)
    await until(lambda: only(warmer).warm == 2)
    await warmer.set_pools([spec(2, "running")], quiet)
    await until(lambda: {vm.state for vm in runtime.vms.values()} == {"running"} and only(warmer).warm == 2)


async def test_a_claim_is_refilled(warmer: Warmer) -> None:
    await warmer.set_pools([spec(1)], quiet)
    vm = await warmer.claim("base", SMALL, wait=5)
    await until(lambda: only(warmer).warm == 1)
    assert vm.describe().state == "paused"


async def test_a_pool_nobody_declared_makes_members_on_demand(warmer: Warmer) -> None:
    await warmer.claim("base", SMALL, wait=5)
    assert only(warmer).target == 0


async def test_a_dry_pool_refuses_when_the_time_is_up(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    runtime.restore_delay = 60
    with pytest.raises(
        PoolDry, match=r"no base sandbox came free in time.*raise the pool's target"
    ) as caught:
        await warmer.claim("base", SMALL, wait=0.05)
    assert caught.value.retry_after >= 1
    assert only(warmer).waiting == 0


@pytest.mark.parametrize(
    ("memory", "disk", "told"),
    [
        (100, 10**6, r"only 100 MiB of memory .* floor is 1024 MiB; end or pause sandboxes"),
        (10**6, 100, r"only 100 MiB of disk .* floor is 2048 MiB; delete snapshots and sandboxes"),
        (10**6, None, r"does not tell .* see the node's log"),
    ],
    ids=["memory", "disk", "cannot be told"],
)
async def test_a_pool_that_is_dry_for_want_of_room_says_so_and_not_to_raise_its_target(
    memory: int, disk: int | None, told: str, runtime: SimulatedRuntime, config: Config, tmp_path: Path
) -> None:
    def free(_directory: Path) -> int:
        if disk is None:
            raise OSError(5, "Input/output error")
        return disk

    room = Headroom(config.pools, tmp_path, lambda: memory, free)
    async with Warmer(runtime, config, tmp_path, room) as warmer:
        await warmer.set_pools([spec(1)], quiet)
        with pytest.raises(PoolDry, match=f"no base sandbox came free in time: .*{told}") as caught:
            await warmer.claim("base", SMALL, wait=0.05)
        assert "target" not in caught.value.message
        assert only(warmer).reason
        waiting = [spawn(warmer.claim("base", SMALL, wait=30), "claim") for _ in range(3)]
        await until(lambda: only(warmer).waiting == 3)
        with pytest.raises(PoolDry, match=f"too many requests .*{told}"):
            await warmer.claim("base", SMALL, wait=30)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_pool_whose_members_fail_says_so(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    runtime.fail_next = 10**6
    await warmer.set_pools([spec(1)], quiet)
    await until(lambda: only(warmer).failed > 0)
    with pytest.raises(PoolDry, match=r"the last one failed \(a simulated restore failed, as asked for\)"):
        await warmer.claim("base", SMALL, wait=0.05)


async def test_declared_stock_alone_is_refused_at_once_where_there_is_none(
    warmer: Warmer, runtime: SimulatedRuntime
) -> None:
    with pytest.raises(PoolDry, match="no base sandboxes of size small are kept warm here; raise"):
        await warmer.claim("base", SMALL, wait=30, stock=True)
    await warmer.claim("base", SMALL, wait=5)
    with pytest.raises(PoolDry, match="are kept warm here"):
        await warmer.claim("base", SMALL, wait=30, stock=True)
    assert len(runtime.vms) == 1


async def test_declared_stock_is_waited_for(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    await warmer.set_pools([spec(1)], quiet)
    vms = [await warmer.claim("base", SMALL, wait=5, stock=True) for _ in range(3)]
    assert len({vm.name for vm in vms}) == 3
    await until(lambda: only(warmer).warm == 1)
    runtime.restore_delay = 60
    await warmer.claim("base", SMALL, wait=5, stock=True)
    await until(lambda: only(warmer).starting == 1)
    with pytest.raises(PoolDry, match="no base sandbox came free in time"):
        await warmer.claim("base", SMALL, wait=0.05, stock=True)
    assert only(warmer).starting == 1, "none was made for the claim"


async def test_one_made_for_the_caller_alone_is_no_member(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    await warmer.set_pools([spec(2)], quiet)
    await until(lambda: only(warmer).warm == 2)
    members = set(runtime.vms)
    vm = await warmer.make("base", SMALL, wait=5)
    assert vm.name not in members
    assert (only(warmer).warm, only(warmer).starting, only(warmer).waiting) == (2, 0, 0)
    assert (await warmer.make("other", SMALL, wait=5)).name not in members


async def test_one_made_for_the_caller_alone_waits_for_its_golden_and_respects_the_floor(
    runtime: SimulatedRuntime, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [10**6]
    room = Headroom(config.pools, tmp_path, lambda: memory[0], lambda _directory: 10**6)
    golden, known = asyncio.Event(), runtime.snapshot_golden

    async def slow(*arguments: Any) -> Any:
        await golden.wait()
        return await known(*arguments)

    monkeypatch.setattr(runtime, "snapshot_golden", slow)
    async with Warmer(runtime, config, tmp_path, room) as warmer:
        with pytest.raises(PoolDry, match="its golden snapshot is being made"):
            await warmer.make("base", SMALL, wait=0.01)
        making = spawn(warmer.make("base", SMALL, wait=30), "a VM")
        golden.set()
        assert (await making).name in runtime.vms
        memory[0] = 100
        with pytest.raises(PoolDry, match="only 100 MiB of memory"):
            await warmer.make("base", SMALL, wait=30)
    with pytest.raises(NodeUnavailable):
        await warmer.make("base", SMALL, wait=1)
    await runtime.close()


async def test_a_full_queue_refuses_at_once(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    runtime.restore_delay = 60
    waiting = [spawn(warmer.claim("base", SMALL, wait=30), "claim") for _ in range(3)]
    await until(lambda: bool(warmer.status()) and only(warmer).waiting == 3)
    with pytest.raises(PoolDry, match="too many requests already wait"):
        await warmer.claim("base", SMALL, wait=30)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert only(warmer).waiting == 0


async def test_members_that_fail_are_counted_with_a_reason_and_do_not_pile_up(
    warmer: Warmer, runtime: SimulatedRuntime
) -> None:
    runtime.fail_next = 3
    await warmer.set_pools([spec(2)], quiet)
    await until(lambda: only(warmer).warm == 2)
    assert only(warmer).failed == 3
    assert len(runtime.vms) == 2


async def test_a_warm_member_that_dies_is_replaced(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    await warmer.set_pools([spec(1)], quiet)
    await until(lambda: only(warmer).warm == 1)
    (victim,) = runtime.vms.values()
    victim.ended.set()
    await until(lambda: only(warmer).warm == 1 and victim.name not in runtime.vms)
    assert only(warmer).failed == 1


async def test_a_smaller_target_gives_members_back(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    await warmer.set_pools([spec(3)], quiet)
    await until(lambda: only(warmer).warm == 3)
    await warmer.set_pools([], quiet)
    await until(lambda: not runtime.vms)
    assert only(warmer).target == 0


async def test_a_claim_given_up_at_the_moment_of_its_hand_over_leaks_nothing(
    warmer: Warmer, runtime: SimulatedRuntime
) -> None:
    runtime.restore_delay = 0.01
    for _ in range(20):
        task = spawn(warmer.claim("base", SMALL, wait=5), "claim")
        await until(lambda: bool(runtime.vms))
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(result, BaseException):
            await runtime.stop(result)
        await warmer.set_pools([], quiet)
        await until(lambda: not runtime.vms and only(warmer).starting == 0)


async def test_a_closing_warmer_refuses(runtime: SimulatedRuntime, warmer: Warmer) -> None:
    await warmer.__aexit__()
    with pytest.raises(NodeUnavailable):
        await warmer.claim("base", SMALL, wait=1)


async def test_a_refill_step_that_fails_for_an_unforeseen_reason_is_tried_again(
    warmer: Warmer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([OSError(24, "Too many open files"), RuntimeError("a bug")])

    def faulty(*arguments: Any) -> list[Any]:
        for failure in failures:
            raise failure
        return allot(*arguments)

    monkeypatch.setattr("greenroom.node.warmer.allot", faulty)
    monkeypatch.setattr("greenroom.node.warmer._AFTER_A_FAULT", 0.001)
    await warmer.set_pools([spec(2)], quiet)
    await until(lambda: only(warmer).warm == 2)


async def test_how_long_making_a_member_takes_is_told(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    runtime.restore_delay = 0.01
    await warmer.set_pools([spec(0)], quiet)
    assert (only(warmer).make_seconds, only(warmer).refill_rate) == (None, None)
    await warmer.set_pools([spec(2)], quiet)
    assert warmer.declared() == [spec(2)]
    await until(lambda: only(warmer).warm == 2)
    seconds, rate = only(warmer).make_seconds, only(warmer).refill_rate
    assert seconds is not None
    assert seconds >= 0.01
    assert rate is not None
    parallel = round(rate * seconds)
    assert parallel >= 1
    assert rate == pytest.approx(parallel / seconds)
    assert warmer.room_mib() is None
    assert only(warmer).member_mib is None, "a simulated one takes nothing"


async def test_a_pool_is_failing_until_a_member_is_made(warmer: Warmer, runtime: SimulatedRuntime) -> None:
    runtime.fail_next = 1
    await warmer.set_pools([spec(1)], quiet)
    await until(lambda: only(warmer).failed == 1)
    assert only(warmer).failing
    await until(lambda: only(warmer).warm == 1)
    assert not only(warmer).failing


@pytest.mark.parametrize(
    ("memory", "disk", "room"), [(5000, 10**6, 3976), (1000, 10**6, 0), (5000, 100, 0)], ids=str
)
async def test_the_room_for_members_is_what_is_above_the_floors(
    memory: int, disk: int, room: int, runtime: SimulatedRuntime, config: Config, tmp_path: Path
) -> None:
    headroom = Headroom(config.pools, tmp_path, lambda: memory, lambda _directory: disk)
    assert Warmer(runtime, config, tmp_path, headroom).room_mib() == room


async def test_a_process_tells_how_much_memory_it_has_for_itself() -> None:
    own = own_memory_mib(os.getpid())
    assert own is not None
    assert own > 1
    assert own_memory_mib(2**22 + 1) is None
