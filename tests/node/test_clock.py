"""The wall clock is set under a running node: deadlines keep their length, and what is told stays true."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config import Config
from greenroom.errors import JournalUnavailable
from greenroom.node.clock import SMALLEST, NodeClock, Reference
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.messages import ClaimRequest, TimeoutRequest
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]


class Times:
    """Both clocks in a test's hand."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.boot = 500.0
        self.boot_id = "this boot"

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.boot += seconds

    def clock(self) -> NodeClock:
        return NodeClock(lambda: self.wall, lambda: self.boot, lambda: self.boot_id)


@given(
    moves=st.lists(st.tuples(st.floats(0, 1e5), st.one_of(st.just(0.0), st.floats(-1e6, 1e6))), max_size=20)
)
def test_a_step_is_told_once_and_time_passing_is_none(moves: list[tuple[float, float]]) -> None:
    times = Times()
    clock = times.clock()
    unseen = 0.0
    for passed, step in moves:
        times.pass_by(passed)
        times.wall += step
        unseen += step
        told = clock.take_step()
        if told:
            assert told == pytest.approx(unseen, abs=1e-3)
            unseen = 0.0
        else:
            assert abs(unseen) < SMALLEST + 1e-3
        assert clock.now() == times.wall


def test_an_earlier_runs_reference_counts_within_one_boot() -> None:
    times = Times()
    before = times.clock().reference
    times.pass_by(100)
    assert times.clock().step_since(before) == 0.0
    times.wall -= 3600
    assert times.clock().step_since(before) == -3600.0
    assert times.clock().step_since(None) == 0.0
    times.boot_id = "another boot"
    assert times.clock().step_since(before) == 0.0


def test_the_real_clocks_stand_still_to_each_other() -> None:
    clock = NodeClock()
    assert clock.take_step() == 0.0
    assert clock.reference.boot


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
async def stepped(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, times: Times
) -> AsyncIterator[Keeper]:
    journal = Journal(tmp_path / "journal.db")
    async with Keeper(
        name="n", runtime=runtime, warmer=warmer, journal=journal, config=config, clock=times.clock()
    ) as keeper:
        keeper.adopt([])
        yield keeper
    journal.close()


@pytest.mark.parametrize("step", [86_400.0, -86_400.0])
async def test_sandboxes_keep_the_length_of_their_time(
    stepped: Keeper, runtime: SimulatedRuntime, times: Times, ask: Ask, step: float
) -> None:
    told = await stepped.confirm((await stepped.claim(ask("told", ttl=60.0))).sandbox_id)
    untold = await stepped.claim(ask("untold"))
    before = {vm.name: vm.identity for vm in runtime.vms.values()}
    times.pass_by(10)
    times.wall += step
    confirmed = await stepped.confirm(untold.sandbox_id)
    assert confirmed.confirm_by is None
    moved = stepped.get(told.sandbox_id)
    assert (moved.started_at, moved.ends_at) == (told.started_at + step, told.ends_at + step)
    # Both guests were given the right time again, and nothing else but entropy.
    await until(lambda: all(vm.identity is not before[vm.name] for vm in runtime.vms.values()))
    assert all(vm.identity is not None and vm.identity.token is None for vm in runtime.vms.values())
    times.pass_by(51)
    with pytest.raises(Exception, match="does not exist"):
        await stepped.set_timeout(told.sandbox_id, TimeoutRequest(60))
    assert [sandbox.sandbox_id for sandbox in stepped.list()] == [untold.sandbox_id]


@pytest.mark.parametrize("step", [86_400.0, -86_400.0])
async def test_a_step_while_the_node_was_down_is_seen_by_its_next_run(
    runtime: SimulatedRuntime,
    warmer: Warmer,
    config: Config,
    tmp_path: Path,
    times: Times,
    ask: Ask,
    step: float,
) -> None:
    journal = Journal(tmp_path / "j.db")

    def keeper() -> Keeper:
        return Keeper(
            name="n", runtime=runtime, warmer=warmer, journal=journal, config=config, clock=times.clock()
        )

    async with keeper() as before:
        before.adopt([])
        sandbox = await before.confirm((await before.claim(ask())).sandbox_id)
        (vm,) = runtime.vms.values()
        before.leave_running()
    times.pass_by(5)
    times.wall += step
    found = [Adopted(vm, "base", sandbox.size, claimed=True, introduced=True)]
    for _ in range(2):  # the second heir sees no step: the first wrote it down
        async with keeper() as after:
            assert after.adopt(found) == []
            assert after.get(sandbox.sandbox_id).ends_at == sandbox.ends_at + step
            after.leave_running()
    await runtime.stop(vm)
    journal.close()


async def test_a_step_that_cannot_be_written_down_counts_all_the_same_and_is_written_later(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, times: Times, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")
    full = False
    restamp = journal.restamp

    def write(clock: Reference, sandboxes: dict[str, object]) -> None:
        if full:
            raise JournalUnavailable("database or disk is full")
        restamp(clock, sandboxes)  # type: ignore[arg-type]

    journal.restamp = write  # type: ignore[method-assign, assignment]
    async with Keeper(
        name="n", runtime=runtime, warmer=warmer, journal=journal, config=config, clock=times.clock()
    ) as keeper:
        keeper.adopt([])
        sandbox = await keeper.confirm((await keeper.claim(ask())).sandbox_id)
        old = journal.clock()
        full = True
        times.wall += 3600
        await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(60))
        assert keeper.get(sandbox.sandbox_id).ends_at == times.wall + 60
        assert journal.clock() == old
        full = False
        await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(90))  # wakes the reaper
        await until(lambda: journal.clock() != old)
    journal.close()


def test_what_is_kept_of_ended_claims_moves_too(tmp_path: Path, ask: Ask) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.restamp(Reference("boot", 1000.0), {})
    journal.begin("key", "digest", "iabcd12345678901234x", 5000.0)
    journal.end("key", "it was killed", 5000.0)
    journal.restamp(Reference("boot", 1000.0 + 3600), {})
    assert journal.forget(5000.0 + 3599) == 0
    assert journal.forget(5000.0 + 3601) == 1
    assert journal.clock() == Reference("boot", 4600.0)
    journal.close()


def test_a_restamp_is_all_or_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    journal.restamp(Reference("boot", 1000.0), {})
    journal.begin("key", "digest", "iabcd12345678901234x", 5000.0)
    with pytest.raises(TypeError):
        journal.restamp(Reference("boot", 2000.0), {"key": msgspec})  # type: ignore[dict-item]
    assert journal.clock() == Reference("boot", 1000.0)
    assert journal.forget(0) == 0
    journal.begin("another", "digest", "iabcd12345678901234y", 5000.0)
    journal.close()
