"""Which VM is behind whose rules, and when: at claims, pauses, resumes, forks, changes, restarts and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import Config
from greenroom.errors import BadRequest, JournalUnavailable, NotRunning, RuntimeFailure, UnknownSandbox
from greenroom.node.branching import Branching
from greenroom.node.egress import NoGate
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted, Vm
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.messages import ClaimRequest, ForkRequest, Network, Sandbox, SnapshotRequest
from greenroom.wire.tasks import spawn
from tests.node.conftest import SMALL
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]
CLOSED = Network(allow_internet_access=False)
SOME = Network(allow_out=["one.test"], deny_out=["0.0.0.0/0"])


class Recording(NoGate):
    """A gate that notes what VM is behind which rules, and whether it ran before it was."""

    def __init__(self) -> None:
        self.rules: dict[str, Network] = {}
        self.too_late: list[str] = []
        self.fail: Exception | None = None
        self.hold: asyncio.Event | None = None

    async def apply(self, vm: Vm, sandbox_id: str, network: Network) -> None:
        if self.fail is not None:
            raise self.fail
        if vm.name not in self.rules and vm.describe().state == "running":
            self.too_late.append(vm.name)
        self.rules[vm.name] = network
        if self.hold is not None:
            await self.hold.wait()

    async def close(self, vm: Vm) -> None:
        self.rules.pop(vm.name, None)


@pytest.fixture
def gate(keeper: Keeper) -> Recording:
    made = Recording()
    keeper.gate = made  # a double
    return made


async def claimed(keeper: Keeper, request: ClaimRequest) -> Sandbox:
    return await keeper.confirm((await keeper.claim(request)).sandbox_id)


async def test_a_vm_is_behind_its_rules_before_it_runs_and_loses_its_way_out_with_its_end(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, gate: Recording
) -> None:
    made = await claimed(keeper, ask(network=SOME))
    assert made.network == SOME
    (vm,) = runtime.vms
    assert gate.rules == {vm: SOME}
    assert gate.too_late == []
    await keeper.release(made.sandbox_id)
    assert gate.rules == {}


async def test_a_claim_whose_way_out_cannot_be_made_leaves_no_vm(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, gate: Recording
) -> None:
    gate.fail = RuntimeFailure("no rules can be loaded")
    with pytest.raises(RuntimeFailure, match="no rules"):
        await keeper.claim(ask())
    assert not runtime.vms
    assert len(keeper) == 0


async def test_a_resumed_sandbox_is_behind_its_rules_again(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, gate: Recording
) -> None:
    made = await claimed(keeper, ask(network=SOME))
    await keeper.set_network(made.sandbox_id, CLOSED)
    await keeper.pause(made.sandbox_id)
    assert gate.rules == {}
    with pytest.raises(NotRunning, match="resume it"):
        await keeper.set_network(made.sandbox_id, SOME)
    await keeper.resume(made.sandbox_id, 60.0)
    (vm,) = runtime.vms
    assert gate.rules == {vm: CLOSED}
    assert gate.too_late == []


async def test_a_fork_is_behind_its_parents_rules_and_so_is_what_is_rolled_back(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, gate: Recording
) -> None:
    branching = Branching(keeper, runtime, keeper._journal)
    made = await claimed(keeper, ask(network=CLOSED))
    forks = await branching.fork(made.sandbox_id, ForkRequest(keys=["f1", "f2"], ttl=60.0))
    assert [fork.sandbox.network for fork in forks.forks if fork.sandbox] == [CLOSED, CLOSED]
    assert list(gate.rules.values()) == [CLOSED] * 3
    taken = await branching.take(made.sandbox_id, SnapshotRequest())
    await keeper.set_network(made.sandbox_id, SOME)
    await branching.roll_back(made.sandbox_id, taken.snapshot_id)
    assert set(gate.rules) == set(runtime.vms)
    live = keeper.known(made.sandbox_id)
    assert live.vm is not None
    assert gate.rules[live.vm.name] == SOME
    assert gate.too_late == []


async def test_rules_are_replaced_and_outlive_the_node(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, gate: Recording, warmer: Warmer, config: Config,
    tmp_path: Path,
) -> None:  # fmt: skip
    made = await claimed(keeper, ask())
    answer = await keeper.set_network(made.sandbox_id, SOME)
    assert answer.network == SOME == keeper.get(made.sandbox_id).network
    (vm,) = runtime.vms.values()
    journal = Journal(tmp_path / "journal.db")
    later = Keeper(name="node-0", runtime=runtime, warmer=warmer, journal=journal, config=config)
    later.gate = after = Recording()  # a double
    later.adopt([Adopted(vm, "base", SMALL, True, True)])
    await later.reopen()
    assert after.rules == {vm.name: SOME}
    assert later.get(made.sandbox_id).network == SOME
    journal.close()


async def test_one_that_cannot_be_reopened_does_not_keep_the_others_closed(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, gate: Recording
) -> None:
    for key in ("a", "b"):
        await claimed(keeper, ask(key))
    first, second = runtime.vms
    gate.rules.clear()
    apply = gate.apply

    async def sometimes(vm: Vm, sandbox_id: str, network: Network) -> None:
        if vm.name == first:
            raise RuntimeFailure("not this one")
        await apply(vm, sandbox_id, network)

    gate.apply = sometimes  # type: ignore[method-assign]
    await keeper.reopen()
    assert set(gate.rules) == {second}


async def test_rules_that_cannot_be_written_down_are_taken_back(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, gate: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await claimed(keeper, ask(network=SOME))
    (vm,) = runtime.vms

    def full(*_arguments: Any) -> None:
        raise JournalUnavailable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(keeper._journal, "save", full)
        with pytest.raises(JournalUnavailable):
            await keeper.set_network(made.sandbox_id, Network())
    assert gate.rules == {vm: SOME}
    assert keeper.get(made.sandbox_id).network == SOME


async def test_rules_that_are_refused_change_nothing(keeper: Keeper, ask: Ask, gate: Recording) -> None:
    made = await claimed(keeper, ask(network=SOME))
    gate.fail = BadRequest("not these")
    with pytest.raises(BadRequest):
        await keeper.set_network(made.sandbox_id, CLOSED)
    assert keeper.get(made.sandbox_id).network == SOME
    with pytest.raises(UnknownSandbox):
        await keeper.set_network("iabcd000000000000000", CLOSED)


async def test_a_sandbox_that_is_paused_and_resumed_meanwhile_gets_the_rules_on_its_new_vm(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, gate: Recording
) -> None:
    made = await claimed(keeper, ask())
    gate.hold = asyncio.Event()
    change = spawn(keeper.set_network(made.sandbox_id, CLOSED), "change")
    await until(lambda: CLOSED in gate.rules.values())
    hold, gate.hold = gate.hold, None
    await keeper.pause(made.sandbox_id)
    await keeper.resume(made.sandbox_id, 60.0)
    hold.set()
    assert (await change).network == CLOSED
    (vm,) = runtime.vms
    assert gate.rules[vm] == CLOSED
    assert keeper.get(made.sandbox_id).network == CLOSED


async def test_one_that_ends_while_its_rules_are_replaced_keeps_no_way_out(
    keeper: Keeper, ask: Ask, gate: Recording
) -> None:
    made = await claimed(keeper, ask())
    gate.hold = asyncio.Event()
    change = spawn(keeper.set_network(made.sandbox_id, CLOSED), "change")
    await until(lambda: CLOSED in gate.rules.values())
    await keeper.release(made.sandbox_id)
    gate.hold.set()
    with pytest.raises(UnknownSandbox):
        await change
    assert gate.rules == {}
