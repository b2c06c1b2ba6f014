"""Who observes the nodes of a view hears when they are lost, read again, counted anew, and when they leave."""

from __future__ import annotations

from greenroom.fleet.view import NodeView, View
from greenroom.wire.changes import Counted
from tests.fleet.test_view import STREAM, beat, pool, whole


def test_node_observers() -> None:
    view = View()
    told: list[tuple[str, str, bool]] = []

    def observer(node: NodeView, there: bool) -> None:
        told.append((node.name, "partial" if node.since is not None else "whole", there))

    view.observe_nodes(observer)
    view.join("aaaa", "one", 1.0)
    view.join("aaaa", "one", 2.0)
    assert told == [("one", "partial", True)]
    told.clear()
    assert view.apply("aaaa", whole(0), 3.0)
    assert view.apply("aaaa", beat(0), 3.0)
    assert told[-1] == ("one", "whole", True)
    told.clear()
    assert view.apply("aaaa", Counted(stream=STREAM, seq=1, pool=pool(3)), 4.0)
    assert told == [("one", "whole", True)]
    told.clear()
    view.lost("aaaa", 5.0)
    view.lost("aaaa", 6.0)
    assert told == [("one", "partial", True)]
    told.clear()
    view.join("aaaa", "other", 7.0)
    view.leave("aaaa")
    assert told == [("other", "partial", True), ("other", "partial", False)]
