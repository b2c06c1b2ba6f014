"""Which node a claim goes to: a warm one, found without looking at all; else the shortest queue.

What nodes have is a *hint*, told by their streams of changes a moment ago, while several masters place at the same
time. That is enough, because the node decides (a claim is a transaction there) and its reply corrects us: a claim is
taken off a node's stock from its placing until the view is as far as the node's answer. A wrong hint costs a wait or
one more hop, never a wrong sandbox.

A node whose stream is not followed at the moment is not picked as a warm one; where no other is, its last heartbeat
says what it had.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

from greenroom.fleet.view import View
from greenroom.fleet.warm import Pool, WarmIndex
from greenroom.master.membership import Membership
from greenroom.wire.messages import NodeStatus

Policy = Literal["never", "prefer", "require"]
"""What a claim says of warm members, see `ClaimRequest.warm`."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it stands for a claim on one pool: its members and queue, if it keeps that pool at all."""

    name: str
    code: str
    keeps_pool: bool
    warm: int
    starting: int
    waiting: int
    sandboxes: int


def choose(candidates: Iterable[Candidate]) -> Candidate | None:
    """The best node for one claim, or None when there is none.

    Most warm members first. When all are dry: a node that keeps the pool (elsewhere a member would have to be
    made for this claim), the shortest queue for what is starting, the least loaded, and the name, so that the
    choice is the same for the same input.
    """
    return min(
        candidates,
        key=lambda node: (
            -node.warm,
            not node.keeps_pool,
            node.waiting - node.starting,
            node.sandboxes,
            node.name,
        ),
        default=None,
    )


class Placement:
    """Chooses nodes. Each choice counts as a claim on its way until it is settled."""

    def __init__(self, view: View, warm: WarmIndex, membership: Membership) -> None:
        self._view = view
        self._warm = warm
        self._membership = membership

    def choose(
        self, pool: Pool, tried: Collection[str] = (), policy: Policy = "prefer", *, warm_only: bool = False
    ) -> NodeStatus | None:
        """The node for one claim, none of those with the codes `tried`; None when there is none.

        With `warm_only` it has a warm member: the claim has waited already.
        """
        if policy == "never":
            return self._sent(self._emptiest(tried), pool)
        code = self._warm.pick(pool, tried)
        if code is not None:
            info = self._membership.of_code(code)
            if info is not None and info.live and not info.status.draining:
                return info.status
            self._warm.settle(code, pool)
        best = choose(
            node
            for node in self._candidates(pool, tried)
            if (node.warm > 0 or not warm_only) and (node.keeps_pool or policy == "prefer")
        )
        return self._sent(best, pool)

    def settle(self, code: str, pool: Pool) -> None:
        """The view knows of a claim that was placed, or nothing came of it."""
        self._warm.settle(code, pool)

    def _sent(self, best: Candidate | None, pool: Pool) -> NodeStatus | None:
        info = None if best is None else self._membership.of_code(best.code)
        if info is None:
            return None
        self._warm.send(info.status.code, pool)
        return info.status

    def _candidates(self, pool: Pool, tried: Collection[str]) -> list[Candidate]:
        """The nodes that keep the pool; where there are none, all."""
        told = []
        # Of those that are not seen now, the heartbeats tell.
        for code in {*self._warm.keepers(pool), *self._view.partial()}:
            info = self._membership.of_code(code)
            if code not in tried and info is not None and info.live and not info.status.draining:
                told.append(self.candidate(info.status, pool))
        keepers = [node for node in told if node.keeps_pool]
        if keepers:
            return keepers
        statuses = (status for status in self._membership.placeable() if status.code not in tried)
        return [self.candidate(status, pool) for status in statuses]

    def _emptiest(self, tried: Collection[str]) -> Candidate | None:
        nodes = []
        for status in self._membership.placeable():
            if status.code not in tried:
                count = self._sandboxes(status)
                nodes.append(
                    Candidate(
                        name=status.name,
                        code=status.code,
                        keeps_pool=False,
                        warm=0,
                        starting=0,
                        waiting=0,
                        sandboxes=count,
                    )
                )
        return choose(nodes)

    def _sandboxes(self, status: NodeStatus) -> int:
        node = self._view.node(status.code)
        return status.sandboxes if node is None or node.position is None else len(node.entries)

    def candidate(self, status: NodeStatus, pool: Pool) -> Candidate:
        """How a node stands for a claim on `pool`."""
        node = self._view.node(status.code)
        sent = self._warm.sent(status.code, pool)
        if node is not None and node.since is None:
            live = node.pools.get(pool)
            target, warm, starting, waiting = (
                (0, 0, 0, 0) if live is None else (live.target, live.warm, live.starting, live.waiting)
            )
        else:
            told = next((each for each in status.pools if (each.template, each.size) == pool), None)
            target, warm, starting, waiting = (
                (0, 0, 0, 0) if told is None else (told.target, told.warm, told.starting, told.waiting)
            )
        return Candidate(
            name=status.name,
            code=status.code,
            keeps_pool=target > 0 or warm > 0,
            warm=max(0, warm - sent),
            starting=starting,
            # Those of this master that wait are among those that it has sent, and are told of a moment later.
            waiting=max(waiting, sent - warm),
            sandboxes=self._sandboxes(status) + sent,
        )
