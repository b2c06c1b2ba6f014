"""Pausing, resuming, waking, snapshots and forks on the simulated engine: what counts when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest

from greenroom.config import Config
from greenroom.errors import (
    AlreadyPaused,
    BadRequest,
    InternalError,
    JournalUnavailable,
    RuntimeFailure,
    SnapshotDamaged,
    UnknownSandbox,
    UnknownSnapshot,
)
from greenroom.guest.signing import signature
from greenroom.node.branching import Branching
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted, ClockReading, Golden, Identity, Snapshot, Vm
from greenroom.runtime.simulated import SimulatedRuntime, SimulatedVm
from greenroom.wire.messages import (
    ClaimRequest,
    Declared,
    ForkRequest,
    Inbound,
    Lifespan,
    Sandbox,
    SignedUrl,
    SnapshotRequest,
    TimeoutRequest,
)
from greenroom.wire.tasks import spawn, stop
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]
WAKES = Lifespan(auto_pause=True, auto_resume=True)


async def claimed(keeper: Keeper, request: ClaimRequest) -> Sandbox:
    """Claim and confirm, as the api does."""
    return await keeper.confirm((await keeper.claim(request)).sandbox_id)


@pytest.fixture
def branching(keeper: Keeper, runtime: SimulatedRuntime) -> Branching:
    return Branching(keeper, runtime, keeper._journal)


async def test_a_paused_sandbox_has_no_vm_and_comes_back_as_itself(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask(env={"A": "1"}, metadata={"m": "1"}))
    (before,) = runtime.vms.values()
    assert before.identity is not None
    paused = await keeper.pause(made.sandbox_id)
    assert (paused.state, paused.paused_memory) == ("paused", True)
    assert not runtime.vms
    assert keeper.list() == [paused]
    assert (len(keeper), keeper.paused()) == (1, 1)
    assert keeper.lookup(made.sandbox_id) is None
    with pytest.raises(AlreadyPaused):
        await keeper.pause(made.sandbox_id)
    with pytest.raises(UnknownSandbox):
        await keeper.set_timeout(made.sandbox_id, TimeoutRequest(900))
    answer = await keeper.resume(made.sandbox_id, 600.0)
    assert answer.resumed
    (after,) = runtime.vms.values()
    assert after.identity is not None
    for field in ("machine_id", "hostname", "sandbox_id", "env", "token"):
        assert getattr(after.identity, field) == getattr(before.identity, field)
    assert after.identity.entropy != before.identity.entropy
    assert (answer.sandbox.token, answer.sandbox.metadata) == (made.token, made.metadata)
    assert answer.sandbox.ends_at > made.ends_at
    assert not runtime.saved
    assert keeper.paused() == 0
    again = await keeper.resume(made.sandbox_id, 1.0)
    assert not again.resumed
    assert again.sandbox.ends_at == answer.sandbox.ends_at


@pytest.mark.parametrize("memory", [True, False], ids=["with-memory", "disk-alone"])
async def test_a_paused_sandbox_goes_on_or_boots_as_it_is_asked_for(
    memory: bool, keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    (before,) = runtime.vms.values()
    before.memory["process"], before.disk["file"] = 1, 1
    assert (await keeper.pause(made.sandbox_id)).paused_memory is True
    answer = await keeper.resume(made.sandbox_id, 600.0, memory=memory)
    assert (answer.resumed, answer.sandbox.sandbox_id, answer.sandbox.token) == (
        True,
        made.sandbox_id,
        made.token,
    )
    (after,) = runtime.vms.values()
    assert (after.memory, after.disk) == ({"process": 1} if memory else {}, {"file": 1})
    assert after.identity is not None
    assert after.identity.token == made.token
    assert not runtime.saved


@pytest.mark.parametrize("memory", [True, False], ids=["with-memory", "disk-alone"])
async def test_what_a_guest_has_written_is_on_its_disk_when_it_is_paused(
    memory: bool, keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await claimed(keeper, ask())

    async def sync(vm: Vm, _deadline: float) -> None:
        assert isinstance(vm, SimulatedVm)
        assert vm.state == "running"
        vm.disk.update(vm.memory.pop("unwritten", {}))

    monkeypatch.setattr(runtime, "sync", sync)
    (before,) = runtime.vms.values()
    before.memory["unwritten"] = {"file": 1}
    await keeper.pause(made.sandbox_id, memory=memory)
    await keeper.resume(made.sandbox_id, 600.0, memory=False)
    (after,) = runtime.vms.values()
    assert after.disk == {"file": 1}


async def test_a_guest_that_writes_nothing_out_is_paused_all_the_same(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await claimed(keeper, ask())

    async def sync(_vm: Vm, _deadline: float) -> None:
        raise RuntimeFailure("the guest did not write its disk out")

    monkeypatch.setattr(runtime, "sync", sync)
    assert (await keeper.pause(made.sandbox_id)).state == "paused"


async def test_damaged_memory_is_said_with_the_way_round_it(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await claimed(keeper, ask())
    await keeper.pause(made.sandbox_id)
    restore = runtime.restore

    async def damaged(source: Golden | Snapshot) -> Vm:
        if isinstance(source, Snapshot) and source.kind == "full":
            raise SnapshotDamaged("its file ram is not what was written")
        return await restore(source)

    monkeypatch.setattr(runtime, "restore", damaged)
    with pytest.raises(SnapshotDamaged, match="boot its disk alone"):
        await keeper.resume(made.sandbox_id, 600.0)
    assert (await keeper.resume(made.sandbox_id, 600.0, memory=False)).resumed


async def test_a_paused_sandbox_is_ended_without_a_resume(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    await keeper.pause(made.sandbox_id)
    await keeper.release(made.sandbox_id)
    assert len(keeper) == 0
    assert not runtime.saved
    with pytest.raises(UnknownSandbox):
        await keeper.resume(made.sandbox_id, 60.0)


async def test_a_pause_that_fails_leaves_it_running(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    runtime.fail_captures = 1
    with pytest.raises(RuntimeFailure):
        await keeper.pause(made.sandbox_id)
    (vm,) = runtime.vms.values()
    assert vm.state == "running"
    assert keeper.get(made.sandbox_id) == made
    assert (await keeper.pause(made.sandbox_id)).state == "paused"


async def test_a_pause_that_cannot_be_written_down_leaves_it_running_and_nothing_on_disk(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await claimed(keeper, ask())

    def full(*_arguments: object) -> None:
        raise JournalUnavailable("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(keeper._journal, "settle", full)
        with pytest.raises(JournalUnavailable):
            await keeper.pause(made.sandbox_id)
    assert not runtime.saved
    (vm,) = runtime.vms.values()
    assert vm.state == "running"
    await keeper.pause(made.sandbox_id)
    with monkeypatch.context() as patch:
        patch.setattr(keeper._journal, "settle", full)
        with pytest.raises(JournalUnavailable):
            await keeper.resume(made.sandbox_id, 60.0)
    assert not runtime.vms
    assert len(runtime.saved) == 1
    assert (await keeper.resume(made.sandbox_id, 60.0)).resumed


async def test_a_resume_that_fails_leaves_it_paused(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    await keeper.pause(made.sandbox_id)
    runtime.fail_next = 1
    with pytest.raises(RuntimeFailure):
        await keeper.resume(made.sandbox_id, 60.0)
    runtime.fail_introductions = 1
    with pytest.raises(RuntimeFailure):
        await keeper.resume(made.sandbox_id, 60.0)
    assert not runtime.vms
    assert keeper.get(made.sandbox_id).state == "paused"
    assert (await keeper.resume(made.sandbox_id, 60.0)).resumed


async def test_at_its_time_out_it_is_paused_and_a_request_wakes_it(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask(lifespan=WAKES, ttl=300.0))
    await keeper.set_timeout(made.sandbox_id, TimeoutRequest(0.01))
    await until(lambda: keeper.get(made.sandbox_id).state == "paused")
    live = keeper.lookup(made.sandbox_id)
    assert live is not None
    assert await asyncio.gather(*(live.ready() for _ in range(5))) == [True] * 5
    assert len(runtime.vms) == 1
    woken = keeper.get(made.sandbox_id)
    assert woken.state == "running"
    assert woken.ends_at - keeper._clock.now() == pytest.approx(300, abs=60)
    assert await live.ready() is False


@pytest.mark.parametrize(
    ("expiration", "awake", "asleep"),
    [
        (None, True, True),
        ("9999999999", True, True),
        ("1", True, False),
        ("soon", True, False),
        ("", True, False),
    ],
    ids=["no end", "far off", "over", "no number", "empty"],
)
async def test_a_signature_that_is_over_finds_no_sandbox_that_it_would_wake(
    expiration: str | None, awake: bool, asleep: bool, keeper: Keeper, ask: Ask
) -> None:
    """One that runs says for itself what is wrong with it, as E2B does."""
    made = await claimed(keeper, ask(lifespan=WAKES))
    assert made.token is not None
    fields = {"path": "/a", "signature": signature("/a", "read", "", made.token, expiration)}
    if expiration is not None:
        fields["signature_expiration"] = expiration
    url = SignedUrl(urlencode(fields), ("read",))
    assert keeper.signer(url) == (made.sandbox_id if awake else None)
    await keeper.pause(made.sandbox_id)
    assert keeper.signer(url) == (made.sandbox_id if asleep else None)
    assert keeper.signer(SignedUrl("path=/a&signature=v1_wrong", ("read",))) is None


async def test_a_request_that_comes_while_it_is_being_paused_waits_and_wakes_it(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask(lifespan=WAKES))
    runtime.capture_delay = 0.05
    pausing = spawn(keeper.pause(made.sandbox_id), "pause")
    live = keeper._live[made.sandbox_id]
    await until(lambda: live.life.phase == "pausing")
    found = keeper.lookup(made.sandbox_id)
    assert found is live
    await found.ready()
    await pausing
    assert keeper.get(made.sandbox_id).state == "running"


async def test_a_request_that_cannot_be_served_learns_why(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask(lifespan=WAKES))
    await keeper.pause(made.sandbox_id)
    live = keeper.lookup(made.sandbox_id)
    assert live is not None
    runtime.fail_next = 1
    with pytest.raises(RuntimeFailure):
        await live.ready()
    await keeper.release(made.sandbox_id)
    with pytest.raises(UnknownSandbox):
        await live.ready()


async def test_a_resume_during_a_pause_follows_it_and_a_second_pause_is_refused(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    runtime.capture_delay = 0.05
    first = spawn(keeper.pause(made.sandbox_id), "pause")
    await until(lambda: keeper._live[made.sandbox_id].life.phase == "pausing")
    with pytest.raises(AlreadyPaused):
        await keeper.pause(made.sandbox_id)
    assert (await first).state == "paused"
    runtime.capture_delay = 0.0
    both = await asyncio.gather(keeper.resume(made.sandbox_id, 60.0), keeper.resume(made.sandbox_id, 90.0))
    assert sorted(answer.resumed for answer in both) == [False, True]
    assert len(runtime.vms) == 1


@pytest.mark.parametrize("step", ["capture", "resume"])
async def test_ending_it_meanwhile_leaves_nothing(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, step: str
) -> None:
    made = await claimed(keeper, ask())
    if step == "resume":
        await keeper.pause(made.sandbox_id)
        runtime.start_delay = 30.0
        working = spawn(keeper.resume(made.sandbox_id, 60.0), "resume")
        await until(lambda: bool(runtime.vms))
    else:
        runtime.capture_delay = 30.0
        working = spawn(keeper.pause(made.sandbox_id), "pause")
        await until(lambda: keeper._live[made.sandbox_id].life.phase == "pausing")
    await keeper.release(made.sandbox_id)
    with pytest.raises(UnknownSandbox):
        await working
    assert not runtime.vms
    assert not runtime.saved
    assert len(keeper) == 0


async def test_a_vm_that_dies_while_it_is_saved_ends_the_sandbox(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    (vm,) = runtime.vms.values()
    runtime.capture_delay = 0.05
    pausing = spawn(keeper.pause(made.sandbox_id), "pause")
    await until(lambda: keeper._live[made.sandbox_id].life.phase == "pausing")
    vm.ended.set()
    with pytest.raises(UnknownSandbox):
        await pausing
    await until(lambda: len(keeper) == 0)
    assert not runtime.saved


async def test_a_paused_sandbox_outlives_the_node(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")

    def keeper() -> Keeper:
        return Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config)

    async with keeper() as first:
        made = await claimed(first, ask("paused", ttl=0.5))
        paused = await first.pause(made.sandbox_id)
        running = await claimed(first, ask("running"))
        live = first._live[running.sandbox_id]
        assert live.vm is not None
        await runtime.pause(live.vm)  # as if the node had died in the middle of a pause
        stray = await runtime.capture(live.vm, "asleep-stray")
        vm = live.vm
        first.leave_running()
    async with keeper() as second:
        found = [Adopted(vm, "base", running.size, claimed=True, introduced=True)]
        assert second.adopt(found) == []
        assert await second.tidy() == 1
        assert stray.snapshot.name not in runtime.saved
        assert second.get(made.sandbox_id) == paused
        await until(lambda: vm.describe().state == "running")
        assert (await second.resume(made.sandbox_id, 60.0)).sandbox.state == "running"
    journal.close()


async def test_stopping_the_node_leaves_paused_sandboxes(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as first:
        made = await claimed(first, ask())
        await first.pause(made.sandbox_id)
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as second:
        second.adopt([])
        assert second.get(made.sandbox_id).state == "paused"
    journal.close()


async def test_a_snapshot_whose_files_are_gone_is_damaged_until_it_is_deleted(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    taken = await branching.take(made.sandbox_id, SnapshotRequest())
    del runtime.saved[taken.snapshot_id]
    with pytest.raises(SnapshotDamaged, match=r"cannot be used: its files are gone; delete it"):
        await branching.snapshot_of(taken.snapshot_id)
    await branching.delete(taken.snapshot_id)
    with pytest.raises(UnknownSnapshot):
        await branching.snapshot_of(taken.snapshot_id)


async def test_a_snapshot_is_kept_listed_used_and_deleted(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask(owner="o"))
    taken = await branching.take(made.sandbox_id, SnapshotRequest(name="mine"))
    assert (taken.owner, taken.name, taken.sandbox_id) == ("o", "mine", made.sandbox_id)
    assert keeper.get(made.sandbox_id).state == "running"
    assert branching.list() == [taken] == Branching(keeper, runtime, keeper._journal).list()

    request = ask("from it", snapshot=taken.snapshot_id, template=taken.snapshot_id, secure=False)
    child = await keeper.claim(request, lambda: branching.snapshot_of(taken.snapshot_id))
    assert child.token not in (None, made.token)
    await branching.delete(taken.snapshot_id)
    assert branching.list() == []
    assert await keeper.claim(request, lambda: branching.snapshot_of(taken.snapshot_id)) == child
    with pytest.raises(UnknownSnapshot):
        await branching.delete(taken.snapshot_id)
    with pytest.raises(UnknownSnapshot):
        await keeper.claim(ask("late"), lambda: branching.snapshot_of(taken.snapshot_id))
    assert await keeper.tidy() == 0


async def test_forks_are_others_and_nothing_is_left_of_the_way(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask(metadata={"m": "1"}, env={"A": "1"}))
    answer = await branching.fork(made.sandbox_id, ForkRequest(keys=["a", "b", "c"], ttl=60.0))
    forks = [fork.sandbox for fork in answer.forks if fork.sandbox is not None]
    assert len({fork.sandbox_id for fork in forks} | {made.sandbox_id}) == 4
    assert len({fork.token for fork in forks} | {made.token}) == 4
    assert all(fork.metadata == made.metadata and fork.confirm_by is not None for fork in forks)
    assert not runtime.saved
    assert await branching.fork(made.sandbox_id, ForkRequest(keys=["a", "b", "c"], ttl=60.0)) == answer


async def test_forks_have_names_and_declarations_of_their_own_or_none(
    keeper: Keeper, branching: Branching, ask: Ask
) -> None:
    declared = [Declared(document=msgspec.Raw(b'{"n":%d}' % number)) for number in range(3)]
    made = await claimed(keeper, ask(owner="me", name="box", declared=declared[0]))
    (plain,) = (await branching.fork(made.sandbox_id, ForkRequest(keys=["a"], ttl=60.0))).forks
    assert plain.sandbox is not None
    assert (plain.sandbox.name, plain.sandbox.declared, plain.sandbox.launch) == ("", None, "cold")
    request = ForkRequest(keys=["b", "c", "d"], ttl=60.0, names=["b", "box", ""], declared=declared)
    named = (await branching.fork(made.sandbox_id, request)).forks
    assert "'box' exists already" in named[1].error
    forks = {fork.sandbox.name: fork.sandbox.declared for fork in named if fork.sandbox is not None}
    assert forks == {"b": declared[0], "": declared[2]}
    for fields in ({"names": ["x"]}, {"declared": declared}):
        with pytest.raises(BadRequest, match="one for each fork"):
            await branching.fork(made.sandbox_id, ForkRequest(keys=["e", "f"], ttl=60.0, **fields))  # type: ignore[arg-type]


async def test_a_fork_of_a_private_sandbox_is_private_with_a_token_of_its_own(
    keeper: Keeper, branching: Branching, ask: Ask
) -> None:
    inbound = Inbound(public=False, mask_host="localhost:${PORT}")
    made = await claimed(keeper, ask(inbound=inbound))
    answer = await branching.fork(made.sandbox_id, ForkRequest(keys=["a", "b"], ttl=60.0))
    forks = [fork.sandbox for fork in answer.forks if fork.sandbox is not None]
    assert [fork.inbound for fork in forks] == [inbound] * 2
    assert None not in {fork.traffic_token for fork in forks}
    assert len({fork.traffic_token for fork in forks} | {made.traffic_token}) == 3


async def test_a_private_sandbox_is_private_after_a_pause_and_signatures_find_it_if_requests_wake_it(
    keeper: Keeper, ask: Ask
) -> None:
    wakes = Lifespan(auto_pause=True, auto_resume=True)
    made = await claimed(keeper, ask(inbound=Inbound(public=False), lifespan=wakes))
    other = await claimed(keeper, ask("k2"))
    for sandbox in (made, other):
        await keeper.pause(sandbox.sandbox_id)
    assert dict(keeper.tokens()) == {made.sandbox_id: made.token}
    resumed = await keeper.resume(made.sandbox_id, 60.0)
    assert (resumed.sandbox.inbound, resumed.sandbox.traffic_token) == (made.inbound, made.traffic_token)


async def test_one_fork_that_fails_stands_beside_those_that_did_not(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    runtime.fail_next = 1
    answer = await branching.fork(made.sandbox_id, ForkRequest(keys=["a", "b"], ttl=60.0))
    assert sorted(bool(fork.error) for fork in answer.forks) == [False, True]
    assert sorted(fork.sandbox is None for fork in answer.forks) == [False, True]
    assert not runtime.saved


@pytest.mark.parametrize("keys", [[], ["a", "a"], [f"k{n}" for n in range(21)]])
async def test_a_number_of_forks_that_cannot_be(
    keeper: Keeper, branching: Branching, ask: Ask, keys: list[str]
) -> None:
    made = await claimed(keeper, ask())
    with pytest.raises(BadRequest):
        await branching.fork(made.sandbox_id, ForkRequest(keys=keys, ttl=60.0))


async def test_a_paused_sandbox_is_neither_saved_nor_forked(
    keeper: Keeper, branching: Branching, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    await keeper.pause(made.sandbox_id)
    with pytest.raises(BadRequest, match="resume it first"):
        await branching.take(made.sandbox_id, SnapshotRequest())
    with pytest.raises(BadRequest, match="resume it first"):
        await branching.fork(made.sandbox_id, ForkRequest(keys=["a"], ttl=60.0))
    with pytest.raises(UnknownSandbox):
        await branching.take("iabcd" + "0" * 15, SnapshotRequest())


@pytest.mark.parametrize("seen", ["before", "damaged", "unreadable"])
async def test_who_starts_from_a_snapshot_while_it_is_deleted_is_told_that_it_is_not_there(
    seen: str,
    keeper: Keeper,
    runtime: SimulatedRuntime,
    branching: Branching,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever the deletion comes between the steps of a create or a rollback: 404, not 409, 500 or 503."""
    made = await claimed(keeper, ask())
    taken = await branching.take(made.sandbox_id, SnapshotRequest())
    looked, read = runtime.snapshots, runtime.restore

    async def snapshots() -> list[Snapshot]:
        if seen == "before":
            await branching.delete(taken.snapshot_id)
        return await looked()

    async def restore(source: Golden | Snapshot) -> Vm:
        if isinstance(source, Snapshot):
            await branching.delete(taken.snapshot_id)
            if seen == "damaged":
                raise SnapshotDamaged("a layer of its disk cannot be read; delete it")
            raise RuntimeFailure("the snapshot cannot be loaded: No such file or directory")
        return await read(source)

    def start() -> Awaitable[Sandbox]:
        return keeper.claim(ask("child"), lambda: branching.snapshot_of(taken.snapshot_id))

    monkeypatch.setattr(runtime, "snapshots", snapshots)
    monkeypatch.setattr(runtime, "restore", restore)
    with pytest.raises(UnknownSnapshot):
        await start()
    with pytest.raises(UnknownSnapshot):
        await start()
    taken = await branching.take(made.sandbox_id, SnapshotRequest())
    with pytest.raises(UnknownSnapshot):
        await branching.roll_back(made.sandbox_id, taken.snapshot_id)
    assert keeper.get(made.sandbox_id).state == "running"


async def test_a_snapshot_that_is_damaged_is_said_to_be(
    keeper: Keeper, runtime: SimulatedRuntime, branching: Branching, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await claimed(keeper, ask())
    taken = await branching.take(made.sandbox_id, SnapshotRequest())

    async def restore(_source: Golden | Snapshot) -> Vm:
        raise SnapshotDamaged("a layer of its disk cannot be read; delete it")

    monkeypatch.setattr(runtime, "restore", restore)
    with pytest.raises(SnapshotDamaged):
        await keeper.claim(ask("child"), lambda: branching.snapshot_of(taken.snapshot_id))
    with pytest.raises(SnapshotDamaged):
        await branching.roll_back(made.sandbox_id, taken.snapshot_id)


async def test_a_pause_waits_for_a_snapshot_that_is_being_taken(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    runtime.capture_delay = 0.02
    taken, paused = await asyncio.gather(
        branching.take(made.sandbox_id, SnapshotRequest()), keeper.pause(made.sandbox_id)
    )
    assert paused.state == "paused"
    assert set(runtime.saved) > {taken.snapshot_id}


async def test_a_rollback_gives_it_an_earlier_state_and_nothing_else_changes(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask(env={"A": "1"}))
    (before,) = runtime.vms.values()
    before.disk["file"] = "old"
    taken = await branching.take(made.sandbox_id, SnapshotRequest())
    before.disk["file"] = "new"
    assert await branching.roll_back(made.sandbox_id, taken.snapshot_id) == made
    (after,) = runtime.vms.values()
    assert after is not before
    assert after.disk == {"file": "old"}
    assert after.identity is not None
    assert (after.identity.token, after.identity.env) == (made.token, {"A": "1"})
    after.ended.set()
    await until(lambda: len(keeper) == 0)


async def test_a_rollback_that_fails_leaves_it_as_it_was(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    taken = await branching.take(made.sandbox_id, SnapshotRequest())
    (before,) = runtime.vms.values()
    runtime.fail_introductions = 1
    with pytest.raises(RuntimeFailure):
        await branching.roll_back(made.sandbox_id, taken.snapshot_id)
    assert list(runtime.vms.values()) == [before]
    assert keeper.get(made.sandbox_id) == made
    await keeper.set_timeout(made.sandbox_id, TimeoutRequest(900))
    other = await claimed(keeper, ask("other"))
    with pytest.raises(BadRequest, match="another sandbox"):
        await branching.roll_back(other.sandbox_id, taken.snapshot_id)
    await keeper.pause(made.sandbox_id)
    with pytest.raises(BadRequest, match="resume it first"):
        await branching.roll_back(made.sandbox_id, taken.snapshot_id)


async def test_a_sandbox_whose_vm_dies_while_it_cannot_be_rolled_back_has_ended(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    taken = await branching.take(made.sandbox_id, SnapshotRequest())
    (before,) = runtime.vms.values()
    runtime.start_delay, runtime.fail_introductions = 0.05, 1
    working = spawn(branching.roll_back(made.sandbox_id, taken.snapshot_id), "roll back")
    await until(lambda: keeper._live[made.sandbox_id].life.phase == "replacing")
    before.ended.set()
    with pytest.raises((RuntimeFailure, UnknownSandbox)):
        await working
    await until(lambda: len(keeper) == 0)
    assert not runtime.vms


@pytest.mark.parametrize("what", ["pause", "resume", "rollback"])
async def test_a_fault_that_nobody_foresaw_leaves_it_usable(
    keeper: Keeper,
    branching: Branching,
    runtime: SimulatedRuntime,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    made = await claimed(keeper, ask())
    taken = await branching.take(made.sandbox_id, SnapshotRequest())
    if what == "resume":
        await keeper.pause(made.sandbox_id)

    async def fault(*_arguments: object, **_options: object) -> None:
        raise ValueError("nobody foresaw this")

    attempts = {
        "pause": lambda: keeper.pause(made.sandbox_id),
        "resume": lambda: keeper.resume(made.sandbox_id, 60.0),
        "rollback": lambda: branching.roll_back(made.sandbox_id, taken.snapshot_id),
    }
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "capture" if what == "pause" else "restore", fault)
        with pytest.raises(InternalError, match="nobody foresaw"):
            await attempts[what]()
    assert "nobody foresaw this" in caplog.text
    assert keeper.get(made.sandbox_id).state == ("paused" if what == "resume" else "running")
    if what == "resume":
        assert (await keeper.resume(made.sandbox_id, 60.0)).resumed
    assert (await keeper.pause(made.sandbox_id)).state == "paused"
    await keeper.release(made.sandbox_id)


async def test_snapshots_and_forks_wait_for_a_resume_that_is_under_way(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask
) -> None:
    made = await claimed(keeper, ask())
    await keeper.pause(made.sandbox_id)
    runtime.start_delay = 0.05
    resuming = spawn(keeper.resume(made.sandbox_id, 60.0), "resume")
    await until(lambda: keeper._live[made.sandbox_id].life.phase == "resuming")
    taken, forked = await asyncio.gather(
        branching.take(made.sandbox_id, SnapshotRequest()),
        branching.fork(made.sandbox_id, ForkRequest(keys=["a"], ttl=60.0)),
    )
    assert (await resuming).resumed
    assert taken.sandbox_id == made.sandbox_id
    assert forked.forks[0].sandbox is not None


async def test_a_hung_guest_of_one_owner_holds_up_nobody_else(
    keeper: Keeper, branching: Branching, runtime: SimulatedRuntime, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, other = (
        await claimed(keeper, ask("bad", owner="bad")),
        await claimed(keeper, ask("other", owner="other")),
    )
    await keeper.pause(other.sandbox_id)
    introduce, hung = runtime.introduce, 0

    async def hang(vm: Vm, identity: Identity, deadline: float) -> ClockReading:
        nonlocal hung
        if isinstance(vm, SimulatedVm) and vm.parent.startswith("fork-"):
            hung += 1
            await asyncio.Event().wait()
        return await introduce(vm, identity, deadline)

    monkeypatch.setattr(runtime, "introduce", hang)
    keys = [f"fork-{n}" for n in range(20)]
    forking = spawn(branching.fork(bad.sandbox_id, ForkRequest(keys=keys, ttl=60.0)), "fork")
    await until(lambda: hung > 0)
    assert (await claimed(keeper, ask("third", owner="third"))).state == "running"
    assert (await keeper.resume(other.sandbox_id, 60.0)).resumed
    await stop(forking)
    for task in list(keeper._pending.values()):
        await stop(task)


async def test_a_paused_sandbox_is_not_resumed_for_no_time(keeper: Keeper, ask: Ask) -> None:
    made = await claimed(keeper, ask())
    assert not (await keeper.resume(made.sandbox_id, 0.0)).resumed
    await keeper.pause(made.sandbox_id)
    with pytest.raises(BadRequest, match="1 second"):
        await keeper.resume(made.sandbox_id, 0.0)
    assert keeper.get(made.sandbox_id).state == "paused"
