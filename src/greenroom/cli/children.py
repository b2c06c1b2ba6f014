"""One role process: how it is started, what is heard from it, how it ends.

Each role runs in a session of its own, so that Ctrl-C in the terminal reaches only the supervisor, and that
stops the roles in order. `setpriv --pdeathsig` (util-linux) makes the kernel send it a signal when the
supervisor dies without being able to stop it: SIGTERM, but SIGHUP to a node, which then leaves its VMs running
for the next start to adopt. The setting is made by setpriv and kept across its exec of Python, so no code has
to run between fork and exec, and no role needs to know. The kernel ties it to the *thread* that forked, hence
`start` is called on the main thread only. It leaves a window of some milliseconds (a supervisor killed between
fork and setpriv's call), which the next `up` or `down` closes from the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from greenroom.cli.processes import MARK, ProcessId, describe_exit, kill_group
from greenroom.cli.records import StateDir
from greenroom.config import RoleSpec
from greenroom.errors import InternalError
from greenroom.wire.credentials import write_private

_LINE_LIMIT = 1 << 20
"""Bytes of a line on the ready pipe; a role that writes more without an end of line is not understood."""
_PASSED_ON = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
_PASSED_ON_TO_NODES = ("http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""A node builds its image from a package mirror, which may lie behind a proxy."""


_PARENT_DIED = {"node": "HUP"}
"""Signal for a role whose supervisor died, where it is not SIGTERM."""


class ProgressLine(msgspec.Struct, frozen=True):
    """How far a role is that is not ready yet."""

    step: str
    done: float | None = None


class _PipeLine(msgspec.Struct, frozen=True):
    """A line on the ready pipe: `wire.serving.Ready`, or progress before it."""

    url: str = ""
    detail: dict[str, Any] = {}
    progress: ProgressLine | None = None


def passed_on(role: str) -> dict[str, str]:
    """The part of our environment that a role needs, so that nothing secret of the user's leaks into it."""
    wanted = _PASSED_ON + (_PASSED_ON_TO_NODES if role == "node" else ())
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in wanted or name.lower() in wanted or name.startswith(("PYTHON", "GREENROOM_", "LC_"))
    }
    environment.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    return environment


def role_environment(role: str, mark: str) -> dict[str, str]:
    """The whole environment of a role."""
    # A log is read while the role runs, and after it was killed.
    return {**passed_on(role), "PYTHONUNBUFFERED": "1", MARK: mark}


class Child:
    """A started role. The callbacks are called on the event loop; `on_exit` once, after the last others."""

    def __init__(
        self,
        spec: RoleSpec,
        on_progress: Callable[[ProgressLine], None],
        on_ready: Callable[[str, dict[str, Any]], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._pidfd = -1
        self._buffer = b""
        self._mark = ""
        self.identity: ProcessId | None = None

    def start(self, state: StateDir, module: str, mark: str) -> None:
        """Start the process. Raises OSError when that cannot be done."""
        if threading.current_thread() is not threading.main_thread():
            raise InternalError("roles must be started on the main thread; see children.py")
        spec_path = state.spec_path(self.spec.name)
        write_private(spec_path, msgspec.json.encode(self.spec).decode())
        environment = role_environment(self.spec.role, mark)
        read_end, write_end = os.pipe()
        log = -1
        try:
            log = state.open_log(self.spec.name)
            environment["GREENROOM_READY_FD"] = str(write_end)
            self._process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    _PARENT_DIED.get(self.spec.role, "TERM"),
                    sys.executable,
                    "-m",
                    module,
                    str(spec_path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd="/",
                pass_fds=(write_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
            if log >= 0:
                os.close(log)
        self._mark = mark
        self._pipe = read_end
        os.set_blocking(read_end, False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self.identity = ProcessId.of(self._process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe, self._read)
        loop.add_reader(self._pidfd, self._ended)

    @property
    def pid(self) -> int:
        """The process's pid, 0 before it was started."""
        return 0 if self._process is None else self._process.pid

    def terminate(self) -> None:
        """SIGTERM to the role itself; its children are its own business as long as it lives."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the role; its end then clears its process group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _read(self) -> None:
        """Take what the role wrote; called when there is something, and once more at its end."""
        while self._pipe >= 0:
            try:
                chunk = os.read(self._pipe, 65536)
            except BlockingIOError:
                return
            if not chunk or len(self._buffer) > _LINE_LIMIT:
                self._close_pipe()
                return
            self._buffer += chunk
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            told = msgspec.json.decode(line, type=_PipeLine)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if told.progress is not None:
            self._on_progress(told.progress)
        elif told.url:
            self._close_pipe()
            self._on_ready(told.url, told.detail)

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def _ended(self) -> None:
        process = self._process
        if process is None or (status := process.poll()) is None:
            return
        self._read()
        self._close_pipe()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        # What a role means to outlive it runs in a session of its own; the rest must not hold its ports.
        kill_group(process.pid, self._mark)
        self._on_exit(describe_exit(status))
