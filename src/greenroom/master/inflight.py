"""Claims that this master has let through and the view does not show yet: their names, and what they come to. Pure.

A name is given once, and a quota holds, also while a claim is on its way. So what a claim takes is written down here
before it is sent, and stays until it failed or the view shows it; then the view is who knows. What the view never
shows (its api did not confirm it, so its node destroyed it) is dropped after `held_for`, as is what was sent and
whose answer was lost.
"""

from __future__ import annotations

import heapq
import itertools

from greenroom.fleet.usage import Amount, Totals
from greenroom.fleet.view import Entry, View


class Ticket:
    """One claim on its way."""

    __slots__ = ("amount", "done", "name", "owner", "sandbox_id", "unknown")

    def __init__(self, owner: str, name: str, amount: Amount) -> None:
        self.owner = owner
        self.name = name
        self.amount = amount
        self.sandbox_id = ""
        """Known once it was answered."""
        self.unknown = False
        """Its answer was lost."""
        self.done = False

    def __repr__(self) -> str:
        return f"<Ticket {self.owner}/{self.name} {self.sandbox_id or 'unanswered'} done={self.done}>"


class InFlight:
    """See the module. `held_for` is in seconds, of the same clock as `now`."""

    def __init__(self, view: View, held_for: float) -> None:
        self._view = view
        self._held_for = held_for
        self._names: dict[tuple[str, str], Ticket] = {}
        self._by_id: dict[str, Ticket] = {}
        self._late: list[tuple[float, int, Ticket]] = []
        """A heap of those that are over at a time of their own."""
        self._numbers = itertools.count()
        self.reserved = Totals()
        """What they come to, by owner."""
        view.observe(self._seen)

    def statistics(self) -> dict[str, int]:
        """Names held, and claims answered that the view does not show."""
        return {"names": len(self._names), "unseen": len(self._by_id)}

    def named(self, owner: str, name: str) -> Ticket | None:
        """The claim that has this name."""
        return self._names.get((owner, name))

    def begin(self, owner: str, name: str, amount: Amount) -> Ticket:
        """A claim is about to be sent."""
        ticket = Ticket(owner, name, amount)
        if name:
            self._names[owner, name] = ticket
        self.reserved.add(owner, amount)
        return ticket

    def failed(self, ticket: Ticket) -> None:
        """Nothing came of it."""
        self._end(ticket)

    def lost(self, ticket: Ticket, now: float, within: float) -> None:
        """Nobody knows what came of it, and will not before it has had `within` seconds more for its hand-over."""
        ticket.unknown = True
        self._end_at(ticket, now + within + self._held_for)

    def answered(self, ticket: Ticket, sandbox_id: str, now: float) -> None:
        """It became a sandbox."""
        if self._view.get(sandbox_id) is not None:
            self._end(ticket)
            return
        ticket.sandbox_id = sandbox_id
        self._by_id[sandbox_id] = ticket
        self._end_at(ticket, now + self._held_for)

    def told(self, ticket: Ticket) -> None:
        """The view is as far as its node's answer: if it has the name, it is also who knows when that is free again.
        That the sandbox is shown, and counted, comes later."""
        if self._view.taken(ticket.owner, ticket.name):
            self._drop_name(ticket)

    def expire(self, now: float) -> None:
        """Drop what is late."""
        while self._late and (self._late[0][2].done or self._late[0][0] <= now):
            self._end(heapq.heappop(self._late)[2])

    def _end_at(self, ticket: Ticket, until: float) -> None:
        heapq.heappush(self._late, (until, next(self._numbers), ticket))

    def _seen(self, _before: Entry | None, after: Entry | None) -> None:
        if after is not None and (ticket := self._by_id.get(after.sandbox.sandbox_id)) is not None:
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        if ticket.done:
            return
        ticket.done = True
        self._drop_name(ticket)
        self._by_id.pop(ticket.sandbox_id, None)
        self.reserved.take(ticket.owner, ticket.amount)

    def _drop_name(self, ticket: Ticket) -> None:
        if self._names.get((ticket.owner, ticket.name)) is ticket:
            del self._names[ticket.owner, ticket.name]
