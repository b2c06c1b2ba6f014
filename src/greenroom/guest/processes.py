"""Following started commands: output to whoever listens, input in order, the exit, the memory of it.

Between ``spawning`` (starts them) and ``commands`` (the RPC service). Each process hangs on the event loop
by its descriptors: output pipes, and a pidfd that becomes readable at its exit, so that hundreds of
commands need neither threads nor timers nor SIGCHLD.

Output. A chunk read from a pipe is encoded once and handed to every subscriber. When one of them lags the
pipes are not read, so the command itself is slowed down; with nobody subscribed output is read and dropped
and the command never waits. A subscriber that leaves does not touch the command.

The end. A command has ended when its leader has exited *and* its pipes are closed: a background child that
inherited stdout keeps the stream open, and its output keeps flowing, until it exits or the command is
killed. Meanwhile the leader stays a zombie on purpose, as that keeps its number from being given to another
process group. After a SIGKILL the pipes are emptied and closed at once, whoever may still hold them.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from .connect import frame
from .errors import AgentError
from .messages import encode
from .spawning import Spawned, signal_session

CHUNK = 32 * 1024
RETENTION_SECONDS = 30.0
"""How long the exit of a process can still be asked for."""

MAX_RETAINED = 1024
MAX_LIVE = 1024
MAX_PENDING_STDIN = 16 * 1024 * 1024
_MAX_FINAL_OUTPUT = 1024 * 1024

_log = logging.getLogger(__name__)


class Subscriber(Protocol):
    """Somebody who receives the events of one process."""

    @property
    def lagging(self) -> bool:
        """True while no more output should be delivered."""

    def deliver(self, envelope: bytes) -> None:
        """One output event, as a ready stream envelope."""

    def ended(self, envelope: bytes) -> None:
        """The end event; nothing follows."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the client asked to run, for listings."""

    command: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    cwd: str | None
    tag: str | None


class Process:
    """One command from its start until 30 s after its end. Lives on the event loop only."""

    def __init__(self, spawned: Spawned, config: Config, on_end: Callable[[Process], None]) -> None:
        self.pid = spawned.pid
        self.config = config
        self.timed_out = False
        self.end_envelope: bytes | None = None
        self.ended_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._spawned = spawned
        self._on_end = on_end
        self._outputs = dict(spawned.outputs)
        self._subscribers: list[Subscriber] = []
        self._reading = False
        self._wait_status: int | None = None
        self._killed = False
        self._deadline: asyncio.TimerHandle | None = None
        self.stdin = StandardInput(spawned.stdin)

    def __repr__(self) -> str:
        state = "ended" if self.ended else "exited" if self._wait_status is not None else "running"
        return f"<Process {self.pid} {state}, {len(self._subscribers)} subscribers>"

    @property
    def ended(self) -> bool:
        """Whether the leader has exited and the output is complete."""
        return self.end_envelope is not None

    def begin(self) -> None:
        """Start to read output and to watch for the exit; the first subscriber is in place by now."""
        self._loop.add_reader(self._spawned.pidfd, self._on_exit)
        self.update_flow()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Send output to this one too, from here on."""
        self._subscribers.append(subscriber)
        self.update_flow()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop sending to this one; the command goes on."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
        self.update_flow()

    def update_flow(self) -> None:
        """Read the pipes exactly while every subscriber keeps up."""
        wanted = not self.ended and not any(subscriber.lagging for subscriber in self._subscribers)
        if wanted == self._reading:
            return
        self._reading = wanted
        for name, descriptor in self._outputs.items():
            if wanted:
                self._loop.add_reader(descriptor, self._on_output, name)
            else:
                self._loop.remove_reader(descriptor)

    def kill_after(self, seconds: float) -> None:
        """Kill the whole session when this time is over, unless the command ends before."""
        self._deadline = self._loop.call_later(seconds, self._on_deadline)

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole session. Raises ``not_found`` when the command has ended."""
        if self.ended:
            raise AgentError("not_found", f"process {self.pid} has already finished")
        if number == signal.SIGKILL:
            self._killed = True
        signal_session(self.pid, number)
        self._maybe_finish()

    # -- events from the loop ---------------------------------------------------------------------------

    def _on_output(self, name: str) -> None:
        descriptor = self._outputs[name]
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal reports its end as EIO
        if not data:
            self._close_output(name)
            self._maybe_finish()
            return
        self._publish(name, data)

    def _publish(self, name: str, data: bytes) -> None:
        if not self._subscribers:
            return
        envelope = output_event(name, data)
        for subscriber in tuple(self._subscribers):
            subscriber.deliver(envelope)
        if any(subscriber.lagging for subscriber in self._subscribers):
            self.update_flow()

    def _on_exit(self) -> None:
        # Look without reaping (WNOWAIT): the zombie keeps the number of the process group ours.
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return
        self._loop.remove_reader(self._spawned.pidfd)
        self._wait_status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self._maybe_finish()

    def _on_deadline(self) -> None:
        self._deadline = None
        if not self.ended:
            self.timed_out = True
            self.signal(signal.SIGKILL)

    def _maybe_finish(self) -> None:
        if self._wait_status is None or self.ended:
            return
        if self._killed:
            self._empty_outputs()
        if not self._outputs:
            self._finish(self._wait_status)

    def _empty_outputs(self) -> None:
        """Take what is in the pipes of a killed command, then close them.

        At most two full pipes and what a detached survivor adds meanwhile, so this may exceed the bound of
        a lagging subscriber once, by a fixed amount.
        """
        for name, descriptor in tuple(self._outputs.items()):
            taken = 0
            with suppress(OSError):
                while taken < _MAX_FINAL_OUTPUT and (data := os.read(descriptor, CHUNK)):
                    taken += len(data)
                    self._publish(name, data)
            self._close_output(name)

    def _close_output(self, name: str) -> None:
        descriptor = self._outputs.pop(name)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _finish(self, status: int) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._spawned.popen.returncode = status  # so that Popen does not look for it again
        os.close(self._spawned.pidfd)
        self.stdin.close_now()
        self.ended_at = self._loop.time()
        self.end_envelope = end_event(status)
        self._on_end(self)
        subscribers, self._subscribers = self._subscribers, []
        for subscriber in subscribers:
            subscriber.ended(self.end_envelope)


class StandardInput:
    """The writing end of a command's stdin: writes go in whole and in order, and wait for a full pipe."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._pending = 0
        self._space: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        """Returns when the pipe has taken everything. Raises :class:`AgentError` when it cannot."""
        if self._descriptor is None:
            raise AgentError("internal", "stdin of this process is closed or was not enabled")
        if self._pending + len(data) > MAX_PENDING_STDIN:
            raise AgentError("resource_exhausted", "the process does not read its stdin; too much is waiting")
        self._pending += len(data)
        try:
            async with self._lock:
                view = memoryview(data)
                while view:
                    view = view[await self._write_some(view) :]
        finally:
            self._pending -= len(data)

    async def close(self) -> None:
        """Close after what is being written; closing twice is fine."""
        async with self._lock:
            self.close_now()

    def close_now(self) -> None:
        """Close at once; whoever waits for room is told that the pipe is gone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._loop.remove_writer(descriptor)
            os.close(descriptor)
        self._wake()

    async def _write_some(self, view: memoryview) -> int:
        while self._descriptor is not None:
            try:
                return os.write(self._descriptor, view)
            except BlockingIOError:
                await self._wait_for_space(self._descriptor)
            except OSError:
                self.close_now()  # EPIPE: nobody will ever read it
        raise AgentError("internal", "the process has closed its stdin")

    async def _wait_for_space(self, descriptor: int) -> None:
        self._space = self._loop.create_future()
        self._loop.add_writer(descriptor, self._wake)
        try:
            await self._space
        finally:
            self._space = None
            if self._descriptor == descriptor:
                self._loop.remove_writer(descriptor)

    def _wake(self) -> None:
        if self._space is not None and not self._space.done():
            self._space.set_result(None)


class ProcessTable:
    """The commands of this sandbox: those alive, and for a while those that have ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._live: dict[int, Process] = {}
        self._ended: OrderedDict[int, Process] = OrderedDict()
        self._starting = 0
        self._emptied: asyncio.Future[None] | None = None

    def reserve(self) -> None:
        """Claim a place for a command about to start. Raises ``resource_exhausted`` when there is none."""
        if len(self._live) + self._starting >= MAX_LIVE:
            raise AgentError("resource_exhausted", f"{MAX_LIVE} processes are running already")
        self._starting += 1

    def release(self) -> None:
        """Give back the claim, after :meth:`add` or a failed start."""
        self._starting -= 1

    def add(self, spawned: Spawned, config: Config) -> Process:
        """Begin to follow a started command."""
        process = Process(spawned, config, self._retain)
        self._ended.pop(process.pid, None)
        self._live[process.pid] = process
        return process

    def live(self) -> list[Process]:
        """All commands that have not ended."""
        return list(self._live.values())

    def find(self, *, pid: int | None = None, tag: str | None = None) -> Process:
        """A live command, or one that ended within the last 30 s. Raises ``not_found``."""
        self._forget_old()
        if pid is not None:
            process = self._live.get(pid) or self._ended.get(pid)
            if process is None:
                raise AgentError("not_found", f"process with pid {pid} not found")
            return process
        for table in (self._live, self._ended):
            for process in reversed(table.values()):
                if process.config.tag == tag:
                    return process
        raise AgentError("not_found", f"process with tag {tag!r} not found")

    async def end_all(self) -> None:
        """Kill every command and wait until all have ended, when the agent itself is told to stop."""
        for process in self.live():
            with suppress(AgentError):
                process.signal(signal.SIGKILL)
        if self._live:
            self._emptied = self._loop.create_future()
            await self._emptied

    def _retain(self, process: Process) -> None:
        self._live.pop(process.pid, None)
        self._ended[process.pid] = process
        self._forget_old()
        if not self._live and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _forget_old(self) -> None:
        # Done whenever somebody looks, so that an idle guest has no timer for it.
        horizon = self._loop.time() - RETENTION_SECONDS
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.ended_at >= horizon and len(self._ended) <= MAX_RETAINED:
                return
            self._ended.popitem(last=False)


def start_event(pid: int) -> bytes:
    """The first event of a stream."""
    return frame(b'{"event":{"start":{"pid":%d}}}' % pid)


def output_event(name: str, data: bytes) -> bytes:
    """A chunk of output, untouched: it may begin or end inside a character."""
    encoded = binascii.b2a_base64(data, newline=False)
    return frame(b'{"event":{"data":{"%b":"%b"}}}' % (name.encode("ascii"), encoded))


def end_event(status: int) -> bytes:
    """The last event; ``status`` is an exit code, or the negative number of the signal that killed it.

    Texts follow the contract: "exit status 3", "signal: killed" with exit code -1.
    """
    end: dict[str, object] = {"exitCode": status if status >= 0 else -1, "exited": status >= 0}
    text = f"exit status {status}" if status >= 0 else f"signal: {signal_text(-status)}"
    end["status"] = text
    if status:
        end["error"] = text
    return frame(encode({"event": {"end": end}}))


def signal_text(number: int) -> str:
    """The C library's description in lower case, such as "killed" or "segmentation fault"."""
    return (signal.strsignal(number) or f"signal {number}").lower()


KEEPALIVE_EVENT = frame(b'{"event":{"keepalive":{}}}')
