"""Claims, timeouts and ends on the simulated engine."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from greenroom.bench import faults_host as host
from greenroom.config import Config
from greenroom.errors import (
    JournalUnavailable,
    KeyConflict,
    NodeUnavailable,
    PoolDry,
    RuntimeFailure,
    SandboxEnded,
    UnknownSandbox,
)
from greenroom.node.headroom import Headroom
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted, quiet
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.ids import node_code_of
from greenroom.wire.messages import ClaimRequest, Inbound, PoolSpec, Sandbox, TimeoutRequest
from greenroom.wire.tasks import spawn
from tests.node.conftest import SMALL
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]


async def claimed(keeper: Keeper, request: ClaimRequest) -> Sandbox:
    """Claim and confirm, as the api does."""
    return await keeper.confirm((await keeper.claim(request)).sandbox_id)


async def test_a_claim_gives_a_running_sandbox_with_an_identity_of_its_own(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    sandbox = await claimed(keeper, ask(env={"A": "1"}, metadata={"m": "1"}))
    (vm,) = runtime.vms.values()
    assert vm.state == "running"
    assert vm.identity is not None
    assert vm.identity.hostname == sandbox.sandbox_id
    assert vm.identity.env == {"A": "1"}
    assert len(vm.identity.entropy) == 64
    assert vm.identity.token == sandbox.token
    assert node_code_of(sandbox.sandbox_id) == keeper.code
    assert sandbox.metadata == {"m": "1"}
    assert set(sandbox.claim_ms) == {"queue", "turn", "start", "identity", "total"}
    assert keeper.list() == [sandbox]


async def test_no_two_sandboxes_share_a_secret(keeper: Keeper, runtime: SimulatedRuntime, ask: Ask) -> None:
    await asyncio.gather(*(keeper.claim(ask(f"k{n}")) for n in range(3)))
    identities = [vm.identity for vm in runtime.vms.values() if vm.identity is not None]
    for field in ("entropy", "machine_id", "hostname", "token"):
        assert len({getattr(identity, field) for identity in identities}) == 3


async def test_an_insecure_sandbox_has_no_token(keeper: Keeper, ask: Ask) -> None:
    assert (await keeper.claim(ask(secure=False))).token is None


async def test_private_ports_have_a_token_that_outlives_the_node(
    keeper: Keeper, ask: Ask, runtime: SimulatedRuntime, tmp_path: Path
) -> None:
    inbound = Inbound(public=False, mask_host="localhost:${PORT}", https_ports=(8443,))
    sandbox = await claimed(keeper, ask(inbound=inbound))
    assert sandbox.traffic_token is not None
    assert len(sandbox.traffic_token) == 64
    assert sandbox.traffic_token != sandbox.token
    other = await claimed(keeper, ask("k2", inbound=inbound))
    assert other.traffic_token != sandbox.traffic_token
    assert (await claimed(keeper, ask("k3"))).traffic_token is None
    live = keeper.lookup(sandbox.sandbox_id)
    assert live is not None
    assert (live.inbound, live.traffic_token) == (inbound, sandbox.traffic_token)
    read_again = Journal(tmp_path / "journal.db")
    kept = {entry.key: entry.sandbox for entry, *_rest in read_again.running()}
    assert kept["k1"] == sandbox
    read_again.close()


async def test_the_same_key_with_another_wish_for_incoming_requests_is_refused(
    keeper: Keeper, ask: Ask
) -> None:
    await claimed(keeper, ask())
    with pytest.raises(KeyConflict):
        await keeper.claim(ask(inbound=Inbound(public=False)))


async def test_the_same_key_gives_the_same_sandbox(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    first = await keeper.claim(ask())
    assert await keeper.claim(ask()) == first
    assert await keeper.by_key("k1") == first
    assert len(runtime.vms) == 1


async def test_two_requests_with_one_key_at_once_give_one_sandbox(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runtime.start_delay = 0.02
    both = await asyncio.gather(keeper.claim(ask()), keeper.claim(ask()))
    assert both[0] == both[1]
    assert len(runtime.vms) == 1


async def test_a_key_used_for_something_else_is_a_conflict(keeper: Keeper, ask: Ask) -> None:
    await keeper.claim(ask())
    with pytest.raises(KeyConflict):
        await keeper.claim(ask(metadata={"other": "body"}))


async def test_a_key_whose_sandbox_has_ended_makes_no_second_one(keeper: Keeper, ask: Ask) -> None:
    sandbox = await keeper.claim(ask())
    await keeper.release(sandbox.sandbox_id)
    with pytest.raises(SandboxEnded, match="use a new key"):
        await keeper.claim(ask())
    with pytest.raises(SandboxEnded):
        await keeper.by_key("k1")


async def test_a_key_nobody_used_is_unknown(keeper: Keeper) -> None:
    with pytest.raises(UnknownSandbox):
        await keeper.by_key("never")


async def test_asking_for_a_key_whose_claim_is_under_way_waits_for_it(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runtime.start_delay = 0.05
    claiming = spawn(keeper.claim(ask()), "a claim")
    await until(lambda: bool(runtime.vms))
    assert await keeper.by_key("k1") == await claiming


async def test_a_caller_that_goes_away_does_not_stop_the_claim(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runtime.start_delay = 0.05
    task = spawn(keeper.claim(ask()), "a caller")
    await until(lambda: bool(runtime.vms))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await keeper.claim(ask())).state == "running"
    assert len(runtime.vms) == 1


async def test_a_guest_that_does_not_come_up_is_destroyed_and_another_is_tried(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runtime.fail_introductions = 1
    sandbox = await keeper.claim(ask())
    assert sandbox.state == "running"
    assert len(runtime.vms) == 1


async def test_two_guests_that_do_not_come_up_fail_the_claim_and_its_key_is_free(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runtime.fail_introductions = 2
    with pytest.raises(RuntimeFailure):
        await keeper.claim(ask())
    assert not runtime.vms
    assert (await keeper.claim(ask())).state == "running"


async def test_a_refused_claim_leaves_nothing(keeper: Keeper, runtime: SimulatedRuntime, ask: Ask) -> None:
    runtime.restore_delay = 30
    with pytest.raises(PoolDry):
        await keeper.claim(ask(wait=0.02))
    runtime.restore_delay = 0
    assert len(keeper) == 0


async def test_release_ends_it_and_cuts_its_connections(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    cut: list[str] = []

    async def note(sandbox_id: str) -> None:
        cut.append(sandbox_id)

    keeper.cut = note
    sandbox = await keeper.claim(ask())
    await keeper.release(sandbox.sandbox_id)
    assert cut == [sandbox.sandbox_id]
    assert not runtime.vms
    assert keeper.lookup(sandbox.sandbox_id) is None
    with pytest.raises(UnknownSandbox):
        await keeper.release(sandbox.sandbox_id)


async def test_a_timeout_moves_and_extend_only_never_shortens(keeper: Keeper, ask: Ask) -> None:
    sandbox = await claimed(keeper, ask(ttl=600.0))
    shorter = await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(60, extend_only=True))
    assert shorter.ends_at == sandbox.ends_at
    longer = await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(900, extend_only=True))
    assert longer.ends_at > sandbox.ends_at
    assert (await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(60))).ends_at < sandbox.ends_at


async def test_it_ends_when_its_time_is_up(keeper: Keeper, runtime: SimulatedRuntime, ask: Ask) -> None:
    sandbox = await claimed(keeper, ask(ttl=3600.0))
    (vm,) = runtime.vms.values()
    await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(0))
    async with asyncio.timeout(5):
        await vm.ended.wait()
    assert keeper.lookup(sandbox.sandbox_id) is None


async def test_it_ends_when_its_vm_does(keeper: Keeper, runtime: SimulatedRuntime, ask: Ask) -> None:
    sandbox = await keeper.claim(ask())
    (vm,) = runtime.vms.values()
    vm.ended.set()
    await until(lambda: len(keeper) == 0)
    with pytest.raises(UnknownSandbox):
        keeper.get(sandbox.sandbox_id)


async def test_after_a_restart_what_lives_goes_on_and_the_rest_has_ended(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as before:
        kept = await claimed(before, ask("kept"))
        lost = await claimed(before, ask("lost"))
        spare = await runtime.restore(await runtime.snapshot_golden("base", kept.size, lambda _s, _d: None))
        journal.begin("under way", "d", "iabcd12345678901234x", time.time())
        journal.assign("under way", spare.name)
        vms = {
            live.sandbox_id: live.vm for live in (before.lookup(s.sandbox_id) for s in (kept, lost)) if live
        }
        before.leave_running()
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as after:
        found = [
            Adopted(vms[kept.sandbox_id], "base", kept.size, claimed=True, introduced=True),
            Adopted(spare, "base", kept.size, claimed=True, introduced=False),
        ]
        assert [adopted.vm for adopted in after.adopt(found)] == [spare]
        assert after.list() == [kept]
        assert await after.claim(ask("kept")) == kept
        with pytest.raises(SandboxEnded):
            await after.by_key("lost")
        assert journal.find("under way") is None
        await after.release(kept.sandbox_id)
        assert vms[kept.sandbox_id].ended.is_set()
    journal.close()


async def test_a_time_out_that_passed_meanwhile_is_kept_at_once(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as before:
        sandbox = await before.claim(ask())
        (vm,) = runtime.vms.values()
        before.leave_running()
    journal.save("k1", msgspec.structs.replace(sandbox, ends_at=time.time() - 1), time.time())
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as after:
        after.adopt([Adopted(vm, "base", sandbox.size, claimed=True, introduced=True)])
        async with asyncio.timeout(5):
            await vm.ended.wait()
    journal.close()


class FullDisk:
    """A journal whose writes fail from some moment on, as on a full disk; a test double."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.full = False

    def __getattr__(self, name: str) -> object:
        if self.full and name in ("begin", "assign", "save", "end", "abort", "forget"):

            def fail(*_arguments: object) -> None:
                raise JournalUnavailable("database or disk is full")

            return fail
        return getattr(self._journal, name)


async def test_on_a_full_disk_sandboxes_still_end_and_new_ones_are_refused(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    real = Journal(tmp_path / "j.db")
    disk = FullDisk(real)
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=disk, config=config) as keeper:  # type: ignore[arg-type]
        killed, timed = await claimed(keeper, ask("a")), await claimed(keeper, ask("b", ttl=3600.0))
        await keeper.set_timeout(timed.sandbox_id, TimeoutRequest(0.2))
        disk.full = True
        with pytest.raises(JournalUnavailable):
            await claimed(keeper, ask("c"))
        with pytest.raises(JournalUnavailable):
            await keeper.set_timeout(killed.sandbox_id, TimeoutRequest(900))
        assert keeper.get(killed.sandbox_id).ends_at == killed.ends_at
        await keeper.release(killed.sandbox_id)
        await until(lambda: len(keeper) == 0 and not runtime.vms)
        disk.full = False
        assert (await claimed(keeper, ask("d"))).state == "running"
    real.close()


async def test_a_claim_that_cannot_be_written_down_takes_no_member(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    real = Journal(tmp_path / "j.db")
    disk = FullDisk(real)
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=disk, config=config) as keeper:  # type: ignore[arg-type]
        await warmer.set_pools([PoolSpec(template="base", size=SMALL, target=1)], quiet)
        await until(lambda: warmer.next_member("base", SMALL) is not None)
        (only,) = runtime.vms
        disk.full = True
        with pytest.raises(JournalUnavailable):
            await keeper.claim(ask("a"))
        assert warmer.next_member("base", SMALL) == only
        assert list(runtime.vms) == [only]
    real.close()


async def test_claims_at_once_get_a_member_each_and_the_journal_names_it_before_the_hand_over(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "journal.db")
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as keeper:
        await warmer.set_pools([PoolSpec(template="base", size=SMALL, target=2)], quiet)
        await until(lambda: warmer.status()[0].warm == 2)
        runtime.start_delay = 0.05
        members = set(runtime.vms)
        claims = [spawn(keeper.claim(ask(f"k{number}")), "a claim") for number in range(3)]
        await until(lambda: len(host.journalled(tmp_path)) >= 2)
        assert members <= host.journalled(tmp_path)
        made = await asyncio.gather(*claims)
        names = {live.vm.name for live in keeper._live.values()}
        assert len(names) == len({sandbox.sandbox_id for sandbox in made}) == 3
        assert members < names, "the third had to wait for another"
    journal.close()


async def test_a_claim_says_how_warm_it_wants_its_vm_and_learns_how_it_was(
    keeper: Keeper, warmer: Warmer, runtime: SimulatedRuntime, ask: Ask
) -> None:
    with pytest.raises(PoolDry, match="are kept warm here"):
        await keeper.claim(ask("k1", warm="require", wait=30.0))
    assert (await keeper.claim(ask("k1", warm="prefer"))).launch == "cold", "its key was free again"
    await warmer.set_pools([PoolSpec(template="base", size=SMALL, target=1)], quiet)
    await until(lambda: warmer.next_member("base", SMALL) is not None)
    member = warmer.next_member("base", SMALL)
    alone = await keeper.claim(ask("k2", warm="never"))
    assert alone.launch == "cold"
    assert warmer.next_member("base", SMALL) == member, "no member was taken"
    runtime.restore_delay = 0.02
    first, second = await asyncio.gather(
        keeper.claim(ask("k3", warm="require")), keeper.claim(ask("k4", warm="require"))
    )
    assert (first.launch, second.launch) == ("warm", "warm")
    assert (await keeper.claim(ask("k5"))).launch == "warm"
    assert keeper._live[alone.sandbox_id].vm is not None


async def test_vms_made_for_one_claim_alone_are_made_so_many_at_once(
    runtime: SimulatedRuntime, config: Config, tmp_path: Path, ask: Ask
) -> None:
    one = msgspec.structs.replace(config, pools=msgspec.structs.replace(config.pools, refill_parallel=1))
    journal = Journal(tmp_path / "journal.db")
    async with (
        Warmer(runtime, one, tmp_path) as warmer,
        Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=one) as keeper,
    ):
        runtime.restore_delay = 60
        waiting = spawn(keeper.claim(ask("k1", warm="never")), "a claim")
        await until(keeper._restores.locked)
        with pytest.raises(PoolDry, match="too many sandboxes are being made here"):
            await keeper.claim(ask("k2", warm="never", wait=0.02))
        waiting.cancel()
    journal.close()
    await runtime.close()


async def test_a_time_out_that_is_sooner_than_the_next_look_is_kept(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    late, soon = await claimed(keeper, ask("late", ttl=3600.0)), await claimed(keeper, ask("soon", ttl=0.05))
    await until(lambda: len(keeper) == 1)
    assert keeper.list() == [late]
    assert soon.sandbox_id != late.sandbox_id


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from greenroom.config import Config, VmConfig
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.messages import ClaimRequest, Size

async def main(home):
    runtime, config = SimulatedRuntime(), Config(vm=VmConfig(engine="simulated"))
    journal = Journal(home / "journal.db")
    async with Warmer(runtime, config, home) as warmer, Keeper(
        name="n", runtime=runtime, warmer=warmer, journal=journal, config=config
    ) as keeper:
        for number in range(5):
            request = ClaimRequest(key=f"k{number}", template="base", size=Size("small", 1, 512, 4096), ttl=60.0)
            await keeper.claim(request)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_claims_that_were_answered_outlive_a_sigkill(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    journal = Journal(tmp_path / "journal.db")
    assert {entry.key for entry, _, _ in journal.running()} == {f"k{number}" for number in range(5)}
    journal.close()


async def test_a_provisional_sandbox_is_nobodys_until_it_is_confirmed(keeper: Keeper, ask: Ask) -> None:
    sandbox = await keeper.claim(ask())
    assert sandbox.confirm_by is not None
    assert keeper.list() == []
    assert keeper.lookup(sandbox.sandbox_id) is None
    with pytest.raises(UnknownSandbox):
        await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(900))
    assert await keeper.claim(ask()) == sandbox
    confirmed = await keeper.confirm(sandbox.sandbox_id)
    assert confirmed == await keeper.confirm(sandbox.sandbox_id)
    assert confirmed.confirm_by is None
    assert keeper.list() == [confirmed]


async def test_a_provisional_sandbox_can_be_given_back(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    await keeper.release((await keeper.claim(ask())).sandbox_id)
    assert not runtime.vms


async def test_one_that_nobody_confirms_is_given_back_and_its_key_says_so(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")
    quick = msgspec.structs.replace(
        config, claims=msgspec.structs.replace(config.claims, confirm_within=0.05)
    )
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=quick) as keeper:
        sandbox = await keeper.claim(ask())
        await until(lambda: not runtime.vms)
        with pytest.raises(UnknownSandbox):
            await keeper.confirm(sandbox.sandbox_id)
        with pytest.raises(SandboxEnded):
            await keeper.claim(ask())
    journal.close()


async def test_an_heir_goes_on_waiting_for_a_confirmation(
    runtime: SimulatedRuntime, warmer: Warmer, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "j.db")
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as before:
        sandbox = await before.claim(ask())
        (vm,) = runtime.vms.values()
        before.leave_running()
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as after:
        assert after.adopt([Adopted(vm, "base", sandbox.size, claimed=True, introduced=True)]) == []
        assert after.list() == []
        assert (await after.confirm(sandbox.sandbox_id)).confirm_by is None
        assert len(after.list()) == 1
    journal.close()


async def test_on_a_full_disk_a_claim_is_refused_at_once_and_one_that_was_made_is_still_told(
    runtime: SimulatedRuntime, config: Config, tmp_path: Path, ask: Ask
) -> None:
    free = [10_000]
    room = Headroom(config.pools, tmp_path, lambda: 10**6, lambda _path: free[0])
    journal = Journal(tmp_path / "journal.db")
    async with (
        Warmer(runtime, config, tmp_path, room) as warmer,
        Keeper(name="node-0", runtime=runtime, warmer=warmer, journal=journal, config=config) as keeper,
    ):
        await warmer.set_pools([PoolSpec(template="base", size=SMALL, target=2)], quiet)
        await warmer.ready()
        made = await keeper.claim(ask("k1"))
        free[0] = config.pools.disk_emergency_mib - 1
        with pytest.raises(
            NodeUnavailable, match=r"only 511 MiB of the node's disk are free.* delete"
        ) as caught:
            await keeper.claim(ask("k2"))
        assert caught.value.retry_after
        assert await keeper.claim(ask("k1")) == made
        free[0] += 1
        assert (await keeper.claim(ask("k2"))).sandbox_id != made.sandbox_id
    journal.close()
    await runtime.close()
