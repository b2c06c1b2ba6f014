"""uvicorn's HTTP protocol with the bounds it lacks: connections in all, and the time for a request's head; and with
answers in one piece (`joined`).

Every user of the machine can open connections to a role's listener, and before its credential was checked a
connection is worth little. So a head has a deadline and a bound in bytes, and when too many connections are open
the one that has waited longest without a complete head is dropped. Honest heads are short and arrive within
milliseconds.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from greenroom.wire.joined import Joined

HEAD_DEADLINE = 10.0
"""Seconds from a connection, or from the first byte of a further request, to a complete head."""
HEAD_LIMIT = 64 << 10
"""Bytes of a head, about; more ends the connection."""
CONNECTIONS = 4096
"""Connections of one process, all listeners together; one more drops the oldest that has no head."""

TRANSPORT = "greenroom.transport"
"""Under this name a request's `extensions` have its connection's transport, for who must be able to cut it off."""

_open: set[GuardedProtocol] = set()
_headless: dict[GuardedProtocol, None] = {}


def statistics() -> dict[str, int]:
    """How many connections are open, and how many of them have no complete head."""
    return {"open": len(_open), "headless": len(_headless)}


class GuardedProtocol(HttpToolsProtocol):
    """See the module."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._joined = Joined(transport)
        super().connection_made(self._joined)  # type: ignore[arg-type]
        _open.add(self)
        self._await_head()
        if len(_open) > CONNECTIONS and _headless:
            next(iter(_headless))._drop()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        # What comes at once may be some more; the parser would take any number of headers, each of any length.
        if self in _headless and self._head_bytes > HEAD_LIMIT:
            self._drop()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT: self.transport}  # type: ignore[dict-item]
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._joined.flush()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        _open.discard(self)
        self._head_came()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        _headless[self] = None
        self._head_bytes = 0
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_DEADLINE, self._drop)

    def _head_came(self) -> None:
        _headless.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _drop(self) -> None:
        _headless.pop(self, None)
        self.transport.abort()
