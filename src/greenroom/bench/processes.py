"""The processes that a benchmark starts: each tells when it is ready, writes a log, and ends with the benchmark.

`setpriv --pdeathsig` (util-linux) makes the kernel end a process whose starter dies without being able to stop it; the
kernel means the *thread* that started it, hence `start` on the main thread only. What they are told is in a file, so
that their command lines name the directory that they work in, and are found by it.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from greenroom.errors import InternalError, RuntimeFailure
from greenroom.wire.serving import Ready, tell_ready

S = TypeVar("S")
T = TypeVar("T")

START_DEADLINE = 120.0
"""Seconds for a process to get ready, from its last sign of life on."""
STOP_DEADLINE = 30.0
"""Seconds from SIGTERM to SIGKILL."""
_PASSED_ON = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")


class Running:
    """A started process. `url` and `detail` are what it told when it was ready."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.url = ""
        self.detail: dict[str, Any] = {}
        self._process = process
        self._log = log
        self._told = False

    def __repr__(self) -> str:
        return f"<Running {self.name} pid={self.pid} {self.url}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def log(self, lines: int = 5) -> str:
        """The end of what it wrote to standard error."""
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return " | ".join(text.splitlines()[-lines:])

    def tell_to_end(self) -> None:
        """Ask it to end, and go on; `stop` waits for that. So several can end at the same time."""
        if not self.ended:
            self._process.send_signal(signal.SIGTERM)
            self._told = True

    async def stop(self, deadline: float = STOP_DEADLINE) -> None:
        """End it. Raises RuntimeFailure when it had ended by itself, or had to be killed."""
        if self.ended and not self._told:
            raise RuntimeFailure(
                f"{self.name} ended by itself with status {self._process.returncode}: {self.log()}"
            )
        if not self._told:
            self.tell_to_end()
        try:
            await asyncio.to_thread(self._process.wait, deadline)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeFailure(
                f"{self.name} did not end within {deadline:.0f} s and was killed: {self.log()}"
            ) from None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


def _start(name: str, module: str, spec: msgspec.Struct, home: Path) -> tuple[Running, int]:
    if threading.current_thread() is not threading.main_thread():
        raise InternalError("a benchmark's processes are started on the main thread; see processes.py")
    path = home / f"{name}.json"
    path.write_bytes(msgspec.json.encode(spec))
    environment = {
        key: value
        for key, value in os.environ.items()
        if key in _PASSED_ON or key.startswith(("PYTHON", "LC_"))
    }
    reader, writer = os.pipe()
    log = home / f"{name}.log"
    try:
        with log.open("ab") as stream:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", module, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd="/",
                env={**environment, "GREENROOM_READY_FD": str(writer)},
                pass_fds=(writer,),
                start_new_session=True,
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return Running(name, process, log), reader


def _wait_ready(reader: int, deadline: float) -> Ready | None:
    """What the process tells at last; None when it ends, or is silent for too long."""
    text = b""
    ends = time.monotonic() + deadline
    while True:
        readable, _, _ = select.select([reader], [], [], max(0.0, ends - time.monotonic()))
        chunk = os.read(reader, 65536) if readable else b""
        if not chunk:
            return None
        ends = time.monotonic() + deadline
        text += chunk
        *lines, text = text.split(b"\n")
        for line in lines:
            if b'"url"' in line:
                return msgspec.json.decode(line, type=Ready)


@asynccontextmanager
async def started(
    name: str, module: str, spec: msgspec.Struct, home: Path, deadline: float = START_DEADLINE
) -> AsyncIterator[Running]:
    """`python -m module SPEC.json` for the length of a block, its spec and log in `home`.

    Raises RuntimeFailure with the end of its log when it does not get ready, or does not end as it should.
    """
    running, reader = _start(name, module, spec, home)
    try:
        try:
            ready = await asyncio.to_thread(_wait_ready, reader, deadline)
        finally:
            os.close(reader)
        if ready is None:
            raise RuntimeFailure(f"{name} did not get ready: {running.log()}")
        running.url, running.detail = ready.url, ready.detail
        yield running
    except BaseException:
        # Whatever went wrong is told; how this one ends does not matter beside it.
        running.kill()
        raise
    await running.stop()


async def answer_of(
    name: str, module: str, spec: msgspec.Struct, home: Path, kind: type[T], deadline: float
) -> T:
    """What `python -m module SPEC.json` tells with `tell`, as its whole work. Raises RuntimeFailure."""
    async with started(name, module, spec, home, deadline) as running:
        return msgspec.convert(running.detail.get("answer"), kind)


def tell(answer: msgspec.Struct) -> None:
    """In such a process: its answer. It then waits to be ended."""
    tell_ready(Ready(url="-", detail={"answer": msgspec.to_builtins(answer)}))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def answering(arguments: list[str], kind: type[S], work: Callable[[S], msgspec.Struct]) -> int:
    """The main function of such a process; returns its exit status."""
    if len(arguments) != 1:
        print("one argument is needed: the file that says what to do", file=sys.stderr)
        return 2
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=kind)
    answer = work(spec)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    tell(answer)
    return 0
