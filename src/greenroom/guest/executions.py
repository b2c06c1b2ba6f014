"""The commands of this sandbox: those alive, and for a while those that have ended.

Above ``processes``; ``commands`` asks here. Every command is an *execution* with an id of its own. Its exit
can be asked for by pid or tag for 30 s (E2B's contract), and by execution id for an hour as long as it is
among the last 1024; so can its output, as far as the budget of ``outputs`` allows. Nothing here has a timer:
what is old is forgotten when somebody looks.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

from .errors import AgentError, printable
from .outputs import Budget, Limits
from .processes import Config, Process
from .recording import Recorder
from .sessions import CommandGroups
from .spawning import Spawned
from .workers import Workers

RETENTION_SECONDS = 30.0
"""How long the exit of a process can still be asked for by its pid or tag."""

MAX_LIVE = 1024


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of commands: how much output, where it spills to, how many that ended, how long (s)."""

    directory: str
    limits: Limits = field(default_factory=Limits)
    executions: int = 1024
    seconds: float = 3600.0


class ProcessTable:
    """All commands by execution id and by pid."""

    def __init__(self, workers: Workers, keeping: Keeping, groups: CommandGroups | None = None) -> None:
        self.groups = groups
        self._loop = asyncio.get_running_loop()
        self._workers = workers
        self._keeping = keeping
        self._budget = Budget(keeping.limits, self._relieve)
        self._live: dict[int, Process] = {}
        self._by_id: dict[str, Process] = {}
        self._ended: OrderedDict[str, Process] = OrderedDict()
        self._with_output: OrderedDict[str, Recorder] = OrderedDict()
        self._ended_pids: dict[int, Process] = {}
        self._starting = 0
        self._emptied: asyncio.Future[None] | None = None

    def reserve(self) -> str:
        """Claim a place for a command about to start; answers its execution id.

        Raises ``resource_exhausted`` when there is none.
        """
        if len(self._live) + self._starting >= MAX_LIVE:
            raise AgentError("resource_exhausted", f"{MAX_LIVE} processes are running already")
        self._starting += 1
        return os.urandom(10).hex()

    def release(self) -> None:
        """Give back the claim, after :meth:`add` or a failed start."""
        self._starting -= 1

    def add(self, spawned: Spawned, config: Config, *, lossless: bool = False) -> Process:
        """Begin to follow a started command."""

        def recorder(on_room: object) -> Recorder:
            assert callable(on_room)  # noqa: S101
            return Recorder(self._workers, self._budget, self._keeping.directory, on_room, lossless=lossless)

        process = Process(spawned, config, self.groups, recorder, self._retain)
        self._ended_pids.pop(process.pid, None)
        self._live[process.pid] = process
        self._by_id[process.execution_id] = process
        return process

    def live(self) -> list[Process]:
        """All commands that have not ended."""
        return list(self._live.values())

    def find(
        self, *, pid: int | None = None, tag: str | None = None, execution_id: str | None = None
    ) -> Process:
        """A live command, or one that ended not too long ago. Raises ``not_found``."""
        self._forget_old()
        if execution_id is not None:
            process = self._by_id.get(execution_id)
            if process is None:
                raise AgentError("not_found", f"execution {printable(execution_id)[:80]!r} not found")
            return process
        horizon = self._loop.time() - RETENTION_SECONDS
        if pid is not None:
            process = self._live.get(pid) or self._ended_pids.get(pid)
            if process is None or (process.ended and process.ended_at < horizon):
                raise AgentError("not_found", f"process with pid {pid} not found")
            return process
        for process in reversed(self._live.values()):
            if process.config.tag == tag:
                return process
        for process in reversed(self._ended.values()):
            if process.ended_at < horizon:
                break
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

    def statistics(self) -> dict[str, int]:
        """How many are alive and remembered, and the bytes of output kept."""
        kept = [process.recorder.log.statistics() for process in self._by_id.values()]
        return {
            "live": len(self._live),
            "ended": len(self._ended),
            "memory": sum(item["memory"] for item in kept),
            "disk": sum(item["disk"] for item in kept),
        }

    def _retain(self, process: Process) -> None:
        self._live.pop(process.pid, None)
        self._ended[process.execution_id] = process
        self._ended_pids[process.pid] = process
        self._with_output[process.execution_id] = process.recorder
        self._forget_old()
        if not self._live and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _relieve(self) -> bool:
        """Forget the output (not the exit) of the command that ended first."""
        if not self._with_output:
            return False
        _, recorder = self._with_output.popitem(last=False)
        recorder.discard()
        return True

    def _forget_old(self) -> None:
        # Done whenever somebody looks, so that an idle guest has no timer for it.
        horizon = self._loop.time() - self._keeping.seconds
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.ended_at >= horizon and len(self._ended) <= self._keeping.executions:
                return
            self._ended.popitem(last=False)
            del self._by_id[oldest.execution_id]
            if self._ended_pids.get(oldest.pid) is oldest:
                del self._ended_pids[oldest.pid]
            self._with_output.pop(oldest.execution_id, None)
            oldest.recorder.discard()
