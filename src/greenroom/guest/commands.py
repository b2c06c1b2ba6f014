"""The ``process.Process`` service: start commands, follow them, feed them, signal them.

Stands on ``processes``; ``app`` calls it. Only a command's own deadline or a signal ends it: a client that
disconnects merely stops listening.

A terminal (``pty``) is refused with ``unimplemented``. It would be another source of a ``Spawned`` with the
one output "pty" and a stdin that is the terminal; everything above that is indifferent to it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from .connect import (
    END_OK,
    end_error,
    frame,
    incoming,
    reply,
    start_stream,
    stream_request,
    timeout_seconds,
    unary_request,
)
from .errors import AgentError
from .exchange import Request, Response
from .messages import Message, child, flag, integer, octets, text, text_map, texts
from .processes import KEEPALIVE_EVENT, Config, Process, ProcessTable, start_event
from .settings import Settings
from .spawning import Launch, environment, start, working_directory
from .users import UserDirectory, requested_name
from .workers import Workers

DEFAULT_KEEPALIVE_SECONDS = 90.0
_MIN_KEEPALIVE_SECONDS = 1
_AFTER_KILL_SECONDS = 2.0

_SIGNALS = {
    "SIGNAL_SIGTERM": signal.SIGTERM,
    "SIGNAL_SIGKILL": signal.SIGKILL,
    15: signal.SIGTERM,
    9: signal.SIGKILL,
}

Method = Callable[[Request, Response], Awaitable[None]]


class Subscription:
    """One response stream that follows one process; ends with the process, its peer, or a deadline.

    Events go straight into the connection's write buffer: its high-water mark is the bound, and a full one
    makes this subscriber a lagging one.
    """

    def __init__(self, response: Response, process: Process, keepalive: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._response = response
        self._process = process
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
        try:
            await self._over
        finally:
            self._timer.cancel()
            if self._deadline is not None:
                self._deadline.cancel()
            self._process.unsubscribe(self)
            self._response.listen(None)

    def stop_after(self, seconds: float) -> None:
        """End the stream, not the process, with ``deadline_exceeded`` after this time."""
        self._deadline = self._loop.call_later(seconds, self._on_deadline)

    # -- from the process -------------------------------------------------------------------------------

    def deliver(self, envelope: bytes) -> None:
        self._last_event = self._loop.time()
        self._response.write(envelope)

    def ended(self, envelope: bytes) -> None:
        if self.follows_deadline and self._process.timed_out:
            self._on_deadline()
        else:
            self._end(envelope + END_OK)

    # -- from the connection ----------------------------------------------------------------------------

    def flow(self, writable: bool) -> None:
        self.lagging = not writable
        self._process.update_flow()

    def gone(self) -> None:
        self.lagging = False
        if not self._over.done():
            self._over.set_result(None)
        self._process.unsubscribe(self)

    # -- from timers ------------------------------------------------------------------------------------

    def _on_silence(self) -> None:
        # Data does not move the timer, it only leaves its time: the timer looks when it fires.
        now = self._loop.time()
        due = self._last_event + self._keepalive
        if now >= due - 0.001:
            if not self.lagging:
                self._response.write(KEEPALIVE_EVENT)
            self._last_event = now
            due = now + self._keepalive
        self._timer = self._loop.call_later(due - now, self._on_silence)

    def _on_deadline(self) -> None:
        self._end(end_error(AgentError("deadline_exceeded", "the command ran into its timeout")))

    def _end(self, data: bytes) -> None:
        if not self._over.done():
            self._over.set_result(None)
            self._response.finish(data)


class CommandService:
    """The methods, by name: :attr:`unary` answer once, :attr:`streaming` in envelopes."""

    def __init__(
        self, settings: Settings, users: UserDirectory, workers: Workers, table: ProcessTable
    ) -> None:
        self._settings = settings
        self._users = users
        self._workers = workers
        self._table = table
        self.unary: dict[str, Method] = {
            "List": self.list,
            "SendInput": self.send_input,
            "SendSignal": self.send_signal,
            "CloseStdin": self.close_stdin,
        }
        self.streaming: dict[str, Method] = {
            "Start": self.start,
            "Connect": self.connect,
            "StreamInput": self.stream_input,
        }

    async def start(self, request: Request, response: Response) -> None:
        """Start a command and stream its events."""
        message = await stream_request(request)
        if child(message, "pty") is not None:
            raise AgentError("unimplemented", "terminals (pty) are not supported by this agent")
        seconds = timeout_seconds(request)
        keepalive = _keepalive_seconds(request)
        launch, config = self._launch(request, message)
        process = await self._spawn(launch, config)
        if seconds is not None:
            left = seconds - (asyncio.get_running_loop().time() - request.started)
            process.kill_after(max(0.0, left))
        subscription = self._open(response, process, keepalive)
        subscription.follows_deadline = True
        if seconds is not None:
            # The kill normally ends the stream; this is for a process that cannot die (uninterruptible I/O).
            subscription.stop_after(seconds + _AFTER_KILL_SECONDS)
        process.begin()
        await subscription.run()

    async def connect(self, request: Request, response: Response) -> None:
        """Follow a command that is running already, or learn how one ended within the last 30 s."""
        message = await stream_request(request)
        seconds = timeout_seconds(request)
        keepalive = _keepalive_seconds(request)
        process = self._select(message)
        if process.end_envelope is not None:
            start_stream(response, start_event(process.pid))
            response.finish(process.end_envelope + END_OK)
            return
        subscription = self._open(response, process, keepalive)
        if seconds is not None:
            subscription.stop_after(seconds)
        await subscription.run()

    async def list(self, request: Request, response: Response) -> None:
        """All commands started here that have not ended."""
        await unary_request(request)
        reply(response, {"processes": [_describe(process) for process in self._table.live()]})

    async def send_input(self, request: Request, response: Response) -> None:
        """Write to stdin; answers when the pipe has taken it all."""
        message = await unary_request(request)
        process = self._select(message, live=True)
        await _until_gone(response, process.stdin.write(_input(message)))
        reply(response, {})

    async def stream_input(self, request: Request, response: Response) -> None:
        """Write to stdin whatever arrives, in order, as fast as the command reads."""
        messages = incoming(request)
        process = await self._first_selection(messages)
        async for message in messages:
            if (data := child(message, "data")) is not None:
                await _until_gone(response, process.stdin.write(_input(data)))
        start_stream(response, frame(b"{}"))
        response.finish(END_OK)

    async def send_signal(self, request: Request, response: Response) -> None:
        """SIGTERM or SIGKILL to the command's whole session."""
        message = await unary_request(request)
        process = self._select(message)
        wanted = message.get("signal")
        number = _SIGNALS.get(wanted) if isinstance(wanted, (str, int)) else None
        if number is None:
            raise AgentError("unimplemented", "only SIGNAL_SIGTERM and SIGNAL_SIGKILL can be sent")
        process.signal(number)
        reply(response, {})

    async def close_stdin(self, request: Request, response: Response) -> None:
        """Let the command read the end of its input; closing twice is fine."""
        message = await unary_request(request)
        process = self._select(message)  # of one that has ended, stdin is closed already
        await _until_gone(response, process.stdin.close())
        reply(response, {})

    def _launch(self, request: Request, message: Message) -> tuple[Launch, Config]:
        spec = child(message, "process")
        command = text(spec, "cmd") if spec is not None else ""
        if spec is None or not command:
            raise AgentError("invalid_argument", "field 'process.cmd' is missing")
        user = self._users.find(requested_name(request.headers, self._settings.default_user))
        requested = text_map(spec, "envs")
        cwd = text(spec, "cwd")
        config = Config(command, texts(spec, "args"), requested, cwd or None, text(message, "tag") or None)
        launch = Launch(
            arguments=[command, *config.arguments],
            environment=environment(user, self._settings.environment, requested),
            cwd=working_directory(cwd, user, self._settings.default_workdir),
            user=user,
            stdin=flag(message, "stdin", True),
        )
        return launch, config

    async def _spawn(self, launch: Launch, config: Config) -> Process:
        self._table.reserve()
        try:
            return self._table.add(await self._workers.spawning(start, launch), config)
        finally:
            self._table.release()

    def _open(self, response: Response, process: Process, keepalive: float) -> Subscription:
        start_stream(response, start_event(process.pid))
        subscription = Subscription(response, process, keepalive)
        process.subscribe(subscription)
        response.listen(subscription)
        if not response.writable:
            subscription.flow(False)
        return subscription

    def _select(self, message: Message, *, live: bool = False) -> Process:
        selector = child(message, "process")
        if selector is None:
            raise AgentError("invalid_argument", "field 'process' must name a pid or a tag")
        if selector.get("pid") is not None:
            process = self._table.find(pid=integer(selector, "pid"))
        elif tag := text(selector, "tag"):
            process = self._table.find(tag=tag)
        else:
            raise AgentError("invalid_argument", "field 'process' must name a pid or a tag")
        if live and process.ended:
            raise AgentError("not_found", f"process {process.pid} has already finished")
        return process

    async def _first_selection(self, messages: AsyncIterator[Message]) -> Process:
        async for message in messages:
            if (opening := child(message, "start")) is not None:
                return self._select(opening, live=True)
            if child(message, "keepalive") is None:
                break
        raise AgentError("invalid_argument", "the first message must be 'start' with a process")


class _Cutter:
    """Cancels a waiting write when its client leaves."""

    def __init__(self, task: asyncio.Future[None]) -> None:
        self._task = task

    def flow(self, writable: bool) -> None:
        """Nothing is being written."""

    def gone(self) -> None:
        self._task.cancel()


async def _until_gone(response: Response, work: Awaitable[None]) -> None:
    """Await something that may take for ever, but no longer than the client stays."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("must run inside a task")
    response.listen(_Cutter(task))
    try:
        await work
    finally:
        response.listen(None)


def _input(message: Message) -> bytes:
    wrapper = child(message, "input")
    if wrapper is None:
        raise AgentError("invalid_argument", "field 'input' is missing")
    if wrapper.get("pty") is not None:
        raise AgentError("internal", "this process has no terminal, send 'stdin' input")
    return octets(wrapper, "stdin") or b""


def _keepalive_seconds(request: Request) -> float:
    """Seconds of silence before a keepalive event, from ``Keepalive-Ping-Interval``."""
    value = request.headers.get("keepalive-ping-interval", "")
    if value.isascii() and value.isdigit() and len(value) <= 6:
        return float(max(_MIN_KEEPALIVE_SECONDS, int(value)))
    return DEFAULT_KEEPALIVE_SECONDS


def _describe(process: Process) -> dict[str, Any]:
    config = process.config
    shown: dict[str, Any] = {
        "cmd": config.command,
        "args": list(config.arguments),
        "envs": dict(config.environment),
    }
    if config.cwd is not None:
        shown["cwd"] = config.cwd
    described: dict[str, Any] = {"config": shown, "pid": process.pid}
    if config.tag is not None:
        described["tag"] = config.tag
    return described
