"""The fleet as the api sees it: the node table kept by long polling, and calls to nodes and masters.

Reads and changes of a sandbox go straight to its node, which the sandbox's id names: no master is on that
path, and an api that has seen the table once goes on working while every master is away. Only a create, and a fork,
ask a master: it places, and knows which names and how much of a quota are left. Lists ask nobody: they are
answered from what the nodes have told (`seen`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from greenroom.api.seen import Seen
from greenroom.config import Config
from greenroom.errors import (
    GreenroomError,
    NodeUnavailable,
    OutcomeUnknown,
    UnknownSandbox,
    UnknownSnapshot,
    UnknownTemplate,
)
from greenroom.wire.calling import RoleClient
from greenroom.wire.ids import is_sandbox_id, is_snapshot_id, node_code_of
from greenroom.wire.messages import (
    ClaimRequest,
    DeclaredChange,
    ForkList,
    ForkRequest,
    Listed,
    Network,
    NodeInfo,
    NodeList,
    Past,
    PauseRequest,
    Resumed,
    ResumeRequest,
    RollbackRequest,
    Sandbox,
    SnapshotInfo,
    SnapshotList,
    SnapshotRequest,
    Template,
    TimeoutRequest,
    listed,
)
from greenroom.wire.tasks import spawn

_log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_WAIT = 25.0
"""Seconds one long poll of the node table waits; a master answers within 30."""
POLL_SLACK = 5.0
"""Seconds beyond that until a master that says nothing is given up."""
RETRY_FIRST, RETRY_LAST = 0.1, 2.0
"""Seconds between rounds over all masters while none answers: doubling from the first to the last."""
CLAIM_SLACK = 10.0
"""Seconds that a create may take beyond queue and hand-over, 5 more than its node gets from the master."""
TEMPLATES_FOR = 5.0
"""Seconds a template is used without asking a master again."""


class NodeTable(msgspec.Struct, frozen=True):
    """The node table at one revision, by node code."""

    revision: int
    by_code: dict[str, NodeInfo]

    @classmethod
    def of(cls, nodes: NodeList) -> NodeTable:
        """Index a master's list."""
        return cls(nodes.revision, {info.status.code: info for info in nodes.nodes})


class Fleet:
    """Knows the nodes and calls them. `follow` must run for the table to stay current."""

    def __init__(self, client: RoleClient, masters: list[str], config: Config) -> None:
        self._client = client
        self._masters = masters
        self._config = config
        self._deadline = config.api.call_deadline
        self._table: NodeTable | None = None
        self.seen = Seen(client)
        self._master = 0
        self._refreshing: asyncio.Task[GreenroomError | None] | None = None
        self._templates: dict[str, Template] = {}
        self._templates_until = 0.0

    def __repr__(self) -> str:
        table = self._table
        known = "no table yet" if table is None else f"revision {table.revision}, {sorted(table.by_code)}"
        return f"Fleet(masters={self._masters}, {known})"

    def address(self, code: str) -> str:
        """The URL of a node's API as the table has it, or an empty text."""
        info = None if self._table is None else self._table.by_code.get(code)
        return "" if info is None else info.status.api_url

    def live(self) -> list[str] | None:
        """Codes of the nodes that are alive as far as is known; None before the table was read."""
        if self._table is None:
            return None
        return [code for code, info in self._table.by_code.items() if info.live]

    async def follow(self) -> None:
        """Keep the node table current by long polling one master, the next one when it fails.

        Runs until it is cancelled.
        """
        pause, failed, after = RETRY_FIRST, 0, 0
        while True:
            url = f"{self._masters[self._master]}/v1/nodes?after={after}&wait={POLL_WAIT}"
            try:
                nodes = await self._client.call("GET", url, NodeList, deadline=POLL_WAIT + POLL_SLACK)
            except GreenroomError as error:
                if failed == 0:
                    _log.warning(
                        "the node table cannot be followed, asking the next master: %s", error.message
                    )
                failed += 1
                after = 0  # revisions of two masters do not compare
                self._master = (self._master + 1) % len(self._masters)
                if failed >= len(self._masters):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, RETRY_LAST)
            else:
                pause, failed, after = RETRY_FIRST, 0, nodes.revision
                self._learn(nodes)

    def _learn(self, nodes: NodeList) -> None:
        self._table = NodeTable.of(nodes)
        self.seen.learn(nodes)

    async def table(self) -> NodeTable:
        """The node table, asked for when not known yet. Raises NodeUnavailable when no master answers."""
        if self._table is None:
            await self._refresh()
        if self._table is None:
            raise NodeUnavailable("the nodes are not known yet")
        return self._table

    async def _refresh(self) -> None:
        """Read the table now. Requests that need it at the same time share one call."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = spawn(self._read(), "node-table")
        error = await asyncio.shield(self._refreshing)
        if error is not None:
            raise NodeUnavailable(error.message) from error

    async def _read(self) -> GreenroomError | None:
        """Read the table; an error is returned, because each of those who share the call raises it."""

        async def read(master: str) -> NodeList:
            return await self._client.call("GET", f"{master}/v1/nodes", NodeList, deadline=self._deadline)

        try:
            self._learn(await self._any_master(read))
        except GreenroomError as error:
            return error
        return None

    async def _any_master(self, call: Callable[[str], Awaitable[T]]) -> T:
        """What the first master that can be reached answers, beginning with the one in use."""
        last: GreenroomError = NodeUnavailable("no master is configured")
        # `follow` may turn to another one meanwhile, and each is to be asked.
        for master in [*self._masters[self._master :], *self._masters[: self._master]]:
            try:
                return await call(master)
            except NodeUnavailable as error:
                last = error
        raise last

    async def _node_of(self, sandbox_id: str) -> NodeInfo:
        """The node an id is homed on. Raises UnknownSandbox, or NodeUnavailable when that cannot be told."""
        if not is_sandbox_id(sandbox_id):
            raise UnknownSandbox(f"there is no sandbox {sandbox_id[:40]!r}")
        code = node_code_of(sandbox_id)
        info = (await self.table()).by_code.get(code)
        if info is None:
            # A node that registered a moment ago: another api may have handed out its sandbox already.
            await self._refresh()
            info = (await self.table()).by_code.get(code)
        if info is None:
            raise UnknownSandbox(f"there is no sandbox {sandbox_id!r}")
        return info

    async def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox as its node reports it. Raises UnknownSandbox or NodeUnavailable."""
        node = await self._node_of(sandbox_id)
        url = f"{node.status.api_url}/v1/sandboxes/{sandbox_id}"
        return await self._client.call("GET", url, Sandbox, deadline=self._deadline)

    async def delete(self, sandbox_id: str, *, ended: bool = False) -> None:
        """End a sandbox; with `ended` also drop what stays of one that has ended. A lost answer is resolved by looking
        whether it is gone."""
        node = await self._node_of(sandbox_id)
        url = f"{node.status.api_url}/v1/sandboxes/{sandbox_id}{'?ended=1' if ended else ''}"
        try:
            await self._client.call("DELETE", url, type(None), deadline=self._deadline)
        except OutcomeUnknown:
            try:
                await self._client.call("GET", url, msgspec.Raw, deadline=self._deadline)
            except UnknownSandbox:
                return
            raise

    async def set_timeout(self, sandbox_id: str, request: TimeoutRequest) -> Sandbox:
        """Move a sandbox's end. May be repeated: the end only counts from a later now."""
        node = await self._node_of(sandbox_id)
        url = f"{node.status.api_url}/v1/sandboxes/{sandbox_id}/timeout"
        return await self._client.call("POST", url, Sandbox, request, deadline=self._deadline)

    async def set_network(self, sandbox_id: str, network: Network) -> Sandbox:
        """Replace a sandbox's egress rules. May be repeated: the same rules again change nothing."""
        node = await self._node_of(sandbox_id)
        url = f"{node.status.api_url}/v1/sandboxes/{sandbox_id}/network"
        return await self._client.call("PUT", url, Sandbox, network, deadline=self._deadline)

    async def declare(self, sandbox_id: str, change: DeclaredChange) -> Listed:
        """Replace what is declared of a sandbox. Raises StaleObject when it is not as `change` expects.

        A lost answer is resolved by looking: the record has the new revision and document, or has not.
        """
        node = await self._node_of(sandbox_id)
        url = f"{node.status.api_url}/v1/sandboxes/{sandbox_id}/declared"
        try:
            return await self._client.call("PUT", url, Listed, change, deadline=self._deadline)
        except OutcomeUnknown:
            found = await self.get(sandbox_id)
            now = found.declared
            if (
                now is None
                or now.revision != change.expect + 1
                or bytes(now.document) != bytes(change.declared.document)
            ):
                raise
            return listed(found)

    async def pause(self, sandbox_id: str, request: PauseRequest) -> Sandbox:
        """Pause a sandbox. Raises AlreadyPaused, UnknownSandbox, or why it runs on."""
        return await self._sandbox_call(sandbox_id, "pause", Sandbox, request)

    async def resume(self, sandbox_id: str, ttl: float, *, memory: bool = True) -> Resumed:
        """Let a sandbox run for `ttl` seconds at least; a paused one boots, unless `memory`. May be repeated."""
        return await self._sandbox_call(sandbox_id, "resume", Resumed, ResumeRequest(ttl, memory))

    async def past(self, sandbox_id: str) -> Past:
        """Samples and log of a sandbox."""
        node = await self._node_of(sandbox_id)
        url = f"{node.status.api_url}/v1/sandboxes/{sandbox_id}/past"
        return await self._client.call("GET", url, Past, deadline=self._deadline)

    async def fork(self, sandbox_id: str, request: ForkRequest) -> ForkList:
        """Sandboxes that go on where this one stands, each provisional; the same keys give the same ones."""

        async def ask(master: str) -> ForkList:
            url = f"{master}/v1/sandboxes/{sandbox_id}/fork"
            return await self._client.call(
                "POST", url, ForkList, request, deadline=self._config.api.move_deadline
            )

        await self._node_of(sandbox_id)
        try:
            return await self._any_master(ask)
        except OutcomeUnknown as error:
            raise _unsaid("fork") from error

    async def roll_back(self, sandbox_id: str, snapshot_id: str) -> Sandbox:
        """Let a sandbox go on from a snapshot that was taken of it. May be repeated."""
        return await self._sandbox_call(sandbox_id, "rollback", Sandbox, RollbackRequest(snapshot_id))

    async def take_snapshot(self, sandbox_id: str, request: SnapshotRequest) -> SnapshotInfo:
        """Save a sandbox, which goes on."""
        return await self._sandbox_call(sandbox_id, "snapshots", SnapshotInfo, request)

    async def _sandbox_call(self, sandbox_id: str, what: str, kind: type[T], body: object) -> T:
        """A call that moves a sandbox's memory to disk or back, for which its node gets longer."""
        node = await self._node_of(sandbox_id)
        url = f"{node.status.api_url}/v1/sandboxes/{sandbox_id}/{what}"
        try:
            return await self._client.call("POST", url, kind, body, deadline=self._config.api.move_deadline)
        except OutcomeUnknown as error:
            raise _unsaid(what) from error

    async def snapshot(self, owner: str, ref: str) -> SnapshotInfo:
        """The owner's snapshot with this id or name (the newest of that name). Raises UnknownSnapshot."""
        if is_snapshot_id(ref):
            node = (await self.table()).by_code.get(node_code_of(ref))
            if node is not None:
                url = f"{node.status.api_url}/v1/snapshots/{ref}"
                found = await self._client.call("GET", url, SnapshotInfo, deadline=self._deadline)
                if found.owner == owner:
                    return found
            raise UnknownSnapshot(f"there is no snapshot {ref!r}")
        named = [
            snapshot
            for snapshot in await self.snapshots()
            if snapshot.owner == owner
            and snapshot.name
            and snapshot.name.removesuffix(":default") == ref.removesuffix(":default")
        ]
        if not named:
            raise UnknownSnapshot(f"there is no snapshot {ref[:80]!r}")
        return max(named, key=lambda snapshot: snapshot.created_at)

    async def snapshots(self) -> list[SnapshotInfo]:
        """All snapshots on live nodes. Raises NodeUnavailable when one cannot be read."""
        answers = await self._of_live("/v1/snapshots", SnapshotList, "snapshots")
        return [snapshot for answer in answers for snapshot in answer.snapshots]

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove a snapshot. Raises UnknownSnapshot."""
        node = (await self.table()).by_code.get(node_code_of(snapshot_id))
        if node is None:
            raise UnknownSnapshot(f"there is no snapshot {snapshot_id!r}")
        url = f"{node.status.api_url}/v1/snapshots/{snapshot_id}"
        await self._client.call("DELETE", url, type(None), deadline=self._deadline)

    async def _of_live(self, path: str, kind: type[T], what: str) -> list[T]:
        """What each live node answers. Raises NodeUnavailable when one that should be alive cannot be read: leaving
        its part out would look to the client as if it had ended."""
        live = [info.status for info in (await self.table()).by_code.values() if info.live]
        answers = await asyncio.gather(
            *(
                self._client.call("GET", f"{status.api_url}{path}", kind, deadline=self._deadline)
                for status in live
            ),
            return_exceptions=True,
        )
        found: list[T] = []
        for status, answer in zip(live, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, GreenroomError):
                    raise answer
                raise NodeUnavailable(f"the {what} of node {status.name} cannot be read") from answer
            found.append(answer)
        return found

    async def sandboxes(self, owner: str) -> tuple[list[Listed], list[str]]:
        """An owner's sandboxes, and the names of nodes whose sandboxes are therefore not in it (they are dead), or
        not the latest of them.

        Raises NodeUnavailable when a node that should be alive cannot be read.
        """
        return await self.seen.of_owner(owner, list((await self.table()).by_code.values()))

    async def claim(self, request: ClaimRequest) -> Sandbox:
        """Ask a master for a sandbox; the next master only when the request cannot have been taken.

        When the answer was lost, the nodes are asked for the key once. Raises OutcomeUnknown when none has it
        (it may still be on its way), or what the master answered.
        """
        claims = self._config.claims
        deadline = request.wait + claims.handover_deadline + CLAIM_SLACK

        async def ask(master: str) -> Sandbox:
            return await self._client.call("POST", f"{master}/v1/claims", Sandbox, request, deadline=deadline)

        try:
            return await self._any_master(ask)
        except OutcomeUnknown:
            found = await self._claimed(request.key)
            if found is None:
                raise
            return found

    async def confirm(self, sandbox: Sandbox) -> Sandbox:
        """Make a provisional sandbox the client's, just before it is told of it.

        Confirming again changes nothing, so a lost answer is asked for once more. Raises NodeUnavailable when
        the sandbox was given up meanwhile (nothing is left of it: the claim may be repeated), OutcomeUnknown.
        """
        if sandbox.confirm_by is None:
            return sandbox
        node = await self._node_of(sandbox.sandbox_id)
        url = f"{node.status.api_url}/v1/sandboxes/{sandbox.sandbox_id}/confirm"
        for last in (False, True):
            try:
                return await self._client.call("POST", url, Sandbox, deadline=self._deadline)
            except UnknownSandbox as error:
                raise NodeUnavailable(
                    "the sandbox ended before it could be handed over; try again"
                ) from error
            except (OutcomeUnknown, NodeUnavailable) as error:
                if last:
                    raise OutcomeUnknown(f"the hand-over could not be confirmed: {error.message}") from error
        raise OutcomeUnknown("the hand-over was not confirmed")

    async def _claimed(self, key: str) -> Sandbox | None:
        """The sandbox that a live node has for this claim key, as far as the nodes can be asked."""
        table = await self.table()
        answers = await asyncio.gather(
            *(
                self._client.call(
                    "GET", f"{info.status.api_url}/v1/claims/{key}", Sandbox, deadline=self._deadline
                )
                for info in table.by_code.values()
                if info.live
            ),
            return_exceptions=True,
        )
        return next((answer for answer in answers if isinstance(answer, Sandbox)), None)

    async def templates(self) -> list[Template]:
        """All templates, at most `TEMPLATES_FOR` seconds old; older ones while no master answers."""
        if time.monotonic() >= self._templates_until:
            await self._read_templates()
        return list({template.template_id: template for template in self._templates.values()}.values())

    async def template(self, ref: str) -> Template:
        """The template with this id or name, with or without the tag `default`. Raises UnknownTemplate."""
        name, _, tag = ref.partition(":")
        if tag not in ("", "default"):
            raise UnknownTemplate(f"there is no template {ref!r}")
        if name not in self._templates or time.monotonic() >= self._templates_until:
            await self._read_templates()
        found = self._templates.get(name)
        if found is None:
            raise UnknownTemplate(f"there is no template {ref!r}")
        return found

    async def template_of(self, sandbox: Listed) -> Template | None:
        """The template a sandbox was made from, or None when that cannot be told now.

        A template that was seen once is taken from memory: naming it must not need a master.
        """
        name = sandbox.template
        if name not in self._templates and time.monotonic() >= self._templates_until:
            with contextlib.suppress(GreenroomError):
                await self._read_templates()
        return self._templates.get(name)

    async def _read_templates(self) -> None:
        async def read(master: str) -> list[Template]:
            return await self._client.call(
                "GET", f"{master}/v1/templates", list[Template], deadline=self._deadline
            )

        # Set before the answer: while masters are away, one request in that time waits for them, not each.
        self._templates_until = time.monotonic() + TEMPLATES_FOR
        try:
            templates = await self._any_master(read)
        except GreenroomError:
            if not self._templates:
                self._templates_until = 0.0
                raise
            return
        self._templates = {template.template_id: template for template in templates}
        self._templates |= {template.name: template for template in templates}


def _unsaid(what: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"its node did not say in time what became of it ({what}); look at the sandbox before trying again"
    )
