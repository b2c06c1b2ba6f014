"""The ``process.Process`` service: start commands, follow them, feed them, signal them.

Stands on ``executions`` and ``following``; ``app`` calls it. Only a command's own deadline or a signal ends
it: a client that disconnects merely stops listening. What goes beyond E2B's contract (execution ids, offsets,
lossless output) is opt-in and written down in ``docs/executions.md``.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from .connect import (
    END_OK,
    frame,
    incoming,
    reply,
    start_stream,
    stream_request,
    timeout_seconds,
    unary_request,
)
from .errors import AgentError
from .events import end_message, start_event
from .exchange import Request, Response
from .executions import ProcessTable
from .following import Follower, Stream, Subscription, keepalive_seconds, lost_output
from .messages import Message, child, flag, integer, octets, text, text_map, texts
from .processes import Config, Process
from .settings import Settings
from .spawning import Launch, environment, start, working_directory
from .terminals import requested_size, resize
from .users import UserDirectory, requested_name
from .workers import Workers

MAX_TAG = 4096
_MAX_OFFSET = (1 << 63) - 1
_AFTER_KILL_SECONDS = 2.0

_SIGNALS = {
    "SIGNAL_SIGTERM": signal.SIGTERM,
    "SIGNAL_SIGKILL": signal.SIGKILL,
    15: signal.SIGTERM,
    9: signal.SIGKILL,
}

Method = Callable[[Request, Response], Awaitable[None]]


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
            "Update": self.update,
            "Ack": self.acknowledge,
            "Inspect": self.inspect,
        }
        self.streaming: dict[str, Method] = {
            "Start": self.start,
            "Connect": self.connect,
            "StreamInput": self.stream_input,
        }

    async def start(self, request: Request, response: Response) -> None:
        """Start a command and stream its events."""
        message = await stream_request(request)
        lossless = flag(message, "lossless", False)
        offsets = flag(message, "offsets", lossless)
        seconds = timeout_seconds(request)
        keepalive = keepalive_seconds(request)
        process = await self._spawn(request, message, lossless)
        if seconds is not None:
            left = seconds - (asyncio.get_running_loop().time() - request.started)
            process.kill_after(max(0.0, left))
        stream = self._open(response, process, keepalive, 0 if offsets else None)
        stream.follows_deadline = True
        if seconds is not None:
            # The kill normally ends the stream; this is for a process that cannot die (uninterruptible I/O).
            stream.stop_after(seconds + _AFTER_KILL_SECONDS)
        process.begin()
        await stream.run()

    async def connect(self, request: Request, response: Response) -> None:
        """Follow a command that is running already, or learn how one has ended; with an offset, replay."""
        message = await stream_request(request)
        seconds = timeout_seconds(request)
        keepalive = keepalive_seconds(request)
        process = self._select(message)
        offset = _offset(message)
        if offset is not None:
            _check_offset(process, offset)
            process.recorder.acknowledge(offset)
        elif process.end_envelope is not None:
            start_stream(response, start_event(process.pid, process.execution_id))
            response.finish(process.end_envelope + END_OK)
            return
        stream = self._open(response, process, keepalive, offset)
        if seconds is not None:
            stream.stop_after(seconds)
        await stream.run()

    async def acknowledge(self, request: Request, response: Response) -> None:
        """The caller holds all output before an offset: a lossless command may go on."""
        message = await unary_request(request)
        process = self._select(message)
        offset = _offset(message)
        if offset is None:
            raise AgentError("invalid_argument", "field 'offset' is missing")
        if offset > process.recorder.log.end:
            raise _beyond(process, offset)
        process.recorder.acknowledge(offset)
        reply(response, {})

    async def inspect(self, request: Request, response: Response) -> None:
        """What is known of an execution: state, exit, and which output is kept."""
        message = await unary_request(request)
        reply(response, {"execution": _inspection(self._select(message))})

    async def update(self, request: Request, response: Response) -> None:
        """Resize the terminal."""
        message = await unary_request(request)
        process = self._select(message, live=True)
        wanted = child(message, "pty")
        if wanted is not None:
            size = requested_size(wanted)
            if process.terminal is None:
                raise AgentError("internal", "this process has no terminal to resize")
            resize(process.terminal, size)
        reply(response, {})

    async def list(self, request: Request, response: Response) -> None:
        """All commands started here that have not ended."""
        await unary_request(request)
        reply(response, {"processes": [_describe(process) for process in self._table.live()]})

    async def send_input(self, request: Request, response: Response) -> None:
        """Write to stdin; answers when the pipe has taken it all."""
        message = await unary_request(request)
        process = self._select(message, live=True)
        await _until_gone(response, process.stdin.write(_input(message, process)))
        reply(response, {})

    async def stream_input(self, request: Request, response: Response) -> None:
        """Write to stdin whatever arrives, in order, as fast as the command reads."""
        messages = incoming(request)
        process = await self._first_selection(messages)
        async for message in messages:
            if (data := child(message, "data")) is not None:
                await _until_gone(response, process.stdin.write(_input(data, process)))
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
        if process.stdin.kind == "pty":
            raise AgentError("failed_precondition", "a terminal is not closed but sent Ctrl-D, the byte 4")
        await _until_gone(response, process.stdin.close())
        reply(response, {})

    async def _spawn(self, request: Request, message: Message, lossless: bool) -> Process:
        spec = child(message, "process")
        command = text(spec, "cmd") if spec is not None else ""
        if spec is None or not command:
            raise AgentError("invalid_argument", "field 'process.cmd' is missing")
        pty = child(message, "pty")
        tag = text(message, "tag") or None
        if tag is not None and len(tag) > MAX_TAG:
            raise AgentError("invalid_argument", f"a tag has at most {MAX_TAG} characters")
        user = self._users.find(requested_name(request.headers, self._settings.default_user))
        requested = text_map(spec, "envs")
        cwd = text(spec, "cwd")
        config = Config(command, texts(spec, "args"), requested, cwd or None, tag)
        variables = environment(user, self._settings.environment, requested)
        if pty is not None:
            variables.setdefault("TERM", "xterm-256color")
        execution_id = self._table.reserve()
        try:
            launch = Launch(
                execution_id=execution_id,
                arguments=[command, *config.arguments],
                environment=variables,
                cwd=working_directory(cwd, user, self._settings.default_workdir),
                user=user,
                stdin=flag(message, "stdin", True),
                terminal=requested_size(pty) if pty is not None else None,
            )
            spawned = await self._workers.spawning(start, launch, self._table.groups)
            return self._table.add(spawned, config, lossless=lossless)
        finally:
            self._table.release()

    def _open(self, response: Response, process: Process, keepalive: float, offset: int | None) -> Stream:
        start_stream(response, start_event(process.pid, process.execution_id))
        if offset is None:
            return Subscription(response, process, keepalive)
        return Follower(response, process, keepalive, offset)

    def _select(self, message: Message, *, live: bool = False) -> Process:
        selector = child(message, "process")
        if selector is None:
            raise AgentError("invalid_argument", "field 'process' must name a pid or a tag")
        if selector.get("pid") is not None:
            process = self._table.find(pid=integer(selector, "pid"))
        elif tag := text(selector, "tag"):
            process = self._table.find(tag=tag)
        elif execution_id := text(selector, "executionId"):
            process = self._table.find(execution_id=execution_id)
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


def _input(message: Message, process: Process) -> bytes:
    wrapper = child(message, "input")
    if wrapper is None:
        raise AgentError("invalid_argument", "field 'input' is missing")
    kind = process.stdin.kind
    other = "stdin" if kind == "pty" else "pty"
    if wrapper.get(other) is not None:
        has = "a" if kind == "pty" else "no"
        raise AgentError("internal", f"this process has {has} terminal, send {kind!r} input")
    return octets(wrapper, kind) or b""


def _offset(message: Message) -> int | None:
    if message.get("offset") is None:
        return None
    offset = integer(message, "offset")
    if not 0 <= offset <= _MAX_OFFSET:
        raise AgentError("invalid_argument", "field 'offset' must be a number from 0 to 2^63 - 1")
    return offset


def _check_offset(process: Process, offset: int) -> None:
    log = process.recorder.log
    if offset < log.start:
        raise lost_output(offset, log.start)
    if offset > log.end:
        raise _beyond(process, offset)


def _beyond(process: Process, offset: int) -> AgentError:
    end = process.recorder.log.end
    return AgentError("out_of_range", f"offset {offset} is ahead of the output, the next offset is {end}")


def _inspection(process: Process) -> dict[str, Any]:
    log = process.recorder.log
    shown: dict[str, Any] = {
        "executionId": process.execution_id,
        "pid": process.pid,
        "state": "STATE_ENDED" if process.ended else "STATE_RUNNING",
        "firstOffset": str(log.start),
        "nextOffset": str(log.end),
        "acknowledgedOffset": str(log.acknowledged),
        "lossless": log.lossless,
        "blocked": log.blocked and not process.ended,
    }
    if process.config.tag is not None:
        shown["tag"] = process.config.tag
    if process.status is not None:
        shown["end"] = end_message(process.status)
    return shown


def _describe(process: Process) -> dict[str, Any]:
    config = process.config
    shown: dict[str, Any] = {
        "cmd": config.command,
        "args": list(config.arguments),
        "envs": dict(config.environment),
    }
    if config.cwd is not None:
        shown["cwd"] = config.cwd
    described: dict[str, Any] = {
        "config": shown,
        "pid": process.pid,
        "executionId": process.execution_id,
    }
    if config.tag is not None:
        described["tag"] = config.tag
    return described
