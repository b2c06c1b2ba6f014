"""What waits for the view to be as far as a node's answer."""

from __future__ import annotations

from greenroom.fleet.settling import LONGEST, Settling
from greenroom.fleet.view import View
from greenroom.wire.changes import Beat, Counted, Position, Whole
from greenroom.wire.messages import PoolCounts


class Seen:
    """A view of one node, and what has been done since."""

    def __init__(self) -> None:
        self.view = View()
        self.settling = Settling(self.view)
        self.done: list[str] = []
        self.view.join("aaaa", "node", 0.0)

    def run(self, stream: str = "aaaa-1", seq: int = 0) -> None:
        """The node tells all there is."""
        self.view.apply("aaaa", Whole(stream=stream, seq=seq, sandboxes=[]), 0.0)
        self.view.apply("aaaa", Beat(stream=stream, seq=seq, head=seq), 0.0)
        self.settling.moved("aaaa", 0.0)

    def change(self, seq: int, now: float = 0.0) -> None:
        counts = PoolCounts(template="base", size="small", target=1, warm=seq, starting=0, waiting=0)
        assert self.view.apply("aaaa", Counted(stream="aaaa-1", seq=seq, pool=counts), 0.0)
        self.settling.moved("aaaa", now)

    def ask(self, what: str, seq: int, stream: str = "aaaa-1") -> None:
        """The node answers from a place in its stream."""
        self.settling.heard(Position(stream, seq))
        self.settling.after("aaaa", 0.0, lambda: self.done.append(what))


def test_it_is_done_when_the_view_is_as_far_as_the_answer() -> None:
    seen = Seen()
    seen.run()
    seen.ask("first", 0)
    assert seen.done == ["first"]
    seen.ask("second", 2)
    seen.ask("third", 3)
    seen.change(1)
    assert seen.done == ["first"]
    seen.change(2)
    assert seen.done == ["first", "second"]
    assert seen.settling.statistics() == {"waiting": 1}
    seen.change(3)
    assert seen.done == ["first", "second", "third"]
    assert seen.settling.statistics() == {"waiting": 0}


def test_an_answer_without_a_place_is_waited_for_by_nobody() -> None:
    seen = Seen()
    seen.settling.after("aaaa", 0.0, lambda: seen.done.append("now"))
    seen.settling.after("bbbb", 0.0, lambda: seen.done.append("unknown node"))
    assert seen.done == ["now", "unknown node"]


def test_what_was_of_a_run_that_is_over_is_done_with_the_next() -> None:
    seen = Seen()
    seen.run()
    seen.ask("of the first run", 9)
    seen.run("aaaa-2", 4)
    assert seen.done == ["of the first run"]


def test_what_is_of_a_run_that_the_view_has_not_seen_waits_for_it() -> None:
    seen = Seen()
    seen.run()
    seen.ask("of the second run", 4, "aaaa-2")
    seen.change(1)
    assert seen.done == []
    seen.run("aaaa-2", 4)
    assert seen.done == ["of the second run"]


def test_nothing_waits_for_ever() -> None:
    seen = Seen()
    seen.run()
    seen.ask("late", 9)
    seen.change(1, LONGEST - 0.1)
    assert seen.done == []
    seen.change(2, LONGEST)
    assert seen.done == ["late"]


def test_a_node_that_leaves_is_waited_for_no_more() -> None:
    seen = Seen()
    seen.run()
    seen.ask("gone", 9)
    seen.view.leave("aaaa")
    seen.settling.moved("aaaa", 0.0)
    assert seen.done == ["gone"]
    seen.view.join("aaaa", "node", 0.0)
    seen.settling.after("aaaa", 0.0, lambda: seen.done.append("new"))
    assert seen.done == ["gone", "new"]
