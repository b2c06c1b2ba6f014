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
from greenroom.api.kube.stored.pools import Catalogue, members, template_key, wish
from greenroom.api.kube.stored.poolstatus import NOTHING, Count, Part, Totals, parted
from greenroom.api.kube.stored.storage import StoredStorage
from greenroom.api.kube.validation import wrong
from greenroom.api.kube.versions import Clock
from greenroom.fleet.usage import Usage
from greenroom.fleet.warmpools import Members
from greenroom.store.records import Store
from greenroom.wire.messages import PoolName

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
        """What members of a pool are made of, by its template as it is now."""
        place = template_key(pool, key[0])
        return members(self._templates.document(place), place, self._catalogue)

    def part(self) -> None:
        """Part the members of each key among the pools that have it."""
        pools = {key: self._targets(key, pool) for key, pool in self.documents().items()}
        self._counts = parted(pools, self._catalogue.declared, self._totals.of)

    def _targets(self, key: Key, pool: Object) -> dict[PoolName, int]:
        """How many members of each kind are wanted for a pool: as the leader drives it, or else as it says itself."""
        targets = self._driven.targets(key)
        made = self.members(key, pool).key
        if made is not None and made not in targets:
            targets[made] = 0 if targets else self._desired(key, pool)
        return targets

    def _desired(self, key: Key, pool: Object) -> int:
        asked, told = wish(pool), self._driven.pool(key)
        if told is not None and told.observed_generation == asked.generation:
            return told.desired
        return asked.bounds.least

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
        made = self.members(key, document)
        if made.key is None or made.size is None:
            raise StatusError(
                422, "Invalid", f"SandboxWarmPool {name!r} can have no sandboxes: {made.problem}"
            )
        older = self._driven.older(key, made.key, self._catalogue)
        keys = (*older, (made.key.template, made.size))
        return Found(template, keys, keeps=wish(document).bounds.most > 0)


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
