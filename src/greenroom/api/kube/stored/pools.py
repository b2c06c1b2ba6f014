"""What the api knows of warm pools beside their documents, and how it reads these. Pure.

What a pool and its template mean is in `fleet.warmpools`, which the master fills pools by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from greenroom.api.kube.kinds import field
from greenroom.api.kube.live.documents import POOL_LABEL, pool_label
from greenroom.api.kube.objects import Key, Object
from greenroom.fleet.warmpools import Members, PoolDocument, PoolWish, Templates, members_of, wish_of
from greenroom.wire.messages import PoolName, PoolSpec, Size, Template

PoolKey = tuple[str, Size]
"""What the members of a pool are alike in: the name of a Greenroom template, and a size."""


class Catalogue:
    """The Greenroom templates, and the pools that were declared without Kubernetes, as the store has them."""

    def __init__(self) -> None:
        self.known = Templates()
        self.declared: dict[PoolName, int] = {}
        """Targets by key."""

    def learn(self, templates: Iterable[Template], pools: Iterable[PoolSpec]) -> bool:
        """Take what the store has now; whether it was something else."""
        known = Templates(templates)
        declared = {PoolName(pool.template, pool.size.name): pool.target for pool in pools}
        if known == self.known and declared == self.declared:
            return False
        self.known, self.declared = known, declared
        return True

    def templates(self) -> list[Template]:
        """All templates."""
        return self.known.all()

    def template(self, image: str) -> Template | None:
        """The template that an image names."""
        return self.known.find(image)


def template_key(pool: Object, namespace: str) -> Key:
    """Where the SandboxTemplate of a pool is."""
    name: Any = field(pool, ("spec", "sandboxTemplateRef", "name"))
    return (namespace, name if isinstance(name, str) else "")


def members(template: Object | None, place: Key, catalogue: Catalogue) -> Members:
    """What members are made of by the SandboxTemplate at `place` as it is now; None: it is not there."""
    pod = None if template is None else field(template, ("spec", "podTemplate")) or {}
    return members_of(pod, place[1], place[0], catalogue.known)


def wish(pool: Object) -> PoolWish:
    """What a pool's document asks for; nothing where it cannot be understood."""
    try:
        return wish_of(msgspec.convert(pool, PoolDocument))
    except msgspec.ValidationError:
        return PoolWish("", 0, 0, False, None)


def selector_of(name: str) -> str:
    """The label selector that finds the sandboxes that came from a pool."""
    return f"{POOL_LABEL}={pool_label(name)}"
