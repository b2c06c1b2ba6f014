"""A platform of stand-in roles in a state directory of its own, and the `greenroom` command to drive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from greenroom.cli.observation import Observation
from greenroom.cli.processes import MARK, ProcessId
from greenroom.cli.records import RoleRecord, StateDir

SUPPORT = Path(__file__).parent / "support"
DEADLINE = 60.0
"""Seconds after which a test that waits for an event fails; only ever used up by a failure."""


def eventually(ask: Callable[[], bool], what: str, deadline: float = DEADLINE) -> None:
    """Wait until `ask` says yes; fails with `what` when it has not by the deadline."""
    end = time.monotonic() + deadline
    while not ask():
        assert time.monotonic() < end, f"not within {deadline:g} s: {what}"
        time.sleep(0.02)


class Home:
    """A state directory and the command line on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = StateDir(root / "state")
        self.trace_file = root / "trace"
        self.journal = root / "sandboxes"
        self.environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("GREENROOM", "E2B"))
            },
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONWARNINGS": "error",
            "GREENROOM_STANDIN_TRACE": str(self.trace_file),
            "GREENROOM_STANDIN_SANDBOXES": str(self.journal),
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "greenroom.cli.main", "--state-dir", str(self.state.root), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. A traceback is never an answer."""
        done = subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, timeout=DEADLINE * 2,
            check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done

    def ok(self, *arguments: str) -> str:
        """Run a command that must succeed; returns its standard output."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command and leave it running."""
        process = subprocess.Popen(
            self.command(*arguments), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.started.append(process)
        return process

    def up_options(self, *more: str) -> list[str]:
        return [
            "--port",
            "0",
            "--cache-dir",
            str(self.root / "cache"),
            "--role-module",
            "standin.{role}",
            *more,
        ]

    def up(self, *more: str) -> str:
        """Start the platform detached; returns what was reported."""
        done = self.run("up", "--detach", *self.up_options(*more))
        assert done.returncode == 0, done.stderr
        return done.stderr

    def roles(self) -> dict[str, RoleRecord]:
        return {role.name: role for role in self.state.roles()}

    def pid(self, name: str) -> int:
        process = self.roles()[name].process
        assert process is not None
        return process.pid

    def supervisor(self) -> ProcessId:
        record = self.state.running()
        assert record is not None
        return record.process

    def status(self) -> tuple[int, Observation]:
        done = self.run("status", "--json")
        return done.returncode, msgspec.json.decode(done.stdout, type=Observation)

    def trace(self) -> list[str]:
        """What the stand-ins did, as `<verb> <name>`, oldest first."""
        if not self.trace_file.exists():
            return []
        lines = self.trace_file.read_text(encoding="utf-8").splitlines()
        return [line.rsplit(" ", 1)[0] for line in lines]

    def marked(self) -> list[int]:
        """Processes that a supervisor of this directory started and that still live."""
        needle = f"GREENROOM_STANDIN_TRACE={self.trace_file}".encode()
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    environment = Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                own = any(variable.startswith(MARK.encode()) for variable in environment)
                if own and needle in environment and ProcessId.of(int(entry.name)) is not None:
                    found.append(int(entry.name))
        return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A fresh state directory; whatever the test leaves running is ended, and nothing may be left after that."""
    made = Home(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)
    if made.state.run.is_dir():
        made.environment = {**made.environment, "GREENROOM_STANDIN_NODE": ""}
        made.run("down", "--timeout", "20")
    eventually(lambda: not made.marked(), f"the end of {made.marked()}")
