"""What the relay connects to: sandboxes as it sees them, and the ways to a port in one.

There are two. From outside, as another machine on the guest's wire: that reaches what listens on all addresses. And
by the guest's agent, which is on the inside: that reaches what listens on the loopback, as development servers do.
The first is tried first, because it needs nothing of the guest. A port that refuses both is tried again a few times,
since a service just started may be about to listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Protocol

from greenroom.node.relay_heads import AGENT_PORT
from greenroom.wire.messages import Inbound

CONNECT_PAUSES = (0.05, 0.1, 0.15, 0.3, 0.4)
"""Seconds before each further try of a closed port."""
WOKEN_PAUSES = (*CONNECT_PAUSES, 0.5, 0.5, 1.0, 1.0)
"""The same in a sandbox that was resumed for the request: what was starting when it was paused is starting now."""


class Target(Protocol):
    """A sandbox running on this node."""

    @property
    def sandbox_id(self) -> str: ...

    @property
    def owner(self) -> str:
        """Whose sandbox it is: connections are bounded per owner, too."""
        ...

    @property
    def inbound(self) -> Inbound:
        """How what comes from outside reaches it."""
        ...

    @property
    def traffic_token(self) -> str | None:
        """What opens its ports where they are not public."""
        ...

    async def ready(self) -> bool:
        """Return when it runs; True if it did not and was waited for. One that resumes by itself is resumed for this.

        Raises why it does not run.
        """
        ...

    async def connect(self, port: int) -> socket.socket:
        """A connected non-blocking TCP socket to `port` in the guest, now owned by the caller.

        Raises ConnectionRefusedError when nothing listens, TimeoutError when the guest does not answer, other
        OSErrors as they come. When cancelled it must close what it opened.
        """
        ...

    async def connect_inside(self, port: int) -> socket.socket:
        """The same, but to what listens on the guest's loopback only, by way of the guest's agent.

        Asked when `connect` was refused. Raises ConnectionRefusedError when nothing listens there either, or the
        agent offers no such way.
        """
        ...


class Directory(Protocol):
    """The node's running sandboxes."""

    def lookup(self, sandbox_id: str) -> Target | None:
        """The sandbox if it runs here, or will once its `ready` was waited for, else None."""
        ...


async def connect_patiently(
    target: Target, port: int, pauses: Sequence[float] = CONNECT_PAUSES
) -> socket.socket:
    """Connect by whichever way leads to `port`, trying again after each of `pauses` while none does.

    Raises what `Target.connect` raises. The deadline is the caller's.
    """
    for pause in pauses:
        with contextlib.suppress(ConnectionRefusedError):
            return await _connect(target, port)
        await asyncio.sleep(pause)
    return await _connect(target, port)


async def _connect(target: Target, port: int) -> socket.socket:
    try:
        return await target.connect(port)
    except ConnectionRefusedError:
        if port == AGENT_PORT:
            raise
        return await target.connect_inside(port)
