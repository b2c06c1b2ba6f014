"""Following started commands: output to whoever listens, the exit, and the memory of both.

Between ``spawning`` (starts them) and ``commands`` (the RPC service). Each process hangs on the event loop
by its descriptors: output pipes or a terminal, and a pidfd that becomes readable at its exit, so that
hundreds of commands need neither threads nor timers nor SIGCHLD.

Output. A chunk read from a pipe is recorded (``recording``), encoded once and handed to every live
subscriber. When one of them lags the pipes are not read, so the command itself is slowed down; with nobody
subscribed the command never waits, except for a lossless recorder that has no room. A subscriber that leaves
does not touch the command. Followers are other readers: they read the record at their own pace.

The end. A command has ended when its leader has exited *and* its pipes are closed: a background child that
inherited stdout keeps the stream open, and its output keeps flowing, until it exits or the command is
killed. Meanwhile the leader stays a zombie on purpose, as that keeps its number from being given to another
process group. After a SIGKILL the pipes are emptied and closed at once, whoever may still hold them; so is a
terminal when its leader exits, as a terminal without a session is of no use to what was left running in it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from .errors import AgentError
from .events import end_event, output_event
from .inputs import StandardInput
from .recording import Recorder
from .sessions import CommandGroups, signal_session
from .spawning import Spawned

CHUNK = 32 * 1024
TERMINAL_CHUNK = 16 * 1024
_MAX_FINAL_OUTPUT = 1024 * 1024


class Subscriber(Protocol):
    """Somebody who receives the events of one process as they happen."""

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
    """One command, from its start until its execution is forgotten. Lives on the event loop only."""

    def __init__(
        self,
        spawned: Spawned,
        config: Config,
        groups: CommandGroups | None,
        make_recorder: Callable[[Callable[[], None]], Recorder],
        on_end: Callable[[Process], None],
    ) -> None:
        self.pid = spawned.pid
        self.execution_id = spawned.execution_id
        self.config = config
        self.timed_out = False
        self.status: int | None = None
        """Exit code, or the negative number of the signal that killed it; None until it has ended."""
        self.end_envelope: bytes | None = None
        self.ended_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._spawned = spawned
        self._groups = groups
        self._on_end = on_end
        self._outputs = dict(spawned.outputs)
        self._subscribers: list[Subscriber] = []
        self._followers: list[Callable[[], None]] = []
        self._reading = False
        self._wait_status: int | None = None
        self._killed = False
        self._deadline: asyncio.TimerHandle | None = None
        self.recorder = make_recorder(self.update_flow)
        self.stdin = StandardInput(spawned.stdin, "stdin" if self.terminal is None else "pty")

    def __repr__(self) -> str:
        state = "ended" if self.ended else "exited" if self._wait_status is not None else "running"
        return f"<Process {self.pid} {state}, {len(self._subscribers)} subscribers>"

    @property
    def ended(self) -> bool:
        """Whether the leader has exited and the output is complete."""
        return self.end_envelope is not None

    @property
    def terminal(self) -> int | None:
        """Our end of the command's terminal while it is open; None for a command with pipes."""
        return self._outputs.get("pty")

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

    def follow(self, wake: Callable[[], None]) -> None:
        """Call this whenever there is more on record, and at the end."""
        self._followers.append(wake)

    def unfollow(self, wake: Callable[[], None]) -> None:
        """Stop calling it."""
        if wake in self._followers:
            self._followers.remove(wake)

    def update_flow(self) -> None:
        """Read the pipes exactly while every subscriber keeps up and the recorder has room."""
        wanted = not (
            self.ended or self.recorder.blocked or any(subscriber.lagging for subscriber in self._subscribers)
        )
        if wanted == self._reading:
            return
        self._reading = wanted
        for name, descriptor in self._outputs.items():
            if wanted:
                self._loop.add_reader(descriptor, self._on_output, name)
            else:
                self._loop.remove_reader(descriptor)

    def kill_after(self, seconds: float) -> None:
        """Kill everybody when this time is over, unless the command ends before."""
        self._deadline = self._loop.call_later(seconds, self._on_deadline)

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole session, with SIGKILL all that the command has started.

        Raises ``not_found`` when the command has ended.
        """
        if self.ended:
            raise AgentError("not_found", f"process {self.pid} has already finished")
        group = self._spawned.group
        if number == signal.SIGKILL:
            self._killed = True
        if number == signal.SIGKILL and self._groups is not None and group is not None:
            self._groups.kill(group)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        else:
            signal_session(self.pid, number)
        self._maybe_finish()

    # -- events from the loop ---------------------------------------------------------------------------

    def _on_output(self, name: str) -> None:
        descriptor = self._outputs[name]
        try:
            data = os.read(descriptor, TERMINAL_CHUNK if name == "pty" else CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal reports its end as EIO
        if not data:
            self._close_output(name)
            self._maybe_finish()
            return
        self._publish(name, data)
        self.update_flow()

    def _publish(self, name: str, data: bytes) -> None:
        self.recorder.record(name, data)
        if self._subscribers:
            envelope = output_event(name, data)
            for subscriber in tuple(self._subscribers):
                subscriber.deliver(envelope)
        self._wake_followers()

    def _wake_followers(self) -> None:
        for wake in tuple(self._followers):
            wake()

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
        if self._killed or self.terminal is not None:
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
        if self._groups is not None and self._spawned.group is not None:
            self._groups.discard(self._spawned.group)
        self.ended_at = self._loop.time()
        self.status = status
        self.end_envelope = end_event(status)
        # What is remembered of it for an hour should be small.
        self._spawned.popen.args = ()
        self.config = replace(self.config, arguments=(), environment={})
        self._on_end(self)
        subscribers, self._subscribers = self._subscribers, []
        for subscriber in subscribers:
            subscriber.ended(self.end_envelope)
        self._wake_followers()
