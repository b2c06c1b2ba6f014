"""Lists and watches, between HTTP and the storage.

A list is of one version: the current one, the one that its token or the client names, or one that is at least as new.
A watch is a stream of lines; it begins with the state or at a version, and ends at its deadline, when the client has
gone, or when it did not keep up. Source: "Kubernetes API Concepts" in Kubernetes' documentation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from greenroom.api.kube import listings, paging, tables
from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.objects import Object, metadata_of
from greenroom.api.kube.options import Answering
from greenroom.api.kube.pulses import pulse_of
from greenroom.api.kube.rows import Item, Row, key_of_item, object_of
from greenroom.api.kube.selectors import Selection
from greenroom.api.kube.status import StatusError, bad_request, version_too_large
from greenroom.api.kube.storage import Listing, Storage
from greenroom.api.kube.watching import (
    PIECE,
    Cache,
    Change,
    Plan,
    Type,
    Watcher,
    bookmark,
    version_parameter,
)

VERSION_WAIT = 3.0
"""Seconds that a read waits for a version that the client has seen elsewhere."""
BOOKMARK_EVERY = 60.0
"""Seconds between bookmarks of a watch on which nothing happens."""
SELECTED: Final = 1000
"""Objects that are asked whether they are selected before others have their turn."""
BATCH: Final = 256
"""Events that are sent in one piece."""

Now = Callable[[], datetime]


def now_utc() -> datetime:
    """The present."""
    return datetime.now(UTC)


async def listed(
    storage: Storage, selection: Selection, query: Mapping[str, str], wait: float = VERSION_WAIT
) -> paging.Page:
    """The objects that a list's query asks for. Raises 400, 410, 504."""
    asked, match = version_parameter(query.get("resourceVersion")), query.get("resourceVersionMatch") or ""
    limit = paging.limit_of(query.get("limit"))
    if match not in ("", "Exact", "NotOlderThan"):
        raise bad_request(f"resourceVersionMatch: Unsupported value: {match[:40]!r}")
    after = None
    if query.get("continue"):
        token = paging.decoded(query["continue"])
        if asked or match:
            raise bad_request("specifying resource version is not allowed when using continue")
        after, version = token.after, token.version
        try:
            listing = await _at(storage, selection.namespace, None if version < 0 else version)
        except StatusError as error:
            raise paging.too_old(token) from error
    elif match == "Exact":
        if not asked:
            raise bad_request("resourceVersionMatch: Forbidden: Exact needs a resourceVersion that is not 0")
        listing = await _at(storage, selection.namespace, asked)
    else:
        if match and asked is None:
            raise bad_request("resourceVersionMatch: Forbidden: it needs a resourceVersion")
        await reached(storage.cache, asked or 0, wait)
        listing = await storage.list(selection.namespace)
    narrowed = not selection.namespaced_only
    objects = listing.objects
    if narrowed:
        objects = await _admitted(objects, selection)
    page = paging.cut(objects, listing.version, limit, after, counted=not narrowed)
    return msgspec.structs.replace(page, missing=listing.missing) if listing.missing else page


async def _admitted(items: Sequence[Item], selection: Selection) -> list[Item]:
    found: list[Item] = []
    for first in range(0, len(items), SELECTED):
        if first:
            await asyncio.sleep(0)
        found += [item for item in items[first : first + SELECTED] if selection.admits(item)]
    return found


async def _at(storage: Storage, namespace: str, version: int | None) -> Listing:
    current = await storage.list(namespace)
    if version is None or version == current.version:
        return current
    if version > storage.cache.version and not storage.cache.foreign(version):
        raise version_too_large(version, storage.cache.version)
    objects = storage.cache.at(version, current.objects)
    if namespace:
        objects = [item for item in objects if key_of_item(item)[0] == namespace]
    return Listing(version, objects, current.missing)


async def reached(cache: Cache, version: int, wait: float) -> None:
    """Wait until the cache is at `version`, for `wait` seconds. Raises 504.

    A version of another process says nothing here: a list takes in what has arrived, and that has to do.
    """
    if cache.version >= version or cache.foreign(version):
        return
    news = asyncio.Event()
    watcher = cache.watch(cache.version, None, news.set)
    try:
        async with asyncio.timeout(wait):
            while cache.version < version:
                news.clear()
                watcher.take()
                await news.wait()
    except TimeoutError:
        raise version_too_large(version, cache.version) from None
    finally:
        cache.leave(watcher)


def list_body(kind: Kind, page: paging.Page, answer: Answering, now: Now = now_utc) -> bytes:
    """A list in the form that was asked for, encoded."""
    return b"".join(listings.chunks(kind, page, answer, now()))


def list_parts(
    kind: Kind, page: paging.Page, answer: Answering, whole: int, now: Now = now_utc
) -> bytes | AsyncIterator[bytes]:
    """The same, or where it has more than `whole` bytes, in pieces between which others have their turn."""
    pieces = listings.chunks(kind, page, answer, now())
    made: list[bytes] = []
    for piece in pieces:
        made.append(piece)
        if sum(map(len, made)) > whole:
            return _parted(made, pieces)
    return b"".join(made)


async def _parted(made: list[bytes], more: Iterator[bytes]) -> AsyncIterator[bytes]:
    while made:
        yield made.pop(0)
    for piece in more:
        yield piece
        await asyncio.sleep(0)


def object_body(kind: Kind, obj: Object, answer: Answering, now: Now = now_utc) -> bytes:
    """One object in the form that was asked for, encoded."""
    return msgspec.json.encode(_formed(kind, obj, answer, now, headed=True))


def _formed(kind: Kind, obj: Object, answer: Answering, now: Now, *, headed: bool) -> Object:
    if answer.form == "table":
        metadata = {"resourceVersion": metadata_of(obj).get("resourceVersion", "")}
        return tables.table([obj], kind, now(), include=answer.include, metadata=metadata, headed=headed)
    return tables.partial(obj) if answer.form == "partial" else obj


def _row_event(kind: Type, row: Row) -> bytes:
    return b"".join((b'{"type":"', kind.encode(), b'","object":', *row.json(), b"}\n"))


class Watch:
    """One watch as a stream of encoded events, each a line. It follows from when it is made until it is closed."""

    def __init__(
        self,
        storage: Storage,
        selection: Selection,
        answer: Answering,
        plan: Plan,
        initial: Listing | None,
        *,
        seconds: float,
        bookmark_every: float = BOOKMARK_EVERY,
        now: Now = now_utc,
    ) -> None:
        self._kind = storage.kind
        self._cache = storage.cache
        self._selection = selection
        self._answer = answer
        self._plan = plan
        self._initial = initial
        self._seconds = seconds
        self._every = bookmark_every
        self._now = now
        self._news = asyncio.Event()
        self._pulse = pulse_of(self._cache)
        self._headed = True
        self._form = (answer.form, answer.include)
        # Those who select the same are sent the same.
        names = sorted(selection.names) if selection.names is not None else ["*"]
        self._same = (*self._form, selection.namespace, str(selection.labels), str(selection.fields), *names)
        begin = self._cache.version if plan.since is None or initial is not None else plan.since
        since = begin if initial is None else initial.version
        if since > self._cache.version and not self._cache.foreign(since):
            raise version_too_large(since, self._cache.version)
        self._seen = since
        self._watcher: Watcher = self._cache.watch(since, selection, self._wake)

    def _wake(self) -> None:
        self._pulse.wake(self._news)

    def close(self) -> None:
        """Stop following."""
        self._watcher.end()
        self._cache.leave(self._watcher)

    async def lines(self) -> AsyncIterator[bytes]:
        """The events, some at a time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._seconds
        mark = loop.time() + self._every
        alarm = loop.call_at(min(end, mark), self._news.set)
        try:
            for piece in self._beginning():
                yield piece
            while not self._watcher.cut and loop.time() < end:
                self._news.clear()
                if changes := self._watcher.take(BATCH, PIECE):
                    yield self._lines(changes)
                    continue
                if loop.time() >= mark:
                    mark = loop.time() + self._every
                    if self._plan.bookmarks:
                        yield self._bookmark()
                        continue
                if alarm.when() <= loop.time():
                    alarm = loop.call_at(min(end, mark), self._news.set)
                await self._news.wait()
            # A last bookmark, so that the next watch has little to catch up with.
            if self._plan.bookmarks and not self._watcher.cut:
                yield self._bookmark()
        finally:
            alarm.cancel()
            self.close()

    def _beginning(self) -> Iterator[bytes]:
        if self._initial is not None:
            items, self._initial = self._initial.objects, None
            everything = self._selection.namespaced_only
            for first in range(0, len(items), BATCH):
                lines: list[bytes] = []
                size = 0
                for item in items[first : first + BATCH]:
                    if everything or self._selection.admits(item):
                        lines.append(self._added(item))
                        size += len(lines[-1])
                        if size > PIECE:
                            yield b"".join(lines)
                            lines, size = [], 0
                yield b"".join(lines)
            if self._plan.marked:
                yield self._bookmark(initial_end=True)

    def _added(self, item: Item) -> bytes:
        if isinstance(item, Row) and self._answer.form == "object":
            return _row_event("ADDED", item)
        headed, self._headed = self._headed, False
        return self._event("ADDED", object_of(item), headed=headed)

    def _lines(self, changes: list[Change]) -> bytes:
        key = (self._same, changes[0].version, changes[-1].version, len(changes))
        self._seen = changes[-1].version
        if self._headed and self._answer.form == "table":
            return b"".join(self._line(change) for change in changes)
        if (chunk := self._pulse.chunk(key)) is None:
            chunk = self._pulse.keep(key, b"".join(self._line(change) for change in changes))
        return chunk

    def _line(self, change: Change) -> bytes:
        kind = change.type_for(self._selection)
        if kind is None:
            return b""
        if self._headed and self._answer.form == "table":
            self._headed = False
            return self._event(kind, change.shown(kind), headed=True)
        return change.encoded(self._form, kind, self._encode)

    def _encode(self, kind: Type, change: Change) -> bytes:
        if self._answer.form == "object" and kind != "DELETED" and change.row is not None:
            return _row_event(kind, change.row)
        return self._event(kind, change.shown(kind), headed=False)

    def _event(self, kind: Type, obj: Object, *, headed: bool) -> bytes:
        shown = _formed(self._kind, obj, self._answer, self._now, headed=headed)
        return msgspec.json.encode({"type": kind, "object": shown}) + b"\n"

    def _bookmark(self, *, initial_end: bool = False) -> bytes:
        # When nothing waits, everything up to the cache's version has been sent.
        complete = not (initial_end or self._watcher.waiting)
        version = max(self._seen, self._cache.version) if complete else self._seen
        mark = bookmark(self._kind.name, self._kind.api_version, version, initial_end=initial_end)
        if self._answer.form == "table":
            made = tables.table([], self._kind, self._now(), metadata=mark["metadata"], headed=False)
            made["rows"] = [{"cells": [""] * (1 + len(self._kind.columns)), "object": mark}]
            mark = made
        elif self._answer.form == "partial":
            mark = {**mark, "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
        return msgspec.json.encode({"type": "BOOKMARK", "object": mark}) + b"\n"


async def watch(
    storage: Storage,
    selection: Selection,
    answer: Answering,
    plan: Plan,
    *,
    seconds: float,
    wait: float = VERSION_WAIT,
    bookmark_every: float = BOOKMARK_EVERY,
) -> Watch:
    """Begin a watch. Raises 410 when it begins too far back, 504 when the version is not reached."""
    if plan.since is not None:
        if not plan.initial and storage.cache.foreign(plan.since):
            storage.cache.since(plan.since)
        await reached(storage.cache, plan.since, wait)
    initial = await storage.list(selection.namespace) if plan.initial else None
    return Watch(storage, selection, answer, plan, initial, seconds=seconds, bookmark_every=bookmark_every)
