"""What the egress process counts. Nothing here tells where anybody connected or what was asked."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from greenroom.wire.gate import Counts

Outcome = Literal["allowed", "denied", "unresolved", "unreachable", "limited", "left", "failed"]
"""Of a connection: it was joined to its goal; refused by the rules; its allowed name led nowhere; its goal could not
be connected to; there were too many; the guest left before; a fault of ours."""
Question = Literal["answered", "empty", "refused", "failed", "limited", "malformed"]
"""Of a DNS question: with addresses; without; refused by the rules; no resolver answered; too many; unreadable."""


class Tally:
    """Counters, of one sandbox or of all; `parent` counts along."""

    def __init__(self, parent: Tally | None = None) -> None:
        self._parent = parent
        self.connections: Counter[str] = Counter()
        self.dns: Counter[str] = Counter()
        self.open = 0
        self.bytes_out = self.bytes_in = 0

    def connection(self, outcome: Outcome | Literal["cut", "idle"]) -> None:
        """A connection came to this; `cut` (by other rules) and `idle` come after `allowed`."""
        self.connections[outcome] += 1
        if self._parent is not None:
            self._parent.connection(outcome)

    def question(self, outcome: Question) -> None:
        """A DNS question came to this."""
        self.dns[outcome] += 1
        if self._parent is not None:
            self._parent.question(outcome)

    def opened(self, by: int) -> None:
        """So many more connections are there, waiting ones too; fewer if negative."""
        self.open += by
        if self._parent is not None:
            self._parent.opened(by)

    def moved(self, out: int, into: int) -> None:
        """So many bytes went out of and into a sandbox."""
        self.bytes_out += out
        self.bytes_in += into
        if self._parent is not None:
            self._parent.moved(out, into)

    def counts(self) -> Counts:
        """As it stands."""
        return Counts(
            connections=dict(self.connections),
            dns=dict(self.dns),
            open=self.open,
            bytes_out=self.bytes_out,
            bytes_in=self.bytes_in,
        )
