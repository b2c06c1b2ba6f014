"""A storage over the store's objects. Writes are compared and swapped; what others wrote comes with `read`.

The store has documents: metadata and spec. What is shown has a status beside them, which `status` computes whenever
something that it depends on changes (`restate`), and a version of this process (`versions`), whose revision is the
document's. So a change of a status is a change for watchers and no conflict for writers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import msgspec

from greenroom.api.kube.kinds import Action, Kind
from greenroom.api.kube.objects import Key, Object, copied, key_of, metadata_of, same
from greenroom.api.kube.status import Cause, already_exists, conflict, invalid, method_not_allowed, not_found
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.versions import Clock, revision_of
from greenroom.api.kube.watching import Cache, Change
from greenroom.errors import StaleObject, TemporaryError
from greenroom.store.records import Store, StoredObject

Look = Callable[[], Awaitable[None]]
_NOT_KEPT: Final = frozenset({"apiVersion", "kind", "status"})


class Document(msgspec.Struct, frozen=True):
    """A document, the version that the store has of it, and the bytes that it has there."""

    version: int
    body: Object
    size: int = 0


async def nothing() -> None:
    """Takes in nothing."""


class StoredStorage:
    """See the module, and `api.kube.storage.Storage`. Kinds differ in `status`, `check` and `problems`."""

    def __init__(self, kind: Kind, store: Store, clock: Clock) -> None:
        self.kind = kind
        self.cache = Cache(clock.next(), clock=clock)
        self.resource = f"{kind.plural}.{kind.group}" if kind.group else kind.plural
        self.stale = True
        """What is here may not be what the store has: it has to be read."""
        self.look: Look = nothing
        """Takes in what other processes have written: whoever wrote through one replica may read through another."""
        self._store = store
        self._clock = clock
        self._documents: dict[Key, Document] = {}
        self._objects: dict[Key, Object] = {}
        # One at a time, so that what was read never takes the place of what was written after it.
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<StoredStorage {self.resource} objects={len(self._objects)}>"

    # What kinds differ in

    def status(self, document: Object, before: Object | None) -> Object | None:
        """The status of a document, or None for a kind without; `before` is the one that it had."""
        return None

    def changed(self, keys: Iterable[Key]) -> None:
        """Documents have been written, here or elsewhere, or have gone."""

    async def problems(self, new: Object) -> Sequence[Cause]:
        """What is wrong with a new spec that is not seen by looking at it alone."""
        return []

    # What there is

    def document(self, key: Key) -> Object | None:
        """A document; not to be changed."""
        found = self._documents.get(key)
        return None if found is None else found.body

    def documents(self) -> dict[Key, Object]:
        """All documents; not to be changed."""
        return {key: document.body for key, document in self._documents.items()}

    def object(self, key: Key) -> Object | None:
        """An object as it is shown; not to be changed."""
        return self._objects.get(key)

    async def get(self, key: Key) -> Object | None:
        """One object, or None."""
        await self._looked()
        return self._objects.get(key)

    async def list(self, namespace: str) -> Listing:
        """The objects of a namespace, or of all."""
        await self._looked()
        keys = sorted(key for key in self._objects if not namespace or key[0] == namespace)
        return Listing(self.cache.version, [self._objects[key] for key in keys])

    async def _looked(self) -> None:
        # While the store cannot be read, what is known has to do.
        with contextlib.suppress(TemporaryError):
            await self.look()

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        """Nothing beyond the schema, unless a kind says so."""
        return []

    # Writes

    async def create(self, obj: Object, *, dry_run: bool) -> Object:
        """Keep a new object. Raises 409, 422, TemporaryError."""
        key = key_of(obj)
        if key in self._objects:
            await self._looked()
        if key in self._objects:
            raise already_exists(self.kind.subject(key[1]))
        await self._checked(obj, None)
        document = document_of(obj)
        if dry_run:
            return self._shown(document, None, "")
        async with self._turn:
            kept = await self._put(key, document, 0)
            if kept is None:
                raise already_exists(self.kind.subject(key[1]))
            return kept

    async def replace(self, obj: Object, old: Object, *, dry_run: bool) -> Object:
        """Keep a change of `old`. Raises 404, 409, 422, TemporaryError."""
        await self._checked(obj, old)
        document = document_of(obj)
        async with self._turn:
            key, known = self._current(old)
            if same(document, known.body):
                return self._objects[key]
            if dry_run:
                shown = self._objects[key]
                return self._shown(
                    document, shown.get("status"), metadata_of(shown).get("resourceVersion", "")
                )
            kept = await self._put(key, document, known.version)
            if kept is not None:
                return kept
            if key in self._objects:
                raise conflict(self.kind.subject(key[1]))
            raise not_found(self.kind.subject(key[1]))

    async def remove(self, old: Object, *, dry_run: bool) -> None:
        """Let an object go. Raises as `replace` does."""
        async with self._turn:
            key, known = self._current(old)
            if dry_run:
                return
            self.stale = True
            try:
                await self._store.remove_object(self.resource, *key, known.version)
            except StaleObject:
                await self._read()
                if key in self._objects:
                    raise conflict(self.kind.subject(key[1])) from None
                raise not_found(self.kind.subject(key[1])) from None
            self.stale = False
            self._forget(key)
            self.changed([key])

    async def act(self, action: Action, old: Object, body: Object, *, dry_run: bool) -> Object:
        """No stored kind has any."""
        raise method_not_allowed(self.kind.subject(), action.name)

    async def _checked(self, new: Object, old: Object | None) -> None:
        # What was good when it was written stays; a finalizer, say, can always be taken off.
        if old is not None and same(new.get("spec"), old.get("spec")):
            return
        if found := await self.problems(new):
            raise invalid(self.kind.subject_of_kind(metadata_of(new).get("name", "")), found)

    def _current(self, old: Object) -> tuple[Key, Document]:
        key = key_of(old)
        known, shown = self._documents.get(key), self._objects.get(key)
        if known is None or shown is None or metadata_of(shown).get("uid") != metadata_of(old).get("uid"):
            raise not_found(self.kind.subject(key[1]))
        if revision_of(metadata_of(old).get("resourceVersion", "")) != revision_of(known.version):
            raise conflict(self.kind.subject(key[1]))
        return key, known

    async def _put(self, key: Key, document: Object, expect: int) -> Object | None:
        """Keep a document; None where the store has another version, which was read then."""
        stored = StoredObject(
            resource=self.resource,
            namespace=key[0],
            name=key[1],
            document=msgspec.Raw(msgspec.json.encode(document)),
        )
        # The store does not tell a process of its own writes: one whose answer was lost has to be looked for.
        self.stale = True
        try:
            kept = await self._store.put_object(stored, expect)
        except StaleObject:
            await self._read()
            return None
        self.stale = False
        made = self._keep(key, Document(kept.version, document, len(memoryview(stored.document))))
        self.changed([key])
        return made

    # What the store has

    async def read(self) -> None:
        """Take in what the store has now. Raises TemporaryError."""
        async with self._turn:
            await self._read()

    async def _read(self) -> None:
        _, found = await self._store.objects(self.resource)
        told = {(each.namespace, each.name): each for each in found}
        gone = [key for key in self._documents if key not in told]
        for key in gone:
            self._forget(key)
        new = []
        for key, each in told.items():
            known = self._documents.get(key)
            if known is None or known.version != each.version:
                self._keep(
                    key,
                    Document(
                        each.version, msgspec.json.decode(each.document), len(memoryview(each.document))
                    ),
                )
                new.append(key)
        self.stale = False
        if gone or new:
            self.changed([*gone, *new])

    def restate(self, keys: Iterable[Key] | None = None) -> None:
        """Compute statuses anew, of all objects unless told; where one is another, that is a change."""
        for key in list(self._documents) if keys is None else keys:
            document, before = self._documents.get(key), self._objects.get(key)
            if document is None or before is None:
                continue
            status = self.status(document.body, before.get("status"))
            if status is None or same(status, before.get("status")):
                continue
            version = self._clock.next(document.version)
            metadata = {**before["metadata"], "resourceVersion": str(version)}
            after = self._objects[key] = {**before, "metadata": metadata, "status": status}
            self.cache.record(Change(version, before, after, document.size))

    def _keep(self, key: Key, document: Document) -> Object:
        before = self._objects.get(key)
        if before is not None and metadata_of(before).get("uid") != metadata_of(document.body).get("uid"):
            # One that went and came again while nobody looked is two changes.
            self._forget(key)
            before = None
        self._documents[key] = document
        version = self._clock.next(document.version)
        status = None if before is None else before.get("status")
        after = self._objects[key] = self._shown(document.body, status, str(version))
        self.cache.record(Change(version, before, after, document.size))
        return after

    def _forget(self, key: Key) -> None:
        document, before = self._documents.pop(key), self._objects.pop(key)
        self.cache.record(Change(self._clock.next(document.version), before, None, document.size))

    def _shown(self, document: Object, before: Object | None, version: str) -> Object:
        obj: Object = {"apiVersion": self.kind.api_version, "kind": self.kind.name, **copied(document)}
        if version:
            obj["metadata"]["resourceVersion"] = version
        status = self.status(document, before)
        if status is not None:
            obj["status"] = status
        return obj


def document_of(obj: Object) -> Object:
    """What is kept of an object."""
    document = {name: value for name, value in obj.items() if name not in _NOT_KEPT}
    metadata = {name: value for name, value in metadata_of(obj).items() if name != "resourceVersion"}
    return {**document, "metadata": metadata}
