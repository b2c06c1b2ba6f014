"""The change log: numbers without gaps, what is kept and what is not, nothing secret, and any order of changes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
)
from greenroom.wire.messages import PoolCounts, Sandbox, Size, listed

SMALL = Size("small", 1, 512, 4096)


def sandbox(number: int = 0, **changes: Any) -> Sandbox:
    fields: dict[str, Any] = {
        "sandbox_id": f"iabcd{number:015d}",
        "template": "base",
        "size": SMALL,
        "state": "running",
        "started_at": 1.0,
        "ends_at": 2.0,
        "node": "node-0",
    }
    return Sandbox(**fields | changes)


def pool(warm: int, template: str = "base") -> PoolCounts:
    return PoolCounts(template=template, size="small", target=4, warm=warm, starting=0, waiting=0)


def frames(lines: bytes) -> list[Frame]:
    return [frame_of(line) for line in lines.splitlines()]


def after(log: ChangeLog, seq: int) -> list[Frame]:
    given = log.since(seq)
    assert given is not None
    return frames(given[0])


def whole(log: ChangeLog) -> list[Whole]:
    parts = [frame_of(line) for line in log.whole()[1]]
    assert all(isinstance(part, Whole) for part in parts)
    return parts  # type: ignore[return-value]


def test_changes_have_numbers_from_one_on() -> None:
    log = ChangeLog("abcd")
    assert log.position.seq == 0
    assert log.position.code == "abcd"
    log.put(sandbox(1))
    log.count(pool(3))
    log.drop(sandbox(1).sandbox_id)
    kinds = [(type(frame), frame.seq) for frame in after(log, 0)]
    assert kinds == [(Put, 1), (Counted, 2), (Gone, 3)]
    assert [frame.seq for frame in after(log, 2)] == [3]
    assert log.since(3) == (b"", 3)
    assert {frame.stream for frame in after(log, 0)} == {log.position.stream}


def held(number: int, name: str = "box", owner: str = "me") -> HeldName:
    return HeldName(sandbox_id=sandbox(number).sandbox_id, owner=owner, name=name)


def test_a_name_is_held_until_its_sandbox_is_shown_or_nothing_came_of_it() -> None:
    log = ChangeLog("abcd")
    log.hold(held(1))
    log.hold(held(1))
    log.hold(held(2, "other"))
    assert [part.held for part in whole(log)] == [[held(1), held(2, "other")]]
    log.put(sandbox(1, name="box"))
    log.hold(held(1))
    log.drop(held(2).sandbox_id)
    log.drop(held(2).sandbox_id)
    assert [type(frame) for frame in after(log, 0)] == [Held, Held, Put, Gone]
    assert (log.held, [part.held for part in whole(log)]) == ({}, [[]])
    log.drop(held(1).sandbox_id)
    log.hold(held(1))
    assert list(log.held) == [held(1).sandbox_id]


def test_many_held_names_come_in_parts_too() -> None:
    log = ChangeLog("abcd", part=500)
    for number in range(50):
        log.hold(held(number, f"name-{number}"))
    parts = whole(log)
    assert len(parts) > 5
    assert [name for part in parts for name in part.held] == list(log.held.values())
    assert [part.part for part in parts] == list(range(len(parts)))


def test_no_two_runs_have_one_name() -> None:
    assert ChangeLog("abcd").position.stream != ChangeLog("abcd").position.stream


def test_what_is_as_it_was_is_no_news() -> None:
    log = ChangeLog("abcd")
    woken: list[int] = []
    log.on_change = lambda _soon: woken.append(log.position.seq)
    log.put(sandbox(1))
    log.put(sandbox(1))
    log.put(sandbox(1, token="another"))
    log.drop("iabcd" + "9" * 15)
    log.count(pool(1))
    log.count(pool(1))
    assert log.position.seq == 2
    assert woken == [1, 2]


def test_nothing_secret_is_told() -> None:
    log = ChangeLog("abcd")
    log.put(sandbox(1, token="SECRET1", traffic_token="SECRET2", metadata={"a": "b"}))
    told, _ = log.since(0) or (b"", 0)
    assert b'"a":"b"' in told
    for text in (told, *log.whole()[1]):
        assert b"SECRET" not in text
        assert b"token" not in text


def test_of_a_record_with_secrets_only_what_may_be_told_is_listed() -> None:
    told = listed(sandbox(1, token="x", owner="me", name="n"))
    assert (told.owner, told.name) == ("me", "n")
    assert b"token" not in msgspec.json.encode(told)


def test_who_is_too_far_behind_is_told_so() -> None:
    log = ChangeLog("abcd", keep=3)
    for number in range(5):
        log.put(sandbox(number))
    assert log.since(1) is None
    assert [frame.seq for frame in after(log, 2)] == [3, 4, 5]
    assert log.since(6) is None, "a number that was never given"
    stream = log.position.stream
    assert log.covers(Position(stream, 2))
    assert not log.covers(Position(stream, 1))
    assert not log.covers(Position(stream, 6))
    assert not log.covers(Position("abcd-other", 3))


def test_what_is_kept_is_bounded_in_bytes() -> None:
    log = ChangeLog("abcd", keep_bytes=5000)
    for number in range(20):
        log.put(sandbox(number, metadata={"text": "x" * 1000}))
        assert log.statistics()["bytes"] <= 5000
    log.put(sandbox(99, metadata={"text": "x" * 9000}))
    assert log.statistics()["kept"] == 1, "one that is too large is kept alone"


def test_many_changes_are_given_by_and_by() -> None:
    log = ChangeLog("abcd")
    for number in range(10):
        log.put(sandbox(number))
    lines, last = log.since(0, most=4) or (b"", 0)
    assert last == 4
    assert [frame.seq for frame in frames(lines)] == [1, 2, 3, 4]
    assert (log.since(8, most=4) or (b"", 0))[1] == 10


def test_all_there_is_comes_in_parts_and_as_it_was() -> None:
    log = ChangeLog("abcd")
    for number in range(50):
        log.put(sandbox(number, metadata={"text": "x" * 10_000}))
    log.count(pool(2))
    seq, parts = log.whole()
    first = next(parts)
    log.drop(sandbox(49).sandbox_id)
    read = [frame_of(line) for line in (first, *parts)]
    assert len(read) > 2
    assert all(isinstance(part, Whole) and part.seq == seq for part in read)
    assert [part.more for part in read if isinstance(part, Whole)] == [True] * (len(read) - 1) + [False]
    ids = [each.sandbox_id for part in read if isinstance(part, Whole) for each in part.sandboxes]
    assert ids == [sandbox(number).sandbox_id for number in range(50)]
    assert [each.warm for part in read if isinstance(part, Whole) for each in part.pools] == [2]


def test_a_position_as_text() -> None:
    place = Position("abcd-0123", 7)
    assert Position.parse(str(place)) == place
    for text in (
        "",
        "abcd:1",
        ":3",
        "abcd-01:",
        "abcd-01:x",
        "abcd-01:-1",
        "a" * 80 + ":1",
        "abcd-01:" + "9" * 30,
    ):
        assert Position.parse(text) is None


def test_an_empty_log_has_a_whole() -> None:
    assert [(part.seq, part.sandboxes, part.more) for part in whole(ChangeLog("abcd"))] == [(0, [], False)]


def test_a_beat_is_a_line() -> None:
    beat = Beat(stream="abcd-1", seq=1, head=2)
    assert frame_of(msgspec.json.encode(beat)) == beat


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: what is there is what a dictionary would have, and the kept changes lead to it."""

    def __init__(self) -> None:
        super().__init__()
        self.log = ChangeLog("abcd", keep=5)
        self.model: dict[str, Sandbox] = {}
        self.names: dict[str, HeldName] = {}
        self.at: dict[int, tuple[dict[str, Sandbox], dict[str, HeldName]]] = {0: ({}, {})}

    def note(self) -> None:
        self.at[self.log.position.seq] = (dict(self.model), dict(self.names))

    @rule(number=st.integers(0, 4), ends=st.integers(0, 2))
    def put(self, number: int, ends: int) -> None:
        made = sandbox(number, ends_at=float(ends))
        self.model[made.sandbox_id] = made
        self.names.pop(made.sandbox_id, None)
        self.log.put(made)
        self.note()

    @rule(number=st.integers(0, 4))
    def drop(self, number: int) -> None:
        name = sandbox(number).sandbox_id
        self.model.pop(name, None)
        self.names.pop(name, None)
        self.log.drop(name)
        self.note()

    @rule(number=st.integers(0, 4), name=st.sampled_from("ab"))
    def hold(self, number: int, name: str) -> None:
        made = held(number, name)
        if made.sandbox_id not in self.model:
            self.names[made.sandbox_id] = made
        self.log.hold(made)
        self.note()

    @rule(warm=st.integers(0, 2))
    def count(self, warm: int) -> None:
        self.log.count(pool(warm))
        self.note()

    @invariant()
    def all_there_is(self) -> None:
        expected = {name: listed(each) for name, each in self.model.items()}
        assert self.log.sandboxes == expected
        assert self.log.held == self.names
        assert {each.sandbox_id: each for part in whole(self.log) for each in part.held} == self.names
        assert {each.sandbox_id: each for part in whole(self.log) for each in part.sandboxes} == expected

    @invariant()
    def what_is_kept_leads_here(self) -> None:
        head = self.log.position.seq
        for seq in range(max(0, head - 7), head + 1):
            given = self.log.since(seq)
            if given is None:
                assert head - seq > 5
                continue
            shown, names = self.at[seq]
            state = {name: listed(each) for name, each in shown.items()}
            names = dict(names)
            for expected, frame in enumerate(frames(given[0]), seq + 1):
                assert frame.seq == expected
                if isinstance(frame, Put):
                    state[frame.sandbox.sandbox_id] = frame.sandbox
                    names.pop(frame.sandbox.sandbox_id, None)
                elif isinstance(frame, Gone):
                    assert (frame.sandbox_id in state) != (frame.sandbox_id in names)
                    state.pop(frame.sandbox_id, None)
                    names.pop(frame.sandbox_id, None)
                elif isinstance(frame, Held):
                    names[frame.name.sandbox_id] = frame.name
            assert (state, names) == (self.log.sandboxes, self.log.held)


TestAnyOrder = AnyOrder.TestCase
