"""Which node a claim goes to. Pure: it is fed with heartbeats and with the claims that are under way.

The counts of warm members are *hints*: they are as old as the last heartbeat, and several masters place at
the same time. That is enough, because the node decides (a claim is a transaction there) and its reply
corrects us: between two heartbeats a master takes its own claims off the count it was told, and a node that
says it is dry is dry until it reports again. A wrong hint costs a wait or one more hop, never a wrong
sandbox.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from greenroom.wire.messages import NodeStatus, PoolStatus

Pool = tuple[str, str]
"""Template name and size name."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A node as placement sees it: warm members and queue of one pool, if it keeps that pool at all."""

    name: str
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


class Hints:
    """What is known of each node's pools between heartbeats: the last report, less what was sent since."""

    def __init__(self) -> None:
        self._reports: dict[str, NodeStatus] = {}
        self._sent: dict[str, dict[Pool, int]] = {}
        self._dry: dict[str, set[Pool]] = {}

    def __repr__(self) -> str:
        return f"Hints(nodes={sorted(self._reports)}, sent={self._sent}, dry={self._dry})"

    def reported(self, status: NodeStatus) -> None:
        """A node has told about itself: its word replaces every guess."""
        self._reports[status.name] = status
        self._sent.pop(status.name, None)
        self._dry.pop(status.name, None)

    def forget(self, name: str) -> None:
        """The node left the table."""
        for part in (self._reports, self._sent, self._dry):
            part.pop(name, None)

    def sent(self, name: str, pool: Pool) -> None:
        """A claim goes to the node now."""
        counts = self._sent.setdefault(name, {})
        counts[pool] = counts.get(pool, 0) + 1

    def not_taken(self, name: str, pool: Pool) -> None:
        """The claim did not reach the node or it refused it."""
        counts = self._sent.get(name, {})
        if counts.get(pool, 0) > 0:
            counts[pool] -= 1

    def dry(self, name: str, pool: Pool) -> None:
        """The node answered that it has no warm member."""
        self._dry.setdefault(name, set()).add(pool)

    def candidate(self, name: str, pool: Pool) -> Candidate:
        """How the node stands for a claim on `pool`; a node that has not reported yet has nothing."""
        status = self._reports.get(name)
        sent = self._sent.get(name, {}).get(pool, 0)
        counts = _pool_of(status, pool)
        if counts is None:
            sandboxes = 0 if status is None else status.sandboxes
            return Candidate(
                name=name, keeps_pool=False, warm=0, starting=0, waiting=sent, sandboxes=sandboxes + sent
            )
        is_dry = pool in self._dry.get(name, ())
        warm = 0 if is_dry else max(0, counts.warm - sent)
        return Candidate(
            name=name,
            keeps_pool=counts.target > 0 or counts.warm > 0,
            warm=warm,
            starting=counts.starting,
            waiting=counts.waiting + max(0, sent - counts.warm),
            sandboxes=(0 if status is None else status.sandboxes) + sent,
        )

    def choose(
        self, names: Iterable[str], pool: Pool, tried: Collection[str] = (), warm_only: bool = False
    ) -> str | None:
        """The best of `names` (live and not draining) that was not tried yet, or None.

        With `warm_only`, nodes without a warm member do not count: the claim has waited already.
        """
        candidates = [self.candidate(name, pool) for name in names if name not in tried]
        best = choose(node for node in candidates if node.warm > 0 or not warm_only)
        return None if best is None else best.name


def _pool_of(status: NodeStatus | None, pool: Pool) -> PoolStatus | None:
    if status is None:
        return None
    return next((entry for entry in status.pools if (entry.template, entry.size) == pool), None)
