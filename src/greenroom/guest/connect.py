"""Connect-RPC as its JSON clients use it: unary bodies, stream envelopes, errors.

Protocol: https://connectrpc.com/docs/protocol. A stream is a row of envelopes: one flag byte, a 32-bit
big-endian length, a JSON message; the last one has flag 2 and says how the call ended. Nothing is
compressed. Stands on ``server``; ``commands`` and ``filesystem`` stand on it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from .errors import AgentError
from .exchange import MAX_UNARY_BODY, Request, Response
from .messages import Message, decode, encode

UNARY_TYPE = "application/json"
STREAM_TYPE = "application/connect+json"
END_FLAG = 0x02
COMPRESSED_FLAG = 0x01
MAX_MESSAGE = MAX_UNARY_BODY
_HEADER = 5


def frame(payload: bytes, flags: int = 0) -> bytes:
    """One envelope around a JSON text."""
    return b"%c%b%b" % (flags, len(payload).to_bytes(4, "big"), payload)


END_OK = frame(b"{}", END_FLAG)
"""The envelope that ends a stream well."""


def end_error(error: AgentError) -> bytes:
    """The envelope that ends a stream with an error."""
    return frame(encode({"error": {"code": error.code, "message": error.message}}), END_FLAG)


class FrameDecoder:
    """Envelopes out of bytes that arrive in pieces of any size; pure."""

    __slots__ = ("_buffer", "_limit")

    def __init__(self, limit: int = MAX_MESSAGE) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The (flags, payload) pairs completed by these bytes. Raises for what cannot be served."""
        self._buffer += data
        found: list[tuple[int, bytes]] = []
        while len(self._buffer) >= _HEADER:
            flags = self._buffer[0]
            size = int.from_bytes(self._buffer[1:_HEADER], "big")
            if flags & COMPRESSED_FLAG:
                raise AgentError("unimplemented", "compressed messages are not supported, send identity")
            if size > self._limit:
                raise AgentError("resource_exhausted", f"a message is larger than {self._limit} bytes")
            if len(self._buffer) < _HEADER + size:
                break
            found.append((flags, bytes(self._buffer[_HEADER : _HEADER + size])))
            del self._buffer[: _HEADER + size]
        return found

    @property
    def partial(self) -> bool:
        """Whether an incomplete envelope is waiting for its rest."""
        return bool(self._buffer)


async def unary_request(request: Request) -> Message:
    """The message of a unary call."""
    return decode(await request.body.read_all())


async def stream_request(request: Request) -> Message:
    """The single message of a server-streaming call."""
    decoder = FrameDecoder()
    frames = decoder.feed(await request.body.read_all(MAX_MESSAGE + 64))
    messages = [payload for flags, payload in frames if not flags & END_FLAG]
    if len(messages) != 1 or decoder.partial:
        raise AgentError("invalid_argument", "the call takes exactly one message in one envelope")
    return decode(messages[0])


async def incoming(request: Request) -> AsyncIterator[Message]:
    """The messages of a client-streaming call as they arrive."""
    decoder = FrameDecoder()
    while chunk := await request.body.read():
        for flags, payload in decoder.feed(chunk):
            if flags & END_FLAG:
                return
            yield decode(payload)
    if decoder.partial:
        raise AgentError("invalid_argument", "the request ended inside an envelope")


def is_stream(request: Request) -> bool:
    """Whether the caller expects envelopes."""
    return _media_type(request) == STREAM_TYPE


def check_content_type(request: Request, *, stream: bool) -> None:
    """Refuse other codecs with 415, as the protocol asks."""
    expected = STREAM_TYPE if stream else UNARY_TYPE
    if _media_type(request) != expected:
        raise AgentError("unimplemented", f"the content type of this call must be {expected}", status=415)


def timeout_seconds(request: Request) -> float | None:
    """The caller's deadline from ``Connect-Timeout-Ms`` in seconds; None when there is none."""
    value = request.headers.get("connect-timeout-ms")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 10):
        raise AgentError("invalid_argument", "Connect-Timeout-Ms must be a number of at most 10 digits")
    return int(value) / 1000


def reply(response: Response, message: dict[str, Any]) -> None:
    """Answer a unary call."""
    response.send(200, encode(message), UNARY_TYPE)


def reply_error(response: Response, error: AgentError) -> None:
    """Answer a call with an error before anything was streamed: HTTP status and a JSON body."""
    if error.status == 415:
        response.send(415, b"", headers=[("Accept-Post", f"{UNARY_TYPE}, {STREAM_TYPE}")])
        return
    response.send(error.status, encode({"code": error.code, "message": error.message}), UNARY_TYPE)


def start_stream(response: Response, first: bytes = b"") -> None:
    """Begin a streamed answer; errors after this travel in its last envelope."""
    response.start(200, [("Content-Type", STREAM_TYPE)], first=first)


def stream_error(response: Response, error: AgentError) -> None:
    """End a streaming call with an error, whether or not its answer has begun."""
    if not response.started:
        start_stream(response)
    response.finish(end_error(error))


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
