"""What a node counts on its way: stages of claims, ends and losses by why, and what it reads off its parts."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from greenroom.errors import RuntimeFailure, SetupError
from greenroom.node import diskguard, lifecycle, residents
from greenroom.node import metrics as counted
from greenroom.node.keeper import Keeper
from greenroom.node.relay import RelayStatistics
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire import metrics
from greenroom.wire.messages import ClaimRequest, PoolSpec, PoolStatus, Size, TimeoutRequest
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]
STAGES = {"pop", "queue", "journal", "turn", "resume", "first_answer", "identity", "clock", "total"}


async def series(name: str) -> dict[frozenset[tuple[str, str]], float]:
    """Every series called `name` as it is exposed now, by its labels."""
    families = text_string_to_metric_families((await metrics.exposition()).decode())
    return {
        frozenset(sample.labels.items()): float(sample.value)
        for family in families
        for sample in family.samples
        if sample.name == name
    }


async def value(name: str, **labels: str) -> float:
    return (await series(name)).get(frozenset(labels.items()), 0.0)


async def stages_of(size: str) -> dict[str, float]:
    """How often each stage of claims in this size was observed."""
    found = await series("greenroom_node_claim_stage_seconds_count")
    return {dict(labels)["stage"]: n for labels, n in found.items() if n and ("size", size) in labels}


async def test_a_served_claim_has_every_stage_once(keeper: Keeper, ask: Ask) -> None:
    size = Size("staged", 1, 512, 4096)
    assert await stages_of("staged") == {}
    await keeper.claim(ask(size=size))
    await keeper.claim(ask("k2", size=size))
    assert await stages_of("staged") == dict.fromkeys(STAGES, 2)
    total = await value(
        "greenroom_node_claim_stage_seconds_sum", template="base", size="staged", stage="total"
    )
    parts = [
        await value("greenroom_node_claim_stage_seconds_sum", template="base", size="staged", stage=stage)
        for stage in STAGES - {"total", "first_answer"}
    ]
    assert 0 < sum(parts) <= total


async def test_what_the_introduction_took_is_told_by_its_parts(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = runtime.introduce

    async def introduce(*arguments: object) -> object:
        reading = await plain(*arguments)  # type: ignore[arg-type]
        return msgspec.structs.replace(reading, answer_s=0.5, identity_s=0.25, clock_s=0.125)

    monkeypatch.setattr(runtime, "introduce", introduce)
    await keeper.claim(ask(size=Size("parts", 1, 512, 4096)))
    for stage, least in (("first_answer", 0.5), ("identity", 0.25), ("clock", 0.125)):
        name = "greenroom_node_claim_stage_seconds_sum"
        assert await value(name, template="base", size="parts", stage=stage) >= least


async def test_a_claim_that_was_not_served_has_no_stages_of_a_hand_over(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask
) -> None:
    runtime.fail_introductions = 2
    with pytest.raises(RuntimeFailure):
        await keeper.claim(ask(size=Size("failing", 1, 512, 4096)))
    assert await stages_of("failing") == {"pop": 2, "queue": 2}


@pytest.mark.parametrize("reason", ["killed", "timeout", "vm_ended", "unconfirmed"])
async def test_an_end_is_counted_once_by_why(
    keeper: Keeper, runtime: SimulatedRuntime, ask: Ask, reason: str
) -> None:
    before = await series("greenroom_node_sandboxes_ended_total")
    sandbox = await keeper.claim(ask())
    (vm,) = runtime.vms.values()
    if reason == "unconfirmed":
        await keeper.release(sandbox.sandbox_id, lifecycle.UNCONFIRMED)
    else:
        await keeper.confirm(sandbox.sandbox_id)
    if reason == "killed":
        await keeper.release(sandbox.sandbox_id)
    elif reason == "timeout":
        await keeper.set_timeout(sandbox.sandbox_id, TimeoutRequest(0))
    elif reason == "vm_ended":
        vm.ended.set()
    await until(lambda: len(keeper) == 0)
    after = await series("greenroom_node_sandboxes_ended_total")
    grown = {key: after[key] - before.get(key, 0.0) for key in after if after[key] != before.get(key, 0.0)}
    assert grown == {frozenset({("reason", reason)}): 1.0}


def test_every_reason_for_an_end_has_a_class() -> None:
    texts = {
        lifecycle.UNCONFIRMED,
        lifecycle.TIME_UP,
        lifecycle.SHUT_DOWN,
        lifecycle.VM_GONE,
        diskguard.REASON,
    }
    for node in ast.walk(ast.parse(Path(residents.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "Release":
            texts |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "release":
            texts |= {default.value for default in node.args.defaults if isinstance(default, ast.Constant)}
    assert len(texts) >= 7
    assert "other" not in {counted.end_reason(text) for text in texts}
    assert counted.end_reason("something else") == "other"


async def test_refills_are_timed_and_losses_counted_by_class(
    warmer: Warmer, runtime: SimulatedRuntime
) -> None:
    size = Size("refilled", 1, 512, 4096)
    labels = {"template": "base", "size": "refilled"}
    runtime.fail_next = 2
    await warmer.set_pools([PoolSpec(template="base", size=size, target=2)], lambda _step, _done: None)
    await until(lambda: warmer.status()[0].warm == 2)
    assert await value("greenroom_node_refill_seconds_count", **labels) == 2
    assert await value("greenroom_node_refill_failures_total", **labels, reason="runtime") == 2
    next(iter(runtime.vms.values())).ended.set()
    await until(lambda: warmer.status()[0].failed == 3)
    assert await value("greenroom_node_refill_failures_total", **labels, reason="vm_ended") == 1


def test_a_lost_refill_has_the_class_of_its_error() -> None:
    assert counted.failure_reason(SetupError("x")) == "setup"
    assert counted.failure_reason(asyncio.CancelledError()) == "interrupted"


async def test_commits_are_timed_and_questions_are_not(keeper: Keeper, ask: Ask) -> None:
    async def commits() -> dict[str, float]:
        found = await series("greenroom_node_journal_commit_seconds_count")
        return {dict(labels)["operation"]: n for labels, n in found.items()}

    before = await commits()
    await keeper.claim(ask())
    after = await commits()
    assert set(after) <= {"insert", "update", "delete"}
    assert after["insert"] == before.get("insert", 0) + 1
    assert after["update"] >= before.get("update", 0) + 2
    with pytest.raises(Exception, match="no sandbox"):
        await keeper.by_key("nobody's")
    assert await commits() == after


async def test_what_an_earlier_run_left_is_counted(keeper: Keeper, runtime: SimulatedRuntime) -> None:
    golden = await runtime.snapshot_golden("base", Size("small", 1, 512, 4096), lambda _step, _done: None)
    vm = await runtime.restore(golden)
    before = await value("greenroom_node_adopted_total", outcome="spare")
    keeper.adopt([Adopted(vm, "base", golden.size, claimed=False, introduced=False)])
    assert await value("greenroom_node_adopted_total", outcome="spare") == before + 1


async def test_pools_sandboxes_and_relay_are_read_as_they_stand() -> None:
    pool = PoolStatus(
        template="base", size="s", target=4, warm=3, starting=1, waiting=2, failed=7, reason="low memory"
    )
    relay = RelayStatistics(
        waiting=1,
        connecting=2,
        spliced=3,
        accepted=10,
        refused={502: 4, 401: 1},
        dropped=5,
        bytes_up=6,
        bytes_down=7,
    )
    with metrics.reading(lambda: counted.read([pool], 9, relay)):
        of_pool = {"template": "base", "size": "s"}
        for name, number in (("target", 4), ("warm", 3), ("starting", 1), ("waiting", 2), ("held_back", 1)):
            assert await value(f"greenroom_node_pool_{name}", **of_pool) == number
        assert await value("greenroom_node_pool_failed_total", **of_pool) == 7
        assert await value("greenroom_node_sandboxes") == 9
        assert await value("greenroom_node_relay_connections", state="spliced") == 3
        assert await value("greenroom_node_relay_refused_total", status="502") == 4
        assert await value("greenroom_node_relay_bytes_total", direction="down") == 7
        assert await value("greenroom_node_relay_accepted_total") == 10
        assert await value("greenroom_node_relay_dropped_total") == 5
