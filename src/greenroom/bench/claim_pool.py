"""What the claim benchmark needs of a running platform: its public API, its pool, and that nothing is left.

The pool's target is changed through the master and its state asked of the nodes themselves, with the operator's
credential. Sandboxes are made under a mark of this run, by which what is left of them is found at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from greenroom.bench.lanes import unbroken
from greenroom.errors import GreenroomError, NodeUnavailable, RuntimeFailure, SetupError, UnknownSandbox
from greenroom.wire.calling import RoleClient
from greenroom.wire.ids import node_code_of
from greenroom.wire.messages import MasterStatus, NodeInfo, NodeStatus, PoolSpec, Sandbox, SandboxList

SETTLE_DEADLINE = 120.0
"""Seconds for the pool to reach a target; it must restore that many VMs, no more."""
SETTLE_PAUSE = 0.05
"""Seconds between two looks at the pool."""
TTL = 120
"""Seconds a sandbox lives, should even the clean-up at the end fail."""


class Platform(Protocol):
    """A client of the platform's public API. Each call is one request: what is refused counts as failed."""

    async def create_once(self, template: str, ttl: int, metadata: dict[str, str]) -> str:
        """A new sandbox; returns its id. Raises GreenroomError."""

    async def command(self, sandbox_id: str, line: str) -> int:
        """Run a command line in a sandbox that was created here; returns its exit status."""

    async def first_output(self, sandbox_id: str, line: str) -> bytes:
        """Run a command line up to its first piece of standard output, which is returned."""

    async def kill(self, sandbox_id: str) -> bool:
        """End a sandbox; False when there was none."""


class Pool:
    """One declared pool of a running platform: its target changed, its state asked of the nodes themselves."""

    def __init__(self, client: RoleClient, master_url: str, spec: PoolSpec, nodes: list[NodeInfo]) -> None:
        self._client = client
        self._master = master_url
        self.spec = spec
        self._nodes = {info.status.code: info.status.api_url for info in nodes}

    @classmethod
    async def find(cls, client: RoleClient, master_url: str, template: str) -> tuple[Pool, list[NodeInfo]]:
        """The pool of `template` and the live nodes. Raises SetupError when there is none of either."""
        status = await client.call("GET", f"{master_url}/v1/status", MasterStatus)
        spec = next((pool for pool in status.pools if pool.template == template and pool.target > 0), None)
        if spec is None:
            raise SetupError(
                f"the platform keeps no warm pool of {template}; start it with `greenroom up --warm 4`"
            )
        nodes = [info for info in status.nodes if info.live]
        if not nodes:
            raise NodeUnavailable("no node of the platform is live; see `greenroom status`")
        return cls(client, master_url, spec, nodes), nodes

    async def sandbox(self, sandbox_id: str) -> Sandbox:
        """A sandbox in its node's own words. Raises NodeUnavailable or UnknownSandbox."""
        url = self._nodes.get(node_code_of(sandbox_id))
        if url is None:
            raise NodeUnavailable("the sandbox is on a node that joined after the run had begun")
        return await self._client.call("GET", f"{url}/v1/sandboxes/{sandbox_id}", Sandbox)

    async def remove(self, metadata: dict[str, str]) -> None:
        """End every sandbox with this metadata, also one whose create was never answered."""
        wanted = metadata.items()
        for url in self._nodes.values():
            listed = await self._client.call("GET", f"{url}/v1/sandboxes", SandboxList)
            for sandbox in listed.sandboxes:
                if wanted <= sandbox.metadata.items():
                    with contextlib.suppress(UnknownSandbox):
                        await self._client.call(
                            "DELETE", f"{url}/v1/sandboxes/{sandbox.sandbox_id}", type(None)
                        )

    async def declare(self, target: int) -> None:
        """Ask the master for another target; nodes hear of it with their next heartbeat."""
        wanted = msgspec.structs.replace(self.spec, target=target)
        await self._client.call("PUT", f"{self._master}/v1/pools", PoolSpec, wanted)

    async def at_rest(self, target: int) -> None:
        """Wait until exactly `target` members are warm and none is being made.

        Raises RuntimeFailure after SETTLE_DEADLINE with the nodes' reason, if they have one.
        """
        end = time.monotonic() + SETTLE_DEADLINE
        while True:
            seen, why = await self._look()
            if seen == (target, target, 0):
                return
            if time.monotonic() > end:
                raise RuntimeFailure(
                    f"the pool did not come to rest at {target} within {SETTLE_DEADLINE:.0f} s; "
                    + (why or "is somebody else using the platform?")
                )
            await asyncio.sleep(SETTLE_PAUSE)

    async def _look(self) -> tuple[tuple[int, int, int], str]:
        """Target, warm and starting members over all nodes, and why refill is held back."""
        target = warm = starting = 0
        why = ""
        for url in self._nodes.values():
            status = await self._client.call("GET", f"{url}/v1/status", NodeStatus)
            for pool in status.pools:
                if (pool.template, pool.size) == (self.spec.template, self.spec.size.name):
                    target, warm, starting = target + pool.target, warm + pool.warm, starting + pool.starting
                    why = pool.reason or why
        return (target, warm, starting), why

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """For the length of the block the target may be changed; afterwards it is what it was before."""
        try:
            yield
        finally:
            await unbroken(self._put_back(), "put the pool back")

    async def _put_back(self) -> None:
        problem = ""
        for pause in (0.0, 0.5, 1.0, 2.0, 4.0):
            await asyncio.sleep(pause)
            try:
                await self.declare(self.spec.target)
                return
            except GreenroomError as error:
                problem = error.message
        raise RuntimeFailure(
            f"the pool of {self.spec.template} could not be set back to {self.spec.target}: {problem}; "
            "it has no members until it is declared again"
        )


class Tenant:
    """Makes sandboxes of one run and ends them."""

    def __init__(self, platform: Platform, pool: Pool) -> None:
        self.platform = platform
        self.pool = pool
        self._metadata = {"greenroom.by": f"bench-{secrets.token_hex(4)}"}

    async def create(self) -> str:
        """One create request, brought to its end even when this is cancelled, so that `close` finds what it made."""
        creating = self.platform.create_once(self.pool.spec.template, TTL, self._metadata)
        return await unbroken(creating, "create")

    async def end(self, sandbox_id: str) -> None:
        """Kill a sandbox whose end is not measured; what fails here is done by `close`."""
        with contextlib.suppress(GreenroomError, OSError):
            await self.platform.kill(sandbox_id)

    async def close(self) -> None:
        """End what is left. Raises RuntimeFailure when that is not certain."""
        try:
            await unbroken(self.pool.remove(self._metadata), "remove")
        except GreenroomError as error:
            raise RuntimeFailure(
                f"sandboxes of this run may be left: {error.message}; they end by themselves within {TTL} s"
            ) from error
