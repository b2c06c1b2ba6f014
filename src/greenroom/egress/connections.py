"""One connection of a guest: judged, perhaps asked for its name, dialled, joined, and judged again when rules change.

The guest's side is connected before anything is known of the far side (the kernel redirected it), so a refusal is a
reset right after the connection, and so is a far side that cannot be reached.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from ipaddress import IPv4Address
from typing import Protocol

from greenroom.config import NetworkConfig
from greenroom.egress import naming
from greenroom.egress.counting import Outcome, Tally
from greenroom.egress.dialling import dial, is_own
from greenroom.egress.forwarding import reachable
from greenroom.egress.resolving import Resolver, Unanswered
from greenroom.egress.rules import Verdict, judge, may_stay
from greenroom.wire.network import Rules
from greenroom.wire.splice import Splice, reset

_SO_ORIGINAL_DST = 80
"""netfilter's socket option: where a redirected connection was meant to go (linux/netfilter_ipv4.h)."""
_GUEST_SILENCE = 60_000
"""Milliseconds after which data that the guest does not acknowledge ends the connection: a guest that is gone must not
keep its namespace alive by retransmissions."""


def original_destination(sock: socket.socket) -> tuple[IPv4Address, int]:
    """Address and port that the guest connected to. Raises OSError when the kernel does not know."""
    raw = sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    _, port, address = struct.unpack("!HH4s8x", raw)
    return IPv4Address(address), port


class Surroundings(Protocol):
    """What a connection needs of the sandbox it belongs to; `boxes.Box` is it."""

    @property
    def rules(self) -> Rules: ...

    @property
    def settings(self) -> NetworkConfig: ...

    @property
    def resolver(self) -> Resolver: ...

    @property
    def tally(self) -> Tally: ...

    @property
    def scratch(self) -> memoryview: ...

    def ended(self, connection: Connection) -> None: ...


class _Refused(Exception):
    """It goes no further, with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome: Outcome = outcome


class Connection:
    """From `accept` to its end, which it tells its sandbox once. `run` it in a `task` that tells `settled`."""

    def __init__(self, box: Surroundings, guest: socket.socket) -> None:
        self._box = box
        self._guest = guest
        self._loop = asyncio.get_running_loop()
        self._splice: Splice | None = None
        self._told = (0, 0)
        self._dialled: IPv4Address | None = None
        self._name: str | None = None
        self._over = False
        self.task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Connection {'over' if self._over else self._splice or 'under way'}>"

    async def run(self) -> None:
        """Bring it as far as it may go. Never raises, except when it is cancelled."""
        outcome: Outcome = "failed"
        try:
            await self._join()
            outcome = "allowed"
        except _Refused as refused:
            outcome = refused.outcome
        except OSError:
            outcome = "left"
        except asyncio.CancelledError:
            outcome = "left"
            raise
        finally:
            self._box.tally.connection(outcome)

    def settled(self, _task: asyncio.Task[None]) -> None:
        """Its task is over, even if it was cancelled before it began: without a splice the connection is, too."""
        if self._splice is None:
            reset(self._guest)
            self._end()

    async def _join(self) -> None:
        guest, box = self._guest, self._box
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GUEST_SILENCE)
        address, port = original_destination(guest)
        first = b""
        addresses: tuple[IPv4Address, ...]
        match judge(box.rules, address):
            case Verdict.DENY:
                raise _Refused("denied")
            case Verdict.ALLOW:
                if is_own(address):
                    raise _Refused("denied")
                addresses = (address,)
            case Verdict.ASK:
                first, self._name = await self._ask_name()
                if self._name is None or not box.rules.allows_name(self._name):
                    raise _Refused("denied")
                addresses = await self._lead(self._name)
        try:
            upstream, dialled = await dial(addresses, port, box.settings.dial_deadline)
        except OSError as error:
            raise _Refused("unreachable") from error
        # The rules may be others by now.
        if not may_stay(box.rules, dialled, self._name):
            reset(upstream)
            raise _Refused("denied")
        self._dialled = dialled
        self._splice = Splice(self._loop, guest, upstream, first, box.scratch, self._end)
        self._splice.start()

    async def _ask_name(self) -> tuple[bytes, str | None]:
        """What the guest said first, and the host it named; None when it named none in time."""
        data = b""
        try:
            async with asyncio.timeout(self._box.settings.peek_deadline):
                while (found := naming.sniff(data)) is naming.MORE:
                    chunk = await self._loop.sock_recv(self._guest, naming.LIMIT - len(data))
                    if not chunk:
                        return data, None
                    data += chunk
        except TimeoutError:
            return data, None
        assert not isinstance(found, naming.More)  # noqa: S101
        return data, found

    async def _lead(self, name: str) -> tuple[IPv4Address, ...]:
        """Where an allowed name leads, by our own question, without what no sandbox may reach."""
        try:
            answer = await self._box.resolver.addresses(name)
        except Unanswered as error:
            raise _Refused("unresolved") from error
        addresses = reachable(self._box.rules, answer.addresses)
        if answer.addresses and not addresses:
            raise _Refused("denied")
        if not addresses:
            raise _Refused("unresolved")
        return addresses

    def judge_again(self) -> None:
        """The rules were replaced: what they do not allow ends now. One still under way sees to itself."""
        if self._splice is None or self._dialled is None:
            return
        if not may_stay(self._box.rules, self._dialled, self._name):
            self._box.tally.connection("cut")
            self.reset()

    def look(self, now: float) -> None:
        """Tell what was moved since the last look, and end it if it was silent for too long."""
        if self._splice is None:
            return
        self._tell_moved()
        if now - self._splice.touched > self._box.settings.idle_timeout:
            self._box.tally.connection("idle")
            self.reset()

    def _tell_moved(self) -> None:
        if self._splice is not None:
            before, self._told = self._told, self._splice.moved
            self._box.tally.moved(self._told[0] - before[0], self._told[1] - before[1])

    def reset(self) -> None:
        """End it with a reset on both sides, at once. Idempotent.

        One that is not joined yet is cancelled and reset by `settled`, since something still waits for its sockets.
        """
        if self._splice is not None:
            self._splice.reset()
        elif self.task is not None:
            self.task.cancel()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._tell_moved()
            self._box.ended(self)
