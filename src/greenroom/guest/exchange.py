"""One HTTP exchange as handlers see it: the request, its body, the response.

Between ``server``, whose connections feed and carry these objects, and everything that answers requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from .errors import AgentError
from .messages import encode
from .parsing import Head

MAX_UNARY_BODY = 4 * 1024 * 1024
UNARY_BODY_SECONDS = 60.0
BODY_HIGH = 256 * 1024
"""Bytes of a request body that may wait for their reader before the socket is left alone."""

_BODY_LOW = 64 * 1024

_REASONS = {
    100: "Continue", 101: "Switching Protocols", 200: "OK", 204: "No Content", 206: "Partial Content",
    304: "Not Modified",
    400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    406: "Not Acceptable", 408: "Request Timeout", 409: "Conflict", 413: "Content Too Large",
    415: "Unsupported Media Type", 416: "Range Not Satisfiable", 426: "Upgrade Required", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 499: "Client Closed Request", 500: "Internal Server Error",
    501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
    505: "HTTP Version Not Supported", 507: "Insufficient Storage",
}  # fmt: skip
_STATUS_LINES = {code: f"HTTP/1.1 {code} {reason}\r\n".encode() for code, reason in _REASONS.items()}


Headers = Iterable[tuple[str, str]]


class Receiver(Protocol):
    """Who gets the raw bytes of a connection that has stopped to speak HTTP."""

    def received(self, data: bytes) -> None:
        """Some bytes."""

    def finished(self) -> None:
        """The peer will send no more."""


class Link(Protocol):
    """What an exchange needs of its connection."""

    listener: StreamListener | None
    closed: bool
    speaks_chunked: bool
    write_paused: bool

    def transmit(self, data: bytes) -> None:
        """Hand bytes to the transport; nothing happens when the peer has gone."""

    async def drain(self) -> None:
        """Wait while the peer lags. Raises :class:`ClientGone`."""

    async def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """Send part of a regular file; answers how many bytes the file had of it."""

    def before_body_wait(self) -> None:
        """Somebody wants the body."""

    def update_reading(self) -> None:
        """There may be room for more of the body."""

    def take_over(self, receiver: Receiver) -> bytes:
        """Give all further bytes to this receiver; answers those that are here already."""

    def hold(self, held: bool) -> None:
        """Stop or go on reading, after :meth:`take_over`."""

    def send_eof(self) -> None:
        """Close our side after what was written."""

    def reset(self) -> None:
        """Close with a reset."""


class StreamListener(Protocol):
    """Who writes a long response and must hear how the peer is doing."""

    def flow(self, writable: bool) -> None:
        """The peer lags (False) or has caught up (True)."""

    def gone(self) -> None:
        """The peer has closed its connection."""


class Body:
    """The request body, in the order it arrives; the socket pauses while too much waits here."""

    __slots__ = ("_chunks", "_connection", "_waiter", "buffered", "discarding", "done", "error")

    def __init__(self, connection: Link) -> None:
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

    def __init__(self, head: Head, body: Body, connection: Link, started: float) -> None:
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

    def __init__(self, connection: Link, head: Head | None) -> None:
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

    def upgrade(self, protocol: str) -> None:
        """Stop to speak HTTP; what follows is the business of who takes the connection over."""
        self.started = True
        self.finished = True
        self.keep_alive = False
        head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n"
        self._connection.transmit(head.encode("ascii"))

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
