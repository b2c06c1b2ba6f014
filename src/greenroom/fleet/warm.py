"""Which node has a warm member: found in the same time whether there are two nodes or two thousand. Pure.

The nodes of a pool lie in *levels* by what they have left: what they told, less the claims that were sent and are not
in it yet. A pick takes the node that has waited longest on the highest level and puts it one level down, so nodes with
equal stock get equal shares of a burst, to within one. Nothing is searched and nothing is sorted: finding the highest
level that is not empty is a heap of the levels there are, whose empty ones are dropped when they come up.

The stock is a hint, as a node's answer is the truth: whoever picks tells with `settle` when a claim no longer has to be
taken off, because its node refused it or has told numbers that it is in.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection

Pool = tuple[str, str]
"""Template name and size name."""


class _Stock:
    """One pool over all nodes."""

    __slots__ = ("heap", "levels", "sent", "told")

    def __init__(self) -> None:
        self.told: dict[str, int] = {}
        """By node, the warm members that it told of."""
        self.sent: dict[str, int] = {}
        """By node, the claims that are not in this number yet; only where there are any."""
        self.levels: dict[int, OrderedDict[str, None]] = {}
        """Nodes by what they have left, the one that waited longest first."""
        self.heap: list[int] = []
        """The keys of `levels`, negated."""

    def left(self, node: str) -> int:
        return self.told.get(node, 0) - self.sent.get(node, 0)

    def enter(self, node: str) -> None:
        """Put a node where it belongs; one that has nothing left belongs nowhere."""
        if (left := self.left(node)) > 0:
            level = self.levels.get(left)
            if level is None:
                level = self.levels[left] = OrderedDict()
                heapq.heappush(self.heap, -left)
            level[node] = None

    def leave(self, node: str) -> None:
        """Take a node out, before what it has left changes."""
        if (level := self.levels.get(self.left(node))) is not None:
            level.pop(node, None)

    def highest(self) -> OrderedDict[str, None] | None:
        while self.heap:
            if level := self.levels[-self.heap[0]]:
                return level
            del self.levels[-heapq.heappop(self.heap)]
        return None

    def first(self, avoid: Collection[str]) -> str | None:
        """The node to take, none of `avoid`."""
        level = self.highest()
        if level is None:
            return None
        node = next(iter(level))
        if node not in avoid:
            return node
        # A claim that was refused already: rare, and worth a search.
        for left in sorted(self.levels, reverse=True):
            for node in self.levels[left]:
                if node not in avoid:
                    return node
        return None


class WarmIndex:
    """See the module. Nodes are named as its user likes; one that was never admitted is not picked."""

    def __init__(self) -> None:
        self._stocks: dict[Pool, _Stock] = {}
        self._pools: dict[str, set[Pool]] = {}
        self._admitted: set[str] = set()

    def __repr__(self) -> str:
        return (
            f"<WarmIndex nodes={len(self._pools)} admitted={len(self._admitted)} pools={len(self._stocks)}>"
        )

    def statistics(self) -> dict[str, int]:
        """Nodes that told of a pool, nodes that may be picked, pools, and their entries together."""
        return {
            "nodes": len(self._pools),
            "admitted": len(self._admitted),
            "pools": len(self._stocks),
            "entries": sum(len(pools) for pools in self._pools.values()),
        }

    def left(self, node: str, pool: Pool) -> int:
        """Warm members that a node has, less the claims that are on their way to it; never below 0."""
        stock = self._stocks.get(pool)
        return 0 if stock is None else max(0, stock.left(node))

    def admit(self, node: str, may: bool) -> None:
        """Whether a node may be picked (it is alive and does not leave). What it has is remembered meanwhile."""
        if may == (node in self._admitted):
            return
        if may:
            self._admitted.add(node)
        else:
            self._admitted.discard(node)
        for pool in self._pools.get(node, ()):
            if may:
                self._stocks[pool].enter(node)
            else:
                self._stocks[pool].leave(node)

    def told(self, node: str, pool: Pool, warm: int) -> None:
        """A node has told how many warm members of a pool it has."""
        stock = self._stocks.get(pool)
        if stock is None:
            stock = self._stocks[pool] = _Stock()
        if stock.told.get(node) == warm:
            return
        stock.leave(node)
        stock.told[node] = warm
        self._pools.setdefault(node, set()).add(pool)
        if node in self._admitted:
            stock.enter(node)

    def forget(self, node: str) -> None:
        """Nothing is known of a node's pools any more. Claims on their way to it are still counted."""
        for pool in self._pools.pop(node, ()):
            stock = self._stocks[pool]
            stock.leave(node)
            del stock.told[node]
            if not stock.told and not stock.sent:
                del self._stocks[pool]

    def pick(self, pool: Pool, avoid: Collection[str] = ()) -> str | None:
        """The node for one claim, which is taken off its stock, or None when none is warm but those to `avoid`."""
        stock = self._stocks.get(pool)
        node = None if stock is None else stock.first(avoid)
        if stock is None or node is None:
            return None
        stock.leave(node)
        stock.sent[node] = stock.sent.get(node, 0) + 1
        stock.enter(node)
        return node

    def send(self, node: str, pool: Pool) -> None:
        """A claim goes to a node that was not picked: to stand in its queue, for it is dry. It is settled as others."""
        stock = self._stocks.get(pool)
        if stock is None:
            stock = self._stocks[pool] = _Stock()
        stock.leave(node)
        stock.sent[node] = stock.sent.get(node, 0) + 1
        if node in self._admitted:
            stock.enter(node)

    def sent(self, node: str, pool: Pool) -> int:
        """Claims on their way to a node, or in its queue, that are not settled."""
        stock = self._stocks.get(pool)
        return 0 if stock is None else stock.sent.get(node, 0)

    def keepers(self, pool: Pool) -> Collection[str]:
        """The nodes that may be picked and have told of a pool, whatever they have of it."""
        stock = self._stocks.get(pool)
        return [] if stock is None else [node for node in stock.told if node in self._admitted]

    def settle(self, node: str, pool: Pool) -> None:
        """A claim that was picked for is taken off no longer: see the module. One that was not is no harm."""
        stock = self._stocks.get(pool)
        if stock is None or not stock.sent.get(node):
            return
        stock.leave(node)
        stock.sent[node] -= 1
        if not stock.sent[node]:
            del stock.sent[node]
        if node in self._admitted:
            stock.enter(node)
        if not stock.told and not stock.sent:
            del self._stocks[pool]
