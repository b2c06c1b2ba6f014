"""The reading half of a storage whose objects lie on a shelf: Sandboxes and SandboxClaims."""

from __future__ import annotations

from collections.abc import Callable

from greenroom.api.kube.live.operating import Operating
from greenroom.api.kube.live.shelves import Shelf
from greenroom.api.kube.objects import Key, Object
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.watching import Cache


class Shelved:
    """See the module; the other half is each kind's own."""

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
