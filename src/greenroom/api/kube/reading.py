"""Lists and watches, between HTTP and the storage.

A list is of one version: the current one, the one that its token or the client names, or one that is at least as new.
A watch is a stream of lines; it begins with the state or at a version, and ends at its deadline, when the client has
gone, or when it did not keep up. Source: "Kubernetes API Concepts" in Kubernetes' documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec

from greenroom.api.kube import paging, tables
from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.objects import Object, metadata_of
from greenroom.api.kube.options import Answering
from greenroom.api.kube.selectors import Selection
from greenroom.api.kube.status import StatusError, bad_request, version_too_large
from greenroom.api.kube.storage import Listing, Storage
from greenroom.api.kube.watching import (
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
    narrowed = bool(selection.labels.requirements or selection.fields.requirements)
    objects = listing.objects
    if narrowed:
        objects = [obj for obj in objects if selection.matches(obj)]
    return paging.cut(objects, listing.version, limit, after, counted=not narrowed)


async def _at(storage: Storage, namespace: str, version: int | None) -> Listing:
    current = await storage.list(namespace)
    if version is None or version == current.version:
        return current
    if version > storage.cache.version:
        raise version_too_large(version, storage.cache.version)
    objects = storage.cache.at(version, current.objects)
    if namespace:
        objects = [obj for obj in objects if metadata_of(obj).get("namespace") == namespace]
    return Listing(version, objects)


async def reached(cache: Cache, version: int, wait: float) -> None:
    """Wait until the cache is at `version`, for `wait` seconds. Raises 504."""
    if cache.version >= version:
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
    if answer.form == "table":
        made: Any = tables.table(page.objects, kind, now(), include=answer.include, metadata=page.metadata)
    elif answer.form == "partial":
        made = {
            "kind": "PartialObjectMetadataList",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": page.metadata,
            "items": [tables.partial(obj) for obj in page.objects],
        }
    else:
        made = {
            "kind": kind.list_name,
            "apiVersion": kind.api_version,
            "metadata": page.metadata,
            "items": page.objects,
        }
    return msgspec.json.encode(made)


def object_body(kind: Kind, obj: Object, answer: Answering, now: Now = now_utc) -> bytes:
    """One object in the form that was asked for, encoded."""
    return msgspec.json.encode(_formed(kind, obj, answer, now, headed=True))


def _formed(kind: Kind, obj: Object, answer: Answering, now: Now, *, headed: bool) -> Object:
    if answer.form == "table":
        metadata = {"resourceVersion": metadata_of(obj).get("resourceVersion", "")}
        return tables.table([obj], kind, now(), include=answer.include, metadata=metadata, headed=headed)
    return tables.partial(obj) if answer.form == "partial" else obj


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
        self._headed = True
        self._form = (answer.form, answer.include)
        begin = self._cache.version if plan.since is None else plan.since
        since = begin if initial is None else initial.version
        if since > self._cache.version:
            raise version_too_large(since, self._cache.version)
        self._seen = since
        self._watcher: Watcher = self._cache.watch(since, selection, self._news.set)

    def close(self) -> None:
        """Stop following."""
        self._watcher.end()
        self._cache.leave(self._watcher)

    async def lines(self) -> AsyncIterator[bytes]:
        """The events, some at a time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._seconds
        mark = loop.time() + self._every
        try:
            for piece in self._beginning():
                yield piece
            while not self._watcher.cut and loop.time() < end:
                self._news.clear()
                if changes := self._watcher.take(BATCH):
                    yield b"".join(self._line(change) for change in changes)
                    continue
                if loop.time() >= mark:
                    mark = loop.time() + self._every
                    if self._plan.bookmarks:
                        yield self._bookmark()
                        continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(end, mark)):
                        await self._news.wait()
            # A last bookmark, so that the next watch has little to catch up with.
            if self._plan.bookmarks and not self._watcher.cut:
                yield self._bookmark()
        finally:
            self.close()

    def _beginning(self) -> list[bytes]:
        pieces: list[bytes] = []
        if self._initial is not None:
            matching = [obj for obj in self._initial.objects if self._selection.matches(obj)]
            batches = [matching[first : first + BATCH] for first in range(0, len(matching), BATCH)]
            pieces += [b"".join(self._event("ADDED", obj) for obj in batch) for batch in batches]
            if self._plan.marked:
                pieces.append(self._bookmark(initial_end=True))
        return pieces

    def _line(self, change: Change) -> bytes:
        self._seen = change.version
        seen = change.seen(self._selection)
        if seen is None:
            return b""
        kind, obj = seen
        if self._headed and self._answer.form == "table":
            return self._event(kind, obj)
        # What a selection makes DELETED of is another object than the one that goes.
        form = (*self._form, change.after is None)
        return change.encoded(form, kind, obj, partial(self._encode, headed=False))

    def _event(self, kind: Type, obj: Object) -> bytes:
        headed, self._headed = self._headed, False
        return self._encode(kind, obj, headed=headed)

    def _encode(self, kind: Type, obj: Object, *, headed: bool) -> bytes:
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
        await reached(storage.cache, plan.since, wait)
    initial = await storage.list(selection.namespace) if plan.initial else None
    return Watch(storage, selection, answer, plan, initial, seconds=seconds, bookmark_every=bookmark_every)
