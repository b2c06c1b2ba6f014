"""The view of the fleet: playbooks of one node's stream, then any order of changes, faults, restarts and tables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.fleet import view as module
from greenroom.fleet.view import Entry, View
from greenroom.fleet.warm import WarmIndex
from greenroom.node.changelog import ChangeLog
from greenroom.wire.changes import (
    Beat,
    Counted,
    Frame,
    Gone,
    Held,
    HeldName,
    Position,
    Put,
    Whole,
    frame_of,
    line_of,
)
from greenroom.wire.messages import Listed, PoolCounts, Size

SMALL, LARGE = Size("small", 1, 512, 4096), Size("large", 4, 8192, 8192)
STREAM = "aaaa-1"


def sandbox(number: int = 0, **changes: Any) -> Listed:
    fields: dict[str, Any] = {
        "sandbox_id": f"iaaaa{number:015d}",
        "template": "base",
        "size": SMALL,
        "state": "running",
        "started_at": 1.0,
        "ends_at": 2.0,
        "node": "node-0",
        "owner": "me",
    }
    return Listed(**fields | changes)


def pool(warm: int, template: str = "base", size: str = "small") -> PoolCounts:
    return PoolCounts(template=template, size=size, target=4, warm=warm, starting=0, waiting=0)


def whole(seq: int, *sandboxes: Listed, stream: str = STREAM, **fields: Any) -> Whole:
    return Whole(stream=stream, seq=seq, sandboxes=list(sandboxes), **fields)


def put(seq: int, made: Listed, stream: str = STREAM) -> Put:
    return Put(stream=stream, seq=seq, sandbox=made)


def gone(seq: int, number: int, stream: str = STREAM) -> Gone:
    return Gone(stream=stream, seq=seq, sandbox_id=sandbox(number).sandbox_id)


def beat(seq: int, head: int | None = None, stream: str = STREAM) -> Beat:
    return Beat(stream=stream, seq=seq, head=seq if head is None else head)


class Told:
    """A view with one node, and what it made of frames."""

    def __init__(self, *frames: Frame) -> None:
        self.warm = WarmIndex()
        self.warm.admit("aaaa", True)
        self.view = View(self.warm)
        self.view.join("aaaa", "node-0", 10.0)
        for frame in frames:
            assert self.view.apply("aaaa", frame, 11.0)

    def __call__(self, frame: Frame, now: float = 20.0) -> bool:
        return self.view.apply("aaaa", frame, now)

    @property
    def ids(self) -> set[int]:
        return {int(entry.sandbox.sandbox_id[5:]) for entry in self.view}


def test_a_node_is_partial_until_it_was_read() -> None:
    told = Told()
    assert told.view.partial() == {"aaaa": 10.0}
    assert told(whole(4, sandbox(1), sandbox(2)))
    assert told.view.partial() == {}
    assert told.ids == {1, 2}


def test_changes_are_applied_in_order_and_only_once() -> None:
    told = Told(whole(4, sandbox(1)), put(5, sandbox(2)), gone(6, 1))
    version = told.view.version
    for again in (put(5, sandbox(2)), gone(6, 1), beat(6), whole(4, sandbox(1)), put(3, sandbox(9))):
        assert told(again)
    assert told.ids == {2}
    assert told.view.version == version


def test_a_gap_is_noticed_and_what_was_known_is_kept_and_marked() -> None:
    told = Told(whole(4, sandbox(1)))
    assert not told(put(6, sandbox(2)), now=30.0)
    assert told.view.partial() == {"aaaa": 30.0}
    assert told.ids == {1}
    entry = told.view.get(sandbox(1).sandbox_id)
    assert entry is not None
    assert entry.partial
    assert not told(put(5, sandbox(2))), "nothing counts before the stream begins anew"


def test_a_beat_tells_of_a_gap_too() -> None:
    assert not Told(whole(4))(beat(5))


def test_a_stream_goes_on_where_it_was_and_is_whole_once_it_caught_up() -> None:
    told = Told(whole(4, sandbox(1)))
    told.view.lost("aaaa", 30.0)
    node = told.view.node("aaaa")
    assert node is not None
    assert node.position == Position(STREAM, 4)
    assert told(beat(4, head=6))
    assert told.view.partial() == {"aaaa": 30.0}
    assert told(put(5, sandbox(2)))
    assert told.view.partial() == {"aaaa": 30.0}
    assert told(gone(6, 1))
    assert told.view.partial() == {}
    assert told.ids == {2}


def test_another_place_than_the_own_is_not_gone_on_from() -> None:
    told = Told(whole(4))
    told.view.lost("aaaa", 30.0)
    assert not told(beat(3))


def test_another_run_begins_with_all_there_is() -> None:
    told = Told(whole(4, sandbox(1), sandbox(2)))
    assert not told(put(5, sandbox(3), stream="aaaa-2"))
    kept = told.view.get(sandbox(1).sandbox_id)
    assert told(whole(0, sandbox(1), sandbox(3), stream="aaaa-2"))
    assert told.ids == {1, 3}
    assert told.view.get(sandbox(1).sandbox_id) is kept, "what is the same stays as it is"


def test_parts_count_once_all_are_there() -> None:
    told = Told(whole(4, sandbox(1)))
    assert told(whole(9, sandbox(2), more=True))
    assert told.ids == {1}
    assert told(whole(9, sandbox(2), more=True)), "the same again"
    assert told(put(3, sandbox(7))), "from before"
    assert told(whole(9, sandbox(3), part=1, pools=[pool(2)]))
    assert told.ids == {2, 3}
    assert told.warm.left("aaaa", ("base", "small")) == 2


@pytest.mark.parametrize(
    "frame",
    [whole(9, part=2), whole(9, part=1, stream="aaaa-2"), put(10, sandbox(3)), beat(10)],
    ids=["a part is missing", "of another run", "a change before all is there", "a beat"],
)
def test_parts_that_do_not_belong_together(frame: Frame) -> None:
    told = Told(whole(4, sandbox(1)), whole(9, sandbox(2), more=True))
    assert not told(frame)
    assert told.ids == {1}


def test_another_node_at_the_address_is_not_taken_for_this_one() -> None:
    assert not Told()(whole(1, sandbox(1), stream="bbbb-1"))


def test_a_node_that_is_not_in_the_table_counts_for_nothing() -> None:
    view = View()
    assert not view.apply("aaaa", whole(1, sandbox(1)), 1.0)
    view.lost("aaaa", 1.0)
    view.leave("aaaa")
    assert (len(view), view.version) == (0, 0)


def test_a_node_that_left_the_table_takes_its_sandboxes_along() -> None:
    told = Told(whole(4, sandbox(1), pools=[pool(3)]))
    told.view.leave("aaaa")
    assert len(told.view) == 0
    assert told.view.of_owner("me") == {}
    assert told.warm.statistics()["entries"] == 0


def test_too_many_sandboxes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SANDBOXES", 2)
    told = Told()
    assert told(whole(4, sandbox(1), sandbox(2), more=True))
    assert not told(whole(4, sandbox(3), part=1))


def test_found_by_everything() -> None:
    made = sandbox(1, owner="me", name="box", template="other", size=LARGE)
    told = Told(whole(1, made, sandbox(2)))
    view = told.view
    entry = view.named("me", "box")
    assert entry is not None
    assert entry.sandbox == made
    assert view.get(made.sandbox_id) is entry
    assert view.of_pool(("other", "large")) == {made.sandbox_id: entry}
    assert set(view.of_owner("me")) == {made.sandbox_id, sandbox(2).sandbox_id}
    assert view.named("you", "box") is None
    assert told(put(2, sandbox(1, owner="you")))
    assert view.named("me", "box") is None
    assert view.of_pool(("other", "large")) == {}
    assert set(view.of_owner("you")) == {made.sandbox_id}


def holds(number: int, name: str, owner: str = "me") -> HeldName:
    return HeldName(sandbox_id=sandbox(number).sandbox_id, owner=owner, name=name)


def hold(seq: int, number: int, name: str, owner: str = "me", stream: str = STREAM) -> Held:
    return Held(stream=stream, seq=seq, name=holds(number, name, owner))


def test_a_name_is_taken_before_its_sandbox_is_shown_and_until_it_is_gone() -> None:
    told = Told(whole(1))
    view = told.view
    assert not view.taken("me", "box")
    version = view.version
    assert told(hold(2, 1, "box"))
    assert (view.taken("me", "box"), view.named("me", "box")) == (True, None)
    assert not view.taken("you", "box")
    assert view.version > version
    assert told(put(3, sandbox(1, name="box")))
    assert view.taken("me", "box")
    assert told(gone(4, 1))
    assert not view.taken("me", "box")
    assert told(hold(5, 2, "box"))
    assert told(gone(6, 2)), "nothing came of its claim"
    assert not view.taken("me", "box")


def test_held_names_are_as_the_whole_says_and_go_with_their_node() -> None:
    told = Told(whole(4, held=[holds(1, "one"), holds(2, "two")]))
    view = told.view
    assert view.taken("me", "one")
    told.view.lost("aaaa", 30.0)
    assert view.taken("me", "one"), "not to see a node is no sign that the name is free"
    assert told(whole(0, sandbox(2, name="two"), held=[holds(3, "three")], stream="aaaa-2"))
    taken = {name: view.taken("me", name) for name in ("one", "two", "three")}
    assert taken == {"one": False, "two": True, "three": True}
    view.leave("aaaa")
    assert not any(view.taken("me", name) for name in taken)


def test_a_name_that_two_nodes_hold_is_taken_until_both_let_it_go() -> None:
    told = Told(whole(1))
    told.view.join("bbbb", "node-1", 10.0)
    assert told.view.apply("bbbb", whole(1, held=[holds(7, "box")], stream="bbbb-1"), 11.0)
    assert told(hold(2, 1, "box"))
    told.view.leave("bbbb")
    assert told.view.taken("me", "box")
    assert told(gone(3, 1))
    assert not told.view.taken("me", "box")


def test_too_many_held_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SANDBOXES", 2)
    assert not Told()(whole(4, sandbox(1), held=[holds(2, "two"), holds(3, "three")]))


def test_observers_hear_of_each_change_once() -> None:
    heard: list[tuple[object, object]] = []
    told = Told()

    def observer(before: Entry | None, after: Entry | None) -> None:
        now = None if after is None else told.view.get(after.sandbox.sandbox_id)
        assert now is after
        heard.append(
            (
                None if before is None else before.sandbox.ends_at,
                None if after is None else after.sandbox.ends_at,
            )
        )

    told.view.observe(observer)
    assert told(whole(1, sandbox(1, ends_at=5)))
    assert told(put(2, sandbox(1, ends_at=6)))
    assert told(put(3, sandbox(1, ends_at=6)))
    assert told(gone(4, 1))
    assert heard == [(None, 5), (5, 6), (6, None)]


def test_a_fragment_is_made_once_for_each_state() -> None:
    told = Told(whole(1, sandbox(1)))
    made: list[Listed] = []

    def make(each: Listed) -> bytes:
        made.append(each)
        return each.template.encode()

    def entry() -> Entry:
        found = told.view.get(sandbox(1).sandbox_id)
        assert found is not None
        return found

    assert [entry().fragment("e2b", make) for _ in range(3)] == [b"base"] * 3
    assert len(made) == 1
    told(put(2, sandbox(1, template="new")))
    assert entry().fragment("e2b", make) == b"new"
    assert entry().version == told.view.version


def test_a_node_that_cannot_be_read_is_not_taken_for_warm() -> None:
    told = Told(whole(1, pools=[pool(3)]))
    key = ("base", "small")
    assert told.warm.left("aaaa", key) == 3
    told.view.lost("aaaa", 20.0)
    assert told.warm.pick(key) is None
    assert told(beat(1, head=2))
    assert told.warm.pick(key) is None
    assert told(Counted(stream=STREAM, seq=2, pool=pool(1)))
    assert told.warm.left("aaaa", key) == 1


CODES = ("aaaa", "bbbb")


class _Connection:
    """One stream on its way: what the node has sent and the view has not got."""

    def __init__(self, log: ChangeLog, after: Position | None) -> None:
        self.log = log
        self.lines: list[bytes] = []
        if after is not None and log.covers(after):
            self.seq = after.seq
            self.lines.append(self.beat())
        else:
            self.send_whole()

    def beat(self) -> bytes:
        made = Beat(stream=self.log.position.stream, seq=self.seq, head=self.log.position.seq)
        return line_of(made)

    def send_whole(self) -> None:
        self.seq, parts = self.log.whole()
        self.lines += list(parts)

    def send(self) -> None:
        given = self.log.since(self.seq, most=2)
        if given is None:
            self.send_whole()
        elif given[0]:
            self.lines += given[0].splitlines()
            self.seq = given[1]
        else:
            self.lines.append(self.beat())


_CHANGES = st.tuples(
    st.sampled_from(["put", "put", "drop", "count", "hold"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from("xy"),
    st.booleans(),
)
"""What, of which sandbox, how, whose, and whether it has a name."""


class AnyOrder(RuleBasedStateMachine):
    """Nodes that change, restart, come and go, over connections that lose, repeat and swap what they carry."""

    codes = st.sampled_from(CODES)

    def __init__(self) -> None:
        super().__init__()
        self.warm = WarmIndex()
        self.view = View(self.warm)
        self.logs: dict[str, ChangeLog] = {}
        self.history: dict[
            Position, tuple[dict[str, Listed], dict[Any, PoolCounts], dict[str, HeldName]]
        ] = {}
        self.connections: dict[str, _Connection] = {}
        self.table: set[str] = set()
        self.version = 0
        self.clock = 0.0
        for code in CODES:
            self.start(code, {})
            self.warm.admit(code, True)
            self.join(code)

    def start(self, code: str, sandboxes: dict[str, Listed]) -> None:
        self.logs[code] = ChangeLog(code, keep=4, part=300)
        self.note(code)
        for each in sandboxes.values():
            self.logs[code].put(each)
            self.note(code)

    def note(self, code: str) -> None:
        log = self.logs[code]
        self.history[log.position] = (dict(log.sandboxes), dict(log._pools), dict(log.held))

    def now(self) -> float:
        self.clock += 1.0
        return self.clock

    # What happens on nodes

    @rule(code=codes, changes=st.lists(_CHANGES, min_size=1, max_size=6))
    def change(self, code: str, changes: list[tuple[Any, ...]]) -> None:
        log = self.logs[code]
        for what, number, detail, owner, named in changes:
            if what == "put":
                name = f"name-{number}" if named else ""
                log.put(sandbox(number, ends_at=float(detail), owner=owner, name=name, node=code))
            elif what == "drop":
                log.drop(sandbox(number).sandbox_id)
            elif what == "hold":
                log.hold(holds(number, f"name-{detail}", owner))
            else:
                log.count(pool(detail, size=("small", "large")[named]))
            self.note(code)

    @rule(code=codes, data=st.data())
    def restart(self, code: str, data: st.DataObject) -> None:
        before = self.logs[code].sandboxes
        kept = data.draw(st.sets(st.sampled_from(sorted(before)))) if before else set()
        self.disconnect(code)
        self.start(code, {name: before[name] for name in kept})

    # What happens between

    @rule(code=codes)
    def join(self, code: str) -> None:
        self.table.add(code)
        self.view.join(code, code, self.now())

    @rule(code=codes)
    def leave(self, code: str) -> None:
        self.table.discard(code)
        self.connections.pop(code, None)
        self.view.leave(code)

    @rule(code=codes)
    def disconnect(self, code: str) -> None:
        self.connections.pop(code, None)
        self.view.lost(code, self.now())

    @rule(
        code=codes,
        fault=st.sampled_from(["none", "none", "lost", "twice", "late"]),
        count=st.integers(1, 8),
        sent=st.integers(0, 3),
    )
    def deliver(self, code: str, fault: str, count: int, sent: int) -> None:
        node = self.view.node(code)
        if node is None:
            return
        if code not in self.connections:
            self.connections[code] = _Connection(self.logs[code], node.position)
        for _ in range(sent):
            self.connections[code].send()
        lines = self.connections[code].lines
        first, rest = lines[:count], lines[count:]
        if fault == "lost":
            first = first[1:]
        elif fault == "twice":
            first = [*first, *first]
        elif fault == "late":
            first = [*first[1:], *first[:1]]
        self.connections[code].lines = rest
        for line in first:
            if not self.view.apply(code, frame_of(line), self.now()):
                self.connections.pop(code)
                assert code in self.view.partial()
                break

    @rule()
    def all_is_read(self) -> None:
        """However it came to be so: once every node is read, the view is the union of what is on them."""
        for code in sorted(self.table):
            node = self.view.node(code)
            assert node is not None
            self.disconnect(code)
            connection = _Connection(self.logs[code], node.position)
            while connection.seq < self.logs[code].position.seq:
                connection.send()
            for line in connection.lines:
                assert self.view.apply(code, frame_of(line), self.now())
            self.connections[code] = connection
            connection.lines = []
        assert self.view.partial() == {}
        for code in self.table:
            node = self.view.node(code)
            assert node is not None
            assert node.position == self.logs[code].position
            for key, counts in self.logs[code]._pools.items():
                assert self.warm.left(code, key) == counts.warm
        assert {entry.sandbox.sandbox_id for entry in self.view} == {
            name for code in self.table for name in self.logs[code].sandboxes
        }

    # What holds at any time

    @invariant()
    def a_nodes_part_is_what_it_had_at_one_moment(self) -> None:
        assert set(self.view.nodes()) == self.table
        for code, node in self.view.nodes().items():
            if node.position is None:
                assert not node.entries
                assert not node.held
                continue
            sandboxes, pools, held = self.history[node.position]
            assert node.held == held
            assert {name: entry.sandbox for name, entry in node.entries.items()} == sandboxes
            assert node.pools == pools
            assert all(entry.node is node for entry in node.entries.values())
            if code in self.view.partial():
                assert all(self.warm.left(code, key) == 0 for key in pools)

    @invariant()
    def the_version_only_rises(self) -> None:
        assert self.view.version >= self.version
        self.version = self.view.version
        assert all(entry.version <= self.version for entry in self.view)

    @invariant()
    def indexes_agree_with_a_plain_dictionary(self) -> None:
        shown = {entry.sandbox.sandbox_id: entry for entry in self.view}
        everywhere: dict[str, list[Entry]] = {}
        for node in self.view.nodes().values():
            for name, entry in node.entries.items():
                everywhere.setdefault(name, []).append(entry)
        assert shown.keys() == everywhere.keys()
        assert all(entry in everywhere[name] for name, entry in shown.items())
        assert all(self.view.get(name) is entry for name, entry in shown.items())
        for owner in "xy":
            mine = {name: entry for name, entry in shown.items() if entry.sandbox.owner == owner}
            assert dict(self.view.of_owner(owner)) == mine
            for number in range(5):
                wanted = f"name-{number}"
                named = [entry for entry in mine.values() if entry.sandbox.name == wanted]
                assert self.view.named(owner, wanted) is (named[0] if named else None)
                held = any(
                    (name.owner, name.name) == (owner, wanted)
                    for node in self.view.nodes().values()
                    for name in node.held.values()
                )
                assert self.view.taken(owner, wanted) == (held or bool(named))
        of_pool = self.view.of_pool(("base", "small"))
        assert dict(of_pool) == shown
        statistics = self.view.statistics()
        assert statistics["sandboxes"] == len(self.view) == len(shown)
        doubles = {name for name, entries in everywhere.items() if len(entries) > 1}
        assert set(self.view._doubles) == doubles


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=50)
