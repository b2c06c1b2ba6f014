"""What the storages of Sandboxes and SandboxClaims have in common: their objects lie on a shelf, and end together."""

from __future__ import annotations

import abc
from collections.abc import Callable

from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.documents import Document
from greenroom.api.kube.live.operating import Ending, Operating
from greenroom.api.kube.live.shelves import LiveRow, Shelf
from greenroom.api.kube.objects import Key, Object, key_of
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.watching import Cache


class Shelved(abc.ABC):
    """See the module; the rest of a storage is each kind's own."""

    kind: Kind

    def __init__(self, operating: Operating, shelf: Shelf) -> None:
        self._operating = operating
        self._shelf = shelf
        self._now: Callable[[], float] = operating.live.now

    @property
    def cache(self) -> Cache:
        """See `Storage`."""
        return self._shelf.cache

    async def get(self, key: Key) -> Object | None:
        """See `Storage`. Raises NodeUnavailable when it may be on a node that was never read."""
        row = await self._operating.find(self._shelf, key)
        return None if row is None else row.object()

    async def list(self, namespace: str) -> Listing:
        """See `Storage`."""
        return await self._operating.listing(self._shelf, namespace)

    async def remove(self, old: Object, *, dry_run: bool) -> None:
        """See `Storage`. What a finalizer on the other of the two holds is kept, both of them, until that is gone."""
        row = self._operating.present(self._shelf, self.kind, old)
        if dry_run:
            return
        listed = row.facts.listed
        with self._operating.about(self.kind, key_of(old)[1]):
            kept = self._kept(row, documents.document_of(listed))
            if kept is None:
                await self._operating.end(listed)
            else:
                going = documents.going(kept, self._now())
                await self._operating.declare(row, going, Ending.of(listed.declared))

    @abc.abstractmethod
    def _kept(self, row: LiveRow, document: Document) -> Document | None:
        """The document, with the object's own part as it is shown, where a finalizer on the other part holds both."""
