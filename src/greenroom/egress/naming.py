"""Which host a connection names, from its first bytes: TLS ClientHello (RFC 8446, SNI: RFC 6066) or an HTTP/1 head.

Pure, and bounded: at most `LIMIT` bytes are looked at. What is read here was written by a guest that may lie; the
name only decides together with where it really leads (`rules`). With encrypted ClientHello the outer name counts.
"""

from __future__ import annotations

import enum
import re
from typing import Final

LIMIT = 16 << 10
"""Bytes in which the name must have come. Real ClientHellos take 0.3 to 2 KB."""


class More(enum.Enum):
    """More bytes are needed to tell."""

    MORE = "more"


MORE: Final = More.MORE

_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_](?:[a-z0-9_-]{0,62})(?:\.[a-z0-9_](?:[a-z0-9_-]{0,62}))*")
_REQUEST = re.compile(rb"[A-Z]{1,20} (\S{1,8000}) HTTP/1\.[01]")
_METHOD_START = re.compile(rb"[A-Z]{1,20}(?: |\Z)")
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(?=[/?#]|\Z)", re.IGNORECASE)
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME = 0


class _Short(Exception):
    """The bytes end before the structure does."""


class _Reader:
    """Reads big-endian structures; raises _Short at the end."""

    __slots__ = ("_data", "_place")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def take(self, size: int) -> bytes:
        part = self._data[self._place : self._place + size]
        if len(part) < size:
            raise _Short
        self._place += size
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> bytes:
        """What follows a length of `size` bytes."""
        return self.take(self.number(size))

    @property
    def rest(self) -> int:
        return len(self._data) - self._place


def sniff(data: bytes) -> str | More | None:
    """The host that a connection beginning with `data` names, in lower case; None if it names none; MORE."""
    if not data:
        return MORE
    found = _tls(data) if data[0] == _HANDSHAKE else _http(data)
    return None if found is MORE and len(data) >= LIMIT else found


def _tls(data: bytes) -> str | More | None:
    """The server name of a ClientHello, which may be spread over several records."""
    hello = b""
    records = _Reader(data)
    try:
        while True:
            kind, major, _ = records.take(3)
            if kind != _HANDSHAKE or major != 3:
                return None
            size = records.number(2)
            if not 0 < size <= 1 << 14:
                return None
            hello += records.take(min(size, records.rest))
            if len(hello) >= 4:
                if hello[0] != _CLIENT_HELLO:
                    return None
                wanted = int.from_bytes(hello[1:4], "big")
                if wanted > LIMIT:
                    return None
                if len(hello) >= 4 + wanted:
                    return _server_name(hello[4 : 4 + wanted])
    except _Short:
        return MORE


def _server_name(hello: bytes) -> str | None:
    """The name in the body of a ClientHello that has come whole."""
    reader = _Reader(hello)
    try:
        reader.take(2 + 32)  # version and random
        reader.block(1)  # session
        reader.block(2)  # cipher suites
        reader.block(1)  # compression methods
        extensions = _Reader(reader.block(2))
        while extensions.rest:
            kind, body = extensions.number(2), extensions.block(2)
            if kind == _SERVER_NAME:
                names = _Reader(_Reader(body).block(2))
                # The type of the one kind of name there is: host_name.
                return _clean(names.block(2)) if names.number(1) == 0 else None
    except _Short:
        pass
    return None


def _http(data: bytes) -> str | More | None:
    """The host of an HTTP/1 request: its one Host field, which an absolute target must agree with.

    The whole head is waited for, since a second Host field would let two readers see two hosts.
    """
    if _METHOD_START.match(data[:21]) is None:
        return None
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return MORE
    first, *lines = data[:end].split(b"\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None:
        return None
    hosts = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            return None
        if name.lower() == b"host":
            hosts.append(value.strip(b" \t"))
    if len(hosts) != 1:
        return None
    host = _clean(_without_port(hosts[0]))
    target = request[1]
    if not target.startswith(b"/") and target != b"*":
        absolute = _ABSOLUTE.match(target)
        if absolute is None or _clean(_without_port(absolute[1])) != host:
            return None
    return host


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host


def _clean(name: bytes) -> str | None:
    """A host name in lower case without a final dot; None for what is none."""
    try:
        text = name.decode("ascii").lower().removesuffix(".")
    except UnicodeDecodeError:
        return None
    return text if _NAME.fullmatch(text) else None
