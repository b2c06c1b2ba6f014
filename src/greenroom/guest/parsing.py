"""HTTP/1.1 request heads and chunked bodies as pure functions over bytes (RFC 9112).

``server`` feeds these from sockets, the tests from strings. Everything is bounded and strict: a request
that two parsers could read in two ways (both Content-Length and Transfer-Encoding, bare line feeds, folded
headers) is refused, because a proxy stands in front of this server.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from .errors import AgentError

MAX_HEAD = 64 * 1024
"""Bytes of request line and headers."""

MAX_HEADERS = 200
_MAX_CHUNK_LINE = 1024
_MAX_TRAILERS = 16 * 1024

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEX = re.compile(rb"[0-9a-fA-F]{1,15}")


class Head:
    """A parsed request line with its headers.

    ``path`` is the raw path without query; header names are lower case, repeated ones are joined with a
    comma. ``length`` is the Content-Length (None when absent), ``chunked`` tells of a chunked body.
    """

    __slots__ = ("chunked", "headers", "keep_alive", "length", "method", "path", "query", "version")

    def __init__(self, method: str, target: str, version: str, headers: dict[str, str]) -> None:
        self.method = method
        self.path, _, self.query = target.partition("?")
        self.version = version
        self.headers = headers
        self.length, self.chunked = _body_kind(headers)
        connection = headers.get("connection", "").lower()
        self.keep_alive = version == "HTTP/1.1" and "close" not in connection

    def arguments(self) -> dict[str, str]:
        """The query as a dictionary; of a repeated name the first value counts."""
        found: dict[str, str] = {}
        if self.query:
            try:
                pairs = parse_qsl(
                    self.query, keep_blank_values=True, max_num_fields=100, errors="surrogateescape"
                )
            except ValueError as error:
                raise AgentError("invalid_argument", f"the query cannot be read: {error}") from None
            for name, value in pairs:
                found.setdefault(name, value)
        return found


def parse_head(raw: bytes) -> Head:
    """Read everything before the empty line. Raises :class:`AgentError` for what is not HTTP/1.x."""
    text = raw.decode("latin-1")
    lines = text.split("\r\n")
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise _malformed("stray control characters in the request head")
    if len(lines) > MAX_HEADERS:
        raise AgentError("invalid_argument", "too many headers", status=431)
    parts = lines[0].split(" ")
    if len(parts) != 3:
        raise _malformed("the request line must be 'METHOD target HTTP/1.1'")
    method, target, version = parts
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise AgentError("unimplemented", "only HTTP/1.0 and HTTP/1.1 are spoken here", status=505)
    if _TOKEN.fullmatch(method) is None:
        raise _malformed("the method is not a token")
    if not target.startswith("/"):
        target = _origin_form(target)
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or _TOKEN.fullmatch(name) is None:
            raise _malformed("a header line is not 'Name: value'")
        name = name.lower()
        value = value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Head(method, target, version, headers)


def _origin_form(target: str) -> str:
    """The path of an absolute target as a forward proxy would send it; ``*`` stays as it is."""
    if target == "*":
        return target
    for scheme in ("http://", "https://"):
        if target.lower().startswith(scheme):
            slash = target.find("/", len(scheme))
            return target[slash:] if slash >= 0 else "/"
    raise _malformed("the request target is neither a path nor an http URL")


def _body_kind(headers: dict[str, str]) -> tuple[int | None, bool]:
    coding = headers.get("transfer-encoding")
    length = headers.get("content-length")
    if coding is not None:
        if length is not None:
            raise _malformed("both Content-Length and Transfer-Encoding are given")
        if coding.lower() != "chunked":
            raise AgentError("unimplemented", "the only transfer coding spoken here is chunked")
        return None, True
    if length is None:
        return None, False
    if not (length.isascii() and length.isdigit() and len(length) <= 18):
        raise _malformed("Content-Length is not a number")
    return int(length), False


def _malformed(why: str) -> AgentError:
    return AgentError("invalid_argument", f"malformed request: {why}")


class ChunkedDecoder:
    """Takes a chunked body in pieces of any size, gives its data, and keeps what follows it.

    After :attr:`done`, :meth:`rest` holds bytes that belong to the next request.
    """

    __slots__ = ("_buffer", "_remaining", "_state", "_trailers", "done")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._remaining = 0
        self._trailers = 0
        self._state = "size"
        self.done = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data completed by these bytes. Raises ``invalid_argument`` for a malformed body."""
        # Large chunks pass through untouched; only the small framing parts are put together.
        out: list[bytes] = []
        if self._state == "data" and not self._buffer and len(data) <= self._remaining:
            self._take(data, out)
            return out
        self._buffer += data
        while not self.done and self._step(out):
            pass
        return out

    def rest(self) -> bytes:
        """Bytes received after the end of the body."""
        return bytes(self._buffer)

    def _take(self, piece: bytes, out: list[bytes]) -> None:
        if piece:
            out.append(piece)
        self._remaining -= len(piece)
        if not self._remaining:
            self._state = "crlf"

    def _step(self, out: list[bytes]) -> bool:
        """One element of the framing; False when more bytes are needed."""
        buffer = self._buffer
        if self._state == "data":
            if not buffer:
                return False
            piece = bytes(buffer[: self._remaining])
            del buffer[: len(piece)]
            self._take(piece, out)
            return True
        if self._state == "crlf":
            if len(buffer) < 2:
                return False
            if buffer[:2] != b"\r\n":
                raise _malformed("a chunk is longer than its size says")
            del buffer[:2]
            self._state = "size"
            return True
        end = buffer.find(b"\r\n")
        if end < 0:
            if len(buffer) > (_MAX_CHUNK_LINE if self._state == "size" else _MAX_TRAILERS):
                raise _malformed("a line between chunks is too long")
            return False
        line = bytes(buffer[:end])
        del buffer[: end + 2]
        if self._state == "size":
            self._size(line)
        elif not line:
            self.done = True
        else:
            self._trailers += len(line)
            if self._trailers > _MAX_TRAILERS:
                raise _malformed("the trailers are too long")
        return True

    def _size(self, line: bytes) -> None:
        digits = line.partition(b";")[0].strip(b" \t")
        if len(line) > _MAX_CHUNK_LINE or _HEX.fullmatch(digits) is None:
            raise _malformed("a chunk size is not a hexadecimal number")
        self._remaining = int(digits, 16)
        self._state = "data" if self._remaining else "trailers"
