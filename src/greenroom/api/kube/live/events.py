"""Events about sandboxes: made from the view, for `kubectl describe` and for whoever watches them.

That a sandbox was handed over, and warm or cold, its record says, so this event is there as long as the sandbox and
the same on every replica. What happens to it afterwards (suspended, resumed, ended, out of reach) is told by the
replicas that see it happen, and kept for the last `KEPT` of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final

from greenroom.api.kube.kinds import CLAIM, EVENT, SANDBOX, Kind
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.conditions import EXPIRED, ending
from greenroom.api.kube.live.instants import instant_text
from greenroom.api.kube.live.observing import Live
from greenroom.api.kube.live.reads import Current, ReadOnly
from greenroom.api.kube.live.shelves import LiveRow
from greenroom.api.kube.objects import Key, Object
from greenroom.api.kube.rows import Row
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.versions import Clock
from greenroom.api.kube.watching import Cache, Change
from greenroom.fleet.view import NodeView

KEPT: Final = 4096
"""Transitions that are remembered."""
COMPONENT: Final = "greenroom"
SKEW: Final = 0.5
"""Seconds that a node's clock may be ahead of this one's."""


class EventRow(Row):
    """An event about a Sandbox, or its SandboxClaim, as that is or was."""

    __slots__ = ("_about", "_at", "_message", "_node", "_of", "_reason", "_sandbox_id", "_type", "_version")

    def __init__(
        self,
        sandbox: LiveRow,
        at: float,
        reason: str,
        message: str,
        version: int,
        kind: str = "Normal",
        about: Kind = SANDBOX,
    ) -> None:
        namespace, name = sandbox.key
        # As Kubernetes does, with the instant in nanoseconds; the id tells two with one name apart.
        self.key = (
            namespace,
            f"{name[:200]}.{sandbox.sandbox_id[-6:]}{int(at * 1e6):x}.{about.singular}-{reason.lower()}",
        )
        self._about = about
        # Not the row: it has all that was ever declared of the sandbox, and events outlive that.
        self._of = name
        self._sandbox_id = sandbox.sandbox_id
        self._node = sandbox.facts.node
        self._at = at
        self._reason = reason
        self._message = message
        self._type = kind
        self._version = version

    @property
    def version(self) -> int:
        """Its version."""
        return self._version

    def field(self, name: str) -> str | None:
        """See `Row`."""
        match name:
            case "involvedObject.name":
                return self._of
            case "involvedObject.namespace":
                return self.key[0]
            case "involvedObject.kind":
                return self._about.name
            case "involvedObject.uid":
                return documents.uid_of(self._about, self._sandbox_id)
            case "reason":
                return self._reason
            case "type":
                return self._type
        return None

    def object(self) -> Object:
        """See `Row`."""
        namespace, name = self.key
        at = instant_text(self._at)
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": documents.uid_of(EVENT, name),
                "resourceVersion": str(self._version),
                "creationTimestamp": at,
            },
            "involvedObject": {
                "apiVersion": self._about.api_version,
                "kind": self._about.name,
                "namespace": namespace,
                "name": self._of,
                "uid": documents.uid_of(self._about, self._sandbox_id),
            },
            "reason": self._reason,
            "message": self._message,
            "type": self._type,
            "count": 1,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "eventTime": None,
            "reportingComponent": COMPONENT,
            "reportingInstance": self._node,
            "source": {"component": COMPONENT, "host": self._node},
        }


def begun(row: LiveRow, clock: Clock) -> list[EventRow]:
    """That a sandbox was handed over: to who made it, and to the claim that it was made for."""
    listed = row.facts.listed
    how = {"warm": "a warm one was handed over", "cold": "it was started for this"}
    what = how.get(listed.launch, "it was handed over")
    message = f"Sandbox {listed.sandbox_id} of template {listed.template} on node {row.facts.node}: {what}"
    about = [SANDBOX, CLAIM] if documents.claimed(listed) else [SANDBOX]
    reason = "Claimed" if CLAIM in about else "Created"
    return [EventRow(row, listed.started_at, reason, message, clock.next(), about=each) for each in about]


class EventStorage(ReadOnly):
    """See the module."""

    kind = EVENT

    def __init__(self, live: Live, current: Current) -> None:
        super().__init__(current)
        self._live = live
        self.cache = Cache(live.clock.next(), clock=live.clock)
        self._begun: dict[Key, list[EventRow]] = {}
        """By the key of the sandbox."""
        self._ring: deque[EventRow] = deque()
        self._sorted: list[EventRow] | None = None
        """All of them in order, until there is another."""
        live.follow(self)

    def changed(self, before: LiveRow | None, after: LiveRow | None) -> None:
        """See `Follower`."""
        self._sorted = None
        if before is not None and (after is None or before.sandbox_id != after.sandbox_id):
            for old in self._begun.pop(before.key, ()):
                self.cache.record(Change(self._live.clock.next(), old, None))
            if before.facts.listed.state != "ended":
                self._left(before)
            before = None
        if after is None:
            return
        if before is None:
            made = self._begun[after.key] = begun(after, self._live.clock)
            for event in made:
                self.cache.record(Change(event.version, None, event))
            return
        self._transition(before, after)

    def node(self, node: NodeView, *, there: bool) -> None:
        """See `Follower`."""

    def close(self) -> None:
        """See `Follower`."""

    def _left(self, before: LiveRow) -> None:
        """One went that nobody keeps: its time had come, or somebody ended it. Its node does not say which."""
        end = documents.ends(before.facts.listed)
        if end is not None and self._live.now() >= end - SKEW:
            self._note(before, "Expired", f"Sandbox {before.sandbox_id} has ended, as its time was up")
        else:
            self._note(before, "Killed", f"Sandbox {before.sandbox_id} has ended and is removed")

    def _transition(self, before: LiveRow, after: LiveRow) -> None:
        was, now = before.facts, after.facts
        if now.listed.state != was.listed.state:
            if now.listed.state == "ended":
                reason, message = ending(now.listed)
                short = "Expired" if reason == EXPIRED else "Failed"
                self._note(after, short, message, "Normal" if reason == EXPIRED else "Warning")
            elif now.listed.state == "paused":
                self._note(after, "Suspended", "the sandbox was paused")
            else:
                self._note(after, "Resumed", "the sandbox was resumed")
        elif now.reachable != was.reachable and now.listed.state != "ended":
            if now.reachable:
                self._note(after, "NodeReachable", f"node {now.node} can be read again")
            else:
                self._note(after, "NodeUnreachable", f"node {now.node} cannot be read", "Warning")

    def _note(self, row: LiveRow, reason: str, message: str, kind: str = "Normal") -> None:
        version = self._live.clock.next()
        event = EventRow(row, self._live.now(), reason, message, version, kind)
        if len(self._ring) >= KEPT:
            self.cache.record(Change(version, self._ring.popleft(), None))
            version = self._live.clock.next()
            event = EventRow(row, self._live.now(), reason, message, version, kind)
        self._ring.append(event)
        self.cache.record(Change(version, None, event))

    def rows(self, namespace: str) -> list[Row]:
        """The events there are, in order."""
        if self._sorted is None:
            handed = [event for events in self._begun.values() for event in events]
            self._sorted = sorted([*handed, *self._ring], key=lambda row: row.key)
        if not namespace:
            return list(self._sorted)
        first = bisect_left(self._sorted, (namespace, ""), key=lambda row: row.key)
        end = bisect_left(self._sorted, (namespace + "\0", ""), key=lambda row: row.key)
        return list(self._sorted[first:end])

    async def list(self, namespace: str) -> Listing:
        """See `Storage`."""
        missing = await self.current()
        return Listing(self.cache.version, self.rows(namespace), missing)

    async def get(self, key: Key) -> Object | None:
        """See `Storage`."""
        await self.current()
        found = next((row for row in self.rows(key[0]) if row.key == key), None)
        return None if found is None else found.object()
