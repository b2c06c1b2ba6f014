"""Shares of warm members, totals over nodes, and what a pool's conditions say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.stored.poolstatus import NOTHING, Count, Part, Totals, parted, status_of
from greenroom.fleet.view import View
from greenroom.wire.changes import Beat, Counted, Whole
from greenroom.wire.messages import PoolCounts, PoolName

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DOCUMENT: dict[str, Any] = {"metadata": {"name": "p", "namespace": "a", "generation": 3}, "spec": {}}


ONE, TWO = PoolName("one", "small"), PoolName("two", "small")
KEYS = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"))
TARGETS = st.dictionaries(st.sampled_from([ONE, TWO]), st.integers(0, 50))


@given(
    st.dictionaries(KEYS, TARGETS),
    TARGETS,
    st.dictionaries(st.sampled_from([ONE, TWO]), st.builds(Count, st.integers(0, 200), st.integers(0, 9))),
)
def test_the_parts_of_a_key_add_up_and_nobody_has_more_than_is_there(
    pools: dict[tuple[str, str], dict[PoolName, int]],
    declared: dict[PoolName, int],
    there: dict[PoolName, Count],
) -> None:
    parts = parted(pools, declared, lambda name: there.get(name, NOTHING))
    assert parts.keys() == pools.keys()
    for name in (ONE, TWO):
        # One key alone, so that its parts can be told from the other's.
        total = there.get(name, NOTHING)
        per = {ONE: NOTHING, TWO: NOTHING} | {name: total}
        alone = parted(pools, declared, per.__getitem__)
        shown = sum((part for part in alone.values()), NOTHING)
        weights = {key: targets[name] for key, targets in pools.items() if name in targets}
        if weights and not declared.get(name):
            assert shown == total
        assert shown.warm <= total.warm
        wanted = sum(weights.values()) + declared.get(name, 0)
        for key, weight in weights.items():
            if wanted:
                assert abs(alone[key].warm - total.warm * weight / wanted) < 1
    assert sum((part for part in parts.values()), NOTHING).warm <= sum(each.warm for each in there.values())


def test_who_wants_nothing_of_a_key_gets_nothing_beside_one_who_does() -> None:
    """As a pool that is full of older members, and is to have others of which Greenroom's own pool has some."""
    there = {ONE: Count(1), TWO: Count(4, 1)}
    pool = {("a", "x"): {ONE: 1, TWO: 0}}
    assert parted(pool, {TWO: 4}, there.__getitem__) == {("a", "x"): Count(1)}
    assert parted({("a", "x"): {TWO: 0}}, {}, there.__getitem__) == {("a", "x"): Count(4, 1)}
    assert parted({}, {TWO: 4}, there.__getitem__) == {}


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
    assert totals.of(PoolName("base", "small")) == Count(4, 2)
    assert view.apply("aaaa", Counted(stream="aaaa-1", seq=2, pool=counts(5)), 3.0)
    assert totals.of(PoolName("base", "small")) == Count(7, 1)
    view.lost("aaaa", 4.0)
    assert totals.of(PoolName("base", "small")) == Count(2, 1)
    view.leave("bbbb")
    assert totals.of(PoolName("base", "small")) == NOTHING
    assert any(changed)


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def test_a_pool_that_fills_and_is_full() -> None:
    filling = status_of(DOCUMENT, Part(count=Count(1, 2), desired=4), None, NOW)
    assert {
        name: filling[name]
        for name in ("replicas", "readyReplicas", "desiredReplicas", "selector", "observedGeneration")
    } == {
        "replicas": 3,
        "readyReplicas": 1,
        "desiredReplicas": 4,
        "selector": "agents.x-k8s.io/warm-pool=p",
        "observedGeneration": 3,
    }
    assert conditions(filling) == {"Ready": ("False", "Filling"), "Progressing": ("True", "Filling")}
    full = status_of(DOCUMENT, Part(count=Count(4, 0), desired=4), filling, NOW)
    assert conditions(full) == {"Ready": ("True", "Filled"), "Progressing": ("False", "Filled")}
    more = status_of(DOCUMENT, Part(count=Count(6, 0), desired=4), full, NOW)
    assert conditions(more) == {"Ready": ("True", "Filled"), "Progressing": ("True", "Settling")}
    assert more["conditions"][0]["message"] == "6 are ready, 4 are wanted"


def test_the_time_of_a_condition_is_that_of_its_last_change() -> None:
    first = status_of(DOCUMENT, Part(count=Count(1), desired=4), None, NOW)
    later = status_of(DOCUMENT, Part(count=Count(3), desired=4), first, NOW + timedelta(minutes=1))
    assert later["conditions"][0]["lastTransitionTime"] == "2026-01-02T03:04:05Z"
    full = status_of(DOCUMENT, Part(count=Count(4), desired=4), later, NOW + timedelta(minutes=2))
    assert full["conditions"][0]["lastTransitionTime"] == "2026-01-02T03:06:05Z"


def test_what_keeps_a_pool_empty_and_what_has_no_room() -> None:
    part = Part(desired=4, reason="TemplateNotFound", problem="there is no SandboxTemplate 'x'", unplaced=0)
    missing = status_of(DOCUMENT, part, None, NOW)
    assert conditions(missing)["Ready"] == ("False", "TemplateNotFound")
    assert "Unplaced" not in conditions(missing)
    assert missing["conditions"][0]["message"] == "there is no SandboxTemplate 'x'"
    crowded = status_of(DOCUMENT, Part(count=Count(1), desired=4, unplaced=3), None, NOW)
    assert conditions(crowded)["Unplaced"] == ("True", "NoRoom")
    placed = status_of(DOCUMENT, Part(count=Count(1), desired=4, unplaced=0), None, NOW)
    assert conditions(placed)["Unplaced"] == ("False", "Placed")
