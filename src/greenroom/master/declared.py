"""Objects of the Kubernetes dialect that the master acts on, decoded once for each version of each: pure.

Whoever wrote them has checked them. Still nothing is taken for granted here: an object that cannot be understood is one
with a problem, which its pool tells of, and no reason to stop for all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, Literal

import msgspec

from greenroom.errors import BadRequest
from greenroom.master.quotas import Quota
from greenroom.store.records import StoredObject
from greenroom.wire.messages import PoolName, Size, Template
from greenroom.wire.podsizes import image_of, quantity, resources_of, size_for

_log = logging.getLogger(__name__)

TEMPLATES = "sandboxtemplates.extensions.agents.x-k8s.io"
WARM_POOLS = "sandboxwarmpools.extensions.agents.x-k8s.io"
QUOTAS = "resourcequotas"
MOST_REPLICAS = 1_000_000
"""Of one pool; more is taken for a mistake."""


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    generation: int = 0
    deletion_timestamp: str | None = None


class _Ref(msgspec.Struct, frozen=True):
    name: str


class _Strategy(msgspec.Struct, frozen=True):
    type: Literal["OnReplenish", "Recreate"] = "OnReplenish"


class Autoscaling(msgspec.Struct, frozen=True, rename="camel"):
    """Bounds between which a pool's replicas follow the claims."""

    min_replicas: int | None = None
    max_replicas: int | None = None


class _PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    sandbox_template_ref: _Ref
    replicas: int = 1
    update_strategy: _Strategy = _Strategy()
    autoscaling: Autoscaling | None = None


class _PoolDocument(msgspec.Struct, frozen=True):
    spec: _PoolSpec
    metadata: _Metadata = _Metadata()


class _TemplateSpec(msgspec.Struct, frozen=True, rename="camel"):
    pod_template: dict[str, Any]


class _TemplateDocument(msgspec.Struct, frozen=True):
    spec: _TemplateSpec


class _QuotaSpec(msgspec.Struct, frozen=True):
    hard: dict[str, str | int | float] = {}


class _QuotaDocument(msgspec.Struct, frozen=True):
    spec: _QuotaSpec = _QuotaSpec()


class DeclaredPool(msgspec.Struct, frozen=True, kw_only=True):
    """A SandboxWarmPool as it is to be driven."""

    namespace: str
    name: str
    generation: int = 0
    replicas: int = 1
    key: PoolName | None = None
    """None where its template says none; then `problem` says why."""
    size: Size | None = None
    recreate: bool = False
    """How members of an older template go: at once, but for a floor, or as they are claimed."""
    autoscaling: Autoscaling | None = None
    problem: str = ""


class Declarations:
    """What is declared, as it was read last."""

    RESOURCES = (TEMPLATES, WARM_POOLS, QUOTAS)

    def __init__(self) -> None:
        self._decoded: dict[tuple[str, str, str], tuple[int, object]] = {}
        """By resource, namespace and name: the version, and what it says, or the error that kept from knowing."""

    def read(self, objects: Iterable[StoredObject]) -> None:
        """All objects there are, in place of those before."""
        kinds: dict[str, type[msgspec.Struct]] = {
            TEMPLATES: _TemplateDocument,
            WARM_POOLS: _PoolDocument,
            QUOTAS: _QuotaDocument,
        }
        decoded = {}
        for stored in objects:
            place = (stored.resource, stored.namespace, stored.name)
            before = self._decoded.get(place)
            if before is not None and before[0] == stored.version:
                decoded[place] = before
            else:
                decoded[place] = (stored.version, _decode(stored, kinds[stored.resource]))
        self._decoded = decoded

    def _all(self, resource: str) -> Iterable[tuple[str, str, object]]:
        for (kind, namespace, name), (_version, said) in sorted(
            self._decoded.items(), key=lambda item: item[0]
        ):
            if kind == resource:
                yield namespace, name, said

    def quotas(self) -> dict[str, list[Quota]]:
        """By namespace. What a quota says that is no quantity is left out, and logged."""
        found: dict[str, list[Quota]] = {}
        for namespace, name, said in self._all(QUOTAS):
            if not isinstance(said, _QuotaDocument):
                continue
            hard: dict[str, Fraction] = {}
            for key, text in said.spec.hard.items():
                try:
                    hard[key] = quantity(text)
                except BadRequest as error:
                    _log.warning("quota %s/%s, %s: %s", namespace, name, key, error.message)
            found.setdefault(namespace, []).append(Quota(name, hard))
        return found

    def pools(self, find: Callable[[str], Template | None]) -> list[DeclaredPool]:
        """All pools by namespace and name. `find` knows Greenroom's own templates by name or id."""
        return [self._pool(namespace, name, said, find) for namespace, name, said in self._all(WARM_POOLS)]

    def _pool(
        self, namespace: str, name: str, said: object, find: Callable[[str], Template | None]
    ) -> DeclaredPool:
        if not isinstance(said, _PoolDocument):
            return DeclaredPool(namespace=namespace, name=name, replicas=0, problem=str(said))
        spec, metadata = said.spec, said.metadata
        going = metadata.deletion_timestamp is not None
        pool = DeclaredPool(
            namespace=namespace,
            name=name,
            generation=metadata.generation,
            replicas=0 if going else max(0, min(spec.replicas, MOST_REPLICAS)),
            recreate=spec.update_strategy.type == "Recreate",
            autoscaling=None if going else spec.autoscaling,
        )
        try:
            key, size = self._key(namespace, spec.sandbox_template_ref.name, find)
        except BadRequest as error:
            return msgspec.structs.replace(pool, problem=error.message)
        return msgspec.structs.replace(pool, key=key, size=size)

    def _key(
        self, namespace: str, template: str, find: Callable[[str], Template | None]
    ) -> tuple[PoolName, Size]:
        _version, said = self._decoded.get((TEMPLATES, namespace, template), (0, None))
        if said is None:
            raise BadRequest(
                f"there is no SandboxTemplate {template!r} in namespace {namespace!r}; create it, "
                "or let sandboxTemplateRef name another"
            )
        if not isinstance(said, _TemplateDocument):
            raise BadRequest(f"SandboxTemplate {template!r}: {said}")
        try:
            image = image_of(said.spec.pod_template)
            own = find(image)
            if own is None:
                raise BadRequest(f"there is no template {image!r}; name one that `greenroom status` lists")
            size = size_for(resources_of(said.spec.pod_template), own.size)
        except BadRequest as error:
            raise BadRequest(f"SandboxTemplate {template!r}: {error.message}") from error
        return PoolName(own.name, size.name), size


def _decode(stored: StoredObject, kind: type[msgspec.Struct]) -> object:
    try:
        return msgspec.json.decode(stored.document, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _log.warning(
            "%s %s/%s cannot be understood: %s", stored.resource, stored.namespace, stored.name, error
        )
        return f"its stored document cannot be understood ({error}); apply it again"
