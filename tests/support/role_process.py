"""Real role processes for tests: started as the supervisor does, awaited by their ready message, and ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from greenroom.config import RoleSpec
from greenroom.wire.serving import Ready

DEADLINE = 30.0
"""Seconds until a role that does not get ready, or does not end, fails its test."""


class RoleProcess:
    """`python -m greenroom.<role>` with a spec. Use as a context manager; `url` is its address."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self.url = ""
        self.detail: dict[str, Any] = {}
        """What it told beside its address."""
        self._home = spec.state / f"{spec.name}.test"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it wrote to standard error so far."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def _log_path(self) -> Path:
        return self._home.with_suffix(".log")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start it without waiting; its ready message is read by `wait_ready`."""
        spec_path = self._home.with_suffix(".json")
        spec_path.write_bytes(msgspec.json.encode(self.spec))
        self._reader, writer = os.pipe()
        environment = {**os.environ, "GREENROOM_READY_FD": str(writer), "PYTHONWARNINGS": "default"}
        try:
            with self._log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", f"greenroom.{self.spec.role}", str(spec_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=(writer,),
                )
        finally:
            os.close(writer)

    def wait_ready(self) -> None:
        """Wait for the ready message; fails with the role's log when it ends or takes too long."""
        text = b""
        ends = time.monotonic() + DEADLINE
        try:
            # Messages before the last one tell of progress only.
            while not (text.endswith(b"\n") and b'"url"' in text.splitlines()[-1]):
                ready, _, _ = select.select([self._reader], [], [], max(0.0, ends - time.monotonic()))
                chunk = os.read(self._reader, 4096) if ready else b""
                assert chunk, f"{self.spec.name} did not get ready:\n{self.log}"
                text += chunk
        finally:
            os.close(self._reader)
        ready = msgspec.json.decode(text.splitlines()[-1], type=Ready)
        self.url, self.detail = ready.url, ready.detail

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal, wait for the end, return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.spec.name} does not end:\n{self.log}") from None

    def __enter__(self) -> RoleProcess:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(signal.SIGKILL if kind else signal.SIGTERM)
        if kind is None:
            assert "Traceback" not in self.log, self.log
            assert "Warning" not in self.log, self.log
