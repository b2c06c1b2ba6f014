"""What every role logs: one JSON object a line on standard error, which the supervisor sends to the role's file.

A request has an id from the client's edge to the node. It comes as `x-request-id` (the proxy gives one to every
request that has none), is kept in a context variable, and `wire.calling` sends it on, so that the lines of one
claim in the api's, the master's and the node's log share it. A task that a request starts inherits it.

No line holds a secret. Nobody logs one on purpose; `redacted` is the net below: it blanks what follows the name
of a header that carries one, and whatever looks like a key or a token, in messages and tracebacks alike.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import re
import secrets
import sys
import time
from types import TracebackType
from typing import Any

import msgspec

HEADER = "x-request-id"
EXCEPTION_LIMIT = 16 << 10
"""Characters of a traceback in one line."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_NAMES = (
    r"x-api-key|authorization|x-access-token|x-greenroom-relay|x-greenroom-control|access_?token|control_?token"
    r"|signature"
)
_NAMED = re.compile(
    rf"""((?:{_NAMES})["']?\s*[:=,]\s*(?:b(?=["']))?)"""
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?:(?:bearer|basic)\s+)?[^\s"'&,;)}\]]+)""",
    re.IGNORECASE,
)
_ENV = re.compile(r"""(\benv(?:_?vars)?["']?\s*[:=]\s*)\{[^}]*\}?""", re.IGNORECASE)
_SHAPED = re.compile(r"(?i:\bbearer\s+)\S+|e2b_[0-9a-f]{40}|(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_BLANK = "[redacted]"


class Trail:
    """What the lines of one request have in common. `sandbox_id` is empty until it is known."""

    __slots__ = ("request_id", "sandbox_id")

    def __init__(self, request_id: str, sandbox_id: str = "") -> None:
        self.request_id = request_id
        self.sandbox_id = sandbox_id


_trail: contextvars.ContextVar[Trail | None] = contextvars.ContextVar("trail", default=None)


def acceptable(offered: str) -> bool:
    """True for a request id that may be taken over: 1 to 64 letters, digits, dots, dashes and underscores."""
    return _ID.fullmatch(offered) is not None


def begin(offered: str) -> tuple[Trail, contextvars.Token[Trail | None]]:
    """A request begins in this context, with the id that it came with if that is acceptable, else a new one."""
    trail = Trail(offered if acceptable(offered) else secrets.token_hex(16))
    return trail, _trail.set(trail)


def end(token: contextvars.Token[Trail | None]) -> None:
    """Undo `begin`."""
    _trail.reset(token)


def request_id() -> str | None:
    """The id of the request that this code runs for, or None."""
    trail = _trail.get()
    return None if trail is None else trail.request_id


def about(sandbox_id: str) -> None:
    """From here on the lines of this request are about this sandbox; nothing when there is no request."""
    trail = _trail.get()
    if trail is not None:
        trail.sandbox_id = sandbox_id


def _blank_value(found: re.Match[str]) -> str:
    return found[1] + _BLANK


def redacted(text: str) -> str:
    """`text` without secrets, as far as they can be told by their name or form."""
    text = _NAMED.sub(_blank_value, text)
    text = _ENV.sub(_blank_value, text)
    return _SHAPED.sub(_BLANK, text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line.

    `extra` may give `request_id`, `sandbox_id` and `fields`, a dict of further ones, which are numbers and words
    of our own and go in as they are.
    """

    def __init__(self, role: str, replica: int) -> None:
        super().__init__()
        self._role = role
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "role": self._role,
            "replica": self._replica,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        trail = _trail.get()
        for name in ("request_id", "sandbox_id"):
            if value := getattr(record, name, None) or (trail is not None and getattr(trail, name)):
                line[name] = value
        line |= getattr(record, "fields", {})
        if record.exc_info:
            # The end of a traceback is what tells; its length depends on who raised it.
            line["exception"] = redacted(self.formatException(record.exc_info))[-EXCEPTION_LIMIT:]
        elif record.stack_info:
            line["exception"] = redacted(self.formatStack(record.stack_info))[-EXCEPTION_LIMIT:]
        return msgspec.json.encode(line).decode()


def rfc3339(seconds: float) -> str:
    """A Unix time in UTC with milliseconds, for example `2026-01-31T12:00:00.042Z`."""
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    return f"{_to_the_second(whole)}.{milliseconds:03d}Z"


@functools.lru_cache(maxsize=2)
def _to_the_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def setup_logging(role: str, replica: int, level: str = "info") -> None:
    """Log as this role to standard error; `level` is for Greenroom's own lines, others are told from `info` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role, replica))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("greenroom").setLevel(level.upper())
    logging.getLogger("qemu").setLevel(logging.CRITICAL)
    logging.captureWarnings(True)
    sys.excepthook = _log_crash


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What nobody caught ends the process; its cause belongs to the log in the log's form."""
    logging.getLogger(__name__).critical(
        "the process ends by an unexpected error", exc_info=(kind, error, trace)
    )
