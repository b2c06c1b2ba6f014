"""`demo`: the whole in one go, each step with its time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from greenroom.cli.client import Client, SandboxHandle
from greenroom.cli.frames import Ended, Output
from greenroom.cli.interrupts import Interrupted, Interrupts
from greenroom.cli.launch import Down, bring_up, take_down
from greenroom.cli.leftovers import describe
from greenroom.cli.output import EXIT_ERROR, fail, warn
from greenroom.cli.plans import UpOptions
from greenroom.cli.records import StateDir
from greenroom.cli.reports import format_seconds, reporter_for
from greenroom.cli.target import engines_of, find_target

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
    """Start the platform unless it runs, use one sandbox, stop what was started. Returns an exit status.

    Raises Interrupted when a signal asked for the end, after all of that was undone.
    """
    with Interrupts() as interrupts:
        try:
            return _demonstrate(options, interrupts)
        except Interrupted:
            warn("interrupted; it is safe to run it again")
            raise


def _demonstrate(options: UpOptions, interrupts: Interrupts) -> int:
    state = StateDir(Path(options.state_dir))
    clock = _Clock()
    started = state.running() is None
    if started:
        reporter = reporter_for(sys.stderr)
        try:
            record = bring_up(options, reporter, interrupts)
        finally:
            reporter.close()
    status = EXIT_ERROR
    try:
        interrupts.release()
        if started:
            clock.step(f"platform up at {record.entry_url}")
        status = interrupts.run(lambda: _use(state, clock))
    finally:
        if started:
            interrupts.hold()
            status = _stop(state, clock) or status
    clock.total()
    return status


async def _use(state: StateDir, clock: _Clock) -> int:
    async with Client(find_target(state.root)) as client:
        sandbox = await client.create("base", timeout=300)
        try:
            clock.step(f"sandbox {sandbox.sandbox_id} created")
            if engines_of(state) != {"simulated"}:
                status = await _command(client, sandbox)
                clock.step(f"command finished with exit status {status}")
            else:
                status = 0
                clock.step("no command: the simulated engine has no VM to run it in")
        finally:
            await client.kill(sandbox.sandbox_id)
            clock.step("sandbox killed")
    return status


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
