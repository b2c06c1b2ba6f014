"""The simulated engine keeps the contract of snapshots, so that roles can be tested with it."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import BadRequest, RuntimeFailure, UnknownSnapshot
from greenroom.runtime.engine import Golden, Identity, Runtime, quiet
from greenroom.runtime.simulated import Pace, SimulatedRuntime, SimulatedVm
from greenroom.wire.messages import Size

SIZE = Size("s", 1, 256, 1024)


async def running(runtime: SimulatedRuntime) -> SimulatedVm:
    golden: Golden = await runtime.snapshot_golden("base", SIZE, quiet)
    vm = await runtime.restore(golden)
    assert isinstance(vm, SimulatedVm)
    await runtime.start(vm)
    return vm


async def test_a_child_has_its_parents_memory_and_disk_and_from_then_on_its_own() -> None:
    runtime = SimulatedRuntime()
    contract: Runtime = runtime
    parent = await running(runtime)
    parent.memory["counter"], parent.disk["file"] = [1], "before"
    full = (await contract.capture(parent, "full")).snapshot
    disk = (await contract.capture(parent, "disk", memory=False)).snapshot
    parent.memory["counter"].append(2)
    parent.disk["file"] = "after"
    child = await contract.restore(full)
    booted = await contract.restore(disk)
    assert isinstance(child, SimulatedVm)
    assert isinstance(booted, SimulatedVm)
    assert (child.state, child.memory, child.disk) == ("paused", {"counter": [1]}, {"file": "before"})
    assert (booted.memory, booted.disk) == ({}, {"file": "before"})
    assert (full.kind, disk.kind, full.template, full.size) == ("full", "filesystem", "base", SIZE)
    assert (await contract.capture(child, "grandchild")).snapshot.parent == "full"
    assert parent.state == "running"
    assert [each.name for each in await contract.snapshots()] == ["disk", "full", "grandchild"]
    await contract.delete_snapshot("full")
    assert child.memory == {"counter": [1]}
    with pytest.raises(UnknownSnapshot):
        await contract.restore(full)
    with pytest.raises(UnknownSnapshot):
        await contract.delete_snapshot("full")


async def test_a_child_has_its_parents_identity_until_it_is_introduced() -> None:
    runtime = SimulatedRuntime()
    parent = await running(runtime)
    await runtime.introduce(parent, Identity(entropy=b"e" * 32, hostname="parent"), 1)
    child = await runtime.restore((await runtime.capture(parent, "one")).snapshot)
    assert isinstance(child, SimulatedVm)
    assert child.identity == parent.identity
    await runtime.introduce(child, Identity(entropy=b"f" * 32, hostname="child"), 1)
    assert parent.identity is not None
    assert parent.identity.hostname == "parent"


async def test_captures_fail_as_asked_and_names_are_taken_once() -> None:
    runtime = SimulatedRuntime()
    vm = await running(runtime)
    runtime.fail_captures = 1
    with pytest.raises(RuntimeFailure):
        await runtime.capture(vm, "one")
    assert await runtime.snapshots() == []
    await runtime.capture(vm, "one")
    with pytest.raises(BadRequest):
        await runtime.capture(vm, "one")
    await runtime.stop(vm)
    with pytest.raises(RuntimeFailure):
        await runtime.capture(vm, "two")


async def test_holds_are_counted() -> None:
    runtime = SimulatedRuntime()
    snapshot = (await runtime.capture(await running(runtime), "one")).snapshot
    await runtime.hold(snapshot)
    await runtime.hold(snapshot)
    await runtime.let_go(snapshot)
    assert runtime.held == {"one": 1}
    await runtime.let_go(snapshot)
    await runtime.let_go(snapshot)
    assert runtime.held == {}


@pytest.mark.parametrize("variation", [0.0, 0.1, 0.3])
def test_members_come_at_a_rate_with_times_that_vary(variation: float) -> None:
    pace = Pace(50.0, variation, "seed")
    times = [pace.interval() for _ in range(4000)]
    mean = statistics.fmean(times)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert statistics.pstdev(times) / mean == pytest.approx(variation, rel=0.05, abs=1e-9)
    assert Pace(50.0, variation, "seed").interval() == times[0]


@given(asked=st.lists(st.floats(0, 100), min_size=1, max_size=40), variation=st.floats(0, 1))
def test_one_member_is_made_after_the_other(asked: list[float], variation: float) -> None:
    pace, last = Pace(10.0, variation, "s"), 0.0
    for now in sorted(asked):
        due = pace.due(now)
        assert due >= max(now, last)
        last = due


async def test_a_restore_takes_its_turn() -> None:
    runtime = SimulatedRuntime(pace=Pace(1000.0))
    golden = await runtime.snapshot_golden("base", SIZE, quiet)
    for _ in range(3):
        assert (await runtime.restore(golden)).describe().state == "paused"
