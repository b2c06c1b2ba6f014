"""Reads wait for the version that they need; watches tell a version when nothing happens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from greenroom.api.kube.kinds import SANDBOX
from greenroom.api.kube.listings import FIRST
from greenroom.api.kube.listings import PIECE as LIST_PIECE
from greenroom.api.kube.options import Answering
from greenroom.api.kube.reading import Watch, list_body, list_parts, listed, reached, watch
from greenroom.api.kube.selectors import Selection, parse_labels
from greenroom.api.kube.status import StatusError
from greenroom.api.kube.watching import PIECE, Plan
from tests.support.memory_storage import MemoryStorage


def obj(name: str, label: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "n", "labels": {"l": label}}, "spec": {}}


async def test_a_read_waits_for_a_version_that_is_still_to_come() -> None:
    storage = MemoryStorage(SANDBOX)
    waiting = asyncio.gather(reached(storage.cache, 2, 20), reached(storage.cache, 7, 20))
    await asyncio.sleep(0)
    storage.put(obj("a"))
    storage.put(obj("b"))
    storage.cache.advance(7)
    await waiting
    assert storage.cache.statistics()["watchers"] == 0


@pytest.mark.parametrize("large", [1, 1 << 10, 200 << 10])
async def test_what_waits_for_a_slow_reader_is_bounded_whatever_the_size_of_objects(large: int) -> None:
    storage = MemoryStorage(SANDBOX)
    for number in range(100):
        storage.put(obj(f"a{number}", "x" * large))
    bound = PIECE + FIRST * (large + 1024)
    page = await listed(storage, Selection(), {})
    parts = list_parts(SANDBOX, page, Answering(), 0)
    assert not isinstance(parts, bytes)
    pieces = [piece async for piece in parts]
    assert len(json.loads(b"".join(pieces))["items"]) == 100
    assert max(map(len, pieces)) <= LIST_PIECE + FIRST * (large + 1024)
    assert json.loads(b"".join(pieces)) == json.loads(list_body(SANDBOX, page, Answering()))
    follower = await watch(storage, Selection(), Answering(), Plan(True, None), seconds=20)
    lines = follower.lines()
    events = 0
    for number in range(100):
        storage.put(obj(f"a{number}", "y" * large))
    while events < 200:
        piece = await anext(lines)
        events += piece.count(b"\n")
        assert len(piece) <= bound
    follower.close()


async def test_a_version_that_does_not_come_is_too_large() -> None:
    storage = MemoryStorage(SANDBOX)
    storage.put(obj("a"))
    for query in ({"resourceVersion": "9"}, {"resourceVersion": "9", "resourceVersionMatch": "Exact"}):
        with pytest.raises(StatusError, match="Too large resource version") as refused:
            await listed(storage, Selection(), query, wait=0)
        assert (refused.value.code, refused.value.retry) == (504, 1.0)
    with pytest.raises(StatusError, match="Too large resource version"):
        await watch(storage, Selection(), Answering(), Plan(False, 9), seconds=1, wait=0)


@pytest.mark.parametrize(
    "query",
    [
        {"resourceVersionMatch": "Newest", "resourceVersion": "1"},
        {"resourceVersionMatch": "Exact"},
        {"resourceVersionMatch": "Exact", "resourceVersion": "0"},
        {"resourceVersionMatch": "NotOlderThan"},
        {"resourceVersion": "x"},
        {"limit": "-1"},
    ],
    ids=["match", "exact", "exact-any", "not-older", "version", "limit"],
)
async def test_queries_that_mean_nothing(query: dict[str, str]) -> None:
    with pytest.raises(StatusError) as refused:
        await listed(MemoryStorage(SANDBOX), Selection(), query)
    assert refused.value.code == 400


def follow(storage: MemoryStorage, selection: Selection, **more: Any) -> Watch:
    return Watch(storage, selection, Answering(), Plan(False, None, bookmarks=True), None, **more)


async def test_a_bookmark_is_past_what_the_selection_left_out_and_never_past_what_was_not_sent() -> None:
    storage = MemoryStorage(SANDBOX)
    stream = follow(storage, Selection(labels=parse_labels("l=x")), seconds=60, bookmark_every=0)
    storage.put(obj("a", "y"))
    lines = stream.lines()
    async with asyncio.timeout(20):
        first = json.loads(await anext(lines))
        assert (first["type"], first["object"]["metadata"]["resourceVersion"]) == ("BOOKMARK", "1")
        storage.put(obj("b", "x"))
        storage.put(obj("c", "y"))
        second = json.loads(await anext(lines))
        assert (second["type"], second["object"]["metadata"]["resourceVersion"]) == ("ADDED", "2")
        third = json.loads(await anext(lines))
        assert (third["type"], third["object"]["metadata"]["resourceVersion"]) == ("BOOKMARK", "3")
    await lines.aclose()  # type: ignore[attr-defined]
    assert storage.cache.statistics()["watchers"] == 0


async def test_a_watch_that_is_over_ends_with_what_it_has_sent() -> None:
    storage = MemoryStorage(SANDBOX)
    stream = follow(storage, Selection(), seconds=0)
    storage.put(obj("a"))
    told = [json.loads(line) async for line in stream.lines()]
    assert [(each["type"], each["object"]["metadata"]["resourceVersion"]) for each in told] == [
        ("BOOKMARK", "0")
    ]


async def test_all_who_watch_get_the_same_bytes() -> None:
    storage = MemoryStorage(SANDBOX)
    streams = [follow(storage, Selection(), seconds=60) for _ in range(3)]
    storage.put(obj("a"))
    async with asyncio.timeout(20):
        lines = [await anext(stream.lines()) for stream in streams]
    assert len(set(lines)) == 1
    assert json.loads(lines[0])["type"] == "ADDED"
    for stream in streams:
        stream.close()
