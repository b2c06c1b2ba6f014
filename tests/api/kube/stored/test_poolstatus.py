"""Shares of warm members, totals over nodes, and what a pool's conditions say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.stored.poolstatus import NOTHING, Count, Part, Totals, shares, status_of
from greenroom.fleet.view import View
from greenroom.wire.changes import Beat, Counted, Whole
from greenroom.wire.messages import PoolCounts

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DOCUMENT: dict[str, Any] = {"metadata": {"name": "p", "namespace": "a", "generation": 3}, "spec": {}}


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.integers(0, 20_000))
def test_shares_add_up_and_none_is_off_by_one_or_more(weights: list[int], amount: int) -> None:
    parts = shares(weights, amount)
    assert sum(parts) == amount
    total = sum(weights)
    for part, weight in zip(parts, weights, strict=True):
        exact = amount * weight / total if total else amount / len(weights)
        assert abs(part - exact) < 1


def test_who_asks_for_nothing_gets_nothing_beside_one_who_does() -> None:
    assert shares([0, 3], 2) == [0, 2]
    assert shares([0, 0], 3) == [2, 1]
    assert shares([], 3) == []
    assert shares([1, 1, 1], 4) == [2, 1, 1]


def counts(warm: int, starting: int = 0, template: str = "base") -> PoolCounts:
    return PoolCounts(template=template, size="small", target=9, warm=warm, starting=starting, waiting=0)


def whole(code: str, *pools: PoolCounts) -> Whole:
    return Whole(stream=f"{code}-1", seq=1, sandboxes=[], pools=list(pools))


def test_totals_are_those_of_the_nodes_that_are_read() -> None:
    view = View()
    totals = Totals(view)
    changed: list[bool] = []
    view.observe_nodes(lambda node, there: changed.append(totals.learn(node.code)))
    for code in ("aaaa", "bbbb"):
        view.join(code, code, 1.0)
        assert view.apply(code, whole(code, counts(2, 1)), 2.0)
        assert view.apply(code, Beat(stream=f"{code}-1", seq=1, head=1), 2.0)
    assert totals.of(("base", "small")) == Count(4, 2)
    assert view.apply("aaaa", Counted(stream="aaaa-1", seq=2, pool=counts(5)), 3.0)
    assert totals.of(("base", "small")) == Count(7, 1)
    view.lost("aaaa", 4.0)
    assert totals.of(("base", "small")) == Count(2, 1)
    view.leave("bbbb")
    assert totals.of(("base", "small")) == NOTHING
    assert any(changed)


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def test_a_pool_that_fills_and_is_full() -> None:
    filling = status_of(DOCUMENT, Part(count=Count(1, 2), desired=4), None, NOW)
    assert {
        name: filling[name] for name in ("replicas", "readyReplicas", "selector", "observedGeneration")
    } == {
        "replicas": 3,
        "readyReplicas": 1,
        "selector": "agents.x-k8s.io/warm-pool=p",
        "observedGeneration": 3,
    }
    assert conditions(filling) == {"Ready": ("False", "Filling"), "Progressing": ("True", "Filling")}
    full = status_of(DOCUMENT, Part(count=Count(4, 0), desired=4), filling, NOW)
    assert conditions(full) == {"Ready": ("True", "Filled"), "Progressing": ("False", "Filled")}
    more = status_of(DOCUMENT, Part(count=Count(6, 0), desired=4), full, NOW)
    assert conditions(more) == {"Ready": ("True", "Filled"), "Progressing": ("True", "Settling")}


def test_the_time_of_a_condition_is_that_of_its_last_change() -> None:
    first = status_of(DOCUMENT, Part(count=Count(1), desired=4), None, NOW)
    later = status_of(DOCUMENT, Part(count=Count(3), desired=4), first, NOW + timedelta(minutes=1))
    assert later["conditions"][0]["lastTransitionTime"] == "2026-01-02T03:04:05Z"
    full = status_of(DOCUMENT, Part(count=Count(4), desired=4), later, NOW + timedelta(minutes=2))
    assert full["conditions"][0]["lastTransitionTime"] == "2026-01-02T03:06:05Z"


def test_what_keeps_a_pool_empty_and_what_has_no_room() -> None:
    part = Part(desired=4, reason="TemplateNotFound", problem="there is no SandboxTemplate 'x'")
    missing = status_of(DOCUMENT, part, None, NOW)
    assert conditions(missing)["Ready"] == ("False", "TemplateNotFound")
    assert missing["conditions"][0]["message"] == "there is no SandboxTemplate 'x'"
    crowded = status_of(DOCUMENT, Part(count=Count(1), desired=4, unplaced=3), None, NOW)
    assert conditions(crowded)["Unplaced"] == ("True", "NoRoom")
    placed = status_of(DOCUMENT, Part(count=Count(1), desired=4, unplaced=0), None, NOW)
    assert conditions(placed)["Unplaced"] == ("False", "Placed")
