"""The relay: from the proxy's connection to a port inside a sandbox on this node.

Each connection from the proxy carries one request. The relay reads its head (`relay_heads`), checks the
proxy's credential, finds the sandbox, connects to the port in the guest, sends the rewritten head and joins
the two sockets (`wire.splice`). It knows nothing of namespaces or VMs: the node hands in a `Directory`.

Whoever can open a connection to this port may be any user of the machine, so before the credential was
checked a connection is worth little: its head is bounded in bytes and time, and when too many are still
without one the oldest is dropped. Honest heads arrive within milliseconds of their connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
from collections import Counter
from collections.abc import Callable

import msgspec

from greenroom.config import NodesConfig
from greenroom.errors import BadRequest, GreenroomError, UnknownSandbox
from greenroom.node import relay_heads as heads
from greenroom.node import relay_tls
from greenroom.node.relay_targets import CONNECT_PAUSES, WOKEN_PAUSES, Directory, Target, connect_patiently
from greenroom.wire import serving, tasks
from greenroom.wire.splice import CHUNK, Splice, reset

_log = logging.getLogger(__name__)

HEADLESS = 1024
"""Connections whose head has not come yet, and separately those being refused; one more drops the oldest."""
FAREWELL = 2.0
"""Seconds a refused client gets to read the answer while what it still sends is thrown away."""
UNPROVEN = frozenset((400, 401, 408, 431))
"""Refusals that any user of the machine can bring about: told at DEBUG, so that nobody can fill the log."""
_ACCEPT_PAUSE = 0.1
_ACCEPT_BATCH = 64


class RelayStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges (`waiting`, `connecting`, `spliced`) and counters since start."""

    waiting: int
    """Connections without a complete head."""
    connecting: int
    spliced: int
    accepted: int
    refused: dict[int, int]
    """Answers of our own by HTTP status."""
    dropped: int
    """Connections dropped without an answer: pushed out, silent too long, or cut."""
    bytes_up: int
    """Bytes of ended connections towards guests; `bytes_down` from them."""
    bytes_down: int


class _State(enum.Enum):
    HEAD = "waiting for the head"
    CONNECTING = "connecting to the guest"
    SPLICED = "spliced"
    FAREWELL = "answered, draining"
    CLOSED = "closed"


class Relay:
    """The relay's server. All methods belong to the event loop that called `start`."""

    def __init__(self, sandboxes: Directory, token_ok: Callable[[str], bool], config: NodesConfig) -> None:
        self.sandboxes = sandboxes
        self.token_ok = token_ok
        self.config = config
        self.scratch = memoryview(bytearray(CHUNK))
        self._listener: socket.socket | None = None
        self._headless: dict[_Connection, None] = {}
        self._farewells: dict[_Connection, None] = {}
        self._routed: dict[str, set[_Connection]] = {}
        self._routed_count = 0
        self._by_owner: Counter[str] = Counter()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._accept_timer: asyncio.TimerHandle | None = None
        self._accepted = self._dropped = 0
        self._bytes_up = self._bytes_down = 0
        self._refused: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Relay headless={len(self._headless)} routed={self._routed_count}>"

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port the kernel chose if `port` is 0.

        Raises SetupError when the address is taken.
        """
        self.loop = asyncio.get_running_loop()
        self._listener = serving.listen(host, port)
        self._listener.setblocking(False)
        self.loop.add_reader(self._listener, self._accept)
        self._arm_idle_timer()
        name = self._listener.getsockname()
        return str(name[0]), int(name[1])

    async def close(self) -> None:
        """Stop listening and reset every connection. Idempotent."""
        for timer in (self._idle_timer, self._accept_timer):
            if timer is not None:
                timer.cancel()
        if self._listener is not None:
            self.loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        everyone = [*self._headless, *self._farewells, *(c for group in self._routed.values() for c in group)]
        await self._drop(everyone)

    async def cut(self, sandbox_id: str) -> None:
        """Reset all connections of a sandbox, on both sides, before this first waits for anything.

        Returns when nothing of them is left. New ones are taken for as long as the directory knows the
        sandbox, so take it out of there first if there must be none.
        """
        await self._drop(list(self._routed.get(sandbox_id, ())))

    async def _drop(self, connections: list[_Connection]) -> None:
        connecting = [c.task for c in connections if c.task is not None]
        for connection in connections:
            connection.drop()
        await tasks.stop(*connecting)

    def statistics(self) -> RelayStatistics:
        """A snapshot of what the relay does and has done."""
        states = [c.state for group in self._routed.values() for c in group]
        return RelayStatistics(
            waiting=len(self._headless),
            connecting=states.count(_State.CONNECTING),
            spliced=states.count(_State.SPLICED),
            accepted=self._accepted,
            refused=dict(self._refused),
            dropped=self._dropped,
            bytes_up=self._bytes_up,
            bytes_down=self._bytes_down,
        )

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101
        for _ in range(_ACCEPT_BATCH):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory. The listener stays readable: without a pause this would spin.
                _log.error("cannot accept a relay connection: %s", error.strerror)
                self.loop.remove_reader(self._listener)
                self._accept_timer = self.loop.call_later(_ACCEPT_PAUSE, self._accept_again)
                return
            self._accepted += 1
            while len(self._headless) >= HEADLESS:
                next(iter(self._headless)).drop()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._headless[_Connection(self, sock)] = None

    def _accept_again(self) -> None:
        if self._listener is not None:
            self.loop.add_reader(self._listener, self._accept)

    def _arm_idle_timer(self) -> None:
        self._idle_timer = self.loop.call_later(self.config.relay_idle_timeout / 16, self._drop_idle)

    def _drop_idle(self) -> None:
        oldest = self.loop.time() - self.config.relay_idle_timeout
        for connection in [c for group in self._routed.values() for c in group]:
            if connection.splice is not None and connection.splice.touched < oldest:
                connection.drop()
        self._arm_idle_timer()

    def admit(self, connection: _Connection, target: Target, port: int) -> heads.Refusal | None:
        """Count a connection against the limits, or say why not.

        An eighth of every limit is kept for the agent's port: a service that hangs must not keep its owner from
        running the command that ends it.
        """
        config = self.config
        share = 1.0 if port == heads.AGENT_PORT else 7 / 8
        if self._routed_count >= config.relay_connections * share:
            return heads.refuse(503, "this node relays as many connections as it may; try again")
        if self._by_owner[target.owner] >= config.relay_connections_per_owner * share:
            return heads.refuse(
                429, "this key's owner has as many connections on this node as one may; close some"
            )
        group = self._routed.setdefault(target.sandbox_id, set())
        if len(group) >= config.relay_connections_per_sandbox * share:
            return heads.refuse(429, "this sandbox has as many connections as it may; close some")
        group.add(connection)
        connection.owner = target.owner
        self._by_owner[target.owner] += 1
        self._routed_count += 1
        return None

    def headless_no_more(self, connection: _Connection) -> None:
        self._headless.pop(connection, None)

    def taking_leave(self, connection: _Connection, status: int) -> None:
        self._refused[status] = self._refused.get(status, 0) + 1
        while len(self._farewells) >= HEADLESS:
            next(iter(self._farewells)).drop()
        self._farewells[connection] = None

    def release(self, connection: _Connection) -> None:
        """Give back a routed connection's place."""
        group = self._routed.get(connection.sandbox_id)
        if group is not None and connection in group:
            group.remove(connection)
            self._routed_count -= 1
            self._by_owner[connection.owner] -= 1
            if not self._by_owner[connection.owner]:
                del self._by_owner[connection.owner]
            if not group:
                del self._routed[connection.sandbox_id]

    def closed(self, connection: _Connection, *, dropped: bool) -> None:
        self._headless.pop(connection, None)
        self._farewells.pop(connection, None)
        self.release(connection)
        self._dropped += dropped
        if connection.tunnel is not None:
            connection.tunnel.abort()
        if connection.splice is not None:
            up, down = connection.splice.moved
            self._bytes_up += up
            self._bytes_down += down


class _Connection:
    """One connection from the proxy, from accept to close."""

    __slots__ = (
        *("_relay", "_sock", "_timer", "_unread"),
        *("as_page", "owner", "request_id", "sandbox_id", "splice", "state", "task", "tunnel"),
    )

    def __init__(self, relay: Relay, sock: socket.socket) -> None:
        self._relay = relay
        self._sock = sock
        self._unread = bytearray()
        self.sandbox_id = ""
        self.owner = ""
        self.request_id = ""
        self.as_page = False
        self.splice: Splice | None = None
        self.tunnel: relay_tls.Tunnel | None = None
        self.task: asyncio.Task[None] | None = None
        self.state = _State.HEAD
        relay.loop.add_reader(sock, self._on_head_bytes)
        self._timer = relay.loop.call_later(relay.config.relay_head_deadline, self._on_head_deadline)

    def __repr__(self) -> str:
        return f"<relay connection {self.sandbox_id or 'unrouted'}: {self.state.value}>"

    def drop(self) -> None:
        """Reset both sides now. Idempotent."""
        if self.splice is not None and self.state is _State.SPLICED:
            self.state = _State.CLOSED
            self.splice.reset()
            self._relay.closed(self, dropped=True)
        else:
            self._close(reset, dropped=True)

    def _close(self, how: Callable[[socket.socket], None], *, dropped: bool = False) -> None:
        if self.state is _State.CLOSED:
            return
        self.state = _State.CLOSED
        self._timer.cancel()
        self._relay.loop.remove_reader(self._sock)
        if self.task is not None:
            self.task.cancel()
        how(self._sock)
        self._relay.closed(self, dropped=dropped)

    def _on_head_deadline(self) -> None:
        self._answer(heads.refuse(408, "the request head did not come in time"))

    def _on_head_bytes(self) -> None:
        limit = self._relay.config.relay_head_limit
        try:
            chunk = self._sock.recv(min(CHUNK, limit + 1 - len(self._unread)))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._close(reset, dropped=True)
            return
        if not chunk:
            self._close(socket.socket.close, dropped=True)
            return
        searched = max(0, len(self._unread) - 3)
        self._unread += chunk
        end = self._unread.find(b"\r\n\r\n", searched)
        if end >= 0:
            self._on_head(end + 4)
        elif len(self._unread) > limit:
            self._answer(heads.refuse(431, f"the request head is larger than {limit} bytes"))

    def _on_head(self, size: int) -> None:
        self._timer.cancel()
        self._relay.loop.remove_reader(self._sock)
        self._relay.headless_no_more(self)
        with_body = not self._unread.startswith(b"HEAD ")
        try:
            head = heads.parse(bytes(self._unread[:size]))
            route = heads.decide(head, self._relay.token_ok)
            self.request_id = heads.request_id(head)
            self.as_page = heads.is_navigation(head)
        except BadRequest as error:
            route = heads.refuse(400, error.message)
        if isinstance(route, heads.Refusal):
            self._answer(route, with_body=with_body)
            return
        target = self._relay.sandboxes.lookup(route.sandbox_id)
        if target is None:
            self._answer(heads.not_found(route.sandbox_id), with_body=with_body)
            return
        decision = heads.forward(head, route, target.inbound, target.traffic_token)
        if isinstance(decision, heads.Refusal):
            self._answer(decision, with_body=with_body)
            return
        refusal = self._relay.admit(self, target, decision.port)
        if refusal is not None:
            self._answer(refusal, with_body=with_body)
            return
        self.sandbox_id = decision.sandbox_id
        self.state = _State.CONNECTING
        rest = bytes(self._unread[size:][: decision.body])
        first = decision.head + rest
        more = None if decision.body is None else decision.body - len(rest)
        self._unread = bytearray()
        self.task = tasks.spawn(
            self._connect(target, decision, first, more, with_body), f"relay-connect-{decision.sandbox_id}"
        )

    async def _connect(
        self, target: Target, decision: heads.Forward, first: bytes, more: int | None, with_body: bool
    ) -> None:
        sandbox_id, port = decision.sandbox_id, decision.port
        outcome: socket.socket | heads.Refusal
        try:
            async with asyncio.timeout(self._relay.config.relay_wake_deadline):
                woken = await target.ready()
            async with asyncio.timeout(self._relay.config.relay_connect_deadline):
                outcome = await connect_patiently(target, port, WOKEN_PAUSES if woken else CONNECT_PAUSES)
                if decision.tls_name is not None:
                    self.tunnel = await relay_tls.open_tunnel(outcome, decision.tls_name, self.drop)
                    outcome = self.tunnel.socket
        except ConnectionRefusedError:
            outcome = heads.port_closed(sandbox_id, port)
        except relay_tls.HandshakeFailed:
            outcome = heads.no_tls(sandbox_id, port)
        except UnknownSandbox:
            outcome = heads.not_found(sandbox_id)
        except GreenroomError as error:
            outcome = heads.refuse(503, f"the sandbox could not be resumed: {error.message}")
        except OSError:  # which TimeoutError is
            outcome = heads.no_answer(sandbox_id, port)
        except BaseException:
            # Cancelled by `drop`, or a fault in `connect`, which the task reports.
            self._close(reset, dropped=True)
            raise
        if self.state is not _State.CONNECTING:
            # Dropped in the moment between the connection's success and this task's turn.
            if self.tunnel is not None:
                self.tunnel.abort()
            if isinstance(outcome, socket.socket):
                reset(outcome)
            return
        self.task = None
        # A sandbox that ended or moved meanwhile must not get a connection behind `cut`'s back.
        if self._relay.sandboxes.lookup(sandbox_id) is not target:
            if isinstance(outcome, socket.socket):
                reset(outcome)
            outcome = heads.not_found(sandbox_id)
        if isinstance(outcome, heads.Refusal):
            self._answer(outcome, with_body=with_body)
            return
        with contextlib.suppress(OSError):
            outcome.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.state = _State.SPLICED
        relay = self._relay
        self.splice = Splice(
            relay.loop,
            self._sock,
            outcome,
            first,
            relay.scratch,
            self._on_splice_ended,
            more=more,
            half_close=decision.upgrade,
        )
        self._log(logging.DEBUG, f"relaying to port {port}", sandbox_id)
        self.splice.start()

    def _on_splice_ended(self) -> None:
        """The splice closed both sockets."""
        if self.state is _State.SPLICED:
            self.state = _State.CLOSED
            self._relay.closed(self, dropped=False)

    def _answer(self, refusal: heads.Refusal, *, with_body: bool = True) -> None:
        """Answer and take leave.

        Closing with unread bytes would send RST, which may overtake the answer; so the client's rest is read
        and thrown away until it closes, for `FAREWELL` seconds at most.
        """
        self._timer.cancel()
        self._relay.headless_no_more(self)
        self._relay.release(self)
        self._relay.taking_leave(self, refusal.status)
        level = logging.DEBUG if refusal.status in UNPROVEN else logging.INFO
        about = self.sandbox_id or str(refusal.body.get("sandboxId", ""))
        self._log(level, str(refusal.body["message"]), about, status=refusal.status)
        self._unread = bytearray()
        self.state = _State.FAREWELL
        try:
            self._sock.send(refusal.encode(with_body=with_body, as_page=self.as_page))
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(reset)
            return
        self._relay.loop.remove_reader(self._sock)
        self._relay.loop.add_reader(self._sock, self._on_farewell_bytes)
        self._timer = self._relay.loop.call_later(FAREWELL, self._close, socket.socket.close)

    def _log(self, level: int, message: str, sandbox_id: str, **fields: int) -> None:
        if _log.isEnabledFor(level):
            about = {"request_id": self.request_id, "sandbox_id": sandbox_id, "fields": fields}
            _log.log(level, "%s", message, extra=about)

    def _on_farewell_bytes(self) -> None:
        try:
            size = self._sock.recv_into(self._relay.scratch)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._close(reset)
            return
        if size == 0:
            self._close(socket.socket.close)
