"""A claim's way to a node: choose, send, and never twice.

What may be repeated follows from what is known. A claim that could not be *sent*, or that its node refused,
is free to go to another node. One whose answer was lost may exist, so it is not sent elsewhere: the caller is
told that the outcome is unknown, and the same key leads back to the same node.

Keys that a client chose (all but those beginning with `auto-`, which the api draws for one request) meet
here: claims with the same key go one after the other, to the node that had the key. A master that does not
know a key asks every live node before it creates, since another master or an earlier self may have placed it;
while one of them cannot be asked, the key waits (503). The memory of keys is bounded and only saves that
question.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator

import msgspec

from greenroom.config import ClaimsConfig
from greenroom.errors import (
    GreenroomError,
    NodeUnavailable,
    NotFound,
    PoolDry,
    SandboxEnded,
    TemporaryError,
    UnknownSnapshot,
)
from greenroom.master.catalogue import Catalogue
from greenroom.master.membership import Membership
from greenroom.master.metrics import PLACEMENTS
from greenroom.master.placement import Hints
from greenroom.wire import metrics
from greenroom.wire.calling import RoleClient
from greenroom.wire.ids import is_snapshot_id, node_code_of
from greenroom.wire.messages import ClaimRequest, NodeStatus, Sandbox

AUTO = "auto-"
"""Prefix of keys drawn by the api: nobody can send them again on purpose."""
REMEMBERED = 50_000
"""Client-chosen keys kept in memory, the oldest forgotten first."""
ASK_DEADLINE = 3.0
"""Seconds for a node to say whether it has a key."""
ASK_AGAIN = 3.0
"""Seconds after which a key may be tried again. E2B's SDKs try three times more: that outlasts a lost node's
lease, after which it is no longer asked."""
SLACK = 5.0
"""Seconds beyond queue and hand-over for a node to answer a claim."""


def _home(request: ClaimRequest) -> str:
    """The code of the node that keeps the snapshot of a claim. Raises UnknownSnapshot."""
    if not is_snapshot_id(request.snapshot):
        raise UnknownSnapshot(f"there is no snapshot {request.snapshot[:40]!r}")
    return node_code_of(request.snapshot)


class Claims:
    """Places claims on nodes."""

    def __init__(
        self,
        client: RoleClient,
        membership: Membership,
        hints: Hints,
        catalogue: Catalogue,
        config: ClaimsConfig,
    ) -> None:
        self._client = client
        self._membership = membership
        self._hints = hints
        self._catalogue = catalogue
        self._config = config
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    def statistics(self) -> dict[str, int]:
        """How many keys are remembered, and how many have a claim under way."""
        return {"remembered": len(self._homes), "under_way": len(self._turns)}

    async def claim(self, request: ClaimRequest) -> Sandbox:
        """Place one claim. Raises what its node answered, or NodeUnavailable, PoolDry, OutcomeUnknown."""
        if not request.snapshot:
            template = await self._catalogue.template(request.template)
            request = msgspec.structs.replace(request, template=template.name)
        if request.key.startswith(AUTO):
            return await self._place(request)
        async with self._turn(request.key):
            home = self._remembered(request.key)
            if home is None:
                home = await self._ask(request.key)
            if home is None:
                return await self._place(request)
            self._remember(request.key, home.name)
            return await self._send(home, request, request.wait)

    async def _place(self, request: ClaimRequest) -> Sandbox:
        if request.snapshot:
            # Its node is the only one that has it; whether it can is for it to say.
            home = next((node for node in self._membership.live() if node.code == _home(request)), None)
            if home is None:
                raise NodeUnavailable("the node that has this snapshot is not there at the moment")
            self._remember(request.key, home.name)
            return await self._send(home, request, request.wait)
        pool = (request.template, request.size.name)
        ends = time.monotonic() + request.wait
        tried: list[str] = []
        dry: PoolDry | None = None
        last: TemporaryError = NodeUnavailable("no node can take a sandbox at the moment")
        while True:
            nodes = {status.name: status for status in self._membership.placeable()}
            name = self._hints.choose(nodes, pool, tried, warm_only=dry is not None)
            if name is None:
                raise dry or last
            tried.append(name)
            wait = request.wait if dry is None else max(0.0, ends - time.monotonic())
            self._hints.sent(name, pool)
            self._remember(request.key, name)
            try:
                return await self._send(nodes[name], request, wait)
            except NodeUnavailable as error:
                self._hints.not_taken(name, pool)
                self._homes.pop(request.key, None)
                last = error
            except PoolDry as error:
                self._hints.not_taken(name, pool)
                self._hints.dry(name, pool)
                self._homes.pop(request.key, None)
                dry = dry or error

    async def _send(self, node: NodeStatus, request: ClaimRequest, wait: float) -> Sandbox:
        with metrics.Outcome(PLACEMENTS):
            return await self._client.call(
                "POST",
                f"{node.api_url}/v1/claims",
                Sandbox,
                msgspec.structs.replace(request, wait=wait),
                deadline=wait + self._config.handover_deadline + SLACK,
            )

    async def _ask(self, key: str) -> NodeStatus | None:
        """The live node that has this key. Raises NodeUnavailable when one cannot say and none says yes."""

        async def has(node: NodeStatus) -> bool:
            url = f"{node.api_url}/v1/claims/{key}"
            try:
                await self._client.call("GET", url, msgspec.Raw, deadline=ASK_DEADLINE)
            except NotFound:
                return False
            except SandboxEnded:
                return True
            return True

        nodes = self._membership.live()
        answers = await asyncio.gather(*(has(node) for node in nodes), return_exceptions=True)
        silent: GreenroomError | None = None
        for node, answer in zip(nodes, answers, strict=True):
            if answer is True:
                return node
            if isinstance(answer, GreenroomError):
                silent = answer
            elif isinstance(answer, BaseException):
                raise answer
        if silent is not None:
            raise NodeUnavailable(
                "a node that may know this idempotency key cannot be asked; send the request again",
                retry_after=ASK_AGAIN,
            ) from silent
        return None

    def _remembered(self, key: str) -> NodeStatus | None:
        home = self._homes.get(key)
        if home is None or home[1] < time.monotonic():
            return None
        info = self._membership.get(home[0])
        return None if info is None else info.status

    def _remember(self, key: str, node: str) -> None:
        if key.startswith(AUTO):
            return
        self._homes[key] = (node, time.monotonic() + self._config.retention)
        self._homes.move_to_end(key)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    @contextlib.asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        """One claim with this key at a time."""
        lock, users = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._turns[key][1] - 1
            if users:
                self._turns[key] = (lock, users)
            else:
                del self._turns[key]
