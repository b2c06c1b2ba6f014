"""Objects of the Kubernetes dialect that the master acts on, decoded once for each version of each: pure.

Whoever wrote them has checked them. Still nothing is taken for granted here: an object that cannot be understood is one
with a problem, which its pool tells of, and no reason to stop for all others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from fractions import Fraction

import msgspec

from greenroom.errors import BadRequest
from greenroom.fleet.warmpools import (
    Autoscaling,
    Members,
    PoolDocument,
    TemplateDocument,
    Templates,
    members_of,
    wish_of,
)
from greenroom.master.quotas import Quota
from greenroom.store.records import StoredObject
from greenroom.wire.messages import PoolName, Size
from greenroom.wire.podsizes import quantity

_log = logging.getLogger(__name__)

TEMPLATES = "sandboxtemplates.extensions.agents.x-k8s.io"
WARM_POOLS = "sandboxwarmpools.extensions.agents.x-k8s.io"
QUOTAS = "resourcequotas"


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
            TEMPLATES: TemplateDocument,
            WARM_POOLS: PoolDocument,
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

    def pools(self, templates: Templates) -> list[DeclaredPool]:
        """All pools by namespace and name, made from Greenroom's own `templates`."""
        return [
            self._pool(namespace, name, said, templates) for namespace, name, said in self._all(WARM_POOLS)
        ]

    def _pool(self, namespace: str, name: str, said: object, templates: Templates) -> DeclaredPool:
        if not isinstance(said, PoolDocument):
            return DeclaredPool(namespace=namespace, name=name, replicas=0, problem=str(said))
        wish = wish_of(said)
        made = self._members(namespace, wish.template, templates)
        return DeclaredPool(
            namespace=namespace,
            name=name,
            generation=wish.generation,
            replicas=wish.replicas,
            key=made.key,
            size=made.size,
            recreate=wish.recreate,
            autoscaling=wish.autoscaling,
            problem=made.problem,
        )

    def _members(self, namespace: str, template: str, templates: Templates) -> Members:
        _version, said = self._decoded.get((TEMPLATES, namespace, template), (0, None))
        if said is None:
            return members_of(None, template, namespace, templates)
        if not isinstance(said, TemplateDocument):
            return Members(reason="InvalidTemplate", problem=f"SandboxTemplate {template!r}: {said}")
        return members_of(said.spec.pod_template, template, namespace, templates)


def _decode(stored: StoredObject, kind: type[msgspec.Struct]) -> object:
    try:
        return msgspec.json.decode(stored.document, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _log.warning(
            "%s %s/%s cannot be understood: %s", stored.resource, stored.namespace, stored.name, error
        )
        return f"its stored document cannot be understood ({error}); apply it again"
