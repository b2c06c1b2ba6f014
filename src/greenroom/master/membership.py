"""Which nodes there are and which of them are alive. Pure: told the time, it never asks for it.

A node registers, then sends heartbeats; one that is silent for the length of its lease is dead: it gets no
new work until it is heard again. Each change that others must act on (a node comes, moves, drains, dies,
returns) raises the *revision*, which `master.watching` lets clients wait for. Heartbeats alone change
nothing.

Revisions are compared between a master and its successor on the same address, and clients go from one master
to another, so the first revision is drawn from the clock: a number seen before is not met again with another
table behind it.

Two clocks: `now` is monotonic (leases must not jump with the wall clock), `wall` is Unix time (for people).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from greenroom.errors import KeyConflict
from greenroom.store.records import NodeRecord
from greenroom.wire.messages import NodeInfo, NodeList, NodeStatus


class _Member:
    """One node's row: the last status, when its lease ends (monotonic) and when it was last heard (Unix)."""

    __slots__ = ("expires", "last_seen", "live", "status")

    def __init__(self, status: NodeStatus, expires: float, last_seen: float) -> None:
        self.status = status
        self.expires = expires
        self.last_seen = last_seen
        self.live = True


class Membership:
    """The node table. Every method that changes it returns True when the revision rose."""

    def __init__(self, lease: float, first_revision: int = 0) -> None:
        self._lease = lease
        self._members: dict[str, _Member] = {}
        self._codes: dict[str, str] = {}
        """Names by code."""
        self.revision = first_revision

    def __repr__(self) -> str:
        rows = {name: "live" if member.live else "dead" for name, member in self._members.items()}
        return f"Membership(revision={self.revision}, nodes={rows})"

    def restore(self, records: Iterable[NodeRecord], now: float) -> bool:
        """Take over the nodes that the store knows, when a master starts.

        They count as alive for one lease: a node that lives is heard within it, and calling it dead because
        *we* are new would hide its sandboxes from lists.
        """
        changed = False
        for record in records:
            if record.name not in self._members:
                self._members[record.name] = _Member(status_of(record), now + self._lease, record.last_seen)
                self._codes[record.code] = record.name
                changed = True
        return self._risen(changed)

    def register(self, status: NodeStatus, now: float, wall: float) -> bool:
        """Enter a node, or enter it again. Raises KeyConflict when another node has its code."""
        for name, member in self._members.items():
            if name != status.name and member.status.code == status.code:
                raise KeyConflict(f"the node code {status.code} belongs to the node {name}")
        known = self._members.get(status.name)
        if known is not None:
            self._codes.pop(known.status.code, None)
        self._codes[status.code] = status.name
        if known is None:
            self._members[status.name] = _Member(status, now + self._lease, wall)
            return self._risen(True)
        return self._heard(known, status, now, wall)

    def heartbeat(self, status: NodeStatus, now: float, wall: float) -> bool | None:
        """A node is alive. None when it is not known under this name and code, so that it registers again."""
        member = self._members.get(status.name)
        if member is None or member.status.code != status.code:
            return None
        return self._heard(member, status, now, wall)

    def expire(self, now: float) -> bool:
        """Mark the nodes whose lease has ended as dead."""
        changed = False
        for member in self._members.values():
            if member.live and member.expires <= now:
                member.live = False
                changed = True
        return self._risen(changed)

    def next_expiry(self) -> float | None:
        """When (monotonic) the first live node's lease would end; None when no node is live."""
        return min((member.expires for member in self._members.values() if member.live), default=None)

    def remove(self, name: str) -> bool:
        """Forget a node."""
        member = self._members.pop(name, None)
        if member is not None:
            self._codes.pop(member.status.code, None)
        return self._risen(member is not None)

    def get(self, name: str) -> NodeInfo | None:
        """One node, or None."""
        member = self._members.get(name)
        return None if member is None else _info(member)

    def of_code(self, code: str) -> NodeInfo | None:
        """The node with this code, or None."""
        return self.get(self._codes.get(code, ""))

    def nodes(self) -> NodeList:
        """The whole table, by name."""
        return NodeList(self.revision, [_info(member) for _, member in sorted(self._members.items())])

    def placeable(self) -> list[NodeStatus]:
        """The nodes that may get new work: live and not draining, by name."""
        return [
            member.status
            for _, member in sorted(self._members.items())
            if member.live and not member.status.draining
        ]

    def live(self) -> list[NodeStatus]:
        """The live nodes, draining ones too, by name."""
        return [member.status for _, member in sorted(self._members.items()) if member.live]

    def _heard(self, member: _Member, status: NodeStatus, now: float, wall: float) -> bool:
        changed = not member.live or _visible(member.status) != _visible(status)
        member.status = status
        member.expires = now + self._lease
        member.last_seen = wall
        member.live = True
        return self._risen(changed)

    def _risen(self, changed: bool) -> bool:
        self.revision += changed
        return changed


def _visible(status: NodeStatus) -> NodeStatus:
    """The part of a status that others route by: counts change with every heartbeat and must wake nobody."""
    return msgspec.structs.replace(status, pools=[], sandboxes=0, paused=0, snapshots=0, room_mib=None)


def _info(member: _Member) -> NodeInfo:
    return NodeInfo(status=member.status, live=member.live, last_seen=member.last_seen)


def status_of(record: NodeRecord) -> NodeStatus:
    """What the store's record says of a node that was not heard yet: no pools, no counts."""
    return NodeStatus(
        name=record.name,
        code=record.code,
        api_url=record.api_url,
        relay_host=record.relay_host,
        relay_port=record.relay_port,
        engine=record.engine,
        accelerator=record.accelerator,
    )


def record_of(status: NodeStatus, wall: float) -> NodeRecord:
    """What the store keeps of a node's status; equal but for the times when nothing must be written."""
    return NodeRecord(
        name=status.name,
        code=status.code,
        api_url=status.api_url,
        relay_host=status.relay_host,
        relay_port=status.relay_port,
        engine=status.engine,
        accelerator=status.accelerator,
        first_seen=wall,
        last_seen=wall,
    )
