"""What warm pools mean: which Greenroom template and size their members have. Pure, over documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from greenroom.api.kube.kinds import field
from greenroom.api.kube.objects import Key, Object
from greenroom.errors import BadRequest
from greenroom.wire import podsizes
from greenroom.wire.messages import PoolSpec, Size, Template

PoolKey = tuple[str, Size]
"""What the members of a pool are alike in: the name of a Greenroom template, and a size."""


def pair_of(key: PoolKey) -> tuple[str, str]:
    """The key as nodes and views of the fleet have it: template and size by name."""
    return (key[0], key[1].name)


class Catalogue:
    """The Greenroom templates, and the pools that were declared without Kubernetes, as the store has them."""

    def __init__(self) -> None:
        self._by_name: dict[str, Template] = {}
        self._by_id: dict[str, Template] = {}
        self.declared: dict[tuple[str, str], int] = {}
        """Targets by key."""

    def learn(self, templates: Iterable[Template], pools: Iterable[PoolSpec]) -> bool:
        """Take what the store has now; whether it was something else."""
        by_name = {template.name: template for template in templates}
        declared = {(pool.template, pool.size.name): pool.target for pool in pools}
        if by_name == self._by_name and declared == self.declared:
            return False
        self._by_name, self.declared = by_name, declared
        self._by_id = {template.template_id: template for template in by_name.values()}
        return True

    def templates(self) -> list[Template]:
        """All templates."""
        return list(self._by_name.values())

    def template(self, image: str) -> Template | None:
        """The template that an image names: by name or id, with or without the tag `default`."""
        name, _, tag = image.partition(":")
        if tag not in ("", "default"):
            return None
        return self._by_name.get(name) or self._by_id.get(name)


class Members:
    """Where a pool's members are, or why there can be none: `reason` in one word, `problem` for people."""

    __slots__ = ("keys", "problem", "reason")

    def __init__(self, keys: tuple[PoolKey, ...] = (), reason: str = "", problem: str = "") -> None:
        self.keys = keys
        self.reason = reason
        self.problem = problem


def template_key(pool: Object, namespace: str) -> Key:
    """Where the SandboxTemplate of a pool is."""
    name: Any = field(pool, ("spec", "sandboxTemplateRef", "name"))
    return (namespace, name if isinstance(name, str) else "")


def members(template: Object | None, name: str, catalogue: Catalogue) -> Members:
    """The key of members made by a SandboxTemplate (called `name`) as it is now."""
    if template is None:
        return Members(
            reason="TemplateNotFound", problem=f"there is no SandboxTemplate {name!r} in this namespace"
        )
    pod = field(template, ("spec", "podTemplate")) or {}
    try:
        image = podsizes.image_of(pod)
        resources = podsizes.resources_of(pod)
    except BadRequest as error:
        return Members(reason="InvalidTemplate", problem=error.message)
    found = catalogue.template(image)
    if found is None:
        return Members(reason="ImageNotFound", problem=f"no Greenroom template is called {image!r}")
    try:
        size = podsizes.size_for(resources, found.size)
    except BadRequest as error:
        return Members(reason="NoSize", problem=error.message)
    return Members(((found.name, size),))


def desired(pool: Object) -> int:
    """How many ready members a pool's declaration asks for, whatever its autoscaling makes of that."""
    spec = pool.get("spec") or {}
    wanted = spec.get("replicas")
    wanted = wanted if isinstance(wanted, int) else 0
    scaling = spec.get("autoscaling")
    if isinstance(scaling, dict):
        lowest, highest = scaling.get("minReplicas"), scaling.get("maxReplicas")
        wanted = min(wanted, highest) if isinstance(highest, int) else wanted
        return max(wanted, lowest) if isinstance(lowest, int) else wanted
    return wanted


def selector_of(name: str) -> str:
    """The label selector that finds the sandboxes that came from a pool."""
    return f"agents.x-k8s.io/warm-pool={name}"
