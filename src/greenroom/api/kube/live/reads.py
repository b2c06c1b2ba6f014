"""What kinds have in common that nobody writes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from greenroom.api.kube.kinds import Action, Kind
from greenroom.api.kube.objects import Object
from greenroom.api.kube.status import Cause, StatusError, method_not_allowed

Current = Callable[[], Awaitable[list[str]]]
"""Takes in what the nodes have told; the names of nodes of which not all, or not the latest, is known."""


class ReadOnly:
    """The writing half of a `Storage`, refused. Kinds without these verbs have no paths that lead here."""

    kind: Kind

    def __init__(self, current: Current) -> None:
        self.current = current

    def check(self, new: Object, old: Object | None) -> Sequence[Cause]:
        """See `Storage`."""
        return ()

    async def create(self, obj: Object, *, dry_run: bool) -> Object:
        """See `Storage`."""
        raise self._refused("POST")

    async def replace(self, obj: Object, old: Object, *, dry_run: bool) -> Object:
        """See `Storage`."""
        raise self._refused("PUT")

    async def remove(self, old: Object, *, dry_run: bool) -> None:
        """See `Storage`."""
        raise self._refused("DELETE")

    async def act(self, action: Action, old: Object, body: Object, *, dry_run: bool) -> Object:
        """See `Storage`."""
        raise self._refused("POST")

    def _refused(self, verb: str) -> StatusError:
        return method_not_allowed(self.kind.subject(), verb)
