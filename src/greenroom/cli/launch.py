"""Starting a detached supervisor, and stopping whatever supervises a state directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from greenroom.cli.children import passed_on
from greenroom.cli.interrupts import Interrupted, Interrupts
from greenroom.cli.leftovers import Swept, end_roles, live_roles, sweep_nodes
from greenroom.cli.plans import UpOptions, check_user
from greenroom.cli.records import Busy, Lock, StateDir, SupervisorRecord
from greenroom.cli.reports import Report, Reporter, read_reports
from greenroom.cli.supervisor import REPORT_FD
from greenroom.errors import PermanentError, SetupError, TemporaryError


class StartFailed(PermanentError):
    """The platform did not come up; what had started was stopped again."""

    kind = "start_failed"


def bring_up(options: UpOptions, reporter: Reporter, interrupts: Interrupts) -> SupervisorRecord:
    """Start a detached supervisor and wait until every role is ready; returns its record.

    The supervisor gets a session of its own and this process as a parent that soon ends, so it belongs to
    init like after a double fork; a fresh interpreter inherits neither threads nor an open terminal.
    Raises StartFailed, or Busy when one runs already. A signal stops the supervisor again and is raised as
    Interrupted, until all is ready: from then on `interrupts` holds them, so that whoever has to stop the
    platform can get ready for that before it releases them.
    """
    options.check()
    check_user(options)
    state = StateDir(Path(options.state_dir))
    state.prepare()
    Lock(state).close()  # a clear answer at once; the supervisor takes it for itself
    log = state.open_log("supervisor")
    read_end, write_end = os.pipe()
    # Between the start and the `try` that stops it again nothing may break in.
    interrupts.hold()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "greenroom.cli.supervisor", msgspec.json.encode(options).decode()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**passed_on("node"), REPORT_FD: str(write_end)},
            pass_fds=(write_end,),
            start_new_session=True,
        )
    finally:
        os.close(write_end)
        os.close(log)
    failure = ""
    try:
        interrupts.release()
        with os.fdopen(read_end, "rb") as stream:
            for report in read_reports(stream):
                if report.kind == "failed":
                    failure = report.text
                    break
                reporter.show(report)
                if report.kind == "up":
                    interrupts.hold()
                    process.returncode = 0  # it lives on without us; nobody has to wait for it
                    return _own_record(state)
    except Interrupted:
        reporter.close()
        reporter.show(Report(kind="notice", text="stopping what had started"))
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    reporter.close()
    ended = process.wait()
    if not failure and ended in (0, -signal.SIGTERM):
        raise StartFailed("it was stopped before all of it was up, by `greenroom down` or a signal")
    raise StartFailed(
        failure
        or f"the supervisor ended before the platform was up\nIts log is {state.log_path('supervisor')}"
    )


def _own_record(state: StateDir) -> SupervisorRecord:
    record = state.supervisor()
    if record is None:
        raise StartFailed(f"the supervisor's record in {state.run} cannot be read")
    return record


class Down(msgspec.Struct, frozen=True, kw_only=True):
    """What `take_down` did."""

    was_running: bool
    crashed: bool = False
    """Whether the last supervisor was killed, so that this was a clean-up."""
    ended: list[str] = []
    """Roles that had outlived their supervisor."""
    stuck: list[str] = []
    """Roles that cannot be ended."""
    swept: list[Swept] = []

    @property
    def clean(self) -> bool:
        """Whether nothing is left."""
        return not self.stuck and all(swept.clean for swept in self.swept)


def take_down(state: StateDir, timeout: float, reporter: Reporter) -> Down:
    """Stop the supervisor and clean up, waiting up to `timeout` seconds for an orderly stop.

    When that time is over the roles are killed; what they leave is swept all the same. Raises Busy while
    another `down` works, SetupError for another user's platform.
    """
    if not state.run.is_dir():
        return Down(was_running=False)
    running = state.running()
    if running is not None:
        _stop_supervisor(state, running, timeout, reporter)
    lock = _lock(state)
    try:
        ended, stuck = end_roles(state)
        supervisor = state.supervisor()
        crashed = supervisor is not None and supervisor.state != "stopped"
        module = supervisor.role_module if supervisor is not None else "greenroom.{role}"
        specs = [] if stuck else state.node_specs()
        if specs:
            reporter.show(Report(kind="step", text=f"sweeping {len(specs)} node(s)"))
        swept = sweep_nodes(specs, module)
        if supervisor is not None and (crashed or supervisor.failure) and not stuck:
            # Why the last start failed is of no use any more once what it left was seen to.
            roles = [msgspec.structs.replace(role, state="gone", process=None) for role in state.roles()]
            state.save(msgspec.structs.replace(supervisor, state="stopped", failure=""), roles)
    finally:
        lock.close()
    return Down(was_running=running is not None, crashed=crashed, ended=ended, stuck=stuck, swept=swept)


def _stop_supervisor(state: StateDir, running: SupervisorRecord, timeout: float, reporter: Reporter) -> None:
    process = running.process
    reporter.show(Report(kind="step", text=f"stopping the platform (supervisor {process.pid})"))
    try:
        process.signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        shown = ""
        while not process.wait_gone(0.2):
            names = ", ".join(role.name for role in live_roles(state))
            if names != shown:
                shown = names
                reporter.show(
                    Report(kind="progress", text=f"waiting for {names}" if names else "nearly done")
                )
            if time.monotonic() > deadline:
                break
        else:
            return
        reporter.show(Report(kind="notice", text=f"not stopped within {timeout:g} s; killing what is left"))
        process.signal(signal.SIGTERM)  # a second one means at once
        if not process.wait_gone(10.0):
            process.signal(signal.SIGKILL)
            process.wait_gone(5.0)
    except PermissionError as error:
        raise SetupError("the platform belongs to another user; run this as that user") from error


def _lock(state: StateDir) -> Lock:
    """The lock, which a supervisor that has just ended gives back within moments."""
    deadline = time.monotonic() + 5.0
    while True:
        try:
            return Lock(state)
        except Busy as busy:
            if time.monotonic() > deadline:
                raise TemporaryError(f"another greenroom command is at work: {busy.message}") from busy
            time.sleep(0.05)
