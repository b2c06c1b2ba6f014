"""How a role calls another: one pooled client, a deadline on every call, errors rebuilt from the wire.

A call that could not be *sent* raises NodeUnavailable and may be repeated elsewhere. One whose answer was lost
after it was sent raises OutcomeUnknown if it changes something (the caller asks by key), else NodeUnavailable.
A call made for a request carries that request's id.

Error texts reach users, so they name the kind of role and no address. Where it was is in this process's log: once when
calls to an address begin to fail, and once when one has an answer again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import TypeVar

import aiohttp
import msgspec

from greenroom.errors import GreenroomError, InternalError, NodeUnavailable, OutcomeUnknown, from_wire
from greenroom.wire import changes, logs, metrics
from greenroom.wire.changes import Position

_log = logging.getLogger(__name__)
# A command has no log, and shows the error itself.
_log.addHandler(logging.NullHandler())
T = TypeVar("T")

CALLS = metrics.counter(
    "greenroom_calls_total", "Calls to other roles, by the callee's kind", ("callee", "outcome")
)
SECONDS = metrics.histogram(
    "greenroom_call_seconds", "From sending a call to its answer, long polls left out", ("callee", "outcome")
)


class RoleClient:
    """Calls other roles' internal APIs with this role's bearer token. Use as an async context manager.

    `masters` are the masters' URLs: a role calls only masters and nodes, so they tell the two apart for metrics.
    """

    def __init__(self, token: str, connections_per_host: int = 256, *, masters: Collection[str] = ()) -> None:
        self._token = token
        self._masters = frozenset(_where(url) for url in masters)
        self._limit = connections_per_host
        self._silent: set[str] = set()
        """Addresses whose last call had no answer."""
        self._session: aiohttp.ClientSession | None = None
        self.heard: Callable[[Position], None] = _nobody
        """Hears where a node's stream of changes stood when it answered."""

    async def __aenter__(self) -> RoleClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=self._limit),
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=3.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self, method: str, url: str, kind: type[T], body: object = None, *, deadline: float = 10.0
    ) -> T:
        """Send `body` as JSON and decode the answer as `kind` (`type(None)` for an empty one).

        Raises the error that the other role answered with, NodeUnavailable when it cannot be reached or does
        not answer a read within `deadline` seconds, OutcomeUnknown when a mutation's answer was lost.
        """
        callee = "master" if _where(url) in self._masters else "node"
        begun, outcome = time.perf_counter(), "unreachable"
        try:
            answer = await self._call(method, url, kind, body, deadline, callee)
            outcome = "ok"
        except NodeUnavailable as error:
            # Without a cause it is the other role's own answer: it cannot reach somebody.
            outcome = "unreachable" if error.__cause__ is not None else "rejected"
            raise
        except BaseException as error:
            outcome = metrics.outcome_of(error)
            raise
        finally:
            metrics.child(CALLS, callee, outcome).inc()
            if "wait=" not in url:
                metrics.child(SECONDS, callee, outcome).observe(time.perf_counter() - begun)
        return answer

    async def _call(
        self, method: str, url: str, kind: type[T], body: object, deadline: float, callee: str
    ) -> T:
        if self._session is None:
            raise InternalError("the role client is not open")
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        if request_id := logs.request_id():
            headers[logs.HEADER] = request_id
        timeout = aiohttp.ClientTimeout(total=deadline, sock_connect=min(3.0, deadline))
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                payload = await response.read()
                status = response.status
                position = response.headers.get(changes.HEADER)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._note_silence(callee, url, error)
            raise NodeUnavailable(f"the {callee} cannot be reached; try again shortly") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            self._note_silence(callee, url, error)
            if method in ("GET", "HEAD"):
                raise NodeUnavailable(f"no answer from the {callee}; try again shortly") from error
            raise OutcomeUnknown(f"the {callee}'s answer was lost; what was asked for may be done") from error
        if self._silent and (where := _where(url)) in self._silent:
            self._silent.discard(where)
            _log.info("the %s at %s answers again", callee, where)
        if position is not None and (place := Position.parse(position)) is not None:
            self.heard(place)
        if status >= 400:
            raise _error_in(status, payload)
        if kind is type(None):
            return None
        try:
            return msgspec.json.decode(payload, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.error("the %s at %s answered %s with something unreadable", callee, _where(url), method)
            raise InternalError(f"the {callee} answered something unreadable; the log has more") from error

    def _note_silence(self, callee: str, url: str, error: Exception) -> None:
        where = _where(url)
        level = logging.DEBUG if where in self._silent else logging.WARNING
        self._silent.add(where)
        _log.log(level, "no answer from the %s at %s: %s", callee, where, str(error) or type(error).__name__)

    async def lines(
        self, url: str, *, silence: float, limit: int, connect: float = 3.0
    ) -> AsyncGenerator[list[bytes], None]:
        """The lines of an answer that does not end, as many at once as have come; close it with `aclosing`.

        Raises the error that the other role answered with, NodeUnavailable when it cannot be reached within `connect`
        seconds, says nothing for `silence` seconds, sends a line of more than `limit` bytes, or ends.
        """
        if self._session is None:
            raise InternalError("the role client is not open")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=silence)
        rest = b""
        try:
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
                if response.status >= 400:
                    raise _error_in(response.status, await response.read())
                async for chunk in response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    if whole:
                        yield whole
                    if len(rest) > limit:
                        raise NodeUnavailable(f"it sent a line of more than {limit} bytes")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NodeUnavailable("it cannot be reached, or says nothing any more") from error
        raise NodeUnavailable("it has ended its stream")


def _error_in(status: int, payload: bytes) -> GreenroomError:
    """The error that an answer tells of."""
    parsed: object = None
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        parsed = msgspec.json.decode(payload)
    return from_wire(status, parsed)


def _nobody(_position: Position) -> None:
    """Before anybody wants to hear."""


def _where(url: str) -> str:
    """Host and port of a URL."""
    return url.split("://", 1)[-1].split("/", 1)[0]


@contextlib.asynccontextmanager
async def role_client(token: str, *, masters: Collection[str] = ()) -> AsyncIterator[RoleClient]:
    """An open RoleClient for the length of a block."""
    async with RoleClient(token, masters=masters) as client:
        yield client
