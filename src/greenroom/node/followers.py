"""Those who follow this node's changes, each over one HTTP answer that does not end.

A follower holds nothing up: it is given as many lines as its connection takes, and what it does not take waits in the
log, which is bounded. One that takes nothing for `SEND_DEADLINE` seconds is cut off, as is one whose machine does not
acknowledge what was sent; it comes back and goes on where it was. So many may follow, and one more is refused.

Whoever changes something on this node hears of it after the followers were sent it (`passed`), as long as they keep up.
So a client that is answered by one api and asks another finds what it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable

from prometheus_client.core import Metric
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from greenroom.errors import NodeUnavailable
from greenroom.node.changelog import ChangeLog
from greenroom.wire import metrics
from greenroom.wire.changes import BEAT, CONTENT_TYPE, Beat, Position, line_of
from greenroom.wire.guarded import TRANSPORT
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)

CUT = metrics.counter(
    "greenroom_node_followers_cut_total", "Followers cut off because they took nothing for too long"
)
MOST = 64
"""Followers at the same time."""
SEND_DEADLINE = 5.0
"""Seconds in which a follower's connection must take what it is sent."""
GATHER = 0.005
"""Seconds that a change which can wait is kept for others to be sent with it."""
PASSED_WITHIN = 0.05
"""Seconds that an answer is held back for followers; who is later than that is not waited for until it caught up."""


class Follower:
    """One of them, and how far it is."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.seq = 0
        """The last change that was written to its connection."""
        self.behind = True
        """Nobody waits for it: it gets all there is still, or is slow."""
        self.gone = False

    def __repr__(self) -> str:
        return f"<Follower seq={self.seq} behind={self.behind} gone={self.gone}>"


class Followers:
    """Use from one event loop; `close` ends all streams."""

    def __init__(self, log: ChangeLog, *, most: int = MOST, send_deadline: float = SEND_DEADLINE) -> None:
        self._changes = log
        self._most = most
        self._send_deadline = send_deadline
        self._followers: set[Follower] = set()
        self._progress = asyncio.Event()
        self._closing = False
        self._later: asyncio.TimerHandle | None = None
        log.on_change = self._changed

    def statistics(self) -> dict[str, int]:
        """How many follow, and how many of them are behind."""
        return {"following": len(self._followers), "behind": sum(each.behind for each in self._followers)}

    @property
    def current(self) -> int:
        """How many were sent all there is."""
        return sum(not each.behind for each in self._followers)

    def read(self) -> Iterable[Metric]:
        """How many follow now, for a scrape."""
        rows = [(("current",), self.current), (("behind",), len(self._followers) - self.current)]
        yield metrics.gauges("greenroom_node_followers", "Who follow this node's changes", ("state",), rows)

    def _changed(self, soon: bool) -> None:
        if soon:
            self._wake()
        elif self._later is None and self._followers:
            self._later = asyncio.get_running_loop().call_later(GATHER, self._wake)

    def _wake(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for follower in self._followers:
            follower.wake.set()

    def close(self) -> None:
        """The node leaves: end every stream, so that none holds its end up."""
        self._closing = True
        self._wake()
        self._progressed()

    def answer(self, after: Position | None) -> Response:
        """The answer to one who follows, from `after` on where that can be. Raises NodeUnavailable for one too many."""
        if self._closing:
            raise NodeUnavailable("this node is stopping")
        if len(self._followers) >= self._most:
            raise NodeUnavailable(f"{self._most} already follow this node, the most that can")
        return _Stream(self, after)

    async def passed(self) -> None:
        """Return when all who keep up were sent what has changed until now."""
        seq = self._changes.position.seq
        late = [each for each in self._followers if each.seq < seq and not each.behind]
        if not late:
            return
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PASSED_WITHIN):
                while any(each.seq < seq and not each.gone for each in late):
                    await self._progress.wait()
        for each in late:
            each.behind = each.seq < seq

    def _progressed(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def run(
        self, follower: Follower, after: Position | None, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send one follower all it is to get until it is gone or the node leaves. Raises TimeoutError if it is slow."""
        self._followers.add(follower)
        try:
            stream = self._changes.position.stream
            whole = after is None or not self._changes.covers(after)
            if after is not None and not whole:
                follower.seq = after.seq
                await send(self._beat(stream, after.seq))
            while not (self._closing or follower.gone):
                follower.wake.clear()
                given = None if whole else self._changes.since(follower.seq)
                if given is None:
                    follower.behind = True
                    seq, parts = self._changes.whole()
                    for part in parts:
                        await send(part)
                    follower.seq, whole = seq, False
                elif given[0]:
                    await send(given[0])
                    follower.seq = given[1]
                    self._progressed()
                else:
                    follower.behind = False
                    if not await self._woken(follower):
                        await send(self._beat(stream, follower.seq))
        finally:
            follower.gone = True
            self._followers.discard(follower)
            self._progressed()

    def _beat(self, stream: str, seq: int) -> bytes:
        return line_of(Beat(stream=stream, seq=seq, head=self._changes.position.seq))

    async def _woken(self, follower: Follower) -> bool:
        """Wait for a change; False when there was none for the time of a beat."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT):
                await follower.wake.wait()
                return True
        return False

    @property
    def send_deadline(self) -> float:
        """Seconds in which a follower's connection must take what it is sent."""
        return self._send_deadline


class _Stream(Response):
    """The answer. Starlette's own for streams buffers nothing either, but cannot cut off who takes nothing."""

    def __init__(self, followers: Followers, after: Position | None) -> None:
        super().__init__(media_type=CONTENT_TYPE)
        del self.headers["content-length"]
        self._of = followers
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport: asyncio.Transport | None = scope.get("extensions", {}).get(TRANSPORT)
        if transport is not None:
            _mind_silence(transport, self._of.send_deadline)
        follower = Follower()

        async def within(message: Message) -> None:
            async with asyncio.timeout(self._of.send_deadline):
                await send(message)

        async def give(lines: bytes) -> None:
            await within({"type": "http.response.body", "body": lines, "more_body": True})

        watching = spawn(_until_gone(receive, follower), "a follower's connection")
        try:
            await within({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._of.run(follower, self._after, give)
            if not watching.done():
                await within({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            CUT.inc()
            _log.warning("a follower that took nothing for %.0f s was cut off", self._of.send_deadline)
            if transport is not None:
                transport.abort()
                # Its end is told to us in the next turn; before that the server would take us for unfinished.
                await asyncio.wait({watching}, timeout=1.0)
        finally:
            await stop(watching)


async def _until_gone(receive: Receive, follower: Follower) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    follower.gone = True
    follower.wake.set()


def _mind_silence(transport: asyncio.Transport, seconds: float) -> None:
    """Have the kernel end the connection when the other side acknowledges nothing for so long: its machine is gone."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
