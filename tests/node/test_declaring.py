"""What is declared of a sandbox: one writer at a time, kept on disk, and its shutdown time carried out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenroom.errors import BadRequest, JournalUnavailable, SandboxEnded, StaleObject, UnknownSandbox
from greenroom.node.declaring import LAST_INSTANT, MOST_BYTES, checked
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.changes import Put, frame_of
from greenroom.wire.messages import FOREVER, ClaimRequest, Declared, DeclaredChange, Lifespan, Sandbox
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]


def declared(document: object = None, **fields: Any) -> Declared:
    return Declared(document=msgspec.Raw(json.dumps(document or {"sandbox": {}}).encode()), **fields)


async def claimed(keeper: Keeper, request: ClaimRequest) -> Sandbox:
    """Claim and confirm, as the api does."""
    return await keeper.confirm((await keeper.claim(request)).sandbox_id)


def content(sandbox: Sandbox) -> Any:
    assert sandbox.declared is not None
    return json.loads(bytes(sandbox.declared.document))


async def test_what_is_declared_with_a_claim_is_kept_and_told(
    keeper: Keeper, ask: Ask, tmp_path: Path
) -> None:
    document = '{\n  "sandbox": {"metadata": {"labels": {"a": "b c\\n"}}}\n}'
    given = Declared(document=msgspec.Raw(document.encode()), shutdown_at=4e9, retain=True)
    made = await claimed(keeper, ask(owner="me", name="box", declared=given))
    assert made.declared is not None
    assert (made.declared.revision, made.declared.shutdown_at, made.declared.retain) == (1, 4e9, True)
    assert content(made) == json.loads(document)
    lines = (keeper.changes.since(0) or (b"", 0))[0].splitlines()
    frames = [frame_of(line) for line in lines]
    told = [frame.sandbox for frame in frames if isinstance(frame, Put)]
    assert [each.declared for each in told] == [made.declared], "one line, whatever it was written on"
    assert await keeper.claim(ask(owner="me", name="box", declared=given)) == made
    read_again = Journal(tmp_path / "journal.db")
    assert [entry.sandbox for entry, *_rest in read_again.running()] == [made]
    read_again.close()


async def test_a_change_is_made_from_what_was_read(keeper: Keeper, ask: Ask) -> None:
    made = await claimed(keeper, ask())
    first = await keeper.declare(made.sandbox_id, DeclaredChange(0, declared({"n": 1}, revision=9)))
    assert first.declared is not None
    assert (first.declared.revision, content(first)) == (1, {"n": 1})
    with pytest.raises(StaleObject, match="has revision 1, not 0; read it again"):
        await keeper.declare(made.sandbox_id, DeclaredChange(0, declared({"n": 2})))
    second = await keeper.declare(made.sandbox_id, DeclaredChange(1, declared({"n": 2})))
    assert second.declared is not None
    assert second.declared.revision == 2
    assert keeper.get(made.sandbox_id) == second
    assert keeper.changes.sandboxes[made.sandbox_id].declared == second.declared
    (entry,) = [entry for entry, *_rest in keeper._journal.running()]
    assert entry.sandbox == second


async def test_only_what_is_somebodys_has_anything_declared(keeper: Keeper, ask: Ask) -> None:
    made = await keeper.claim(ask())
    change = DeclaredChange(0, declared())
    with pytest.raises(UnknownSandbox):
        await keeper.declare(made.sandbox_id, change)
    await keeper.confirm(made.sandbox_id)
    await keeper.pause(made.sandbox_id)
    paused = await keeper.declare(made.sandbox_id, change)
    assert paused.state == "paused"
    assert (await keeper.resume(made.sandbox_id, 60.0)).sandbox.declared == paused.declared
    await keeper.release(made.sandbox_id)
    with pytest.raises(UnknownSandbox):
        await keeper.declare(made.sandbox_id, DeclaredChange(1, declared()))


async def test_a_change_that_cannot_be_written_down_is_none(
    keeper: Keeper, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await claimed(keeper, ask())

    def full(*_arguments: object) -> None:
        raise JournalUnavailable("database or disk is full")

    monkeypatch.setattr(keeper._journal, "save", full)
    with pytest.raises(JournalUnavailable):
        await keeper.declare(made.sandbox_id, DeclaredChange(0, declared(shutdown_at=1.0)))
    assert keeper.get(made.sandbox_id) == made


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (declared({"x": "y" * MOST_BYTES}), f"at most {MOST_BYTES}"),
        (Declared(document=msgspec.Raw(b"[1]")), "must be an object"),
        (Declared(document=msgspec.Raw(b"")), "not valid JSON"),
        (declared(shutdown_at=LAST_INSTANT + 1), "years 1970 and 9999"),
        (declared(shutdown_at=float("nan")), "years 1970 and 9999"),
        (declared(retain_for=-1.0), "retain_for"),
        (declared(revision=0), "the first is 1"),
    ],
    ids=["large", "a list", "nothing", "too late", "not a number", "less than nothing", "no revision"],
)
async def test_what_cannot_be_declared_is_refused(
    given: Declared, told: str, keeper: Keeper, ask: Ask
) -> None:
    with pytest.raises(BadRequest, match=told):
        checked(given)
    with pytest.raises(BadRequest, match=told):
        await keeper.claim(ask(declared=given))
    assert keeper._journal.find("k1") is None


async def test_its_shutdown_time_ends_a_sandbox_that_runs_and_one_that_is_paused(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runs, paused, stays = [await claimed(keeper, ask(f"k{number}", ttl=FOREVER)) for number in range(3)]
    await keeper.pause(paused.sandbox_id)
    for each in (runs, paused):
        now = keeper._clock.now()
        await keeper.declare(each.sandbox_id, DeclaredChange(0, declared(shutdown_at=now + 0.05)))
    await until(lambda: len(keeper) == 1)
    assert keeper.list() == [stays]
    assert len(runtime.vms) == 1
    assert not runtime.saved
    with pytest.raises(SandboxEnded):
        await keeper.by_key("k1")


async def test_a_shutdown_time_that_is_taken_back_does_not_count(keeper: Keeper, ask: Ask) -> None:
    made = await claimed(keeper, ask(declared=declared(shutdown_at=keeper._clock.now() + 1000)))
    await keeper.pause(made.sandbox_id)
    assert len(keeper._deadlines) == 1
    await keeper.declare(made.sandbox_id, DeclaredChange(1, declared()))
    assert len(keeper._deadlines) == 0
    assert keeper.get(made.sandbox_id).state == "paused"


async def test_one_that_pauses_at_its_time_out_is_shut_down_all_the_same(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    soon = keeper._clock.now() + 0.3
    made = await keeper.claim(
        ask(ttl=0.05, lifespan=Lifespan(auto_pause=True), declared=declared(shutdown_at=soon))
    )
    await keeper.confirm(made.sandbox_id)
    await until(lambda: keeper.paused() == 1 or len(keeper) == 0)
    await until(lambda: len(keeper) == 0)
    assert keeper._clock.now() >= soon
    assert not runtime.vms


async def test_a_sandbox_that_has_no_end_is_paused_and_resumed_like_any(keeper: Keeper, ask: Ask) -> None:
    made = await claimed(keeper, ask(ttl=FOREVER))
    assert made.ends_at - made.started_at == pytest.approx(FOREVER)
    await keeper.pause(made.sandbox_id)
    resumed = (await keeper.resume(made.sandbox_id, FOREVER)).sandbox
    assert resumed.ends_at >= made.ends_at
    live = keeper.lookup(made.sandbox_id)
    assert live is not None
    assert live.inner.ttl == FOREVER
