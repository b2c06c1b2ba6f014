"""Keeps the stored kinds as the store has them, whoever writes, and their statuses as the nodes are.

The store is asked every 50 ms whether another process has written, which costs it nothing; only then is it read.
Statuses are computed anew when something has changed: the first time at once, then at most every 20 ms.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from greenroom.api.kube.stored.pools import Catalogue
from greenroom.api.kube.stored.storage import StoredStorage
from greenroom.errors import GreenroomError
from greenroom.store.records import Store

_log = logging.getLogger(__name__)

LOOK_EVERY: Final = 0.05
"""Seconds between two looks at the store's version."""
RESTATE_EVERY: Final = 0.02
"""Seconds between two computations of statuses, at least."""


class Following:
    """See the module. `run` has to run; `caught_up` says that the store has been read."""

    def __init__(
        self,
        store: Store,
        storages: Sequence[StoredStorage],
        catalogue: Catalogue,
        changed: Callable[[], None],
        *,
        every: float = LOOK_EVERY,
    ) -> None:
        self._store = store
        self._storages = storages
        self._catalogue = catalogue
        self._changed = changed
        self._every = every
        self._seen: int | None = None
        self._failing = False
        self.caught_up = False

    async def run(self) -> None:
        """Follow the store until it is cancelled. What fails is tried again."""
        while True:
            try:
                await self.look()
            except GreenroomError as error:
                if not self._failing:
                    _log.warning("the store cannot be read: %s", error.message)
                self._failing = True
            else:
                self._failing = False
            await asyncio.sleep(self._every)

    async def look(self) -> None:
        """Read what there is to read. Raises TemporaryError."""
        # Asked before the reading: what is written meanwhile is looked at the next time.
        version = await self._store.version()
        if version != self._seen:
            if self._catalogue.learn(await self._store.templates(), await self._store.pools()):
                self._changed()
            for storage in self._storages:
                await storage.read()
            self._seen = version
        for storage in self._storages:
            if storage.stale:
                await storage.read()
        self.caught_up = True


class Restating:
    """Calls `work` soon after `mark`: at once after a pause, else `every` seconds after the last time."""

    def __init__(self, work: Callable[[], None], every: float = RESTATE_EVERY) -> None:
        self._work = work
        self._every = every
        self._last = float("-inf")
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def mark(self) -> None:
        """Something has changed. Outside of an event loop nothing happens: then nobody watches either."""
        if self._timer is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        due = self._last + self._every
        self._timer = loop.call_soon(self._run) if loop.time() >= due else loop.call_at(due, self._run)

    def close(self) -> None:
        """Do nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        self._last = asyncio.get_running_loop().time()
        try:
            self._work()
        except Exception:
            _log.exception("statuses cannot be computed")
