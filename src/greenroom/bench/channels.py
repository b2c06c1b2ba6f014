"""HTTP/1.1 to a guest agent over one socket that is kept, by whatever way the socket comes about.

The way is the caller's: the platform's entry, or a socket made inside the VM's namespace (`Vm.connect`). Asking is the
same on both, byte for byte but for the headers, so what two ways differ by is the ways'. A library's client would
spend more on a request than the way does; here is no more than a socket and httptools' parser. What runs a command in
the guest speaks Connect's stream frames (one flag byte, a big-endian uint32 length, JSON), whose reading is pure.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import httptools
import msgspec

from greenroom.errors import RuntimeFailure

DEADLINE = 120.0
"""Seconds for one answer, unless told otherwise."""
_READ = 1 << 20
_END_OF_STREAM = 0x02

Connect = Callable[[], Awaitable[Any]]
"""Gives a connected non-blocking socket. Raises OSError."""


class Answer(NamedTuple):
    """Status and body, without the body's transfer coding."""

    status: int
    body: bytes


class Ended(NamedTuple):
    """How a command ended, and its output in the order in which it came."""

    status: int
    output: bytes


class _Reading:
    """What httptools tells of one answer. `take` is given each piece of the body."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take = take
        self.complete = False
        self.keeps = False
        """The connection may be used for another request; the parser tells that only while the message ends."""
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self._take(body)

    def on_message_complete(self) -> None:
        self.keeps = self.parser.should_keep_alive()
        self.complete = True


class Channel:
    """One connection, made when it is first needed and made again when the other side has closed it."""

    def __init__(
        self, host: str, connect: Connect, headers: Mapping[str, str] | None = None, *, keep: bool = True
    ) -> None:
        """`headers` go with every request. Without `keep` each has a connection of its own, and says so."""
        self._host = host
        self._connect = connect
        self._keep = keep
        self._headers = {**(headers or {}), **({} if keep else {"Connection": "close"})}
        self._sock: Any = None

    def request(
        self, method: str, path: str, body: bytes | None = None, content_type: str = "application/json"
    ) -> bytes:
        """The bytes of a request, to be made before anything is timed."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if body is not None:
            lines += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")

    def command(self, line: str) -> bytes:
        """The bytes of a request that runs a command line in a login shell, as E2B's SDKs do."""
        asked = msgspec.json.encode(
            {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", line]}, "stdin": False}
        )
        frame = struct.pack(">BI", 0, len(asked)) + asked
        return self.request("POST", "/process.Process/Start", frame, "application/connect+json")

    async def ask(self, request: bytes, deadline: float = DEADLINE) -> Answer:
        """Send a request and read its answer. Raises RuntimeFailure when none comes, whole and in time."""
        body = bytearray()
        status = await self.read(request, body.extend, deadline)
        return Answer(status, bytes(body))

    async def read(self, request: bytes, take: Callable[[bytes], object], deadline: float = DEADLINE) -> int:
        """The same, giving the body piece by piece to `take`; returns the status."""
        try:
            async with asyncio.timeout(deadline):
                if self._sock is None:
                    self._sock = await self._connect()
                return await self._exchange(request, take)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise RuntimeFailure(f"the guest agent did not answer within {deadline:.0f} s") from error
            if isinstance(error, OSError | httptools.HttpParserError):
                raise RuntimeFailure(f"the guest agent did not answer: {error}") from error
            raise

    async def _exchange(self, request: bytes, take: Callable[[bytes], object]) -> int:
        loop, reading = asyncio.get_running_loop(), _Reading(take)
        await loop.sock_sendall(self._sock, request)
        while not reading.complete:
            chunk = await loop.sock_recv(self._sock, _READ)
            if not chunk:
                raise ConnectionResetError("the connection was closed before the answer was whole")
            reading.parser.feed_data(chunk)
        status: int = reading.parser.get_status_code()
        if not (self._keep and reading.keeps):
            self.close()
        return status

    async def run(self, line: str, deadline: float = DEADLINE) -> bytes:
        """Run a command line to its end; returns its output. Raises RuntimeFailure when it fails."""
        answer = await self.ask(self.command(line), deadline)
        if answer.status != 200:
            raise RuntimeFailure(f"the guest agent answered {answer.status} to a command")
        ended = ended_of(answer.body)
        if ended.status != 0:
            text = ended.output[-200:].decode(errors="replace").strip()
            raise RuntimeFailure(f"`{line}` ended with status {ended.status} in the guest: {text}")
        return ended.output

    def close(self) -> None:
        """Close the connection; the next request makes another."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def ended_of(stream: bytes) -> Ended:
    """What became of a command, from the whole stream about it. Raises RuntimeFailure when it does not tell."""
    output, status, position = b"", None, 0
    try:
        while position < len(stream):
            flags, length = struct.unpack_from(">BI", stream, position)
            raw = stream[position + 5 : position + 5 + length]
            position += 5 + length
            content = msgspec.json.decode(raw, type=dict[str, Any])
            if flags & _END_OF_STREAM and (problem := content.get("error")):
                raise RuntimeFailure(f"the guest agent ended a command's stream: {problem}")
            event = content.get("event", {})
            for piece in event.get("data", {}).values():
                output += base64.b64decode(piece)
            if "end" in event:
                end = event["end"]
                status = int(end.get("exitCode", 255 if "signal" in end.get("status", "") else 0))
    except (struct.error, msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
        raise RuntimeFailure("the guest agent's stream about a command cannot be read") from error
    if status is None:
        raise RuntimeFailure("the guest agent's stream about a command was cut off before its end")
    return Ended(status, output)
