"""The three kinds that are kept, each a storage with what is particular to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from greenroom.api.kube import podtemplates
from greenroom.api.kube.kinds import QUOTA, TEMPLATE, WARM_POOL, field
from greenroom.api.kube.objects import Key, Object
from greenroom.api.kube.pools import PoolFound
from greenroom.api.kube.status import Cause
from greenroom.api.kube.stored import poolstatus, quotas
from greenroom.api.kube.stored.driving import Driven
from greenroom.api.kube.stored.pools import Catalogue, Members, desired, members, template_key
from greenroom.api.kube.stored.poolstatus import NOTHING, Count, Part, Totals, shares
from greenroom.api.kube.stored.storage import StoredStorage
from greenroom.api.kube.validation import wrong
from greenroom.api.kube.versions import Clock
from greenroom.fleet.usage import Usage
from greenroom.store.records import Store

Changed = Callable[[], None]


class TemplateStorage(StoredStorage):
    """SandboxTemplates. `changed_too` hears of changes: pools depend on them."""

    def __init__(self, store: Store, clock: Clock, catalogue: Catalogue, changed_too: Changed) -> None:
        super().__init__(TEMPLATE, store, clock)
        self._catalogue = catalogue
        self._changed_too = changed_too

    def changed(self, keys: Iterable[Key]) -> None:
        """See `StoredStorage`."""
        self._changed_too()

    async def problems(self, new: Object) -> Sequence[Cause]:
        """See `StoredStorage`: the image names a template, a size is large enough."""
        pod = field(new, ("spec", "podTemplate"))
        found = podtemplates.problems(pod, self._catalogue.template, self._catalogue.names())
        if any(cause.field.endswith(".image") for cause in found):
            # The Greenroom template may have been made a moment ago.
            self._catalogue.learn(await self._store.templates(), await self._store.pools())
            found = podtemplates.problems(pod, self._catalogue.template, self._catalogue.names())
        if field(new, ("spec", "volumeClaimTemplates")):
            found.append(
                podtemplates.forbidden(
                    "spec.volumeClaimTemplates", "there are no volumes: a sandbox has the disk of its size"
                )
            )
        return found

    def warnings(self, new: Object) -> list[str]:
        """What of a template has no effect."""
        found = podtemplates.unused(field(new, ("spec", "podTemplate")))
        if field(new, ("spec", "service")):
            found.append("spec.service: has no effect: sandboxes are reached through the entry")
        return found


class PoolStorage(StoredStorage):
    """SandboxWarmPools, with their status: `part` before `restate`."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        catalogue: Catalogue,
        templates: TemplateStorage,
        totals: Totals,
        driven: Driven,
        changed_too: Changed,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        super().__init__(WARM_POOL, store, clock)
        self._catalogue = catalogue
        self._templates = templates
        self._totals = totals
        self._driven = driven
        self._changed_too = changed_too
        self._now = now
        self._counts: dict[Key, Count] = {}

    def changed(self, keys: Iterable[Key]) -> None:
        """See `StoredStorage`: the members of a key are parted anew."""
        self._changed_too()

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        """See `Storage`."""
        scaling = field(new, ("spec", "autoscaling"))
        if not isinstance(scaling, dict):
            return []
        lowest, highest = scaling.get("minReplicas") or 0, scaling.get("maxReplicas") or 0
        if lowest <= highest:
            return []
        return [
            wrong(
                "spec.autoscaling.minReplicas",
                lowest,
                f"must be at most spec.autoscaling.maxReplicas, {highest}",
            )
        ]

    def members(self, key: Key, pool: Object) -> Members:
        """Where the members of a pool are: as the leader drives it, or else as its template says."""
        place = template_key(pool, key[0])
        made = members(self._templates.document(place), place[1], self._catalogue)
        told = self._driven.pool(key)
        if made.keys and told is not None:
            older = self._driven.older(told, made.keys[0], self._catalogue)
            return Members((*older, *made.keys))
        return made

    def part(self) -> None:
        """Part the members of each key among the pools that have it."""
        sharing: dict[tuple[str, str], list[tuple[Key, int]]] = {}
        for key, pool in self.documents().items():
            number = self._desired(key, pool)
            for each in self.members(key, pool).keys:
                sharing.setdefault(each.pair, []).append((key, number))
        counts: dict[Key, Count] = {}
        for pair, those in sharing.items():
            total = self._totals.of(pair)
            weights = [number for _, number in those]
            # What `greenroom pools` declared of the same key has its part, too.
            if other := self._catalogue.declared.get(pair, 0):
                weights.append(other)
            warm, starting = shares(weights, total.warm), shares(weights, total.starting)
            for place, (key, _) in enumerate(those):
                counts[key] = counts.get(key, NOTHING) + Count(warm[place], starting[place])
        self._counts = counts

    def _desired(self, key: Key, pool: Object) -> int:
        told = self._driven.pool(key)
        if told is not None and told.observed_generation == (field(pool, ("metadata", "generation")) or 1):
            return told.desired
        return desired(pool)

    def status(self, document: Object, before: Object | None) -> Object:
        """See `StoredStorage`."""
        metadata = document["metadata"]
        key = (metadata.get("namespace", ""), metadata.get("name", ""))
        where, told = self.members(key, document), self._driven.pool(key)
        part = Part(
            count=self._counts.get(key, NOTHING),
            desired=self._desired(key, document),
            reason=where.reason,
            problem=where.problem,
            unplaced=None if told is None else told.unplaced,
        )
        return poolstatus.status_of(document, part, before, self._now())

    def pool(self, namespace: str, name: str) -> PoolFound | None:
        """See `api.kube.pools.Pools`."""
        key = (namespace, name)
        found, document = self.object(key), self.document(key)
        if found is None or document is None:
            return None
        where = self.members(key, document)
        return PoolFound(
            pool=found,
            template=self._templates.object(template_key(document, namespace)),
            keys=where.keys,
            reason=where.reason,
            problem=where.problem,
        )


class QuotaStorage(StoredStorage):
    """ResourceQuotas, with what their namespaces have."""

    def __init__(self, store: Store, clock: Clock, usage: Usage) -> None:
        super().__init__(QUOTA, store, clock)
        self._usage = usage

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        """See `Storage`."""
        return quotas.problems(new)

    def status(self, document: Object, before: Object | None) -> Object:
        """See `StoredStorage`."""
        return quotas.status_of(document, self._usage.of(document["metadata"].get("namespace", "")))
