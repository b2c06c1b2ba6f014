"""A claim's way to a node: choose, send, and never twice.

What may be repeated follows from what is known. A claim that could not be *sent*, or that its node refused,
is free to go to another node. One whose answer was lost may exist, so it is not sent elsewhere: the caller is
told that the outcome is unknown, and the same key leads back to the same node.

Keys that a client chose (all but those beginning with `auto-`, which the api draws for one request) meet
here: claims with the same key go one after the other, to the node that had the key. A master that does not
know a key asks every live node before it creates, since another master or an earlier self may have placed it;
while one of them cannot be asked, the key waits (503). The memory of keys is bounded and only saves that
question.

Names and quotas are looked after by `admission`, before any node is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from greenroom.config import ClaimsConfig
from greenroom.errors import (
    GreenroomError,
    NodeUnavailable,
    NotFound,
    OutcomeUnknown,
    PoolDry,
    SandboxEnded,
    TemporaryError,
    UnknownSnapshot,
)
from greenroom.fleet.settling import Settling
from greenroom.fleet.warm import Pool
from greenroom.master.admission import Admission
from greenroom.master.catalogue import Catalogue
from greenroom.master.inflight import Ticket
from greenroom.master.membership import Membership
from greenroom.master.metrics import PLACEMENTS
from greenroom.master.placement import Placement
from greenroom.master.turns import Turns
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
DRY_AGAIN = 2.0
"""Seconds after which a claim that no pool could serve may be tried again."""
_LOOK_AGAIN = 0.05
"""Seconds between looks for a node that keeps a pool, while none does."""


def _home(request: ClaimRequest) -> str:
    """The code of the node that keeps the snapshot of a claim. Raises UnknownSnapshot."""
    if not is_snapshot_id(request.snapshot):
        raise UnknownSnapshot(f"there is no snapshot {request.snapshot[:40]!r}")
    return node_code_of(request.snapshot)


class Claims:
    """Places claims on nodes. `arrived` hears of each claim on a pool."""

    def __init__(
        self,
        client: RoleClient,
        membership: Membership,
        placement: Placement,
        settling: Settling,
        admission: Admission,
        catalogue: Catalogue,
        config: ClaimsConfig,
        arrived: Callable[[Pool], None] = lambda _pool: None,
    ) -> None:
        self._client = client
        self._membership = membership
        self._placement = placement
        self._settling = settling
        self._admission = admission
        self._catalogue = catalogue
        self._config = config
        self._arrived = arrived
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._turns = Turns()

    def statistics(self) -> dict[str, int]:
        """How many keys are remembered, and how many have a claim under way."""
        return {"remembered": len(self._homes), "under_way": len(self._turns)}

    async def claim(self, request: ClaimRequest) -> Sandbox:
        """Place one claim. Raises what its node answered, or NodeUnavailable, PoolDry, OutcomeUnknown, NameTaken,
        QuotaExceeded."""
        if not request.snapshot:
            template = await self._catalogue.template(request.template)
            request = msgspec.structs.replace(request, template=template.name)
        if request.key.startswith(AUTO):
            return await self._admitted(request)
        longest = request.wait + self._config.handover_deadline + SLACK
        async with self._turns.turn(request.key, longest, "this idempotency key"):
            home = self._remembered(request.key)
            if home is None:
                home = await self._ask(request.key)
            if home is None:
                return await self._admitted(request)
            self._remember(request.key, home.name)
            self._admission.check_again(request, home.code)
            return await self._send(home, request, request.wait)

    async def _admitted(self, request: ClaimRequest) -> Sandbox:
        """Place a claim whose name is free and which is within its owner's quotas."""
        longest = request.wait + self._config.handover_deadline + SLACK
        async with self._admission.admit(request) as ticket:
            try:
                sandbox = await self._place(request, ticket)
            except (OutcomeUnknown, asyncio.CancelledError):
                self._admission.lost(ticket, longest)
                raise
            except BaseException:
                self._admission.failed(ticket)
                raise
            self._admission.answered(ticket, sandbox.sandbox_id)
            return sandbox

    async def _place(self, request: ClaimRequest, ticket: Ticket) -> Sandbox:
        if request.snapshot:
            # Its node is the only one that has it; whether it can is for it to say.
            home = self._membership.of_code(_home(request))
            if home is None or not home.live:
                raise NodeUnavailable("the node that has this snapshot is not there at the moment")
            self._remember(request.key, home.status.name)
            sandbox = await self._send(home.status, request, request.wait)
            self._settling.after(home.status.code, time.monotonic(), lambda: self._admission.told(ticket))
            return sandbox
        pool = (request.template, request.size.name)
        if request.warm != "never":
            self._arrived(pool)
        ends = time.monotonic() + request.wait
        tried: list[str] = []
        dry: PoolDry | None = None
        last: TemporaryError = NodeUnavailable("no node can take a sandbox at the moment")
        while True:
            left = max(0.0, ends - time.monotonic())
            over = dry is not None and left < _LOOK_AGAIN
            node = self._placement.choose(pool, tried, request.warm, warm_only=over)
            if node is None and request.warm == "require" and not tried and left > 0:
                # A pool may be declared in the moment before, or its nodes be about to come.
                await asyncio.sleep(min(left, _LOOK_AGAIN))
                continue
            if node is None:
                if request.warm == "require" and not tried:
                    raise _not_kept(request)
                raise last if dry is None else _of_pool(request, dry)
            code = node.code
            tried.append(code)
            self._remember(request.key, node.name)
            settle = self._settlement(code, pool)
            try:
                sandbox = await self._send(node, request, request.wait if dry is None else left)
            except NodeUnavailable as error:
                settle()
                self._homes.pop(request.key, None)
                last = error
            except PoolDry as error:
                # Its answer says where its stream stood: from there on the view knows that it is dry.
                self._settling.after(code, time.monotonic(), settle)
                self._homes.pop(request.key, None)
                dry = dry or error
            except BaseException:
                settle()
                raise
            else:
                self._settling.after(code, time.monotonic(), settle)
                self._settling.after(code, time.monotonic(), lambda: self._admission.told(ticket))
                return sandbox

    def _settlement(self, code: str, pool: Pool) -> Callable[[], None]:
        return lambda: self._placement.settle(code, pool)

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


def _not_kept(request: ClaimRequest) -> PoolDry:
    """No node keeps the pool that a claim insists on."""
    kept = f"{request.template} sandboxes of size {request.size.name}"
    if request.pool:
        text = (
            f"no node keeps the {kept} of SandboxWarmPool {request.pool!r} yet; its conditions say why, try again when "
            "it is ready, or ask without insisting on a warm one"
        )
    else:
        text = (
            f"no node keeps {kept} warm; declare a warm pool of them, or ask without insisting on a warm one"
        )
    return PoolDry(text, retry_after=DRY_AGAIN)


def _of_pool(request: ClaimRequest, dry: PoolDry) -> PoolDry:
    """What a node said of its pool, and of which SandboxWarmPool that is."""
    if not request.pool:
        return dry
    return PoolDry(f"SandboxWarmPool {request.pool!r}: {dry.message}", retry_after=dry.retry_after)
