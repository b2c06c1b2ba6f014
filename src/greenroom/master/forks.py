"""Forks on their way to the node that makes them: names and quotas are looked after as a claim's are.

Only the node of the sandbox that is forked can make them, so there is nothing to choose. Either all of them are let
through or none is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from greenroom.errors import NodeUnavailable, NotFound, OutcomeUnknown, SandboxEnded, UnknownSandbox
from greenroom.fleet.following import Following
from greenroom.fleet.settling import Settling
from greenroom.fleet.view import View
from greenroom.master.admission import Admission
from greenroom.master.claims import ASK_DEADLINE, AUTO
from greenroom.master.inflight import Ticket
from greenroom.master.membership import Membership
from greenroom.wire.calling import RoleClient
from greenroom.wire.ids import is_sandbox_id, node_code_of
from greenroom.wire.messages import ClaimRequest, ForkList, ForkRequest, Listed, NodeStatus

SEEN_DEADLINE = 2.0
"""Seconds to wait for the view to show the sandbox that is forked, which was perhaps made a moment ago."""
SLACK = 3.0
"""Seconds that an api waits longer than its master."""


class Forks:
    """Lets forks through. `deadline` is how long the api waits, in seconds."""

    def __init__(
        self,
        client: RoleClient,
        membership: Membership,
        view: View,
        following: Following,
        settling: Settling,
        admission: Admission,
        deadline: float,
    ) -> None:
        self._client = client
        self._membership = membership
        self._view = view
        self._following = following
        self._settling = settling
        self._admission = admission
        self._deadline = max(1.0, deadline - SLACK)

    async def fork(self, sandbox_id: str, request: ForkRequest) -> ForkList:
        """Make forks of a sandbox. Raises what its node answered, or UnknownSandbox, NodeUnavailable, OutcomeUnknown,
        NameTaken, QuotaExceeded."""
        node = self._node(sandbox_id)
        if not await self._made(node, request):
            source = await self._source(sandbox_id)
            return await self._admitted(node, source, request)
        return await self._send(node, sandbox_id, request)

    def _node(self, sandbox_id: str) -> NodeStatus:
        home = self._membership.of_code(node_code_of(sandbox_id)) if is_sandbox_id(sandbox_id) else None
        if home is None:
            raise UnknownSandbox(f"there is no sandbox {sandbox_id[:40]!r}")
        if not home.live:
            raise NodeUnavailable("the node that has this sandbox is not there at the moment")
        return home.status

    async def _made(self, node: NodeStatus, request: ForkRequest) -> bool:
        """Whether the node has carried this request out before: then it answers again, and makes nothing."""
        if not request.keys or request.keys[0].startswith(AUTO):
            return False
        try:
            await self._client.call(
                "GET", f"{node.api_url}/v1/claims/{request.keys[0]}", object, deadline=ASK_DEADLINE
            )
        except NotFound:
            return False
        except SandboxEnded:
            return True
        return True

    async def _source(self, sandbox_id: str) -> Listed:
        entry = self._view.get(sandbox_id)
        if entry is None:
            await self._following.settled([node_code_of(sandbox_id)], SEEN_DEADLINE)
            entry = self._view.get(sandbox_id)
        if entry is None:
            raise UnknownSandbox(f"there is no sandbox {sandbox_id!r}")
        return entry.sandbox

    async def _admitted(self, node: NodeStatus, source: Listed, request: ForkRequest) -> ForkList:
        tickets: list[Ticket] = []
        async with contextlib.AsyncExitStack() as stack:
            try:
                for number, key in enumerate(request.keys):
                    claim = ClaimRequest(
                        key=key,
                        template=source.template,
                        size=source.size,
                        ttl=request.ttl,
                        owner=source.owner,
                        name=request.names[number] if number < len(request.names) else "",
                    )
                    tickets.append(await stack.enter_async_context(self._admission.admit(claim)))
                answer = await self._send(node, source.sandbox_id, request)
            except (OutcomeUnknown, asyncio.CancelledError):
                for ticket in tickets:
                    self._admission.lost(ticket, self._deadline)
                raise
            except BaseException:
                for ticket in tickets:
                    self._admission.failed(ticket)
                raise
            for number, ticket in enumerate(tickets):
                made = answer.forks[number].sandbox if number < len(answer.forks) else None
                if made is None:
                    self._admission.failed(ticket)
                else:
                    self._admission.answered(ticket, made.sandbox_id)
            self._settling.after(node.code, time.monotonic(), lambda: self._told(tickets))
            return answer

    def _told(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._admission.told(ticket)

    async def _send(self, node: NodeStatus, sandbox_id: str, request: ForkRequest) -> ForkList:
        url = f"{node.api_url}/v1/sandboxes/{sandbox_id}/fork"
        return await self._client.call("POST", url, ForkList, request, deadline=self._deadline)
