"""The Connect protocol's stream frames, as far as reading a process's output needs them; no I/O.

A frame is one flag byte, a big-endian uint32 length and JSON. Flag 0x02 marks the last one, whose JSON may
hold an error. Source: the Connect protocol's specification, and E2B's SDKs for which parts are really used.
"""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec

from greenroom.errors import InternalError, PermanentError, TemporaryError

END_OF_STREAM = 0x02
FRAME_LIMIT = 16 << 20
"""Bytes of one frame; the guest agent sends output in far smaller pieces."""


class StreamError(PermanentError):
    """The sandbox ended the stream with an error of its own."""

    kind = "stream"
    status = 502


class StreamUnavailable(TemporaryError):
    """The same, for conditions that may pass."""

    kind = "stream_unavailable"


class Output(msgspec.Struct, frozen=True):
    """A piece of the process's output; `error` tells standard error from standard output."""

    data: bytes
    error: bool


class Started(msgspec.Struct, frozen=True):
    """The process runs."""

    pid: int


class Ended(msgspec.Struct, frozen=True):
    """The process ended, with this exit status as a shell counts it (128 + n after signal n)."""

    status: int


Message = Output | Started | Ended


def encode_frame(content: object) -> bytes:
    """One message frame."""
    body = msgspec.json.encode(content)
    return struct.pack(">BI", 0, len(body)) + body


class FrameReader:
    """Cuts a byte stream into what happened. `finished` tells whether the closing frame has come."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.finished = False

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes as they come. Raises StreamError or StreamUnavailable when the stream says so."""
        self._buffer += data
        found: list[Message] = []
        while len(self._buffer) >= 5:
            flags, length = struct.unpack_from(">BI", self._buffer)
            if length > FRAME_LIMIT:
                raise InternalError("the sandbox sent something that is no Connect stream")
            if len(self._buffer) < 5 + length:
                break
            body = bytes(self._buffer[5 : 5 + length])
            del self._buffer[: 5 + length]
            found += self._take(flags, body)
        return found

    def _take(self, flags: int, body: bytes) -> list[Message]:
        try:
            content = msgspec.json.decode(body, type=dict[str, Any]) if body else {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InternalError("the sandbox sent a frame that cannot be read") from error
        if flags & END_OF_STREAM:
            self.finished = True
            if isinstance(problem := content.get("error"), dict):
                raise stream_error(problem)
            return []
        event = content.get("event")
        return _messages(event) if isinstance(event, dict) else []


def stream_error(problem: dict[str, Any]) -> StreamError | StreamUnavailable:
    """The error of a closing frame or of a refused request, by its Connect code."""
    code, text = str(problem.get("code", "unknown")), str(problem.get("message", ""))
    message = f"the sandbox answered {code}: {text}" if text else f"the sandbox answered {code}"
    if code in ("unavailable", "resource_exhausted", "502", "503", "429"):
        return StreamUnavailable(message)
    return StreamError(message)


def _messages(event: dict[str, Any]) -> list[Message]:
    if isinstance(start := event.get("start"), dict):
        return [Started(int(start.get("pid", 0)))]
    if isinstance(data := event.get("data"), dict):
        return [
            Output(base64.b64decode(data[name]), error)
            for name, error in (("stdout", False), ("stderr", True))
            if isinstance(data.get(name), str)
        ]
    if isinstance(end := event.get("end"), dict):
        return [Ended(_exit_status(end))]
    return []


_SIGNALS = {"hangup": 1, "interrupt": 2, "quit": 3, "aborted": 6, "killed": 9, "segmentation fault": 11}
_SIGNALS |= {"terminated": 15, "broken pipe": 13}


def _exit_status(end: dict[str, Any]) -> int:
    """A shell's exit status from `exitCode` (absent means 0) or from a text such as `signal: killed`."""
    code = int(end.get("exitCode", 0))
    if code >= 0:
        return code
    name = str(end.get("status", "")).removeprefix("signal: ")
    return 128 + _SIGNALS[name] if name in _SIGNALS else 255
