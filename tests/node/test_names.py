"""Names: unique to an owner, told of before their sandbox is shown, and free once nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from greenroom.config import Config
from greenroom.errors import NameTaken, RuntimeFailure, SandboxEnded
from greenroom.node.changelog import ChangeLog
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.names import Names
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.changes import HeldName
from greenroom.wire.messages import ClaimRequest
from greenroom.wire.tasks import spawn
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]


def test_a_name_is_one_sandboxs_and_freed_by_no_other() -> None:
    log = ChangeLog("abcd")
    names = Names(log)
    names.take("i1", "me", "box")
    names.take("i2", "you", "box")
    names.take("i3", "me", "")
    assert len(names) == 2
    with pytest.raises(NameTaken, match="'box' exists already; delete it"):
        names.refuse_taken("me", "box")
    names.refuse_taken("me", "")
    names.free("i2", "me", "box")
    assert names.holder("me", "box") == "i1"
    names.free("i1", "me", "box")
    names.refuse_taken("me", "box")
    assert list(log.held.values()) == [HeldName("i2", "you", "box")]


async def test_a_name_is_taken_from_before_the_claim_is_over_until_its_sandbox_is_gone(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runtime.start_delay = 0.05
    claiming = spawn(keeper.claim(ask("k1", owner="me", name="box")), "a claim")
    await until(lambda: bool(keeper.changes.held))
    ((sandbox_id, held),) = keeper.changes.held.items()
    assert held == HeldName(sandbox_id, "me", "box")
    with pytest.raises(NameTaken):
        await keeper.claim(ask("k2", owner="me", name="box"))
    assert keeper._journal.find("k2") is None, "its key is free for another name"
    again = spawn(keeper.claim(ask("k1", owner="me", name="box")), "the same claim")
    made = await claiming
    assert await again == made
    assert (made.sandbox_id, made.name) == (sandbox_id, "box")
    with pytest.raises(NameTaken):
        await keeper.claim(ask("k3", owner="me", name="box"))
    assert list(keeper.changes.held) == [sandbox_id], "a provisional one is not shown"
    await keeper.confirm(sandbox_id)
    assert keeper.changes.held == {}
    assert keeper.changes.sandboxes[sandbox_id].name == "box"
    with pytest.raises(NameTaken):
        await keeper.claim(ask("k4", owner="me", name="box"))
    assert (await keeper.claim(ask("k5", owner="you", name="box"))).name == "box"
    await keeper.release(sandbox_id)
    assert (await keeper.claim(ask("k6", owner="me", name="box"))).sandbox_id != sandbox_id
    with pytest.raises(SandboxEnded):
        await keeper.claim(ask("k1", owner="me", name="box"))


async def test_a_claim_that_fails_gives_its_name_back(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runtime.fail_introductions = 2
    with pytest.raises(RuntimeFailure):
        await keeper.claim(ask("k1", owner="me", name="box"))
    assert (len(keeper.names), keeper.changes.held) == (0, {})
    made = await keeper.claim(ask("k1", owner="me", name="box"))
    await keeper.release(made.sandbox_id)
    assert (len(keeper.names), keeper.changes.held) == (0, {}), "a provisional one that was given back"


async def test_of_many_claims_of_one_name_at_once_one_is_served(keeper: Keeper, ask: Ask) -> None:
    claims = (keeper.claim(ask(f"k{number}", owner="me", name="box")) for number in range(10))
    answers = await asyncio.gather(*claims, return_exceptions=True)
    assert sum(isinstance(answer, NameTaken) for answer in answers) == 9


async def test_names_outlive_the_node(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as before:
        shown = await before.confirm((await before.claim(ask("k1", owner="me", name="shown"))).sandbox_id)
        provisional = await before.claim(ask("k2", owner="me", name="provisional"))
        vms = {live.sandbox_id: live.vm for live in before._live.values()}
        before.leave_running()
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as after:
        found = [Adopted(vm, "base", shown.size, claimed=True, introduced=True) for vm in vms.values() if vm]
        assert after.adopt(found) == []
        assert list(after.changes.held) == [provisional.sandbox_id]
        assert list(after.changes.sandboxes) == [shown.sandbox_id]
        for name in ("shown", "provisional"):
            with pytest.raises(NameTaken):
                await after.claim(ask("k3", owner="me", name=name))
    journal.close()
