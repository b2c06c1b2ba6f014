"""The watch cache: the last changes of a kind, and everybody who follows them.

Versions are one number per kind that only grows. The cache keeps a ring of changes, so a watch can go on from any
version in it, and a list can be had as it was then. A watcher that selects gets what its selection makes of a change:
an object that enters is ADDED, one that leaves is DELETED. What is sent is encoded once per form and shared by all who
want it. A watcher that does not keep up is cut off, and comes back with the version that it has seen; nothing waits
for it. Pure: whoever writes calls `record`, whoever serves takes from its `Watcher` when it was woken.

A change may be of rows (`rows`): their objects are made only for a selector, or a form, that needs them. A cache with a
clock (`versions`) knows versions of other processes and lets nobody go on from them.
Source: "Efficient detection of changes" in "Kubernetes API Concepts".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, Literal

import msgspec

from greenroom.api.kube.objects import Key, Object, version_of
from greenroom.api.kube.rows import LIGHT, Item, Row, key_of_item, object_of
from greenroom.api.kube.selectors import Selection
from greenroom.api.kube.status import StatusError, bad_request, expired
from greenroom.api.kube.versions import LONGEST, Clock

Type = Literal["ADDED", "MODIFIED", "DELETED"]
RING = 8192
"""Changes that a cache keeps."""
RING_BYTES = 64 << 20
"""Bytes of objects that a cache keeps in changes, about; some forms of them may come on top."""
QUEUE = 4096
"""Changes that may wait for one watcher."""
QUEUE_BYTES = 2 * RING_BYTES
"""Bytes of objects that may wait for one watcher, about."""
PIECE = 256 << 10
"""Bytes that are sent in one piece, about: as much waits for a client that does not read."""
WATCHERS = 4096
"""Watchers of one cache."""
INITIAL_END: Final = "k8s.io/initial-events-end"
Encode = Callable[[Type, "Change"], bytes]
Wake = Callable[[], None]


class Change:
    """One change of one object: `after` is None when it is gone, `before` when it is new."""

    __slots__ = ("_after", "_before", "_encoded", "_gone", "_objects", "key", "version", "weight")

    def __init__(
        self, version: int, before: Item | None, after: Item | None, weight: int | None = None
    ) -> None:
        present = after if after is not None else before
        if present is None:
            raise ValueError("a change is about an object")
        self.version = version
        self.key: Key = key_of_item(present)
        self.weight = weight or (present.weight() if isinstance(present, Row) else LIGHT)
        """About how many bytes of JSON the object has."""
        self._before = before
        self._after = after
        self._objects: tuple[Object | None, Object | None] | None = None
        self._encoded: dict[Hashable, bytes] | None = None
        self._gone: Object | None = None

    @property
    def before(self) -> Object | None:
        """The object as it was."""
        return self._made()[0]

    @property
    def after(self) -> Object | None:
        """The object as it is."""
        return self._made()[1]

    @property
    def was(self) -> Item | None:
        """What was listed before."""
        return self._before

    @property
    def row(self) -> Row | None:
        """What is listed now, where that is a row."""
        return self._after if isinstance(self._after, Row) else None

    def _made(self) -> tuple[Object | None, Object | None]:
        if self._objects is None:
            before, after = self._before, self._after
            self._objects = (
                None if before is None else object_of(before),
                None if after is None else object_of(after),
            )
        return self._objects

    def type_for(self, selection: Selection | None) -> Type | None:
        """The type of event that the change is for a watcher, or None when it is nothing."""
        if selection is None or selection.everything:
            if self._after is None:
                return "DELETED"
            return "ADDED" if self._before is None else "MODIFIED"
        if selection.namespace and selection.namespace != self.key[0]:
            return None
        if selection.namespaced_only:
            return self.type_for(None)
        was = self._before is not None and selection.admits(self._before)
        if self._after is not None and selection.admits(self._after):
            return "MODIFIED" if was else "ADDED"
        return "DELETED" if was else None

    def shown(self, kind: Type) -> Object:
        """The object of an event of this type."""
        if kind == "DELETED":
            if self._gone is None:
                self._gone = _at_version(self.before or {}, self.version)
            return self._gone
        return self.after or {}

    def seen(self, selection: Selection | None) -> tuple[Type, Object] | None:
        """What the change is for a watcher: an event's type and object, or None when it is nothing."""
        kind = self.type_for(selection)
        return None if kind is None else (kind, self.shown(kind))

    def encoded(self, form: Hashable, kind: Type, encode: Encode) -> bytes:
        """The event in a form, encoded by the first who asks."""
        if self._encoded is None:
            self._encoded = {}
        key = (form, kind)
        if (found := self._encoded.get(key)) is None:
            found = self._encoded[key] = encode(kind, self)
        return found


def _at_version(obj: Object, version: int) -> Object:
    # What is DELETED is the last state, at the version of its end, so that a watch can go on from there.
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}}


class Watcher:
    """One who follows a cache. `wake` is called when there is something to take, or when it has been cut off."""

    def __init__(self, selection: Selection | None, wake: Wake, limit: int = QUEUE) -> None:
        self.selection = selection
        self.cut = False
        # Most watch everything, or a namespace; for those nothing has to be asked.
        self._simple = selection is None or selection.namespaced_only
        self._namespace = "" if selection is None else selection.namespace
        self._wake = wake
        self._limit = limit
        self._queue: deque[Change] = deque()
        self._weight = 0

    @property
    def waiting(self) -> int:
        """Changes that have not been taken yet."""
        return len(self._queue)

    def offer(self, change: Change) -> None:
        """A change, unless it is nothing to this watcher."""
        if self.cut or (self._namespace and self._namespace != change.key[0]):
            return
        if not self._simple and change.type_for(self.selection) is None:
            return
        full = len(self._queue) >= self._limit or self._weight > QUEUE_BYTES
        if full:
            self.end()
            return
        self._queue.append(change)
        self._weight += change.weight
        self._wake()

    def nudge(self) -> None:
        """Something else is new: the version."""
        self._wake()

    def take(self, most: int = 256, weight: int = QUEUE_BYTES) -> list[Change]:
        """What has come, oldest first: up to so many, and up to about so many bytes, but one at least."""
        taken: list[Change] = []
        taking = 0
        while self._queue and len(taken) < most and taking < weight:
            taken.append(self._queue.popleft())
            taking += taken[-1].weight
        self._weight -= taking
        return taken

    def end(self) -> None:
        """Cut the watcher off; what was waiting for it is forgotten."""
        self.cut = True
        self._queue.clear()
        self._weight = 0
        self._wake()


class Cache:
    """The changes of one kind, newest last, and its watchers."""

    def __init__(self, version: int = 0, ring: int = RING, clock: Clock | None = None) -> None:
        self._version = version
        self._clock = clock
        self._oldest = version
        self._ring: deque[Change] = deque()
        self._size = ring
        self._weight = 0
        self._watchers: dict[Watcher, None] = {}

    @property
    def version(self) -> int:
        """The version of the current state."""
        return self._version

    def statistics(self) -> dict[str, int]:
        """How many changes are kept, since which version, and how many watch."""
        return {"changes": len(self._ring), "oldest": self._oldest, "watchers": len(self._watchers)}

    def record(self, change: Change) -> None:
        """A change has happened. Its version is above all before it; it may leave some out."""
        if change.version <= self._version:
            raise ValueError(f"version {change.version} is not above {self._version}")
        self._version = change.version
        self._ring.append(change)
        self._weight += change.weight
        while len(self._ring) > self._size or (self._weight > RING_BYTES and len(self._ring) > 1):
            old = self._ring.popleft()
            self._oldest = old.version
            self._weight -= old.weight
        for watcher in list(self._watchers):
            watcher.offer(change)
            if watcher.cut:
                self._watchers.pop(watcher, None)

    def advance(self, version: int) -> None:
        """The state is now at `version`, without a change of this kind."""
        self._version = max(self._version, version)
        for watcher in self._watchers:
            watcher.nudge()

    def restart(self, version: int) -> None:
        """Forget the changes: nobody can go on from before `version`, and whoever watches has to list anew."""
        self._ring.clear()
        self._weight = 0
        self._version = max(self._version, version)
        self._oldest = self._version
        for watcher in list(self._watchers):
            watcher.end()
        self._watchers.clear()

    def foreign(self, version: int) -> bool:
        """Whether a version was given by another process."""
        return self._clock is not None and self._clock.foreign(version)

    def since(self, version: int) -> list[Change]:
        """The changes after `version`. Raises 410 when some of them are not kept any more, or never were here."""
        if self.foreign(version):
            raise expired(
                f"resource version {version} is of another server, or of an earlier run of this one"
            )
        if version < self._oldest:
            raise expired(f"too old resource version: {version} ({self._oldest})")
        newer: deque[Change] = deque()
        for change in reversed(self._ring):
            if change.version <= version:
                break
            newer.appendleft(change)
        return list(newer)

    def at(self, version: int, current: Iterable[Item]) -> list[Item]:
        """What was listed at `version`, by key, from what is listed now. Raises 410."""
        changes = self.since(version)
        items = {key_of_item(item): item for item in current}
        for change in reversed(changes):
            if change.was is None:
                items.pop(change.key, None)
            else:
                items[change.key] = change.was
        return [items[key] for key in sorted(items)]

    def watch(self, version: int, selection: Selection | None, wake: Wake, limit: int = QUEUE) -> Watcher:
        """Follow from `version`: what came after it is taken first. Raises 410; 503 when too many watch."""
        missed = self.since(version)
        if len(self._watchers) >= WATCHERS:
            raise StatusError(503, "ServiceUnavailable", "too many watches", retry=5)
        watcher = Watcher(selection, wake, max(limit, len(missed)))
        for change in missed:
            watcher.offer(change)
        self._watchers[watcher] = None
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Stop following."""
        self._watchers.pop(watcher, None)


class Plan(msgspec.Struct, frozen=True):
    """How a watch begins: with the state as ADDED events or not, from which version, and what tells their end."""

    initial: bool
    since: int | None
    """None is the current version."""
    marked: bool = False
    bookmarks: bool = False


def plan_of(version: str | None, match: str | None, send_initial: str | None, bookmarks: str | None) -> Plan:
    """What the parameters of a watch mean. Raises 400 for combinations that mean nothing."""
    marks = truth_of("allowWatchBookmarks", bookmarks) or False
    initial = truth_of("sendInitialEvents", send_initial)
    number = version_parameter(version)
    if initial is None:
        if match:
            raise bad_request(
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
            )
        # From no version, or from any, a watch begins with the state.
        return Plan(not number, number or None, bookmarks=marks)
    if match != "NotOlderThan":
        raise bad_request("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
    if initial:
        return Plan(True, number or None, marked=marks, bookmarks=marks)
    return Plan(False, number or None, bookmarks=marks)


def truth_of(name: str, asked: str | None) -> bool | None:
    """A parameter that is true or false, or None when it is not there. Raises 400."""
    if not asked:
        return None
    if asked.lower() in ("true", "1", "t"):
        return True
    if asked.lower() in ("false", "0", "f"):
        return False
    raise bad_request(f"{name}: Invalid value: {asked[:20]!r}: true or false is needed")


def version_parameter(asked: str | None) -> int | None:
    """The `resourceVersion` parameter. Raises 400."""
    if not asked:
        return None
    if not asked.isascii() or not asked.isdigit() or len(asked) > LONGEST:
        raise bad_request(
            f"resourceVersion: Invalid value: {asked[:20]!r}: a version of this server is needed"
        )
    return int(asked)


def bookmark(kind: str, api_version: str, version: int, *, initial_end: bool = False) -> Object:
    """The object of a BOOKMARK event: a version to go on from, and whether the initial events are over."""
    metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
    if initial_end:
        metadata["annotations"] = {INITIAL_END: "true"}
    return {"kind": kind, "apiVersion": api_version, "metadata": metadata}


def newest(objects: Sequence[Object]) -> int:
    """The highest resourceVersion among some objects."""
    return max((version_of(obj) for obj in objects), default=0)
