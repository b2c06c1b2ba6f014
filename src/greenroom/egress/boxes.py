"""One sandbox as the egress process sees it: its rules, its three sockets, its connections, its limits."""

from __future__ import annotations

import asyncio
import logging
import socket

from greenroom.config import NetworkConfig
from greenroom.egress.connections import Connection
from greenroom.egress.counting import Tally
from greenroom.egress.forwarding import Forwarder
from greenroom.egress.limits import Bucket
from greenroom.egress.resolving import Resolver
from greenroom.wire.network import Rules
from greenroom.wire.splice import reset
from greenroom.wire.tasks import spawn

_log = logging.getLogger(__name__)
_BATCH = 64
"""Connections accepted at one turn of the event loop."""
_PAUSE = 0.1
"""Seconds without accepting, when the process or the machine has no descriptor or memory left."""


class Common:
    """What all sandboxes share."""

    def __init__(
        self, settings: NetworkConfig, resolver: Resolver, tally: Tally, scratch: memoryview
    ) -> None:
        self.settings = settings
        self.resolver = resolver
        self.tally = tally
        self.scratch = scratch


class Box:
    """Serves from its making to `close`."""

    def __init__(self, sandbox_id: str, rules: Rules, outlets: list[socket.socket], common: Common) -> None:
        """`outlets` are, in this order, the TCP listener, DNS by UDP and DNS by TCP; they are its own from now on."""
        self.sandbox_id = sandbox_id
        self.rules = rules
        self.settings = common.settings
        self.resolver = common.resolver
        self.scratch = common.scratch
        self.tally = Tally(common.tally)
        self._common = common
        for sock in outlets:
            sock.setblocking(False)
        self._listener, udp, tcp = outlets
        self._connections: set[Connection] = set()
        self._closed = False
        rate = self.settings.new_connections_per_second
        self._bucket = Bucket(rate, 2 * rate)
        self._loop = asyncio.get_running_loop()
        self._forwarder = Forwarder(rules, udp, tcp, self.resolver, self.settings, self.tally)
        self._resume: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._listener, self._accept)

    def __repr__(self) -> str:
        return f"<Box {self.sandbox_id} connections={len(self._connections)}>"

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("no connection can be taken for a moment: %s", error)
                self._loop.remove_reader(self._listener)
                self._resume = self._loop.call_later(_PAUSE, self._accept_again)
                return
            sock.setblocking(False)
            if not self._room():
                self.tally.connection("limited")
                reset(sock)
                continue
            connection = Connection(self, sock)
            self._connections.add(connection)
            self.tally.opened(1)
            connection.task = spawn(connection.run(), "connection")
            connection.task.add_done_callback(connection.settled)

    def _room(self) -> bool:
        return (
            len(self._connections) < self.settings.connections_per_sandbox
            and self._common.tally.open < self.settings.connections
            and self._bucket.take(self._loop.time())
        )

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def ended(self, connection: Connection) -> None:
        """A connection is over."""
        if connection in self._connections:
            self._connections.discard(connection)
            self.tally.opened(-1)

    def change(self, rules: Rules) -> None:
        """Judge by these rules from now on, what is open too."""
        self.rules = self._forwarder.rules = rules
        for connection in list(self._connections):
            connection.judge_again()

    def look(self, now: float) -> None:
        """Count bytes and end silent connections; to be called now and then."""
        for connection in list(self._connections):
            connection.look(now)

    def close(self) -> None:
        """Reset every connection and let go of the sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._forwarder.close()
        for connection in list(self._connections):
            connection.reset()
        counts = self.tally.counts()
        if counts.connections or counts.dns:
            fields = {
                "connections": counts.connections,
                "dns": counts.dns,
                "bytes_out": counts.bytes_out,
                "bytes_in": counts.bytes_in,
            }
            _log.info("the way out is closed", extra={"sandbox_id": self.sandbox_id, "fields": fields})
