"""One sandbox that lives on this node, in memory: its record, its state machine, its VM, and what works on it.

Whoever wants to hear of what is told of it (`changelog`) hears of every replacement of its record and its life.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from greenroom.errors import GreenroomError, UnknownSandbox
from greenroom.node import lifecycle
from greenroom.node.journal import Inner
from greenroom.node.observing import History
from greenroom.runtime.engine import Vm
from greenroom.wire.messages import Inbound, Sandbox


class Live:
    """A sandbox that was handed over, with its VM; also what the relay connects to (`relay_targets.Target`)."""

    def __init__(self, key: str, sandbox: Sandbox, vm: Vm | None, inner: Inner) -> None:
        self.told: Callable[[Live], None] = _nobody
        """Hears of each change of its record and its life."""
        self.published: Sandbox | None = None
        """What was told of it last; None while it is nobody's."""
        self.key = key
        self._sandbox = sandbox
        self.vm = vm
        """None while it is paused."""
        self.inner = inner
        self.work: asyncio.Task[GreenroomError | None] | None = None
        """What pauses or resumes it at present, or did last; its result is why it could not."""
        self.wake: Callable[[Live], Awaitable[None]] = _cannot_wake
        self.stays = True
        """Unless somebody wants nothing of it to stay."""
        self.history = History()
        self.capturing = asyncio.Lock()
        """Held while its VM is captured."""
        self.network_turn = asyncio.Lock()
        """Held while its network rules are replaced."""
        phase: lifecycle.Phase = "running" if sandbox.confirm_by is None else "provisional"
        self._life = lifecycle.Lifecycle(
            confirm_by=sandbox.ends_at if sandbox.confirm_by is None else sandbox.confirm_by,
            ends_at=sandbox.ends_at,
            phase=phase if vm is not None else "paused",
            pauses=sandbox.lifespan.auto_pause,
            shutdown_at=None if sandbox.declared is None else sandbox.declared.shutdown_at,
        )

    def __repr__(self) -> str:
        where = "no VM" if self.vm is None else self.vm.name
        return f"<Live {self.sandbox.sandbox_id} on {where} {self.life.phase}>"

    @property
    def sandbox(self) -> Sandbox:
        return self._sandbox

    @sandbox.setter
    def sandbox(self, changed: Sandbox) -> None:
        self._sandbox = changed
        self.told(self)

    @property
    def life(self) -> lifecycle.Lifecycle:
        return self._life

    @life.setter
    def life(self, after: lifecycle.Lifecycle) -> None:
        self._life = after
        self.told(self)

    @property
    def ending(self) -> bool:
        return self.life.phase == "ended"

    @property
    def shown(self) -> bool:
        """Whether it is somebody's: not provisional, not ended."""
        return self.life.phase not in ("provisional", "ended")

    @property
    def sandbox_id(self) -> str:
        return self.sandbox.sandbox_id

    @property
    def owner(self) -> str:
        return self.sandbox.owner

    @property
    def reachable(self) -> bool:
        """Whether a request for it has a way to it: it runs, or will when the request waits for it."""
        match self.life.phase:
            case "running" | "resuming" | "replacing":
                return True
            case "pausing" | "paused":
                # A guest that would have to boot is not what the request was meant for.
                return self.sandbox.lifespan.auto_resume and self.sandbox.paused_memory is not False
            case _:
                return False

    async def ready(self) -> bool:
        """Return when it runs, for which it may have to be resumed; True if it did not. Raises why it does not."""
        if self.life.phase == "running":
            return False
        await self.wake(self)
        return True

    async def connect(self, port: int) -> socket.socket:
        """A connected socket to a port in the guest."""
        if self.vm is None:
            raise ConnectionRefusedError("the sandbox is paused")
        return await self.vm.connect(port)

    @property
    def inbound(self) -> Inbound:
        return self.sandbox.inbound

    @property
    def traffic_token(self) -> str | None:
        return self.sandbox.traffic_token

    async def connect_inside(self, port: int) -> socket.socket:
        """A connected socket to a port of the guest's loopback."""
        if self.vm is None:
            raise ConnectionRefusedError("the sandbox is paused")
        return await self.vm.connect_inside(port)


def _nobody(_live: Live) -> None:
    """Before it is entered it is nobody's news."""


async def _cannot_wake(live: Live) -> None:
    """Before it is entered nobody has a request for it."""
    raise unknown(live.sandbox_id)


def unknown(sandbox_id: str) -> UnknownSandbox:
    """The error for an id that nothing here has."""
    return UnknownSandbox(f"sandbox {sandbox_id} does not exist on this node, or has ended")
