"""What happens in the fleet is told to watchers of all kinds, in order; nodes out of reach are told of too."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube.kinds import SANDBOX
from greenroom.api.kube.live import observing
from greenroom.api.kube.live.instants import instant_text
from greenroom.api.kube.objects import Object
from greenroom.api.kube.options import Answering
from greenroom.api.kube.reading import list_body, listed, watch
from greenroom.api.kube.rows import key_of_item, object_of
from greenroom.api.kube.selectors import Selection, parse_fields, parse_labels
from greenroom.api.kube.status import StatusError
from greenroom.api.kube.validation import pruned, violations
from greenroom.api.kube.watching import Plan
from greenroom.errors import NodeUnavailable
from greenroom.wire.messages import FOREVER, Declared
from tests.support.kube_fleet import World, record
from tests.support.loops import eventually

ONE, TWO = "in00a000000000000001", "in00a000000000000002"


def reasons(world: World) -> list[str]:
    return [row.object()["reason"] for row in world.events.rows("")]


async def get(world: World, name: str = ONE) -> Object:
    found = await world.sandboxes.get(("default", name))
    assert found is not None
    return found


def ready(obj: Object) -> str:
    return str(obj["status"]["conditions"][0]["status"])


async def test_events_tell_a_life() -> None:
    world = World().begin()
    world.node.put(record(launch="warm"))
    world.fleet.change(ONE, state="paused")
    world.fleet.change(ONE, state="running")
    world.fleet.change(ONE, state="ended", ended_at=time.time(), end_reason="its time was up")
    world.node.gone(ONE)
    world.node.put(record(TWO, ends_at=time.time() + 60))
    world.node.gone(TWO)
    assert sorted(reasons(world)) == ["Expired", "Killed", "Resumed", "Suspended"]
    (event,) = [row.object() for row in world.events.rows("") if row.object()["reason"] == "Killed"]
    assert event["involvedObject"]["name"] == TWO
    assert await world.events.get((event["metadata"]["namespace"], event["metadata"]["name"])) == event
    world.close()


@pytest.mark.parametrize("state", ["running", "paused"])
async def test_one_that_nobody_keeps_expires_when_its_time_has_come(state: str) -> None:
    world = World().begin()
    due = Declared(document=msgspec.Raw(b"{}"), revision=1, retain=False, shutdown_at=time.time() - 0.1)
    world.node.put(record(ONE, state=state, ends_at=FOREVER, declared=due))
    world.node.gone(ONE)
    later = msgspec.structs.replace(due, shutdown_at=time.time() + 60)
    world.node.put(record(TWO, state=state, ends_at=FOREVER, declared=later))
    world.node.gone(TWO)
    told = [row.object() for row in world.events.rows("")]
    found = {each["involvedObject"]["name"]: each["reason"] for each in told}
    assert found == {ONE: "Expired", TWO: "Killed"}
    world.close()


async def test_the_first_event_is_the_same_on_every_replica() -> None:
    made = record(launch="cold")
    told = []
    for tag in (1, 2):
        world = World(tag=tag)
        world.begin()
        world.node.put(made)
        (row,) = world.events.rows("default")
        told.append(row.object())
        told[-1]["metadata"].pop("resourceVersion")
        world.close()
    assert told[0] == told[1]
    assert (told[0]["reason"], told[0]["type"]) == ("Created", "Normal")


async def test_a_node_that_stays_away_is_told_of_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "GRACE", 0.0)
    world = World(nodes=2).begin()
    world.node.put(record())
    before = await get(world)
    watcher = world.sandboxes.cache.watch(world.sandboxes.cache.version, None, lambda: None)
    world.node.lose()
    await eventually(lambda: watcher.waiting == 1)
    (change,) = watcher.take()
    assert change.after is not None
    assert change.after["status"]["conditions"][0]["reason"] == "NodeUnreachable"
    assert change.after["metadata"]["uid"] == before["metadata"]["uid"]
    listing = await world.sandboxes.list("")
    assert (len(listing.objects), list(listing.missing)) == (1, ["node-1"])
    world.node.whole()
    assert ready(await get(world)) == "True"
    assert "NodeUnreachable" in reasons(world)
    world.close()


async def test_a_stream_that_breaks_off_for_a_moment_is_no_event() -> None:
    world = World().begin()
    world.node.put(record())
    version = world.sandboxes.cache.version
    world.node.lose()
    world.node.whole()
    assert world.sandboxes.cache.version == version
    world.close()


async def test_what_may_be_on_a_node_that_was_never_read_is_not_denied() -> None:
    world = World(nodes=2)
    world.node.whole()
    with pytest.raises(NodeUnavailable, match="node-2"):
        await world.sandboxes.get(("default", "box"))
    world.fleet.nodes[1].whole()
    assert await world.sandboxes.get(("default", "box")) is None
    world.close()


async def test_a_name_that_another_sandbox_takes_is_another_object() -> None:
    world = World(nodes=2).begin()
    world.node.put(record(ONE, name="box"))
    watcher = world.sandboxes.cache.watch(world.sandboxes.cache.version, None, lambda: None)
    world.fleet.nodes[1].put(record("in00b000000000000001", name="box"))
    world.node.gone(ONE)
    assert [change.type_for(None) for change in watcher.take()] == ["DELETED", "ADDED"]
    assert (await get(world, "box"))["status"]["sandboxID"] == "in00b000000000000001"
    world.close()


async def test_namespaces_come_and_go_with_what_names_them() -> None:
    world = World().begin()
    named = {"keys": 1_600_000_000.0}

    async def others() -> dict[str, float]:
        return named

    world.namespaces._others = others
    world.node.put(record(owner="team"))

    async def names() -> list[str]:
        return [each["metadata"]["name"] for each in (await world.namespaces.list("")).objects]  # type: ignore[index]

    assert await names() == ["default", "keys", "team"]
    team = await world.namespaces.get(("", "team"))
    assert team is not None
    assert team["metadata"]["creationTimestamp"] == instant_text(record().started_at)
    world.node.gone(ONE)
    named.clear()
    assert await names() == ["default"]
    assert await world.namespaces.get(("", "team")) is None
    world.close()


async def test_a_namespace_is_as_old_as_the_oldest_thing_in_it() -> None:
    world = World().begin()
    named: dict[str, float] = {}

    async def others() -> dict[str, float]:
        return named

    async def born(name: str) -> str | None:
        found = await world.namespaces.get(("", name))
        assert found is not None
        return found["metadata"].get("creationTimestamp")  # type: ignore[no-any-return]

    world.namespaces._others = others
    assert await born("default") is None
    watcher = world.namespaces.cache.watch(world.namespaces.cache.version, None, lambda: None)
    world.node.put(record(ONE, started_at=1_700_000_500.0, owner="team"))
    assert await born("team") == "2023-11-14T22:21:40Z"
    world.node.put(record(TWO, started_at=1_700_000_000.0, owner="team"))
    assert await born("team") == "2023-11-14T22:13:20Z"
    named |= {"team": 1_700_000_900.0, "default": 1_600_000_000.0, "bare": math.inf}
    assert await born("team") == "2023-11-14T22:13:20Z"
    assert await born("default") == "2020-09-13T12:26:40Z"
    assert await born("bare") is None
    told = [(change.type_for(None), change.version) for change in watcher.take()]
    assert [kind for kind, _ in told] == ["ADDED", "MODIFIED", "ADDED", "MODIFIED"]
    world.close()


async def test_inventories_are_told_once_a_second_and_are_true_when_read() -> None:
    world = World().begin()
    cache = world.inventories.cache
    watcher = cache.watch(cache.version, None, lambda: None)
    world.node.put(record(name="box"))
    world.node.counted(2)
    world.node.counted(3)
    inventory = await world.inventories.get(("", "node-1"))
    assert inventory is not None
    assert inventory["pools"][0]["warm"] == 3
    (entry,) = inventory["entries"]
    assert (entry["name"], entry["id"], entry["memoryBytes"]) == ("default/box", ONE, 512 << 20)
    assert watcher.waiting <= 1
    assert inventory["address"] == "n00a:80"
    world.fleet.seen.view.leave("n00a")
    assert (await world.inventories.list("")).objects == []
    world.close()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "pause", "label", "gone"]), st.integers(0, 3), st.integers(0, 1)),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(0, 10))
async def test_lists_and_watches_agree_however_they_are_asked(
    actions: list[tuple[str, int, int]], begin: int
) -> None:
    world = World(nodes=1).begin()
    states: list[Object] = []
    versions: list[int] = []

    def do(what: str, number: int, owner: int) -> None:
        sandbox_id = f"in00a{number:015d}"
        there = sandbox_id in world.node.sandboxes
        if what == "put" and not there:
            world.node.put(record(sandbox_id, owner=f"o{owner}", launch="warm"))
        elif what == "gone" and there:
            world.node.gone(sandbox_id)
        elif what == "pause" and there:
            world.fleet.change(sandbox_id, state="paused")
        elif there:
            world.fleet.change(sandbox_id, launch="cold")

    for action in actions[:begin]:
        do(*action)
    stream = await watch(
        world.sandboxes, Selection(), Answering(), Plan(True, None, bookmarks=True), seconds=0
    )
    selections = [
        Selection(),
        Selection("o1"),
        Selection(labels=parse_labels("sandbox.greenroom.dev/launch=warm")),
        Selection(fields=parse_fields("status.phase=Paused", SANDBOX.selectable)),
        Selection(fields=parse_fields(f"metadata.name={ONE}", SANDBOX.selectable)),
    ]
    watchers = [
        world.sandboxes.cache.watch(world.sandboxes.cache.version, each, lambda: None) for each in selections
    ]
    mirrors: list[dict[Any, Object]] = []
    for selection in selections:
        page = await listed(world.sandboxes, selection, {})
        items = json.loads(list_body(SANDBOX, page, Answering()))["items"]
        mirrors.append({each["metadata"]["name"]: each for each in items})
        versions.append(int(page.metadata["resourceVersion"]))
        states = items if selection.everything else states
    for action in actions[begin:]:
        do(*action)
    for selection, watcher, mirror in zip(selections, watchers, mirrors, strict=True):
        for change in watcher.take():
            seen = change.seen(selection)
            assert seen is not None
            kind, obj = seen
            name = obj["metadata"]["name"]
            assert (kind == "ADDED") == (name not in mirror)
            if kind == "DELETED":
                del mirror[name]
            else:
                mirror[name] = obj
        page = await listed(world.sandboxes, selection, {})
        items = json.loads(list_body(SANDBOX, page, Answering()))["items"]
        assert {each["metadata"]["name"]: each for each in items} == mirror
        assert [each["metadata"]["name"] for each in items] == [
            row.key[1]  # type: ignore[union-attr]
            for row in page.objects
        ]
        table = json.loads(list_body(SANDBOX, page, Answering(form="table")))
        assert [row["cells"][0] for row in table["rows"]] == [each["metadata"]["name"] for each in items]
        assert [row["object"]["metadata"] for row in table["rows"]] == [each["metadata"] for each in items]
    # The state that was listed first can still be had.
    page = await listed(
        world.sandboxes,
        Selection(),
        {"resourceVersion": str(versions[0]), "resourceVersionMatch": "Exact"},
    )
    assert json.loads(list_body(SANDBOX, page, Answering()))["items"] == states
    told = [json.loads(line) async for chunk in stream.lines() for line in chunk.splitlines()]
    assert [each["object"] for each in told if each["type"] == "ADDED"] == states
    world.close()


async def test_pages_are_of_one_version_and_of_one_process() -> None:
    world, other = World(tag=1).begin(), World(tag=2).begin()
    for number in range(5):
        for each in (world, other):
            each.node.put(record(f"in00a{number:015d}"))
    page = await listed(world.sandboxes, Selection(), {"limit": "2"})
    world.node.gone("in00a000000000000003")
    token = page.metadata["continue"]
    page = await listed(world.sandboxes, Selection(), {"continue": token})
    assert len(page.objects) == 3
    with pytest.raises(StatusError) as refused:
        await listed(other.sandboxes, Selection(), {"continue": token})
    assert (refused.value.code, bool(refused.value.continue_token)) == (410, True)
    version = page.metadata["resourceVersion"]
    with pytest.raises(StatusError) as refused:
        await watch(other.sandboxes, Selection(), Answering(), Plan(False, int(version)), seconds=1)
    assert refused.value.code == 410
    # A list that is to be no older than another process's version is answered.
    page = await listed(other.sandboxes, Selection(), {"resourceVersion": version})
    assert len(page.objects) == 5
    world.close()
    other.close()


async def test_what_nobody_writes_is_of_its_schema() -> None:
    world = World(nodes=2).begin()
    world.node.put(record(launch="warm"))
    world.node.counted(3)
    world.fleet.change(ONE, state="paused")
    world.fleet.change(ONE, state="ended", ended_at=time.time(), end_reason="its VM ended by itself")
    for storage in world.storages():
        listing = await storage.list("")
        assert listing.objects or storage is world.claims
        for item in listing.objects:
            shown = object_of(item)
            assert violations(shown, storage.kind.schema) == []
            assert pruned(shown, storage.kind.schema)[1] == []
            found = await storage.get(key_of_item(item))
            assert found is not None
            assert found["metadata"]["uid"] == shown["metadata"]["uid"]
    failed = [row.object() for row in world.events.rows("") if row.object()["type"] == "Warning"]
    assert [each["reason"] for each in failed] == ["Failed"]
    world.close()
