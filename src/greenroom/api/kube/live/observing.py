"""The view of the fleet as Kubernetes' kinds: each change of a sandbox's record becomes changes of its objects.

One observer feeds all synthesized kinds, so that what is seen of a Sandbox, its SandboxClaim and its Events comes in
one order. A node whose stream breaks off is followed again within milliseconds as a rule; only when it stays away for
`GRACE` seconds are its sandboxes shown as Ready Unknown. They stay listed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from greenroom.api.kube.live import documents
from greenroom.api.kube.live.conditions import Facts
from greenroom.api.kube.live.shelves import ClaimRow, LiveRow, SandboxRow, Shelf
from greenroom.api.kube.versions import Clock
from greenroom.fleet.view import Entry, NodeView, View
from greenroom.wire.messages import Listed

GRACE: Final = 1.0
"""Seconds for which a node may be away before its sandboxes are shown so."""


class Follower(Protocol):
    """Hears of changes after the shelves have them."""

    def changed(self, before: LiveRow | None, after: LiveRow | None) -> None:
        """A Sandbox is another than it was: None for what was not there, or is no more."""

    def node(self, node: NodeView, *, there: bool) -> None:
        """A node is another than it was, or has left."""

    def close(self) -> None:
        """Nothing is wanted any more."""


class Live:
    """The sandboxes and claims that there are. `now` (Unix seconds) is for tests."""

    def __init__(self, view: View, clock: Clock, now: Callable[[], float] = time.time) -> None:
        self.view = view
        self.clock = clock
        self.sandboxes = Shelf(SandboxRow, clock)
        self.claims = Shelf(ClaimRow, clock)
        self.now = now
        self._followers: list[Follower] = []
        self._unreachable: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        view.observe(self._changed)
        view.observe_nodes(self._node)
        for node in view.nodes().values():
            self._node(node, True)
        for entry in view:
            self._changed(None, entry)

    def follow(self, follower: Follower) -> None:
        """Let somebody hear of every change, beginning with what there is."""
        self._followers.append(follower)
        for node in self.view.nodes().values():
            follower.node(node, there=True)
        for row in self.sandboxes.listing("", []).objects:
            if isinstance(row, LiveRow):
                follower.changed(None, row)

    def close(self) -> None:
        """Wait for nothing any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for follower in self._followers:
            follower.close()

    def reachable(self, code: str) -> bool:
        """Whether a node can be read, or has been away for no longer than `GRACE`."""
        return code not in self._unreachable

    def _changed(self, before: Entry | None, after: Entry | None) -> None:
        gone = before.sandbox if before is not None else None
        if after is None:
            if gone is not None:
                self._drop(gone)
            return
        listed = after.sandbox
        key = (documents.namespace_of(listed), documents.name_of(listed))
        row = self.sandboxes.get(key)
        self._put(listed, after.node, self._since(row, listed))

    def _since(self, row: LiveRow | None, listed: Listed) -> float:
        if row is not None and row.sandbox_id == listed.sandbox_id:
            facts = row.facts
            return facts.since if facts.listed.state == listed.state and facts.reachable else self.now()
        # Of what was there before this process, no more is known than the record says.
        return listed.ended_at or listed.started_at

    def _put(self, listed: Listed, node: NodeView, since: float) -> None:
        facts = Facts(listed, node.name, node.code not in self._unreachable, since, 0)
        key = (documents.namespace_of(listed), documents.name_of(listed))
        before = self.sandboxes.get(key)
        row = self.sandboxes.put(facts)
        if documents.claimed(listed):
            self.claims.put(facts)
        elif before is not None:
            # A claim that was deleted without its sandbox.
            self.claims.drop(key, before.sandbox_id)
        for follower in self._followers:
            follower.changed(before, row)

    def _drop(self, listed: Listed) -> None:
        key = (documents.namespace_of(listed), documents.name_of(listed))
        # The sandbox first: an owner goes after what it owns.
        row = self.sandboxes.drop(key, listed.sandbox_id)
        self.claims.drop(key, listed.sandbox_id)
        if row is not None:
            for follower in self._followers:
                follower.changed(row, None)

    # Nodes

    def _node(self, node: NodeView, there: bool) -> None:
        code = node.code
        if not there or node.since is None:
            if (timer := self._timers.pop(code, None)) is not None:
                timer.cancel()
            if code in self._unreachable:
                self._unreachable.discard(code)
                if there:
                    self._again(node.entries.values(), node)
        elif code not in self._unreachable and code not in self._timers:
            self._expect(node)
        for follower in self._followers:
            follower.node(node, there=there)

    def _expect(self, node: NodeView) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._away(node)
            return
        self._timers[node.code] = loop.call_later(GRACE, self._away, node)

    def _away(self, node: NodeView) -> None:
        self._timers.pop(node.code, None)
        if node.since is None or self.view.node(node.code) is not node:
            return
        self._unreachable.add(node.code)
        self._again(node.entries.values(), node)
        for follower in self._followers:
            follower.node(node, there=True)

    def _again(self, entries: Iterable[Entry], node: NodeView) -> None:
        now = self.now()
        for entry in list(entries):
            if self.view.get(entry.sandbox.sandbox_id) is entry:
                self._put(entry.sandbox, node, now)
