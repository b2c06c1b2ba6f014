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
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from .errors import AgentError, ClientGone
from .messages import encode
from .parsing import MAX_HEAD, ChunkedDecoder, Head, parse_head
from .tasks import spawn

MAX_UNARY_BODY = 4 * 1024 * 1024
MAX_CONNECTIONS = 2048
IDLE_SECONDS = 640.0
HEAD_SECONDS = 30.0
UNARY_BODY_SECONDS = 60.0
DISCARD_SECONDS = 60.0

_BODY_HIGH = 256 * 1024
_BODY_LOW = 64 * 1024

_REASONS = {
    100: "Continue", 200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified",
    400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    406: "Not Acceptable", 408: "Request Timeout", 409: "Conflict", 413: "Content Too Large",
    415: "Unsupported Media Type", 416: "Range Not Satisfiable", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 499: "Client Closed Request", 500: "Internal Server Error",
    501: "Not Implemented", 503: "Service Unavailable", 504: "Gateway Timeout",
    505: "HTTP Version Not Supported", 507: "Insufficient Storage",
}  # fmt: skip
_STATUS_LINES = {code: f"HTTP/1.1 {code} {reason}\r\n".encode() for code, reason in _REASONS.items()}

_log = logging.getLogger(__name__)

Headers = Iterable[tuple[str, str]]
Handler = Callable[["Request", "Response"], Awaitable[None]]


class StreamListener(Protocol):
    """Who writes a long response and must hear how the peer is doing."""

    def flow(self, writable: bool) -> None:
        """The peer lags (False) or has caught up (True)."""

    def gone(self) -> None:
        """The peer has closed its connection."""


class Body:
    """The request body, in the order it arrives; the socket pauses while too much waits here."""

    __slots__ = ("_chunks", "_connection", "_waiter", "buffered", "discarding", "done", "error")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.buffered = 0
        self.done = False
        self.discarding = False
        self.error: Exception | None = None

    def push(self, data: bytes) -> None:
        """Called by the connection with more data."""
        if data and not self.discarding:
            self._chunks.append(data)
            self.buffered += len(data)
        self._wake()

    def finish(self) -> None:
        """Called by the connection when the body is complete."""
        self.done = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Called by the connection when the rest will never come."""
        if not self.done:
            self.error = error
            self._wake()

    def discard(self) -> None:
        """Forget what is there and what comes."""
        self.discarding = True
        self._chunks.clear()
        self.buffered = 0

    async def read(self) -> bytes:
        """The next piece, ``b""`` at the end. Raises :class:`ClientGone` or :class:`AgentError`."""
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.done:
                return b""
            self._connection.before_body_wait()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunk = self._chunks.popleft()
        self.buffered -= len(chunk)
        if self.buffered < _BODY_LOW:
            self._connection.update_reading()
        return chunk

    async def read_all(self, limit: int = MAX_UNARY_BODY) -> bytes:
        """The whole body. Raises ``resource_exhausted`` (413) above the limit, 408 after a minute."""
        if not self.done:
            try:
                async with asyncio.timeout(UNARY_BODY_SECONDS):
                    return await self._collect(limit)
            except TimeoutError:
                raise AgentError("deadline_exceeded", "the request body took too long", status=408) from None
        return await self._collect(limit)

    async def _collect(self, limit: int) -> bytes:
        parts: list[bytes] = []
        total = 0
        while chunk := await self.read():
            total += len(chunk)
            if total > limit:
                raise AgentError("resource_exhausted", f"the body is larger than {limit} bytes", status=413)
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Request:
    """One request: its head, its body, and the connection's fate."""

    __slots__ = ("body", "connection", "head", "headers", "method", "path", "started")

    def __init__(self, head: Head, body: Body, connection: Connection, started: float) -> None:
        self.head = head
        self.method = head.method
        self.path = head.path
        self.headers = head.headers
        self.body = body
        self.connection = connection
        self.started = started
        """Loop time (seconds, monotonic) at which the head was complete."""


class Response:
    """Writes one response: :meth:`send` for a whole one, else :meth:`start`, :meth:`write`, :meth:`finish`.

    Writing never blocks and never raises for a peer that has gone; who writes much awaits :meth:`drain` or
    sets a :class:`StreamListener`.
    """

    __slots__ = ("_chunked", "_connection", "extra_headers", "finished", "keep_alive", "method", "started")

    def __init__(self, connection: Connection, head: Head | None) -> None:
        self._connection = connection
        self._chunked = False
        self.method = head.method if head is not None else ""
        self.keep_alive = head is not None and head.keep_alive
        self.extra_headers: list[tuple[str, str]] = []
        self.started = False
        self.finished = False

    def send(
        self, status: int, body: bytes = b"", content_type: str = "application/json", headers: Headers = ()
    ) -> None:
        """A complete response with a Content-Length."""
        lines = [("Content-Type", content_type), *headers] if body else list(headers)
        head = self._head(status, lines, len(body))
        self.finished = True
        self._connection.transmit(head if self.method == "HEAD" else head + body)

    def send_error(self, error: AgentError) -> None:
        """The error body of plain HTTP routes."""
        self.send(error.status, encode({"code": error.status, "message": error.message}))

    def start(self, status: int, headers: Headers, length: int | None = None, first: bytes = b"") -> None:
        """Head of a long response, chunked unless its length is known; ``first`` goes out with it."""
        head = self._head(status, headers, length)
        self._connection.transmit(head + self._framed(first) if first and self.method != "HEAD" else head)

    def write(self, data: bytes) -> None:
        """More of the body."""
        if data and self.method != "HEAD":
            self._connection.transmit(self._framed(data))

    def finish(self, data: bytes = b"") -> None:
        """The last of the body."""
        self.finished = True
        if self.method == "HEAD":
            return
        tail = self._framed(data) if data else b""
        if self._chunked:
            tail += b"0\r\n\r\n"
        if tail:
            self._connection.transmit(tail)

    async def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """Send part of a regular file as (part of) the body; answers how many bytes the file had of it.

        Uses ``sendfile``. Raises :class:`ClientGone`. The response must have a known length.
        """
        return await self._connection.send_file(descriptor, offset, count)

    async def drain(self) -> None:
        """Wait until the peer has taken most of what was written. Raises :class:`ClientGone`."""
        await self._connection.drain()

    def listen(self, listener: StreamListener | None) -> None:
        """Who hears of a lagging or vanished peer from now on; one already gone is told at once."""
        if listener is not None and self._connection.closed:
            listener.gone()
            return
        self._connection.listener = listener

    @property
    def writable(self) -> bool:
        """Whether the peer keeps up."""
        return not self._connection.write_paused

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _head(self, status: int, headers: Headers, length: int | None) -> bytes:
        self.started = True
        lines = [f"{name}: {value}\r\n" for name, value in headers]
        lines += [f"{name}: {value}\r\n" for name, value in self.extra_headers]
        if length is not None:
            if status not in (204, 304):
                lines.append(f"Content-Length: {length}\r\n")
        elif self._connection.speaks_chunked:
            self._chunked = True
            lines.append("Transfer-Encoding: chunked\r\n")
        else:
            self.keep_alive = False  # an HTTP/1.0 peer learns the end of the body from the close
        if not self.keep_alive:
            lines.append("Connection: close\r\n")
        lines.append("\r\n")
        start = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} Status\r\n".encode()
        return start + "".join(lines).encode("latin-1", "replace")


class Connection(asyncio.Protocol):
    """One client connection. At most one request is served at a time; pipelined ones wait their turn."""

    __slots__ = (
        "_body", "_buffer", "_decoder", "_drain_waiter", "_expects_continue", "_head_timer", "_idle_timer",
        "_last_activity", "_loop", "_reading_paused", "_remaining", "_request", "_server", "_transport",
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
        # As most HTTP servers do, a half-closed connection counts as a client that has left; what is
        # already written still goes out.
        return False

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
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            try:
                return await self._loop.sendfile(transport, file, offset, count)
            except OSError as error:
                raise ClientGone(f"sending stopped: {error}") from None

    def before_body_wait(self) -> None:
        """Somebody wants the body: tell a client that asked for leave to send it."""
        if self._expects_continue:
            self._expects_continue = False
            self.transmit(b"HTTP/1.1 100 Continue\r\n\r\n")

    def update_reading(self) -> None:
        """Read the socket exactly while there is room for what it brings."""
        room = len(self._buffer) < MAX_HEAD and (self._body is None or self._body.buffered < _BODY_HIGH)
        if self._transport is None or self._transport.is_closing():
            return
        if room and self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        elif not room and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

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
        waits_for_peer = self._request is None or (self._body is not None and not self._body.done)
        if not waits_for_peer:
            self._last_activity = self._loop.time()
        left = self._last_activity + IDLE_SECONDS - self._loop.time()
        if left <= 0:
            self.abort() if self._request is not None else self._close()
            return
        self._idle_timer = self._loop.call_later(left, self._check_idle)


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
