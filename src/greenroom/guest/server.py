"""HTTP/1.1 connections: one protocol object each, one task per request, no timer while nothing happens.

Sits between ``parsing`` (pure) and ``app`` (routes). Written on ``asyncio.Protocol`` instead of streams or
``http.server`` because the guest may run ten to twenty times slower than its host: a small request costs
one read, one task step and one write here. Request bodies are handed over piece by piece and the socket is
not read while the reader lags; response writes tell the writer when the peer lags.

Bounds: head 64 KiB and 30 s from its first byte; unary bodies 4 MiB and 60 s; a connection may be idle for
640 s, which is longer than every hop in front of it waits, so that no hop reuses one that is closing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

from .errors import AgentError, ClientGone
from .exchange import BODY_HIGH, Body, Receiver, Request, Response, StreamListener
from .parsing import MAX_HEAD, ChunkedDecoder, parse_head
from .tasks import spawn

MAX_CONNECTIONS = 2048
IDLE_SECONDS = 640.0
HEAD_SECONDS = 30.0
DISCARD_SECONDS = 60.0

_SENDFILE_SLICE = 512 * 1024

_log = logging.getLogger(__name__)

Handler = Callable[[Request, Response], Awaitable[None]]


class Connection(asyncio.Protocol):
    """One client connection. At most one request is served at a time; pipelined ones wait their turn."""

    __slots__ = (
        "_body", "_buffer", "_decoder", "_drain_waiter", "_eof", "_expects_continue", "_head_timer", "_idle_timer",
        "_last_activity", "_loop", "_raw", "_reading_paused", "_remaining", "_request", "_server", "_transport",
        "closed", "listener", "speaks_chunked", "write_paused",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = server.loop
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._request: Request | None = None
        self._body: Body | None = None
        self._decoder: ChunkedDecoder | None = None
        self._remaining = 0
        self._expects_continue = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._last_activity = 0.0
        self._reading_paused = False
        self._raw: Receiver | None = None
        self._eof = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self.listener: StreamListener | None = None
        self.closed = False
        self.speaks_chunked = True
        self.write_paused = False

    # -- what asyncio calls ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_server gives
        self._transport = transport
        if not self._server.admit(self):
            self._refuse(AgentError("unavailable", "too many connections"))
            return
        self._last_activity = self._loop.time()
        self._idle_timer = self._loop.call_later(IDLE_SECONDS, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._server.forget(self)
        for timer in (self._idle_timer, self._head_timer):
            if timer is not None:
                timer.cancel()
        gone = ClientGone("the client closed the connection")
        if self._body is not None:
            self._body.fail(gone)
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_exception(gone)
        if (listener := self.listener) is not None:
            self.listener = None
            listener.gone()

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        if self._raw is not None:
            self._raw.received(data)
            return
        if self._body is not None and not self._body.done:
            self._last_activity = self._loop.time()
            self._feed_body(data)
            return
        self._buffer += data
        if self._request is None:
            self._next_request()
        else:
            self.update_reading()

    def eof_received(self) -> bool:
        """Whether to stay open for writing: only for an answer that is still being made.

        A client that follows a stream and closes its side has left; one that closed it after a complete
        request may be waiting for the response.
        """
        self._eof = True
        if self._raw is not None:
            self._raw.finished()
            return True
        if self._request is None or self._body is None or not self._body.done:
            return False
        self._request.head.keep_alive = False
        if (listener := self.listener) is not None:
            self.listener = None
            listener.gone()
            return False
        return True

    def pause_writing(self) -> None:
        self.write_paused = True
        if self.listener is not None:
            self.listener.flow(False)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)
        if self.listener is not None:
            self.listener.flow(True)

    # -- what requests and responses call ---------------------------------------------------------------

    @property
    def transport(self) -> asyncio.Transport:
        """The open transport. Raises :class:`ClientGone` after the peer has left."""
        if self._transport is None or self.closed or self._transport.is_closing():
            raise ClientGone("the client closed the connection")
        return self._transport

    def transmit(self, data: bytes) -> None:
        """Hand bytes to the transport; nothing happens when the peer has gone."""
        if self._transport is not None and not self.closed and not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait while the peer lags."""
        _ = self.transport
        if self.write_paused:
            self._drain_waiter = self._loop.create_future()
            try:
                await self._drain_waiter
            finally:
                self._drain_waiter = None

    async def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """See :meth:`Response.send_file`."""
        transport = self.transport
        # A duplicate, as the file object closes what it holds.
        sent = 0
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            while sent < count:
                # In slices: to a fast reader one call would send everything and stop the loop meanwhile.
                slice_size = min(_SENDFILE_SLICE, count - sent)
                try:
                    done = await self._loop.sendfile(transport, file, offset + sent, slice_size)
                except (OSError, RuntimeError) as error:  # RuntimeError: the transport is closing
                    raise ClientGone(f"sending stopped: {error}") from None
                sent += done
                if done < slice_size:
                    break
                await asyncio.sleep(0)
        return sent

    def before_body_wait(self) -> None:
        """Somebody wants the body: tell a client that asked for leave to send it."""
        if self._expects_continue:
            self._expects_continue = False
            self.transmit(b"HTTP/1.1 100 Continue\r\n\r\n")

    def update_reading(self) -> None:
        """Read the socket exactly while there is room for what it brings."""
        room = len(self._buffer) < MAX_HEAD and (self._body is None or self._body.buffered < BODY_HIGH)
        if self._transport is None or self._transport.is_closing():
            return
        if room and self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        elif not room and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def take_over(self, receiver: Receiver) -> bytes:
        """From now on everything that comes is this receiver's; answers what has come already."""
        self._raw = receiver
        if self._eof:  # seen while HTTP was still spoken
            self._loop.call_soon(receiver.finished)
        early = bytes(self._buffer)
        self._buffer.clear()
        self.hold(False)
        return early

    def hold(self, held: bool) -> None:
        """Whether to leave the socket alone, once it has been taken over."""
        if self._transport is None or self._transport.is_closing() or held == self._reading_paused:
            return
        self._reading_paused = held
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def send_eof(self) -> None:
        """Close our side after what was written; the peer may go on sending."""
        if self._transport is not None and not self.closed and not self._transport.is_closing():
            self._transport.write_eof()

    def reset(self) -> None:
        """Close with a reset, so that the peer knows that this was no end."""
        if self._transport is not None:
            reset(self._transport)

    def abort(self) -> None:
        """Cut the connection so that the peer cannot take a torn response for a whole one."""
        if self._transport is not None:
            self._transport.abort()

    def retire(self) -> None:
        """Close now if idle, else after the request under way."""
        if self._request is None and self._transport is not None:
            self._transport.close()

    # -- requests ---------------------------------------------------------------------------------------

    def _next_request(self) -> None:
        buffer = self._buffer
        while buffer[:2] == b"\r\n":  # RFC 9112 section 2.2: an empty line before a request is ignored
            del buffer[:2]
        if not buffer:
            return
        end = buffer.find(b"\r\n\r\n")
        if end > MAX_HEAD or (end < 0 and len(buffer) > MAX_HEAD):
            why = f"the head is larger than {MAX_HEAD} bytes"
            self._refuse(AgentError("invalid_argument", why, status=431))
            return
        if end < 0:
            if self._head_timer is None:
                self._head_timer = self._loop.call_later(HEAD_SECONDS, self._head_too_slow)
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        raw = bytes(buffer[:end])
        del buffer[: end + 4]
        try:
            head = parse_head(raw)
        except AgentError as error:
            self._refuse(error)
            return
        self.speaks_chunked = head.version == "HTTP/1.1"
        self._expects_continue = head.headers.get("expect", "").lower() == "100-continue"
        body = self._body = Body(self)
        self._decoder = ChunkedDecoder() if head.chunked else None
        self._remaining = head.length or 0
        if not head.chunked and not self._remaining:
            body.finish()
        request = self._request = Request(head, body, self, self._loop.time())
        if buffer and not body.done:
            rest = bytes(buffer)
            buffer.clear()
            self._feed_body(rest)
        spawn(self._serve(request, Response(self, head)))

    def _feed_body(self, data: bytes) -> None:
        body = self._body
        if body is None or body.error is not None:
            return
        self._expects_continue = False
        if self._decoder is None:
            piece = data[: self._remaining] if len(data) > self._remaining else data
            self._remaining -= len(piece)
            body.push(piece)
            if not self._remaining:
                self._buffer += data[len(piece) :]
                body.finish()
        else:
            try:
                for piece in self._decoder.feed(data):
                    body.push(piece)
            except AgentError as error:
                body.fail(error)
                if self._request is not None:
                    self._request.head.keep_alive = False
                if body.discarding:
                    self._close()
                return
            if self._decoder.done:
                self._buffer += self._decoder.rest()
                body.finish()
        if body.discarding:
            if body.done:
                self._after_discard()
            return
        self.update_reading()

    async def _serve(self, request: Request, response: Response) -> None:
        try:
            await self._server.handler(request, response)
        except ClientGone:
            pass
        except AgentError as error:
            if not response.started:
                response.send_error(error)
        except Exception:
            _log.exception("request failed: %s %s", request.method, request.path)
            if not response.started:
                response.send_error(AgentError("internal", "the agent failed on this request"))
        self.listener = None
        if self.closed:
            return
        if not response.finished:
            self.abort()
        elif not (response.keep_alive and request.head.keep_alive and self._server.accepting):
            self._close_after(request)
        elif request.body.done:
            self._request_done()
        elif self._expects_continue:
            self._close()  # the client was never asked for the body, so it is not on its way
        else:
            self._discard(request.body)

    def _request_done(self) -> None:
        self._request = None
        self._body = None
        self._decoder = None
        self._last_activity = self._loop.time()
        self.update_reading()
        if self._buffer:
            self._next_request()

    def _close_after(self, request: Request) -> None:
        if request.body.done or request.body.error is not None or self._expects_continue:
            self._close()
        else:
            self._discard(request.body)

    def _discard(self, body: Body) -> None:
        """Swallow the rest of a refused upload: closing at once would reset the answer away."""
        body.discard()
        self.update_reading()
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(DISCARD_SECONDS, self._close)

    def _after_discard(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        request = self._request
        if request is not None and request.head.keep_alive and self._server.accepting:
            self._request_done()
        else:
            self._close()

    def _refuse(self, error: AgentError) -> None:
        """Answer what is no request, and close."""
        Response(self, None).send_error(error)
        self._buffer.clear()
        self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _head_too_slow(self) -> None:
        self._head_timer = None
        self._refuse(AgentError("deadline_exceeded", "the request head took too long", status=408))

    def _check_idle(self) -> None:
        closing = self._transport is not None and self._transport.is_closing()
        waits_for_peer = self._request is None or (self._body is not None and not self._body.done)
        if not waits_for_peer and not closing:
            self._last_activity = self._loop.time()
        left = self._last_activity + IDLE_SECONDS - self._loop.time()
        if left <= 0:
            if closing or self._request is not None:
                self.abort()
            else:
                self._close()
            return
        self._idle_timer = self._loop.call_later(left, self._check_idle)


def reset(transport: asyncio.Transport) -> None:
    """Close a connection at once, with a reset (SO_LINGER of zero) instead of an end."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Server:
    """Listens, and knows the open connections."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.loop = asyncio.get_running_loop()
        self.accepting = True
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Open the port (0 chooses one) and answer which it is. Raises OSError when it is taken."""
        self._listener = await self.loop.create_server(
            lambda: Connection(self), host, port, backlog=1024, reuse_address=True
        )
        return int(self._listener.sockets[0].getsockname()[1])

    def admit(self, connection: Connection) -> bool:
        """Whether one more connection may be served."""
        if len(self._connections) >= MAX_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        """A connection has closed."""
        self._connections.discard(connection)

    def statistics(self) -> dict[str, int]:
        """Open connections, for tests and logs."""
        return {"connections": len(self._connections)}

    def close(self) -> None:
        """Stop listening, close idle connections, let the others finish their request."""
        self.accepting = False
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.retire()
