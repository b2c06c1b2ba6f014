"""What must hold before any node is asked for a sandbox: its name is free, and its owner may have one more.

A name is one among all sandboxes of its owner, wherever they are. Claims for one name meet here, one after the other;
whether it is taken is known from the view, where every node that lives must be whole (one that is not may have it),
and from the claims that are on their way. Quotas are kept in the same way, and only where an owner has any.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from greenroom.config import ClaimsConfig
from greenroom.errors import NameTaken, NodeUnavailable, QuotaExceeded
from greenroom.fleet.following import Following
from greenroom.fleet.usage import Usage, amount_of
from greenroom.fleet.view import View
from greenroom.master.catalogue import Catalogue
from greenroom.master.inflight import InFlight, Ticket
from greenroom.master.membership import Membership
from greenroom.master.metrics import QUOTA_REFUSALS
from greenroom.master.quotas import check
from greenroom.master.turns import Turns
from greenroom.wire.messages import ClaimRequest

SEEN_DEADLINE = 5.0
"""Seconds that a claim waits for nodes that are not seen as they are."""
SEEN_AGAIN = 2.0
"""Seconds after which it may be tried again then. A node that stays away loses its lease, and is waited for no more."""
_LOOK_AGAIN = 0.25
"""Seconds between looks at who still lives, of those that are waited for."""
_SLACK = 5.0
"""Seconds beyond the time in which a claim must be confirmed, until it is known not to have been."""


class Admission:
    """See the module."""

    def __init__(
        self,
        view: View,
        following: Following,
        membership: Membership,
        catalogue: Catalogue,
        config: ClaimsConfig,
    ) -> None:
        self._view = view
        self._following = following
        self._membership = membership
        self._catalogue = catalogue
        self._usage = Usage(view)
        self._flying = InFlight(view, config.confirm_within + _SLACK)
        self._turns = Turns()
        self._wait = config.handover_deadline + _SLACK
        self._codes: tuple[int, list[str]] = (-1, [])

    def statistics(self) -> dict[str, int]:
        """Names held by claims on their way, claims the view does not show yet, and owners that have sandboxes."""
        return {**self._flying.statistics(), "owners": len(self._usage)}

    @contextlib.asynccontextmanager
    async def admit(self, request: ClaimRequest) -> AsyncIterator[Ticket]:
        """A block in which the claim may be sent; what became of it is to be told before its end.

        Raises NameTaken, QuotaExceeded, or NodeUnavailable where it cannot be told whether the name is free.
        """
        async with contextlib.AsyncExitStack() as stack:
            if request.name:
                turn = self._turns.turn(
                    (request.owner, request.name),
                    request.wait + self._wait,
                    f"sandbox {request.name!r} in namespace {request.owner!r}",
                )
                await stack.enter_async_context(turn)
            if request.name or self._catalogue.quotas.get(request.owner):
                await self._see_all()
            yield self._begin(request)

    def _begin(self, request: ClaimRequest) -> Ticket:
        self._flying.expire(time.monotonic())
        owner, name = request.owner, request.name
        if name:
            ticket = self._flying.named(owner, name)
            if ticket is not None and ticket.unknown:
                raise NodeUnavailable(
                    f"it is not known yet whether sandbox {name!r} exists in namespace {owner!r}: the answer to an "
                    "earlier request was lost; try again shortly",
                    retry_after=SEEN_AGAIN,
                )
            if ticket is not None or self._view.taken(owner, name):
                raise taken(owner, name)
        amount = amount_of(request.size)
        try:
            used = self._usage.of(owner).plus(self._flying.reserved.of(owner))
            check(self._catalogue.quotas.get(owner, ()), used, amount)
        except QuotaExceeded:
            QUOTA_REFUSALS.inc()
            raise
        return self._flying.begin(owner, name, amount)

    def check_again(self, request: ClaimRequest, home: str) -> None:
        """A claim goes to the node that had its key before. Raises NameTaken where another has its name now."""
        entry = self._view.named(request.owner, request.name) if request.name else None
        if entry is not None and entry.node.code != home:
            raise taken(request.owner, request.name)

    def failed(self, ticket: Ticket) -> None:
        """Nothing came of a claim."""
        self._flying.failed(ticket)

    def lost(self, ticket: Ticket, within: float) -> None:
        """Nobody knows what became of a claim; its node is done with it in `within` seconds at the latest."""
        self._flying.lost(ticket, time.monotonic(), within)

    def answered(self, ticket: Ticket, sandbox_id: str) -> None:
        """A claim became a sandbox."""
        self._flying.answered(ticket, sandbox_id, time.monotonic())

    def told(self, ticket: Ticket) -> None:
        """The view is as far as the answer to a claim."""
        self._flying.told(ticket)

    async def _see_all(self) -> None:
        """Wait until every node that lives is whole. Raises NodeUnavailable."""
        ends = time.monotonic() + SEEN_DEADLINE
        while unseen := self._unseen():
            left = ends - time.monotonic()
            if left <= 0:
                raise NodeUnavailable(
                    "a node that may have a sandbox of this name or owner cannot be seen at the moment; "
                    "send the request again",
                    retry_after=SEEN_AGAIN,
                )
            # One that loses its lease meanwhile is waited for no more.
            await self._following.settled(unseen, min(left, _LOOK_AGAIN))

    def _unseen(self) -> list[str]:
        """Codes of the nodes that live and are not whole."""
        if self._codes[0] != self._membership.revision:
            self._codes = (self._membership.revision, [status.code for status in self._membership.live()])
        partial = self._view.partial()
        return [code for code in self._codes[1] if code in partial or self._view.node(code) is None]


def taken(owner: str, name: str) -> NameTaken:
    """The refusal of a name."""
    return NameTaken(f"sandbox {name!r} exists already in namespace {owner!r}")
