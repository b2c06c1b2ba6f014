"""Watchers learn every change in order, as their selection sees it, or are told that they cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.api.kube.objects import key_of
from greenroom.api.kube.selectors import Selection, parse_labels
from greenroom.api.kube.status import StatusError
from greenroom.api.kube.watching import (
    INITIAL_END,
    QUEUE_BYTES,
    RING_BYTES,
    Cache,
    Change,
    Plan,
    Watcher,
    bookmark,
    plan_of,
)


def obj(name: str, version: int, label: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version), "labels": {"l": label}}}


class World:
    """Some objects and the cache that learns of their changes."""

    def __init__(self, ring: int = 100) -> None:
        self.cache = Cache(ring=ring)
        self.objects: dict[str, dict[str, Any]] = {}

    def put(self, name: str, label: str = "") -> None:
        version = self.cache.version + 1
        before, after = self.objects.get(name), obj(name, version, label)
        self.objects[name] = after
        self.cache.record(Change(version, before, after))

    def drop(self, name: str) -> None:
        if (before := self.objects.pop(name, None)) is not None:
            self.cache.record(Change(self.cache.version + 1, before, None))

    def act(self, action: tuple[str, str | None]) -> None:
        name, label = action
        if label is None:
            self.drop(name)
        else:
            self.put(name, label)


def taken(watcher: Watcher) -> list[tuple[str, str, str]]:
    """What a watcher sees: type, name and version of its events."""
    seen = [change.seen(watcher.selection) for change in watcher.take()]
    return [(each[0], key_of(each[1])[1], each[1]["metadata"]["resourceVersion"]) for each in seen if each]


def nothing() -> None:
    """Wakes nobody."""


def test_a_watch_goes_on_from_where_it_was() -> None:
    world = World()
    for name in "abc":
        world.put(name)
    watcher = world.cache.watch(1, None, nothing)
    assert taken(watcher) == [("ADDED", "b", "2"), ("ADDED", "c", "3")]
    world.put("a")
    world.drop("b")
    assert taken(watcher) == [("MODIFIED", "a", "4"), ("DELETED", "b", "5")]
    world.cache.leave(watcher)
    world.put("z")
    assert taken(watcher) == []


def test_what_enters_a_selection_is_added_and_what_leaves_it_is_deleted() -> None:
    world = World()
    woken: list[int] = []
    watcher = world.cache.watch(0, Selection(labels=parse_labels("l=x")), lambda: woken.append(1))
    world.put("a", "y")
    assert not woken
    world.put("a", "x")
    world.put("a", "x")
    world.put("a", "y")
    world.put("a", "x")
    world.drop("a")
    assert taken(watcher) == [
        ("ADDED", "a", "2"),
        ("MODIFIED", "a", "3"),
        ("DELETED", "a", "4"),
        ("ADDED", "a", "5"),
        ("DELETED", "a", "6"),
    ]
    assert len(woken) == 5


def test_what_is_too_old_is_gone() -> None:
    world = World(ring=2)
    for _ in range(5):
        world.put("a")
    assert [change.version for change in world.cache.since(3)] == [4, 5]
    for ask in (world.cache.since, lambda version: world.cache.at(version, world.objects.values())):
        with pytest.raises(StatusError) as refused:
            ask(2)
        assert (refused.value.code, refused.value.reason) == (410, "Expired")
    with pytest.raises(StatusError):
        world.cache.watch(2, None, nothing)


def test_a_slow_watcher_is_cut_off_and_the_others_go_on() -> None:
    world = World()
    slow = world.cache.watch(0, None, nothing, limit=2)
    quick = world.cache.watch(0, None, nothing, limit=2)
    for _ in range(3):
        world.put("a")
        quick.take()
    assert slow.cut
    assert slow.take() == []
    assert not quick.cut
    assert world.cache.statistics()["watchers"] == 1


def heavy(cache: Cache, number: int, weight: int) -> None:
    for _ in range(number):
        version = cache.version + 1
        cache.record(Change(version, None, obj("a", version), weight))


def test_large_objects_are_kept_for_fewer_changes() -> None:
    cache = Cache()
    heavy(cache, 20, RING_BYTES // 8)
    assert cache.statistics()["changes"] == 8
    assert [change.version for change in cache.since(12)] == list(range(13, 21))
    with pytest.raises(StatusError):
        cache.since(11)
    # The latest is kept in any case, and small ones come back in numbers.
    heavy(cache, 1, 2 * RING_BYTES)
    assert cache.statistics()["changes"] == 1
    heavy(cache, 100, 1)
    assert cache.statistics()["changes"] == 100


def test_who_does_not_take_large_objects_is_cut_off() -> None:
    cache = Cache()
    slow, quick = cache.watch(0, None, nothing), cache.watch(0, None, nothing)
    piece = QUEUE_BYTES // 8
    for _ in range(10):
        heavy(cache, 1, piece)
        assert len(quick.take()) == 1
    assert slow.cut
    assert not quick.cut


def test_what_is_taken_is_bounded_in_bytes_but_one_always_is() -> None:
    cache = Cache()
    watcher = cache.watch(0, None, nothing)
    heavy(cache, 5, 1000)
    assert [len(watcher.take(256, 2000)), len(watcher.take(256, 1)), len(watcher.take(256, 9000))] == [
        2,
        1,
        2,
    ]
    assert watcher.take() == []


def test_a_restart_ends_all_watches_and_forgets() -> None:
    world = World()
    world.put("a")
    watcher = world.cache.watch(1, None, nothing)
    world.cache.restart(10)
    assert watcher.cut
    assert world.cache.version == 10
    with pytest.raises(StatusError):
        world.cache.since(1)
    assert world.cache.since(10) == []


def test_events_are_encoded_once_for_all() -> None:
    change = Change(1, None, obj("a", 1))
    calls: list[str] = []

    def encode(kind: str, _change: Change) -> bytes:
        calls.append(kind)
        return b"x"

    for _ in range(3):
        assert change.encoded("json", "ADDED", encode) == b"x"
    change.encoded("table", "ADDED", encode)
    assert len(calls) == 2


def test_versions_only_grow() -> None:
    cache = Cache(5)
    with pytest.raises(ValueError, match="not above"):
        cache.record(Change(5, None, obj("a", 5)))
    cache.advance(9)
    assert cache.version == 9
    assert cache.since(9) == []


ACTIONS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", None])), max_size=20)


@given(ACTIONS, st.data())
def test_the_state_at_any_version_is_what_it_was(
    actions: list[tuple[str, str | None]], data: st.DataObject
) -> None:
    world = World()
    history = {0: []}
    for action in actions:
        world.act(action)
        history[world.cache.version] = [world.objects[name] for name in sorted(world.objects)]
    version = data.draw(st.sampled_from(sorted(history)))
    assert world.cache.at(version, world.objects.values()) == history[version]


@given(ACTIONS, ACTIONS, st.sampled_from(["", "l=x", "l!=x", "!l"]))
def test_the_events_make_the_state(
    before: list[tuple[str, str | None]], after: list[tuple[str, str | None]], selector: str
) -> None:
    world = World()
    for action in before:
        world.act(action)
    selection = Selection(labels=parse_labels(selector))
    mirror = {name: each for name, each in world.objects.items() if selection.matches(each)}
    watcher = world.cache.watch(world.cache.version, selection, nothing)
    for action in after:
        world.act(action)
    for change in watcher.take():
        seen = change.seen(selection)
        assert seen is not None
        kind, each = seen
        name = key_of(each)[1]
        assert (kind == "ADDED") == (name not in mirror)
        if kind == "DELETED":
            del mirror[name]
        else:
            mirror[name] = each
    assert mirror == {name: each for name, each in world.objects.items() if selection.matches(each)}


@pytest.mark.parametrize(
    ("asked", "plan"),
    [
        ((None, None, None, None), Plan(True, None)),
        (("0", None, None, "true"), Plan(True, None, bookmarks=True)),
        (("7", None, None, None), Plan(False, 7)),
        (("7", "NotOlderThan", "true", "true"), Plan(True, 7, marked=True, bookmarks=True)),
        ((None, "NotOlderThan", "true", "true"), Plan(True, None, marked=True, bookmarks=True)),
        (("7", "NotOlderThan", "false", None), Plan(False, 7)),
        ((None, "NotOlderThan", "false", None), Plan(False, None)),
    ],
    ids=["plain", "any", "from", "streamed-from", "streamed", "not-from", "not"],
)
def test_how_a_watch_begins(asked: tuple[str | None, ...], plan: Plan) -> None:
    assert plan_of(*asked) == plan


@pytest.mark.parametrize(
    "asked",
    [
        ("7", "Exact", None, None),
        ("7", None, "true", None),
        ("7", "Exact", "true", None),
        ("x", None, None, None),
        (None, None, "maybe", None),
    ],
    ids=["match", "no-match", "exact", "version", "truth"],
)
def test_combinations_that_mean_nothing(asked: tuple[str | None, ...]) -> None:
    with pytest.raises(StatusError) as refused:
        plan_of(*asked)
    assert refused.value.code == 400


def test_bookmarks() -> None:
    plain = bookmark("Sandbox", "agents.x-k8s.io/v1beta1", 7)
    assert plain["metadata"] == {"resourceVersion": "7", "creationTimestamp": None}
    assert bookmark("Sandbox", "v", 7, initial_end=True)["metadata"]["annotations"] == {INITIAL_END: "true"}
