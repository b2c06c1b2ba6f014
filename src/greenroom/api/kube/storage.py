"""What the HTTP shell needs of whoever has the objects of a kind.

A storage keeps objects, or makes them up from something else; the rules of the API are above it. It gives versions:
one number that grows with every change of its kind, in `metadata.resourceVersion` of the object that it changed. Every
change is in `cache` before the call that made it returns, so that whoever writes and then lists sees it. What it hands
out is shared and not changed by anybody; what it is given is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from greenroom.api.kube.kinds import Action, Kind
from greenroom.api.kube.objects import Key, Object
from greenroom.api.kube.rows import Item
from greenroom.api.kube.status import Cause
from greenroom.api.kube.watching import Cache


class Listing(msgspec.Struct, frozen=True):
    """Objects, or rows, sorted by namespace and name, as they all were at `version`. `missing` says of what not all, or
    not the latest, is in it: names of nodes that cannot be read."""

    version: int
    objects: Sequence[Item]
    missing: Sequence[str] = ()


class Storage(Protocol):
    """The objects of one kind. All objects have `apiVersion`, `kind` and complete metadata.

    With `dry_run` everything is checked and answered as if it were done, and nothing is done.
    """

    @property
    def kind(self) -> Kind:
        """The kind."""

    @property
    def cache(self) -> Cache:
        """The changes of the kind."""

    async def get(self, key: Key) -> Object | None:
        """One object, in its current state, or None."""

    async def list(self, namespace: str) -> Listing:
        """The objects of a namespace, or with "" of all."""

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        """What is wrong with a new object, or a change, beyond what the schema and the rules of metadata say."""

    async def create(self, obj: Object, *, dry_run: bool) -> Object:
        """Keep a new object; answers it as it is now. Raises `status.already_exists`, or what it failed by."""

    async def replace(self, obj: Object, old: Object, *, dry_run: bool) -> Object:
        """Keep a change of `old`; answers the object as it is now.

        Raises `status.conflict` when the current state is not `old`'s version any more, `status.not_found` when it
        is gone.
        """

    async def remove(self, old: Object, *, dry_run: bool) -> None:
        """Let an object go that has no finalizers. Raises as `replace` does."""

    async def act(self, action: Action, old: Object, body: Object, *, dry_run: bool) -> Object:
        """Do what a subresource stands for; answers what `action.gives`, or the object. Raises what it failed by."""


@runtime_checkable
class Orphaning(Protocol):
    """A storage whose objects have others that belong to them, and stay where that is wished for."""

    async def orphan(self, old: Object, *, dry_run: bool) -> None:
        """Let an object go without what belongs to it. Raises as `remove` does."""


@runtime_checkable
class Cautioning(Protocol):
    """A storage that accepts what has no effect, and says so."""

    def warnings(self, new: Object, old: Object | None) -> Sequence[str]:
        """What of a new object, or of a change of `old`, has no effect, in sentences for people."""
