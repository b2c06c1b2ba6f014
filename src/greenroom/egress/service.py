"""The life of the egress process: orders from its node carried out, until the node lets go of the channel.

It is told everything anew by each node process, and knows nothing that the node does not: when it dies it is started
again and told again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

import msgspec

from greenroom.config import NetworkConfig
from greenroom.egress.boxes import Box, Common
from greenroom.egress.counting import Tally
from greenroom.egress.resolving import Resolver
from greenroom.errors import GreenroomError, InternalError
from greenroom.wire import gate
from greenroom.wire.messages import Network
from greenroom.wire.network import Rules, parse
from greenroom.wire.splice import CHUNK
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)
_LOOK = 1.0
"""Seconds between two looks at all connections."""


class Service:
    """Carries out orders. Make it inside the event loop it belongs to."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel = gate.Channel(sock, self._received, self._lost)
        self._boxes: dict[str, Box] = {}
        self._tally = Tally()
        self._settings = NetworkConfig()
        self._common: Common | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Serve until the channel ends."""
        loop = asyncio.get_running_loop()
        # The node ends it by the channel; a signal that was meant for the node's group must not come before that.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
        looking = spawn(self._look(), "look at connections")
        self._channel.start()
        try:
            await self._over.wait()
        finally:
            await stop(looking)
            for box in list(self._boxes.values()):
                box.close()
            self._channel.close()

    def _lost(self) -> None:
        self._over.set()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            now = asyncio.get_running_loop().time()
            for box in list(self._boxes.values()):
                box.look(now)

    def _received(self, payload: bytes, fds: list[int]) -> None:
        sockets = [socket.socket(fileno=fd) for fd in fds]
        order = msgspec.json.decode(payload, type=gate.Order)
        error, counts = "", None
        try:
            if isinstance(order, gate.Ping):
                counts = self._tally.counts()
            else:
                self._carry_out(order, sockets)
        except GreenroomError as failure:
            error = failure.message
        except OSError as failure:
            error = str(failure)
        if error:
            _log.error("an order of the node could not be carried out: %s", error)
            for sock in sockets:
                sock.close()
        self._channel.send(msgspec.json.encode(gate.Done(order.number, error, counts)))

    def _carry_out(
        self, order: gate.Settings | gate.Open | gate.Change | gate.Close, sockets: list[socket.socket]
    ) -> None:
        match order:
            case gate.Settings(network=settings):
                self._settings = settings
                resolver = Resolver(settings.resolvers, settings.dns_deadline)
                if not resolver.servers():
                    _log.warning(
                        "this machine names no DNS resolver: sandboxes resolve no names until /etc/resolv.conf or "
                        "the setting [network] resolvers does"
                    )
                self._common = Common(settings, resolver, self._tally, memoryview(bytearray(CHUNK)))
            case gate.Open(vm=vm, sandbox_id=sandbox_id, network=network):
                if self._common is None or len(sockets) != gate.OUTLETS:
                    raise InternalError("a sandbox was announced without settings or sockets")
                rules = self._rules(network)
                self._close(vm)
                self._boxes[vm] = Box(sandbox_id, rules, sockets, self._common)
            case gate.Change(vm=vm, network=network):
                if (box := self._boxes.get(vm)) is None:
                    raise InternalError("this sandbox is not known")
                box.change(self._rules(network))
            case gate.Close(vm=vm):
                self._close(vm)

    def _rules(self, network: Network) -> Rules:
        return parse(network, self._settings)

    def _close(self, vm: str) -> None:
        if (box := self._boxes.pop(vm, None)) is not None:
            box.close()


async def run(descriptor: int) -> None:
    """Serve the channel whose socket is this inherited descriptor."""
    os.set_inheritable(descriptor, False)
    await Service(socket.socket(fileno=descriptor)).run()
