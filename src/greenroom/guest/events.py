"""The events of a command as stream envelopes, ready to be sent to any number of readers.

Stands on ``connect``; ``processes`` and ``following`` send these. The wire form is the E2B contract's; the
fields ``executionId`` and ``offset`` are Greenroom's own (``docs/executions.md``), which other clients skip.
"""

from __future__ import annotations

import binascii
import signal

from .connect import frame
from .messages import encode

KEEPALIVE_EVENT = frame(b'{"event":{"keepalive":{}}}')


def start_event(pid: int, execution_id: str) -> bytes:
    """The first event of a stream."""
    return frame(b'{"event":{"start":{"pid":%d,"executionId":"%b"}}}' % (pid, execution_id.encode("ascii")))


def output_event(name: str, data: bytes, offset: int | None = None) -> bytes:
    """A chunk of output, untouched: it may begin or end inside a character.

    ``offset`` is the place of its first byte in all output of the command, for readers who asked for it.
    """
    encoded = binascii.b2a_base64(data, newline=False)
    place = b"" if offset is None else b',"offset":"%d"' % offset
    return frame(b'{"event":{"data":{"%b":"%b"%b}}}' % (name.encode("ascii"), encoded, place))


def end_message(status: int) -> dict[str, object]:
    """How a command ended; ``status`` is an exit code, or the negative number of the signal that killed it.

    Texts follow the contract: "exit status 3", "signal: killed" with exit code -1.
    """
    end: dict[str, object] = {"exitCode": status if status >= 0 else -1, "exited": status >= 0}
    text = f"exit status {status}" if status >= 0 else f"signal: {signal_text(-status)}"
    end["status"] = text
    if status:
        end["error"] = text
    return end


def end_event(status: int) -> bytes:
    """The last event."""
    return frame(encode({"event": {"end": end_message(status)}}))


def signal_text(number: int) -> str:
    """The C library's description in lower case, such as "killed" or "segmentation fault"."""
    return (signal.strsignal(number) or f"signal {number}").lower()
