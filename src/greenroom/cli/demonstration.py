"""`demo`: the whole in one go, each step with its time."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from greenroom.cli.client import Client, SandboxHandle
from greenroom.cli.frames import Ended, Output
from greenroom.cli.launch import Down, bring_up, take_down
from greenroom.cli.leftovers import describe
from greenroom.cli.observation import observe
from greenroom.cli.output import EXIT_ERROR, fail
from greenroom.cli.plans import UpOptions
from greenroom.cli.records import StateDir
from greenroom.cli.reports import format_seconds, reporter_for
from greenroom.cli.target import find_target

COMMAND = "uname -a; id -un; python3 -c 'print(\"6 * 7 =\", 6 * 7)'"
"""Shows a kernel, a user and a language inside the sandbox."""
STOP_DEADLINE = 180.0
"""Seconds for the platform to stop in order."""


class _Clock:
    """Prints steps with the time each took, and at the end the total."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def step(self, text: str) -> None:
        now = time.monotonic()
        print(f"{format_seconds(now - self._last):>12}  {text}", flush=True)
        self._last = now

    def total(self) -> None:
        print(f"{format_seconds(time.monotonic() - self._start):>12}  in all", flush=True)


def demonstrate(options: UpOptions) -> int:
    """Start the platform unless it runs, use one sandbox, stop what was started. Returns an exit status."""
    state = StateDir(Path(options.state_dir))
    clock = _Clock()
    started = state.running() is None
    if started:
        reporter = reporter_for(sys.stderr)
        try:
            record = bring_up(options, reporter)
        finally:
            reporter.close()
        clock.step(f"platform up at {record.entry_url}")
    status = EXIT_ERROR
    try:
        status = asyncio.run(_use(options, clock))
    finally:
        if started:
            status = _stop(state, clock) or status
    clock.total()
    return status


async def _use(options: UpOptions, clock: _Clock) -> int:
    target = find_target(Path(options.state_dir))
    async with Client(target) as client:
        sandbox = await client.create("base", timeout=300)
        clock.step(f"sandbox {sandbox.sandbox_id} created")
        try:
            if await _runs_commands(StateDir(Path(options.state_dir))):
                status = await _command(client, sandbox)
                clock.step(f"command finished with exit status {status}")
            else:
                status = 0
                clock.step("no command: the simulated engine has no VM to run it in")
        finally:
            await client.kill(sandbox.sandbox_id)
            clock.step("sandbox killed")
    return status


async def _runs_commands(state: StateDir) -> bool:
    """Whether any node has real sandboxes."""
    nodes = (await observe(state)).nodes
    return not nodes or any(node.engine != "simulated" for node in nodes)


async def _command(client: Client, sandbox: SandboxHandle) -> int:
    async for message in client.run(sandbox, COMMAND):
        if isinstance(message, Output):
            for line in message.data.decode(errors="replace").splitlines():
                print(f"{'':>12}  | {line}", flush=True)
        elif isinstance(message, Ended):
            return message.status
    return EXIT_ERROR


def _stop(state: StateDir, clock: _Clock) -> int:
    reporter = reporter_for(sys.stderr)
    try:
        result: Down = take_down(state, STOP_DEADLINE, reporter)
    finally:
        reporter.close()
    clock.step("platform stopped")
    if result.clean:
        return 0
    fail("not everything was removed\n" + "\n".join(describe(swept) for swept in result.swept))
    return EXIT_ERROR
