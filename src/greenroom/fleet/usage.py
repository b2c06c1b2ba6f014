"""How much each owner has: sandboxes, CPUs, memory. Kept as the view changes, so asking costs nothing.

A paused sandbox counts in full: it is one of its owner's sandboxes, and its CPUs and memory are what it takes the
moment it is resumed, which a quota must not forbid. What has ended and only stays listed counts for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from greenroom.fleet.view import Entry, View
from greenroom.wire.messages import Listed, Size


class Amount(NamedTuple):
    """So many sandboxes, with so many CPUs and MiB of memory together."""

    sandboxes: int = 0
    cpus: int = 0
    memory_mib: int = 0

    def plus(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(
            self.sandboxes + other.sandboxes, self.cpus + other.cpus, self.memory_mib + other.memory_mib
        )

    def minus(self, other: Amount) -> Amount:
        """What is left of it without the other."""
        return Amount(
            self.sandboxes - other.sandboxes, self.cpus - other.cpus, self.memory_mib - other.memory_mib
        )


NOTHING = Amount()


def amount_of(size: Size) -> Amount:
    """One sandbox of this size."""
    return Amount(1, size.cpus, size.memory_mib)


class Totals:
    """Amounts by owner; owners that have nothing are not kept."""

    def __init__(self) -> None:
        self._of: dict[str, Amount] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, owner: str) -> Amount:
        """What an owner has."""
        return self._of.get(owner, NOTHING)

    def add(self, owner: str, amount: Amount) -> None:
        """The owner has more."""
        self._put(owner, self.of(owner).plus(amount))

    def take(self, owner: str, amount: Amount) -> None:
        """The owner has less."""
        self._put(owner, self.of(owner).minus(amount))

    def _put(self, owner: str, amount: Amount) -> None:
        if amount == NOTHING:
            self._of.pop(owner, None)
        else:
            self._of[owner] = amount


class Usage(Totals):
    """What the sandboxes of a view come to, from the time on at which this is made."""

    def __init__(self, view: View) -> None:
        super().__init__()
        for entry in view:
            self._changed(None, entry)
        view.observe(self._changed)

    def _changed(self, before: Entry | None, after: Entry | None) -> None:
        if before is not None and _counts(before.sandbox):
            self.take(before.sandbox.owner, amount_of(before.sandbox.size))
        if after is not None and _counts(after.sandbox):
            self.add(after.sandbox.owner, amount_of(after.sandbox.size))


def _counts(sandbox: Listed) -> bool:
    return sandbox.state != "ended"
