"""What stays of sandboxes that ended by themselves: told of, named, without a secret, until it is dropped."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from greenroom.config import Config
from greenroom.errors import JournalUnavailable, NameTaken, SandboxEnded, StaleObject, UnknownSandbox
from greenroom.node import lifecycle, remains, residents
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.messages import ClaimRequest, Declared, DeclaredChange, Sandbox, TimeoutRequest
from tests.node.test_clock import Times
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]
STAYS = Declared(document=msgspec.Raw(b'{"sandbox":{}}'), retain=True)


def staying(**changes: object) -> Declared:
    return msgspec.structs.replace(STAYS, **changes)


async def claimed(keeper: Keeper, request: ClaimRequest) -> Sandbox:
    """Claim and confirm, as the api does."""
    return await keeper.confirm((await keeper.claim(request)).sandbox_id)


async def time_is_up(keeper: Keeper, sandbox: Sandbox) -> None:
    await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(0.0))


async def shut_down(keeper: Keeper, sandbox: Sandbox) -> None:
    await keeper.declare(sandbox.sandbox_id, DeclaredChange(1, staying(shutdown_at=1.0)))


async def vm_ends(keeper: Keeper, sandbox: Sandbox) -> None:
    live = keeper.lookup(sandbox.sandbox_id)
    assert live is not None
    assert live.vm is not None
    live.vm.ended.set()


async def evicted(keeper: Keeper, sandbox: Sandbox) -> None:
    await keeper.evict(sandbox.sandbox_id, "the disk is full")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (time_is_up, lifecycle.TIME_UP),
        (shut_down, lifecycle.SHUT_DOWN),
        (vm_ends, lifecycle.VM_GONE),
        (evicted, "the disk is full"),
    ],
)
async def test_of_one_that_ended_by_itself_its_record_stays_until_it_is_deleted(
    keeper: Keeper,
    runtime: SimulatedRuntime,
    ask: Ask,
    end: Callable[[Keeper, Sandbox], Awaitable[None]],
    reason: str,
    tmp_path: Path,
) -> None:
    made = await claimed(keeper, ask(owner="me", name="box", declared=STAYS))
    await end(keeper, made)
    await until(lambda: len(keeper) == 0)
    assert not runtime.vms
    stayed = keeper.get(made.sandbox_id, ended=True)
    assert (stayed.state, stayed.end_reason, stayed.token, stayed.name) == ("ended", reason, None, "box")
    assert stayed.ended_at is not None
    assert keeper.changes.sandboxes[made.sandbox_id].end_reason == reason
    # It is no sandbox any more.
    assert (keeper.list(), keeper.paused(), list(keeper.tokens())) == ([], 0, [])
    assert keeper.lookup(made.sandbox_id) is None
    with pytest.raises(UnknownSandbox):
        keeper.get(made.sandbox_id)
    with pytest.raises(SandboxEnded):
        await keeper.by_key("k1")
    with pytest.raises(NameTaken):
        await keeper.claim(ask("k2", owner="me", name="box"))
    assert keeper._journal.forget(keeper._clock.now() + 1) == 0, "it outlives its key's retention"
    with sqlite3.connect(tmp_path / "journal.db") as rows:
        assert made.token is not None
        assert made.token.encode() not in rows.execute("SELECT record FROM claims").fetchone()[0]
    rows.close()
    with pytest.raises(UnknownSandbox):
        await keeper.release(made.sandbox_id)  # for who knows of no ended ones it is none
    await keeper.release(made.sandbox_id, ended=True)
    assert keeper.changes.sandboxes == {}
    with pytest.raises(UnknownSandbox):
        keeper.get(made.sandbox_id, ended=True)
    with pytest.raises(UnknownSandbox):
        await keeper.release(made.sandbox_id, ended=True)
    with pytest.raises(SandboxEnded):
        await keeper.by_key("k1")
    assert (await keeper.claim(ask("k2", owner="me", name="box"))).name == "box"


async def test_nothing_stays_of_one_that_was_deleted_or_never_told_of(keeper: Keeper, ask: Ask) -> None:
    deleted = await claimed(keeper, ask("k1", declared=STAYS))
    await keeper.release(deleted.sandbox_id)
    untold = await keeper.claim(ask("k2", declared=STAYS))
    live = keeper._live[untold.sandbox_id]
    await keeper.feed(live, lifecycle.VmEnded())
    plain = await claimed(keeper, ask("k3", declared=staying(retain=False)))
    await time_is_up(keeper, plain)
    await until(lambda: len(keeper) == 0)
    assert (len(keeper.remains), keeper.changes.sandboxes) == (0, {})


async def test_what_a_finalizer_holds_stays_whatever_ended_it_until_that_is_gone(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    held = staying(retain=False, retain_for=0.0, held=True)
    made = await claimed(keeper, ask("k1", declared=held))
    await keeper.release(made.sandbox_id)
    await until(lambda: not runtime.vms)
    assert keeper.changes.sandboxes[made.sandbox_id].state == "ended"
    dropped = await claimed(keeper, ask("k3", declared=held))
    await keeper.release(dropped.sandbox_id, ended=True)
    assert dropped.sandbox_id not in keeper.changes.sandboxes, "who knows of ended ones wants nothing to stay"
    untold = await keeper.claim(ask("k2", declared=held))
    await keeper.release(untold.sandbox_id)
    assert len(keeper.remains) == 1, "of what nobody was told of nothing stays"
    freed = staying(retain=False, retain_for=0.0)
    await keeper.declare(made.sandbox_id, DeclaredChange(1, freed))
    await until(lambda: keeper.changes.sandboxes == {})


async def test_it_is_at_no_time_told_that_it_is_gone(keeper: Keeper, ask: Ask) -> None:
    made = await claimed(keeper, ask(declared=STAYS))
    seq = keeper.changes.position.seq
    await evicted(keeper, made)
    lines, _ = keeper.changes.since(seq) or (b"", 0)
    assert [msgspec.json.decode(line)["type"] for line in lines.splitlines()] == ["put"]


async def test_what_is_declared_of_one_that_stayed_can_be_changed(keeper: Keeper, ask: Ask) -> None:
    made = await claimed(keeper, ask(declared=STAYS))
    await evicted(keeper, made)
    with pytest.raises(StaleObject):
        await keeper.declare(made.sandbox_id, DeclaredChange(2, STAYS))
    changed = await keeper.declare(made.sandbox_id, DeclaredChange(1, staying(retain_for=1000.0)))
    assert changed.state == "ended"
    assert changed.declared is not None
    assert changed.declared.revision == 2
    assert keeper.changes.sandboxes[made.sandbox_id].declared == changed.declared
    assert [entry.sandbox for entry in keeper._journal.retained()] == [changed]


async def test_it_is_dropped_when_its_time_is_over(keeper: Keeper, ask: Ask) -> None:
    first = await claimed(keeper, ask("k1", name="one", declared=staying(retain_for=0.05)))
    second = await claimed(keeper, ask("k2", name="two", declared=STAYS))
    for each in (first, second):
        await evicted(keeper, each)
    await until(lambda: list(keeper.remains) == [second.sandbox_id])
    assert list(keeper.changes.sandboxes) == [second.sandbox_id]
    await keeper.declare(second.sandbox_id, DeclaredChange(1, staying(retain_for=0.0)))
    await until(lambda: len(keeper.remains) == 0)
    assert (len(keeper.names), keeper._journal.retained()) == (0, [])


async def test_of_too_many_the_oldest_goes(keeper: Keeper, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "MOST", 2)
    made = [
        await claimed(keeper, ask(f"k{number}", name=f"n{number}", declared=STAYS)) for number in range(4)
    ]
    for each in made:
        await evicted(keeper, each)
    left = [each.sandbox_id for each in made[2:]]
    assert list(keeper.remains) == left == list(keeper.changes.sandboxes)
    assert [entry.sandbox_id for entry in keeper._journal.retained()] == left
    assert keeper.names.holder("", "n0") is None


async def test_a_record_that_cannot_be_dropped_is_tried_again(
    keeper: Keeper, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residents, "_TRY_AGAIN", 0.02)
    made = await claimed(keeper, ask(declared=staying(retain_for=0.0)))
    end, failed = keeper._journal.end, []

    def full(*arguments: object) -> None:
        if len(failed) < 2:
            failed.append(arguments)
            raise JournalUnavailable("database or disk is full")
        end(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(keeper._journal, "end", full)
    await evicted(keeper, made)
    await until(lambda: len(keeper.remains) == 0)
    assert len(failed) == 2


async def test_what_stayed_outlives_the_node_and_what_is_lost_by_it_stays(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")

    def keeper() -> Keeper:
        return Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config)

    async with keeper() as before:
        ended = await claimed(before, ask("k1", owner="me", name="ended", declared=STAYS))
        await evicted(before, ended)
        stayed = before.get(ended.sandbox_id, ended=True)
        lost = await claimed(before, ask("k2", owner="me", name="lost", declared=STAYS))
        untold = await before.claim(ask("k3", owner="me", name="untold", declared=STAYS))
        before.leave_running()
    async with keeper() as after:
        after.adopt([])
        assert after.get(ended.sandbox_id, ended=True) == stayed
        told = after.get(lost.sandbox_id, ended=True)
        assert (told.state, told.end_reason, told.token) == ("ended", residents.LOST, None)
        assert set(after.changes.sandboxes) == set(after.remains) == {ended.sandbox_id, lost.sandbox_id}
        assert after.names.holder("me", "untold") is None
        assert untold.sandbox_id not in after.remains
        stopped = await claimed(after, ask("k4", declared=STAYS))
    assert after.get(stopped.sandbox_id, ended=True).end_reason == "the node was stopped"
    async with keeper() as last:
        last.adopt([])
        assert len(last.remains) == 3
    journal.close()


@pytest.mark.parametrize("step", [86_400.0, -86_400.0])
async def test_a_clock_that_is_set_moves_what_stays_and_shutdown_times(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask, step: float
) -> None:
    times, journal = Times(), Journal(tmp_path / "j.db")

    def keeper() -> Keeper:
        return Keeper(
            name="n", runtime=runtime, warmer=warmer, journal=journal, config=config, clock=times.clock()
        )

    async with keeper() as before:
        before.adopt([])
        ended = await claimed(before, ask("k1", declared=staying(retain_for=100.0)))
        await evicted(before, ended)
        stayed = before.get(ended.sandbox_id, ended=True)
        runs = await claimed(before, ask("k2", declared=staying(shutdown_at=times.wall + 1000.0)))
        (vm,) = runtime.vms.values()
        times.pass_by(10)
        times.wall += step
        before._now()
        moved = before.get(ended.sandbox_id, ended=True)
        assert stayed.ended_at is not None
        assert moved.ended_at == stayed.ended_at + step
        assert runs.declared is not None
        now = before.get(runs.sandbox_id).declared
        assert now == staying(shutdown_at=(runs.declared.shutdown_at or 0.0) + step)
        assert before._live[runs.sandbox_id].life.shutdown_at == now.shutdown_at
        assert before.changes.sandboxes[ended.sandbox_id].ended_at == moved.ended_at
        before.leave_running()
    times.wall += step
    async with keeper() as after:
        after.adopt([Adopted(vm, "base", runs.size, claimed=True, introduced=True)])
        assert after.get(ended.sandbox_id, ended=True).ended_at == stayed.ended_at + 2 * step
        assert after._live[runs.sandbox_id].life.shutdown_at == (now.shutdown_at or 0.0) + step
        assert len(after.remains) == 1
        times.pass_by(100)
        after._moved.set()
        await until(lambda: ended.sandbox_id not in after.remains)
    journal.close()


async def test_one_that_ends_on_a_full_disk_is_told_of_and_written_down_by_the_next_run(
    runtime: SimulatedRuntime,
    warmer: Warmer,
    config: Config,
    tmp_path: Path,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = Journal(tmp_path / "j.db")

    def full(*_arguments: object) -> None:
        raise JournalUnavailable("database or disk is full")

    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as before:
        made = await claimed(before, ask(declared=STAYS))
        with monkeypatch.context() as patch:
            patch.setattr(journal, "retain", full)
            await evicted(before, made)
        assert before.changes.sandboxes[made.sandbox_id].state == "ended"
    assert journal.retained() == []
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as after:
        after.adopt([])
        assert [entry.sandbox_id for entry in journal.retained()] == [made.sandbox_id]
    journal.close()
