"""The plan of the stock, over every state that can be thought of."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from greenroom.runtime.stocking import Level, Step, Wants, plan, targets

counts = st.integers(0, 6)
wants = st.builds(Wants, places=counts, waiting=counts, most=st.integers(0, 20))
levels = st.lists(
    st.builds(
        Level, golden=st.just(""), places=counts, waiting=counts, making_places=counts, making_waiting=counts
    ),
    max_size=5,
).map(lambda found: [msgspec.structs.replace(level, golden=f"g{n}") for n, level in enumerate(found)])


def applied(found: list[Level], steps: list[Step]) -> list[Level]:
    """The levels after every step was carried out."""
    table = {level.golden: level for level in found}
    for step in steps:
        field = "places" if step.kind == "place" else "waiting"
        level = table[step.golden]
        change = 1 if step.do == "make" else -1
        table[step.golden] = msgspec.structs.replace(level, **{field: getattr(level, field) + change})
    return list(table.values())


def settled(found: list[Level]) -> list[Level]:
    """The levels once nothing is being made any more."""
    return [
        Level(
            golden=level.golden,
            places=level.places + level.making_places,
            waiting=level.waiting + level.making_waiting,
        )
        for level in found
    ]


@given(levels, wants)
def test_targets_never_exceed_what_was_asked_for(found: list[Level], asked: Wants) -> None:
    chosen = targets(found, asked)
    assert len(chosen) == len(found)
    assert sum(map(sum, chosen)) <= asked.most
    assert all(places <= asked.places and waiting <= asked.waiting for places, waiting in chosen)
    totals = [sum(pair) for pair in chosen]
    assert totals == sorted(totals, reverse=True)


@given(levels, wants, st.booleans(), st.integers(0, 3), st.integers(0, 8))
def test_nothing_is_made_while_vms_are_restored_or_memory_is_short(
    found: list[Level], asked: Wants, room: bool, restoring: int, hands: int
) -> None:
    steps = plan(found, asked, room=room, restoring=restoring, hands=hands)
    made = [step for step in steps if step.do == "make"]
    if restoring or not room:
        assert made == []
    busy = sum(level.making_places + level.making_waiting for level in found)
    assert len(made) <= max(0, hands - busy)
    after = applied(found, steps)
    assert all(level.places >= 0 and level.waiting >= 0 for level in after)
    if not room:
        assert all(level.waiting == 0 for level in after)


@given(levels, wants)
def test_left_alone_it_becomes_what_was_asked_for_and_stays_so(found: list[Level], asked: Wants) -> None:
    state = settled(found)
    for _ in range(200):
        steps = plan(state, asked, room=True, restoring=0, hands=2)
        if not steps:
            break
        state = applied(state, steps)
    assert [(level.places, level.waiting) for level in state] == targets(state, asked)
    assert sum(level.places + level.waiting for level in state) <= max(asked.most, 0)


@given(levels, wants)
def test_what_is_wanted_is_not_dropped(found: list[Level], asked: Wants) -> None:
    after = applied(found, plan(found, asked, room=True, restoring=1, hands=4))
    for before, level, (places, waiting) in zip(found, after, targets(found, asked), strict=True):
        assert level.places >= min(before.places, places)
        assert level.waiting >= min(before.waiting, waiting)
