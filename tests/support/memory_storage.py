"""A storage of the Kubernetes dialect in memory, for tests: it keeps what it is given, and nothing else happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from greenroom.api.kube.kinds import Action, Kind
from greenroom.api.kube.objects import Key, Object, copied, key_of
from greenroom.api.kube.status import Cause, already_exists, conflict, not_found
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.watching import Cache, Change


class MemoryStorage:
    """See `Storage`. `race` runs once before a write, as if somebody were faster."""

    def __init__(self, kind: Kind, ring: int = 1000) -> None:
        self.kind = kind
        self.cache = Cache(ring=ring)
        self.objects: dict[Key, Object] = {}
        self.acted: list[tuple[str, Object]] = []
        self.race: Any = None

    async def get(self, key: Key) -> Object | None:
        return self.objects.get(key)

    async def list(self, namespace: str) -> Listing:
        keys = sorted(key for key in self.objects if not namespace or key[0] == namespace)
        return Listing(self.cache.version, [self.objects[key] for key in keys])

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        return []

    def put(self, obj: Object) -> Object:
        """Set an object, as the platform would that the storage stands for."""
        full = {"apiVersion": self.kind.api_version, "kind": self.kind.name, **copied(obj)}
        return self._keep(full, self.objects.get(key_of(full)))

    async def create(self, obj: Object, *, dry_run: bool) -> Object:
        self._overtaken()
        key = key_of(obj)
        if key in self.objects:
            raise already_exists(self.kind.subject(key[1]))
        return obj if dry_run else self._keep(obj, None)

    async def replace(self, obj: Object, old: Object, *, dry_run: bool) -> Object:
        self._current(old)
        return obj if dry_run else self._keep(obj, old)

    async def remove(self, old: Object, *, dry_run: bool) -> None:
        self._current(old)
        if not dry_run:
            before = self.objects.pop(key_of(old))
            self.cache.record(Change(self.cache.version + 1, before, None))

    async def act(self, action: Action, old: Object, body: Object, *, dry_run: bool) -> Object:
        if not dry_run:
            self.acted.append((action.name, body))
        if action.gives:
            return {"apiVersion": self.kind.api_version, "kind": action.gives}
        mode = "Suspended" if action.name == "pause" else "Running"
        new = {**copied(old), "spec": {**old["spec"], "operatingMode": mode}}
        return await self.replace(new, old, dry_run=dry_run)

    def _overtaken(self) -> None:
        race, self.race = self.race, None
        if race is not None:
            race()

    def _current(self, old: Object) -> None:
        self._overtaken()
        key = key_of(old)
        if key not in self.objects:
            raise not_found(self.kind.subject(key[1]))
        if self.objects[key]["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]:
            raise conflict(self.kind.subject(key[1]))

    def _keep(self, obj: Object, before: Object | None) -> Object:
        version = self.cache.version + 1
        obj["metadata"]["resourceVersion"] = str(version)
        self.objects[key_of(obj)] = obj
        self.cache.record(Change(version, before, obj, len(msgspec.json.encode(obj))))
        return obj
