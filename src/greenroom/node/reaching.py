"""What sandboxes may reach: their rules, on each VM that they have in their lives.

A VM gets its sandbox's rules before it runs, at a claim as at a resume (`Residents.open`), and loses its way out
before it is gone (`Residents.stop_vm`). Here is what comes between: other rules, and a node that was started again.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from greenroom.errors import GreenroomError, NotRunning
from greenroom.node.declaring import Declaring
from greenroom.node.residents import Live, unknown
from greenroom.runtime.engine import Vm
from greenroom.wire.messages import Network, Sandbox

_log = logging.getLogger(__name__)


class Reaching(Declaring):
    """Residents whose network rules can be replaced."""

    async def reopen(self) -> None:
        """After `adopt`: give the sandboxes of an earlier run their way out again. Until then they have none."""
        for live in list(self._live.values()):
            if (vm := live.vm) is None:
                continue
            try:
                async with live.network_turn:
                    await self.open(vm, live.sandbox_id, live.sandbox.network)
            except GreenroomError as error:
                _log.error("sandbox %s goes on without a way out: %s", live.sandbox_id, error.message)
            if live.ending or live.vm is not vm:
                await self.gate.close(vm)

    async def set_network(self, sandbox_id: str, network: Network) -> Sandbox:
        """Replace a sandbox's network rules; what they do not allow has ended when this returns.

        Raises UnknownSandbox, NotRunning for a paused one, BadRequest, RuntimeFailure.
        """
        live = self.known(sandbox_id)
        async with live.network_turn:
            before = live.sandbox.network
            vm = await self._apply(live, network)
            changed = msgspec.structs.replace(live.sandbox, network=network)
            try:
                self._journal.save(live.key, changed, self._now())
            except GreenroomError:
                await self.gate.apply(vm, sandbox_id, before)
                raise
            live.sandbox = changed
            live.history.note(self._clock.now(), "its network rules were replaced")
        return changed

    async def _apply(self, live: Live, network: Network) -> Vm:
        """Put the VM that the sandbox has when this returns behind these rules; a pause or resume may come between."""
        behind: Vm | None = None
        while True:
            if live.ending:
                if behind is not None:
                    await self.gate.close(behind)
                raise unknown(live.sandbox_id)
            if live.work is not None and not live.work.done():
                await asyncio.wait({live.work})
            elif live.vm is None:
                raise NotRunning(
                    f"sandbox {live.sandbox_id} is paused; resume it, then set its network rules"
                )
            elif live.vm is behind:
                return behind
            else:
                behind = live.vm
                await self.gate.apply(behind, live.sandbox_id, network)
