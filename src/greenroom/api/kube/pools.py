"""What a claim needs to know of the warm pool that it names: between who keeps pools and who keeps claims."""

from __future__ import annotations

from typing import Protocol

import msgspec

from greenroom.api.kube.objects import Object
from greenroom.wire.messages import Size


class PoolKey(msgspec.Struct, frozen=True):
    """What the members of a pool are alike in: the name of a Greenroom template, and a size."""

    template: str
    size: Size

    @property
    def pair(self) -> tuple[str, str]:
        """The key as nodes and views of the fleet have it: template and size by name."""
        return (self.template, self.size.name)


class PoolFound(msgspec.Struct, frozen=True, kw_only=True):
    """A SandboxWarmPool, its SandboxTemplate and where its members are."""

    pool: Object
    template: Object | None
    """None while there is no template of the name that the pool has."""
    keys: tuple[PoolKey, ...] = ()
    """Keys under which members of it may wait, in the order in which a claim should try them: what is left of older
    states of its template, then what it is now. Empty where `problem` says why there can be none."""
    reason: str = ""
    """In one word why it can have no members: TemplateNotFound, ImageNotFound, NoSize, InvalidTemplate."""
    problem: str = ""
    """The same for people."""


class Pools(Protocol):
    """Whoever knows the warm pools."""

    def pool(self, namespace: str, name: str) -> PoolFound | None:
        """A SandboxWarmPool, or None when there is none of this name."""
