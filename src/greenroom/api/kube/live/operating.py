"""What is done to sandboxes for their objects: made, changed, paused, ended; and reads that have seen it.

`Platform` is what this needs of `api.nodes.Fleet`. After each deed the view is waited for, as far as the node's answer
says that its stream stood; so whoever wrote and then reads, or watches, sees it. Errors of the platform become those
of Kubernetes here, where the object is known that they are about.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.conditions import Facts
from greenroom.api.kube.live.documents import Document
from greenroom.api.kube.live.observing import Live
from greenroom.api.kube.live.shelves import LiveRow, Shelf
from greenroom.api.kube.objects import Key, Object, key_of, metadata_of
from greenroom.api.kube.status import already_exists, conflict, forbidden, not_found
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.versions import revision_of
from greenroom.errors import (
    AlreadyPaused,
    GreenroomError,
    NameTaken,
    NodeUnavailable,
    QuotaExceeded,
    SandboxEnded,
    StaleObject,
    UnknownSandbox,
)
from greenroom.fleet.view import View
from greenroom.wire.ids import node_code_of
from greenroom.wire.messages import (
    FOREVER,
    ClaimRequest,
    Declared,
    DeclaredChange,
    ForkList,
    ForkRequest,
    Listed,
    NodeInfo,
    PauseRequest,
    Resumed,
    Sandbox,
    SnapshotInfo,
    SnapshotRequest,
    Template,
    TimeoutRequest,
    listed,
)

_log = logging.getLogger(__name__)


class Sight(Protocol):
    """The part of `api.seen.Seen` that is needed."""

    view: View

    async def current(self) -> list[str]:
        """Take in what has arrived; names of nodes of which not all is known."""

    async def caught_up(self, codes: Collection[str]) -> bool:
        """Wait until these nodes' answers are in the view."""


class Table(Protocol):
    """The node table."""

    @property
    def by_code(self) -> Mapping[str, NodeInfo]:
        """The nodes."""


class Platform(Protocol):
    """The part of `api.nodes.Fleet` that is needed; see there."""

    @property
    def seen(self) -> Sight: ...

    async def table(self) -> Table: ...

    async def template(self, ref: str) -> Template: ...

    async def templates(self) -> list[Template]: ...

    async def claim(self, request: ClaimRequest) -> Sandbox: ...

    async def confirm(self, sandbox: Sandbox) -> Sandbox: ...

    async def delete(self, sandbox_id: str, *, ended: bool = False) -> None: ...

    async def declare(self, sandbox_id: str, change: DeclaredChange) -> Listed: ...

    async def pause(self, sandbox_id: str, request: PauseRequest) -> Sandbox: ...

    async def resume(self, sandbox_id: str, ttl: float, *, memory: bool = True) -> Resumed: ...

    async def set_timeout(self, sandbox_id: str, request: TimeoutRequest) -> Sandbox: ...

    async def fork(self, sandbox_id: str, request: ForkRequest) -> ForkList: ...

    async def snapshot(self, owner: str, ref: str) -> SnapshotInfo: ...

    async def take_snapshot(self, sandbox_id: str, request: SnapshotRequest) -> SnapshotInfo: ...


def new_key() -> str:
    """A claim's key, for this request alone."""
    return f"auto-{secrets.token_hex(16)}"


class Ending(NamedTuple):
    """What is declared of a sandbox's end, see `Declared`."""

    retain: bool
    retain_for: float | None = None
    shutdown_at: float | None = None

    @classmethod
    def of(cls, declared: Declared | None) -> Ending:
        """What a record says."""
        if declared is None:
            return cls(False)
        return cls(declared.retain, declared.retain_for, declared.shutdown_at)


class Operating:
    """See the module. One for all kinds of a process."""

    def __init__(self, platform: Platform, live: Live, *, wait: float, resume_ttl: float) -> None:
        self.platform = platform
        self.live = live
        self.wait = wait
        """Seconds that a claim may stand in a dry pool's queue."""
        self._resume_ttl = resume_ttl
        """Seconds for which a sandbox that was made in the other dialect runs when it is resumed in this one."""

    # Reads

    async def current(self) -> list[str]:
        """Take in what the nodes have told. Names of nodes of which not all, or not the latest, is known.

        Raises NodeUnavailable while the nodes are not known at all.
        """
        await self.platform.table()
        return await self.platform.seen.current()

    async def find(self, shelf: Shelf, key: Key) -> LiveRow | None:
        """The row with a key. Raises NodeUnavailable when it may be on a node that was never read."""
        missing = await self.current()
        row = shelf.get(key)
        if row is None and missing:
            table = await self.platform.table()
            for code, node in self.live.view.nodes().items():
                info = table.by_code.get(code)
                if node.position is None and info is not None and info.live:
                    raise NodeUnavailable(f"node {node.name} has not been read yet, which may have it")
        return row

    async def listing(self, shelf: Shelf, namespace: str) -> Listing:
        """The rows of a namespace."""
        missing = await self.current()
        return shelf.listing(namespace, missing)

    def present(self, shelf: Shelf, kind: Kind, old: Object) -> LiveRow:
        """The row that an object was made from, if what is declared is still the same.

        Raises 404 when it has gone, 409 when somebody else has changed it.
        """
        key = key_of(old)
        row = shelf.get(key)
        metadata = metadata_of(old)
        if row is None or documents.uid_of(kind, row.sandbox_id) != metadata.get("uid"):
            raise not_found(kind.subject(key[1]))
        now = documents.revision_of_listed(row.facts.listed)
        if revision_of(metadata.get("resourceVersion") or "") != revision_of(now):
            raise conflict(kind.subject(key[1]))
        return row

    @contextlib.contextmanager
    def about(self, kind: Kind, name: str) -> Iterator[None]:
        """What fails in the block is told of this object."""
        subject = kind.subject(name)
        try:
            yield
        except NameTaken as error:
            raise already_exists(subject) from error
        except QuotaExceeded as error:
            told = error.message
            raise forbidden(
                subject, told if told.startswith("exceeded quota") else f"exceeded quota: {told}"
            ) from error
        except StaleObject as error:
            raise conflict(subject) from error
        except (UnknownSandbox, SandboxEnded) as error:
            raise not_found(subject) from error

    # Deeds

    async def seen(self, sandbox_id: str) -> None:
        """Wait until what was answered for a sandbox is in the view, and so in the caches."""
        await self.platform.seen.caught_up([node_code_of(sandbox_id)])

    def row_of(self, shelf: Shelf, made: Listed) -> LiveRow:
        """The row of a sandbox that a node has just answered with: the one that is listed, or, where its node's stream
        is behind, one like it that is not."""
        key = (documents.namespace_of(made), documents.name_of(made))
        row = shelf.get(key)
        if row is not None and row.sandbox_id == made.sandbox_id:
            return row
        node = self.live.view.node(node_code_of(made.sandbox_id))
        version = self.live.clock.next(documents.revision_of_listed(made))
        return shelf.row(
            Facts(listed(made), made.node if node is None else node.name, True, made.started_at, version)
        )

    async def make(self, request: ClaimRequest, *, suspended: bool = False) -> Listed:
        """A sandbox for a request, confirmed. Raises what the claim fails by; then there is none."""
        sandbox = await self.platform.confirm(await self.platform.claim(request))
        if suspended:
            try:
                sandbox = await self.platform.pause(sandbox.sandbox_id, PauseRequest())
            except GreenroomError:
                # Nobody is told of it, so nobody would delete it.
                await self._given_back([sandbox.sandbox_id])
                raise
        await self.seen(sandbox.sandbox_id)
        return sandbox

    async def _given_back(self, sandbox_ids: Sequence[str]) -> None:
        for sandbox_id in sandbox_ids:
            try:
                await self.platform.delete(sandbox_id)
            except GreenroomError as error:
                _log.warning("sandbox %s could not be given back: %s", sandbox_id, error.message)

    async def declare(self, row: LiveRow, document: Document, wish: Ending) -> Listed:
        """Change what is declared of a sandbox, if it is not so already. Raises StaleObject."""
        before = row.facts.listed
        revision = documents.revision_of_listed(before)
        declared = documents.declared_of(
            document,
            revision=revision + 1,
            retain=wish.retain,
            retain_for=wish.retain_for,
            shutdown_at=wish.shutdown_at,
        )
        old = before.declared
        if old is not None and documents.document_of(before) == document and wish == Ending.of(old):
            return before
        after = await self.platform.declare(before.sandbox_id, DeclaredChange(revision, declared))
        await self.seen(before.sandbox_id)
        return after

    async def forever(self, listed: Listed) -> None:
        """A running sandbox shall not end at its time-out any more, if it has one, but when it is declared to."""
        lasts = listed.ends_at - listed.started_at < FOREVER / 2
        if lasts and listed.state == "running" and not listed.lifespan.auto_pause:
            await self.platform.set_timeout(listed.sandbox_id, TimeoutRequest(FOREVER))
            await self.seen(listed.sandbox_id)

    async def pause(self, listed: Listed) -> None:
        """Pause a sandbox; one that is paused stays so."""
        with contextlib.suppress(AlreadyPaused):
            await self.platform.pause(listed.sandbox_id, PauseRequest())
        await self.seen(listed.sandbox_id)

    async def resume(self, listed: Listed) -> None:
        """Resume a sandbox; one that runs goes on."""
        declared = listed.declared is not None or bool(listed.name)
        await self.platform.resume(listed.sandbox_id, FOREVER if declared else self._resume_ttl)
        await self.seen(listed.sandbox_id)

    async def end(self, listed: Listed) -> None:
        """End a sandbox; its objects go with it."""
        await self.platform.delete(listed.sandbox_id, ended=True)
        await self.seen(listed.sandbox_id)

    async def fork(self, listed: Listed, names: list[str], declared: list[Declared]) -> list[Listed]:
        """Copies of a sandbox, all of them or none. Raises what the first failed by."""
        base = new_key()
        keys = [f"{base}-fork{number}" for number in range(len(names))]
        request = ForkRequest(keys=keys, ttl=FOREVER, names=names, declared=declared)
        answer = await self.platform.fork(listed.sandbox_id, request)
        made: list[Listed] = []
        failed: GreenroomError | None = None
        for fork in answer.forks:
            if fork.sandbox is None:
                failed = failed or NodeUnavailable(f"a copy could not be made: {fork.error}")
                continue
            try:
                made.append(await self.platform.confirm(fork.sandbox))
            except GreenroomError as error:
                failed = failed or error
        if failed is not None:
            await self._given_back([each.sandbox_id for each in made])
            raise failed
        await self.seen(listed.sandbox_id)
        return made
