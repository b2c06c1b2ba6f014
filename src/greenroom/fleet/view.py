"""What there is on all nodes, as they tell it: pure, one copy in memory, with a version that only rises.

Each node's frames are applied in the order of their numbers. What came before is no news; what comes too early says
that something was lost, and the view then refuses the stream (`apply` returns False) until it begins again where the
view stands, or with all there is. So a node's part is always what that node had at one moment, never a mixture.

A node is *whole* while its stream is followed and has caught up. Else it is *partial* since a time: what was known of
it last is kept and marked, because not to see a node is no sign that its sandboxes ended. Only a node that has left
the table is taken out.

Names that sandboxes hold which nobody is shown yet (`taken`) are known in the same way, and kept as those are.

Sandboxes have one record (`Entry`) each, found by id, by owner, by name, by pool and by node. An entry is never
changed, a new one takes its place; so what is made from one, an encoded answer for example, can be kept with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from greenroom.fleet.warm import Pool, WarmIndex
from greenroom.wire.changes import Beat, Counted, Frame, Gone, Held, HeldName, Position, Put, Whole
from greenroom.wire.messages import Listed, PoolCounts

MOST_SANDBOXES = 200_000
"""Of one node; a stream that brings more is refused."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})
Observer = Callable[["Entry | None", "Entry | None"], None]
"""Hears of a sandbox's entry as it was and as it is: None for one that was not there before, or is no more."""


class NodeView:
    """One node as it is seen. Only the view changes it."""

    __slots__ = ("_head", "_open", "_parts", "code", "entries", "held", "name", "pools", "position", "since")

    def __init__(self, code: str, name: str, now: float) -> None:
        self.code = code
        self.name = name
        self.position: Position | None = None
        """How far its stream was seen; None before it was at all."""
        self.since: float | None = now
        """Since when (Unix seconds) it is partial, or None while it is whole."""
        self.entries: dict[str, Entry] = {}
        self.held: dict[str, HeldName] = {}
        """By the id of the sandbox that is to have it."""
        self.pools: dict[Pool, PoolCounts] = {}
        self._open = False
        """The stream is followed, without a gap so far."""
        self._head = 0
        """The change that it must have seen to have caught up."""
        self._parts: list[Whole] = []
        """Those that came of a whole that is not complete yet."""

    def __repr__(self) -> str:
        state = "whole" if self.since is None else f"partial since {self.since:.3f}"
        return f"<NodeView {self.name} {self.code} {self.position} sandboxes={len(self.entries)} {state}>"


class Entry:
    """A sandbox, where it is, and the version of the view with which it came to be so."""

    __slots__ = ("_fragments", "node", "sandbox", "version")

    def __init__(self, sandbox: Listed, node: NodeView, version: int) -> None:
        self.sandbox = sandbox
        self.node = node
        self.version = version
        self._fragments: dict[Hashable, bytes] | None = None

    def __repr__(self) -> str:
        return f"<Entry {self.sandbox.sandbox_id} on {self.node.name} version={self.version}>"

    @property
    def partial(self) -> bool:
        """Whether this is only what was known last."""
        return self.node.since is not None

    def fragment(self, kind: Hashable, make: Callable[[Listed], bytes]) -> bytes:
        """What `make` makes of the sandbox; made once for each `kind`, of which there should be few."""
        if self._fragments is None:
            self._fragments = {}
        made = self._fragments.get(kind)
        if made is None:
            made = self._fragments[kind] = make(self.sandbox)
        return made


class View:
    """See the module. Nodes are named by their codes. `warm` is told of pools' numbers, and of nodes that are lost."""

    def __init__(self, warm: WarmIndex | None = None) -> None:
        self.version = 0
        """Rises with each change of anything that can be seen here."""
        self._warm = warm
        self._nodes: dict[str, NodeView] = {}
        self._by_id: dict[str, Entry] = {}
        self._by_owner: dict[str, dict[str, Entry]] = {}
        self._by_pool: dict[Pool, dict[str, Entry]] = {}
        self._by_name: dict[tuple[str, str], Entry] = {}
        self._held: dict[tuple[str, str], int] = {}
        """How many sandboxes hold an owner's name; more than one only where nodes do not agree."""
        self._doubles: dict[str, set[str]] = {}
        """Codes of the nodes of an id that more than one has shown: one that is being moved."""
        self._observers: list[Observer] = []

    def __repr__(self) -> str:
        return f"<View version={self.version} nodes={len(self._nodes)} sandboxes={len(self._by_id)}>"

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_id.values())

    def statistics(self) -> dict[str, int]:
        """Nodes, those that are partial, and sandboxes."""
        partial = sum(node.since is not None for node in self._nodes.values())
        return {"nodes": len(self._nodes), "partial": partial, "sandboxes": len(self._by_id)}

    # What there is

    def get(self, sandbox_id: str) -> Entry | None:
        """The sandbox with this id."""
        return self._by_id.get(sandbox_id)

    def named(self, owner: str, name: str) -> Entry | None:
        """The owner's sandbox of this name."""
        return self._by_name.get((owner, name))

    def taken(self, owner: str, name: str) -> bool:
        """Whether a sandbox of the owner has this name, or one will have it whose claim is not over yet."""
        return (owner, name) in self._by_name or (owner, name) in self._held

    def of_owner(self, owner: str) -> Mapping[str, Entry]:
        """An owner's sandboxes by id, in no order; not to be kept."""
        return self._by_owner.get(owner, _NOTHING)

    def of_pool(self, pool: Pool) -> Mapping[str, Entry]:
        """Sandboxes of a template and size, by id, in no order; not to be kept."""
        return self._by_pool.get(pool, _NOTHING)

    def node(self, code: str) -> NodeView | None:
        """A node of the table."""
        return self._nodes.get(code)

    def nodes(self) -> Mapping[str, NodeView]:
        """All nodes of the table by their codes; not to be kept."""
        return self._nodes

    def partial(self) -> dict[str, float]:
        """Nodes that cannot be read now, by code, and since when (Unix seconds)."""
        return {node.code: node.since for node in self._nodes.values() if node.since is not None}

    def observe(self, observer: Observer) -> None:
        """Let somebody hear of every change of an entry, in order, once the indexes have it. It must not change the
        view, and raises nothing."""
        self._observers.append(observer)

    # What happens

    def join(self, code: str, name: str, now: float) -> None:
        """A node is in the table; it is partial until it was read. Again is no harm, and may bring another name."""
        node = self._nodes.get(code)
        if node is None:
            self._nodes[code] = NodeView(code, name, now)
            self.version += 1
        elif node.name != name:
            node.name = name
            self.version += 1

    def leave(self, code: str) -> None:
        """A node has left the table: what it had is no more."""
        node = self._nodes.pop(code, None)
        if node is None:
            return
        self.version += 1
        for entry in list(node.entries.values()):
            self._remove(node, entry)
        for sandbox_id in list(node.held):
            self._free(node, sandbox_id)
        if self._warm is not None:
            self._warm.forget(code)

    def lost(self, code: str, now: float) -> None:
        """A node's stream has broken off at `now` (Unix seconds)."""
        node = self._nodes.get(code)
        if node is None:
            return
        node._open, node._parts = False, []
        if node.since is None:
            node.since = now
            self.version += 1
            if self._warm is not None:
                # A node that does not say what it has is not sent claims for it.
                self._warm.forget(code)

    def apply(self, code: str, frame: Frame, now: float) -> bool:
        """Take what a node's stream brings. False when it does not follow from what was seen: the node is partial
        from then on, and its stream has to be asked for anew from `position` on."""
        node = self._nodes.get(code)
        if node is None:
            return False
        if self._fits(node, frame):
            return True
        self.lost(code, now)
        return False

    def _fits(self, node: NodeView, frame: Frame) -> bool:
        if isinstance(frame, Whole):
            return self._part(node, frame)
        position = node.position
        if node._parts:
            # What was sent before the whole may still come twice; nothing new comes before it is complete.
            first = node._parts[0]
            return frame.seq <= first.seq and frame.stream in (
                first.stream,
                None if position is None else position.stream,
            )
        if position is None or frame.stream != position.stream:
            return False
        if isinstance(frame, Beat):
            return self._beat(node, position, frame)
        if not node._open:
            return False
        if frame.seq <= position.seq:
            return True
        if frame.seq != position.seq + 1:
            return False
        node.position = Position(position.stream, frame.seq)
        match frame:
            case Put(sandbox=sandbox):
                self._put(node, sandbox)
            case Gone(sandbox_id=sandbox_id):
                if (entry := node.entries.get(sandbox_id)) is not None:
                    self.version += 1
                    self._remove(node, entry)
                self._free(node, sandbox_id)
            case Held(name=name):
                self._hold(node, name)
            case Counted(pool=pool):
                self._count(node, pool)
        self._caught_up(node)
        return True

    def _beat(self, node: NodeView, position: Position, beat: Beat) -> bool:
        if not node._open:
            if beat.seq != position.seq:
                return False
            node._open = True
        elif beat.seq > position.seq:
            return False
        node._head = max(node._head, beat.head)
        self._caught_up(node)
        return True

    def _caught_up(self, node: NodeView) -> None:
        if node.since is None or node.position is None or node.position.seq < node._head:
            return
        node.since = None
        self.version += 1
        for pool in node.pools.values():
            self._tell_warm(node, pool)

    def _part(self, node: NodeView, whole: Whole) -> bool:
        if whole.stream[: len(node.code)] != node.code:
            return False  # another node has its address now
        position, parts = node.position, node._parts
        if parts and (whole.stream, whole.seq) == (parts[0].stream, parts[0].seq):
            if whole.part < len(parts):
                return True
        elif node._open and position is not None and whole.stream == position.stream:
            if whole.seq <= position.seq:
                return True
            parts = node._parts = []
        else:
            parts = node._parts = []
        there = sum(len(part.sandboxes) + len(part.held) for part in [*parts, whole])
        if whole.part != len(parts) or there > MOST_SANDBOXES:
            return False
        parts.append(whole)
        if not whole.more:
            self._replace(node, parts)
        return True

    def _replace(self, node: NodeView, parts: list[Whole]) -> None:
        """All there is on a node, in the place of what was known of it. What is the same stays as it is."""
        told = {sandbox.sandbox_id: sandbox for part in parts for sandbox in part.sandboxes}
        for sandbox_id in [each for each in node.entries if each not in told]:
            self.version += 1
            self._remove(node, node.entries[sandbox_id])
        for sandbox in told.values():
            self._put(node, sandbox)
        held = {name.sandbox_id: name for part in parts for name in part.held}
        for sandbox_id in [each for each in node.held if each not in held]:
            self._free(node, sandbox_id)
        for name in held.values():
            self._hold(node, name)
        pools = [pool for part in parts for pool in part.pools]
        node.pools = {(pool.template, pool.size): pool for pool in pools}
        if self._warm is not None:
            self._warm.forget(node.code)
        last = parts[-1]
        if node.position is None or node.position.stream != last.stream:
            node._head = 0
        node.position, node._open, node._parts = Position(last.stream, last.seq), True, []
        self.version += 1
        if node.since is None:
            for pool in node.pools.values():
                self._tell_warm(node, pool)
        self._caught_up(node)

    def _count(self, node: NodeView, pool: PoolCounts) -> None:
        node.pools[pool.template, pool.size] = pool
        self.version += 1
        if node.since is None:
            self._tell_warm(node, pool)

    def _tell_warm(self, node: NodeView, pool: PoolCounts) -> None:
        if self._warm is not None:
            self._warm.told(node.code, (pool.template, pool.size), pool.warm)

    # The indexes

    def _hold(self, node: NodeView, name: HeldName) -> None:
        if node.held.get(name.sandbox_id) == name:
            return
        self._free(node, name.sandbox_id)
        self.version += 1
        node.held[name.sandbox_id] = name
        key = (name.owner, name.name)
        self._held[key] = self._held.get(key, 0) + 1

    def _free(self, node: NodeView, sandbox_id: str) -> None:
        """A sandbox holds no name any more; most never did."""
        if (name := node.held.pop(sandbox_id, None)) is None:
            return
        self.version += 1
        key = (name.owner, name.name)
        left = self._held.pop(key) - 1
        if left:
            self._held[key] = left

    def _put(self, node: NodeView, sandbox: Listed) -> None:
        self._put_entry(node, sandbox)
        # Shown first: between the two the name is not free.
        self._free(node, sandbox.sandbox_id)

    def _put_entry(self, node: NodeView, sandbox: Listed) -> None:
        before = node.entries.get(sandbox.sandbox_id)
        if before is not None and before.sandbox == sandbox:
            return
        self.version += 1
        shown = self._by_id.get(sandbox.sandbox_id)
        entry = node.entries[sandbox.sandbox_id] = Entry(sandbox, node, self.version)
        self._index(entry)
        for observer in self._observers:
            observer(shown, entry)

    def _remove(self, node: NodeView, entry: Entry) -> None:
        sandbox_id = entry.sandbox.sandbox_id
        del node.entries[sandbox_id]
        was_shown = self._by_id.get(sandbox_id) is entry
        if was_shown:
            self._unindex(entry)
        self._show_another(node, sandbox_id)
        if was_shown:
            for observer in self._observers:
                observer(entry, self._by_id.get(sandbox_id))

    def _show_another(self, node: NodeView, sandbox_id: str) -> None:
        """A node has a sandbox no more; if another has it as well, that is where it is."""
        if (codes := self._doubles.get(sandbox_id)) is None:
            return
        codes.discard(node.code)
        for code in codes:
            other = self._nodes[code].entries[sandbox_id] if code in self._nodes else None
            if other is not None and sandbox_id not in self._by_id:
                self._index(other)
        if len(codes) < 2:
            del self._doubles[sandbox_id]

    def _index(self, entry: Entry) -> None:
        sandbox = entry.sandbox
        sandbox_id = sandbox.sandbox_id
        before = self._by_id.get(sandbox_id)
        if before is not None:
            self._unindex(before)
            if before.node is not entry.node:
                self._doubles.setdefault(sandbox_id, set()).update((before.node.code, entry.node.code))
        self._by_id[sandbox_id] = entry
        self._by_owner.setdefault(sandbox.owner, {})[sandbox_id] = entry
        self._by_pool.setdefault((sandbox.template, sandbox.size.name), {})[sandbox_id] = entry
        if sandbox.name:
            self._by_name[sandbox.owner, sandbox.name] = entry

    def _unindex(self, entry: Entry) -> None:
        sandbox = entry.sandbox
        del self._by_id[sandbox.sandbox_id]
        _take(self._by_owner, sandbox.owner, sandbox.sandbox_id)
        _take(self._by_pool, (sandbox.template, sandbox.size.name), sandbox.sandbox_id)
        name = (sandbox.owner, sandbox.name)
        if sandbox.name and self._by_name.get(name) is entry:
            del self._by_name[name]


def _take(index: dict[Any, dict[str, Entry]], key: Hashable, sandbox_id: str) -> None:
    """Take an entry out of an index, and its key with the last."""
    del index[key][sandbox_id]
    if not index[key]:
        del index[key]
