"""Response streams that follow one command.

Between ``processes`` and ``commands``. A :class:`Subscription` is what E2B's clients get: events from now on,
pushed into the connection's write buffer, whose high-water mark is the bound: a full one slows the command.
A :class:`Follower` reads the record from an offset at its own pace, slows nobody, and tells each chunk's
offset, so that whoever loses the connection can go on where it broke; see ``docs/executions.md``.
"""

from __future__ import annotations

import asyncio
import logging

from .connect import END_OK, end_error
from .errors import AgentError, ClientGone
from .events import KEEPALIVE_EVENT, output_event
from .exchange import Request, Response
from .outputs import LostOutputError
from .processes import Process
from .tasks import spawn

DEFAULT_KEEPALIVE_SECONDS = 90.0
_MIN_KEEPALIVE_SECONDS = 1

_log = logging.getLogger(__name__)


def keepalive_seconds(request: Request) -> float:
    """Seconds of silence before a keepalive event, from ``Keepalive-Ping-Interval``."""
    value = request.headers.get("keepalive-ping-interval", "")
    if value.isascii() and value.isdigit() and len(value) <= 6:
        return float(max(_MIN_KEEPALIVE_SECONDS, int(value)))
    return DEFAULT_KEEPALIVE_SECONDS


class Stream:
    """One response stream; ends with its source, its peer, or a deadline. What the two kinds share."""

    keepalive_event = KEEPALIVE_EVENT
    deadline_text = "the command ran into its timeout"

    def __init__(self, response: Response, keepalive: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._response = response
        self._keepalive = keepalive
        self._last_event = self._loop.time()
        self._timer = self._loop.call_later(keepalive, self._on_silence)
        self._deadline: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()
        self.lagging = False
        self.follows_deadline = False
        """Whether this stream ends with ``deadline_exceeded`` when its process is killed for its deadline."""

    async def run(self) -> None:
        """Wait until the stream has ended."""
        self._response.listen(self)
        if not self._response.writable:
            self.flow(False)
        try:
            await self._over
        finally:
            self._timer.cancel()
            if self._deadline is not None:
                self._deadline.cancel()
            self._leave()
            self._response.listen(None)

    def stop_after(self, seconds: float) -> None:
        """End the stream, not what it follows, with ``deadline_exceeded`` after this time."""
        self._deadline = self._loop.call_later(seconds, self._on_deadline)

    # -- from the connection ----------------------------------------------------------------------------

    def flow(self, writable: bool) -> None:
        self.lagging = not writable

    def gone(self) -> None:
        self.lagging = False
        if not self._over.done():
            self._over.set_result(None)
        self._leave()

    # -- for the kinds ----------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Let go of what is followed. Idempotent."""

    def _write(self, envelope: bytes) -> None:
        if self._over.done():
            return  # ended in this very turn of the loop; bytes now would be taken for the next response
        self._last_event = self._loop.time()
        self._response.write(envelope)

    def _end(self, data: bytes) -> None:
        if not self._over.done():
            self._over.set_result(None)
            self._response.finish(data)

    def _on_silence(self) -> None:
        # Data does not move the timer, it only leaves its time: the timer looks when it fires.
        now = self._loop.time()
        due = self._last_event + self._keepalive
        if now >= due - 0.001:
            if not self.lagging and not self._over.done():
                self._response.write(self.keepalive_event)
            self._last_event = now
            due = now + self._keepalive
        self._timer = self._loop.call_later(due - now, self._on_silence)

    def _on_deadline(self) -> None:
        self._end(end_error(AgentError("deadline_exceeded", self.deadline_text)))


class Subscription(Stream):
    """Live events only; a lagging peer slows the command."""

    def __init__(self, response: Response, process: Process, keepalive: float) -> None:
        super().__init__(response, keepalive)
        self._process = process
        process.subscribe(self)

    def deliver(self, envelope: bytes) -> None:
        """See :class:`processes.Subscriber`."""
        self._write(envelope)

    def ended(self, envelope: bytes) -> None:
        """See :class:`processes.Subscriber`."""
        if self.follows_deadline and self._process.timed_out:
            self._on_deadline()
        else:
            self._end(envelope + END_OK)

    def flow(self, writable: bool) -> None:
        super().flow(writable)
        self._process.update_flow()

    def _leave(self) -> None:
        self._process.unsubscribe(self)


class Follower(Stream):
    """Everything from an offset on, read from the record. Ends with ``out_of_range`` when that is overtaken."""

    def __init__(self, response: Response, process: Process, keepalive: float, offset: int) -> None:
        super().__init__(response, keepalive)
        self._process = process
        self._offset = offset
        self._more: asyncio.Future[None] | None = None
        process.follow(self._wake)

    async def run(self) -> None:
        """Wait until the stream has ended."""
        reading = spawn(self._read())
        try:
            await super().run()
        finally:
            reading.cancel()

    def _leave(self) -> None:
        self._process.unfollow(self._wake)

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def _read(self) -> None:
        try:
            await self._send()
        except ClientGone:
            pass
        except Exception:
            # Without this the stream would stay open for ever, silent.
            _log.exception("following %r failed", self._process)
            self._end(end_error(AgentError("internal", "the agent failed to read the output")))

    async def _send(self) -> None:
        while not self._over.done():
            try:
                # Asked before the reading, as the end is certain only for what is on record by then.
                end = self._process.end_envelope
                chunk = await self._process.recorder.read(self._offset)
            except LostOutputError as lost:
                self._end(end_error(lost_output(self._offset, lost.start)))
                return
            if chunk is not None:
                self._offset = chunk.end
                self._write(output_event(chunk.name, chunk.data, chunk.offset))
                await self._response.drain()
                # Neither of these waits for anything while the client keeps up: let others have a turn, deadlines too.
                await asyncio.sleep(0)
            elif end is not None:
                if self.follows_deadline and self._process.timed_out:
                    self._on_deadline()
                else:
                    self._end(end + END_OK)
                return
            elif self._process.end_envelope is None:
                self._more = self._loop.create_future()
                await self._more


def lost_output(offset: int, start: int) -> AgentError:
    """The refusal of an offset before the first one kept; clients may read the number at its end."""
    return AgentError(
        "out_of_range", f"the output at offset {offset} is lost, the first offset kept is {start}"
    )
