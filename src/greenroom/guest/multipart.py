"""multipart/form-data as a pure push parser (RFC 7578, RFC 2046).

``uploads`` feeds it the request body in whatever pieces arrive and gets events back; file data passes
through in pieces, never collected. Everything that must be held back (a possible beginning of a boundary, a
part's headers) is bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from .errors import AgentError

MAX_PART_HEADERS = 16 * 1024
_MAX_PREAMBLE = 64 * 1024

_PARAMETER = re.compile(
    rb'\s*([!#$%&\'*+\-.^_`|~0-9A-Za-z]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s"]*))\s*(?:;|$)', re.DOTALL
)
_ESCAPED = re.compile(rb'\\(["\\])')
_FORM_ESCAPES = re.compile(rb"%(22|0[DdAa])")


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part starts; ``filename`` is None for a plain form field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    """Some bytes of the part that started last."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The part is complete."""


Event = PartBegin | PartData | PartEnd


class MultipartParser:
    """Bytes in, events out; raises ``invalid_argument`` for what is no multipart body."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # The first boundary may stand at the very beginning, without the line break before it.
        self._buffer = bytearray(b"\r\n")
        self._state = "preamble"
        self._skipped = 0

    @property
    def done(self) -> bool:
        """Whether the closing boundary has been seen; what follows it is ignored."""
        return self._state == "epilogue"

    def feed(self, data: bytes) -> list[Event]:
        """The events completed by these bytes."""
        if self.done:
            return []
        self._buffer += data
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> None:
        """The body is over. Raises ``invalid_argument`` when the closing boundary is missing."""
        if not self.done:
            raise _malformed("it ends before its closing boundary")

    def _step(self, events: list[Event]) -> bool:
        if self._state == "data":
            return self._data(events)
        if self._state == "boundary":
            return self._after_boundary()
        if self._state == "headers":
            return self._headers(events)
        if self._state == "preamble":
            return self._preamble()
        return False

    def _preamble(self) -> bool:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            drop = max(0, len(self._buffer) - len(self._delimiter))
            self._skipped += drop
            del self._buffer[:drop]
            if self._skipped > _MAX_PREAMBLE:
                raise _malformed("no boundary was found")
            return False
        del self._buffer[: at + len(self._delimiter)]
        self._state = "boundary"
        return True

    def _after_boundary(self) -> bool:
        buffer = self._buffer
        if buffer[:2] == b"--":
            self._state = "epilogue"
            buffer.clear()
            return False
        end = buffer.find(b"\r\n")
        if end < 0:
            if len(buffer) > 256:
                raise _malformed("a boundary line is too long")
            return False
        if buffer[:end].strip(b" \t"):
            raise _malformed("a boundary is followed by other text")
        # The line break stays: a part without headers has its empty line right here.
        del buffer[:end]
        self._state = "headers"
        return True

    def _headers(self, events: list[Event]) -> bool:
        # The buffer begins with the line break that ended the boundary line.
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_PART_HEADERS or (end < 0 and len(self._buffer) > MAX_PART_HEADERS):
            raise _malformed("the headers of a part are too long")
        if end < 0:
            return False
        events.append(_begin(bytes(self._buffer[2:end])))
        del self._buffer[: end + 4]
        self._state = "data"
        return True

    def _data(self, events: list[Event]) -> bool:
        buffer = self._buffer
        at = buffer.find(self._delimiter)
        if at >= 0:
            if at:
                events.append(PartData(bytes(buffer[:at])))
            events.append(PartEnd())
            del buffer[: at + len(self._delimiter)]
            self._state = "boundary"
            return True
        # Only a tail that may be the beginning of a boundary has to wait for more bytes.
        tail = buffer.find(b"\r", max(0, len(buffer) - len(self._delimiter) + 1))
        ready = len(buffer) if tail < 0 else tail
        if ready:
            events.append(PartData(bytes(buffer[:ready])))
            del buffer[:ready]
        return False


def boundary_of(content_type: str) -> bytes:
    """The boundary a Content-Type header announces. Raises ``invalid_argument`` without a usable one."""
    media_type, _, rest = content_type.partition(";")
    if media_type.strip().lower() != "multipart/form-data":
        raise _malformed("the content type is not multipart/form-data")
    boundary = parameters(rest.encode("latin-1", "replace")).get("boundary", b"")
    if not 1 <= len(boundary) <= 200:
        raise _malformed("the content type names no usable boundary")
    return boundary


def parameters(raw: bytes) -> dict[str, bytes]:
    """The ``name=value`` pairs after a media type or disposition, names in lower case.

    Within quotes only ``\\"`` and ``\\\\`` are escapes: browsers send other backslashes as they are.
    """
    found: dict[str, bytes] = {}
    at = 0
    while (match := _PARAMETER.match(raw, at)) is not None and match.end() > at:
        quoted, bare = match.group(2), match.group(3)
        value = bare if quoted is None else _ESCAPED.sub(rb"\1", quoted)
        found.setdefault(match.group(1).decode("ascii").lower(), value)
        at = match.end()
    return found


def _begin(block: bytes) -> PartBegin:
    for line in block.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            kind, _, rest = value.partition(b";")
            if kind.strip().lower() != b"form-data":
                break
            found = parameters(rest)
            return PartBegin(found.get("name", b"").decode("utf-8", "replace"), _filename(found))
    raise _malformed("a part has no form-data Content-Disposition")


def _filename(found: dict[str, bytes]) -> str | None:
    extended = found.get("filename*")
    if extended is not None:
        # RFC 8187: charset'language'percent-encoded
        charset, _, rest = extended.partition(b"'")
        if charset.lower() == b"utf-8" and b"'" in rest:
            return unquote_to_bytes(rest.partition(b"'")[2]).decode("utf-8", "surrogateescape")
    plain = found.get("filename")
    if plain is None:
        return None
    # The three characters that the HTML form encoding replaces; any other percent sign is literal.
    plain = _FORM_ESCAPES.sub(lambda match: bytes([int(match.group(1), 16)]), plain)
    return plain.decode("utf-8", "surrogateescape")


def _malformed(why: str) -> AgentError:
    return AgentError("invalid_argument", f"malformed multipart body: {why}")
