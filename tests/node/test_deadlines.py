"""Deadlines that move: only the last one set counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from greenroom.node.deadlines import Deadlines


def test_a_moved_deadline_counts_and_the_old_one_does_not() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 10)
    deadlines.set("a", 20)
    assert deadlines.due(15) == []
    assert deadlines.next() == 20
    assert deadlines.due(20) == ["a"]
    assert deadlines.next() is None


def test_a_dropped_name_never_comes_due() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 10)
    deadlines.drop("a")
    assert deadlines.due(99) == []
    assert len(deadlines) == 0


def test_what_counts_no_more_does_not_pile_up() -> None:
    """Sandboxes that have no end of their own have one a hundred years off: their entries would stay for ever."""
    deadlines = Deadlines()
    deadlines.set("stays", 5.0)
    for number in range(10_000):
        deadlines.set(f"gone-{number}", 4e9)
        deadlines.set("moves", 4e9 + number)
        deadlines.drop(f"gone-{number}")
        assert deadlines.kept < 200
    assert (len(deadlines), deadlines.next()) == (2, 5.0)
    assert deadlines.due(1e10) == ["stays", "moves"]


names = st.sampled_from("abc")
step = st.tuples(st.just("set"), names, st.integers(0, 50)) | st.tuples(
    st.sampled_from(["drop", "due"]), names, st.integers(0, 50)
)


@given(st.lists(step, max_size=40))
def test_like_a_dictionary_of_deadlines(steps: list[tuple[str, str, int]]) -> None:
    deadlines, model = Deadlines(), dict[str, int]()
    for what, name, when in steps:
        if what == "set":
            deadlines.set(name, when)
            model[name] = when
        elif what == "drop":
            deadlines.drop(name)
            model.pop(name, None)
        else:
            due = deadlines.due(when)
            assert sorted(due) == sorted(n for n, t in model.items() if t <= when)
            assert [model[n] for n in due] == sorted(model[n] for n in due)
            for n in due:
                del model[n]
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)
