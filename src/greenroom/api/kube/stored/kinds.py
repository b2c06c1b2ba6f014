"""The three kinds that are kept, each a storage with what is particular to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from greenroom.api.kube.kinds import QUOTA, TEMPLATE, WARM_POOL, field
from greenroom.api.kube.live import compiling
from greenroom.api.kube.live.claims import Found
from greenroom.api.kube.live.policies import template_network
from greenroom.api.kube.objects import Key, Object, same
from greenroom.api.kube.status import Cause, StatusError, not_found
from greenroom.api.kube.stored import poolstatus, quotas
from greenroom.api.kube.stored.driving import Driven
from greenroom.api.kube.stored.pools import Catalogue, Members, desired, members, pair_of, template_key
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

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        """See `Storage`."""
        spec = new.get("spec") or {}
        if old is not None and same(spec, old.get("spec")):
            return []
        network = template_network(spec)
        return [*compiling.pod_violations(spec), *(network if isinstance(network, list) else [])]

    async def problems(self, new: Object) -> Sequence[Cause]:
        """See `StoredStorage`: the image names a template, a size is large enough."""
        spec = new.get("spec") or {}
        image = compiling.image(spec)
        found = self._catalogue.template(image)
        if found is None:
            # The Greenroom template may have been made a moment ago.
            self._catalogue.learn(await self._store.templates(), await self._store.pools())
            found = self._catalogue.template(image)
        if found is None:
            return [compiling.unknown_image(image, self._catalogue.templates())]
        made = compiling.made_of(spec, found)
        return [made] if isinstance(made, Cause) else []

    def warnings(self, new: Object, old: Object | None) -> Sequence[str]:
        """What of a template has no effect."""
        return compiling.pod_warnings(new.get("spec") or {}, (old or {}).get("spec"))


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
                sharing.setdefault(pair_of(each), []).append((key, number))
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
            why="" if told is None else told.problem,
        )
        return poolstatus.status_of(document, part, before, self._now())

    def pool(self, namespace: str, name: str) -> Found:
        """A pool's template, and the keys of its members in the order in which a claim should try them.

        Raises 404 where the pool or its template is missing, 422 where the template can have no members.
        """
        key = (namespace, name)
        document = self.document(key)
        if document is None:
            raise not_found(WARM_POOL.subject(name))
        place = template_key(document, namespace)
        template = self._templates.object(place)
        if template is None:
            raise not_found(TEMPLATE.subject(place[1]))
        where = self.members(key, document)
        if not where.keys:
            raise StatusError(
                422, "Invalid", f"SandboxWarmPool {name!r} can have no sandboxes: {where.problem}"
            )
        return Found(template, where.keys)


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
