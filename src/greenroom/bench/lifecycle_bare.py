"""The baseline's side of the lifecycle: `bench/bare_lifecycle.py`, a process of its own that does one step a line.

It is a process of its own so that nothing of Greenroom's works against it, and told step by step so that both sides
take turns on one machine.

It is not started by the event loop: uvloop waits for its child's exec with the interpreter locked, until the last copy
of a pipe's end is closed. A thread that makes a VM's namespace has a copy of all descriptors for a moment
(`runtime.namespaces.apply_rules`) and closes them only when it gets the interpreter: with a node at work in this
process both would wait for ever. `subprocess.Popen` lets others run meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

import greenroom
from greenroom.bench.lanes import unbroken
from greenroom.bench.lifecycle_sides import Held, SideName, Took
from greenroom.bench.report import Meter
from greenroom.config import RoleSpec
from greenroom.errors import RuntimeFailure
from greenroom.wire.messages import Size

READY_DEADLINE = 300.0
"""Seconds until it has the golden in memory, which it may have to make."""
STEP_DEADLINE = 300.0
END_DEADLINE = 60.0
T = TypeVar("T")


class _Answer(msgspec.Struct, frozen=True):
    error: str = ""


def script() -> Path | None:
    """The script, where Greenroom runs from a checkout."""
    path = Path(greenroom.__file__).resolve().parents[2] / "bench" / "bare_lifecycle.py"
    return path if path.is_file() else None


class Bare:
    """The side. Use as an async context manager."""

    name: SideName = "bare"

    def __init__(self, path: Path, spec: RoleSpec, size: Size, children: int, meter: Meter) -> None:
        """`spec` names a directory of its own; at most `children` VMs beside the parent are alive at a time."""
        self._argv = [
            sys.executable, str(path), "--serve", "--memory", str(size.memory_mib), "--forks", str(children),
            "--accelerator", spec.config.vm.accelerator, "--cache-dir", spec.cache_dir,
            "--directory", spec.state_dir,
        ]  # fmt: skip
        self._directory = Path(spec.state_dir)
        self._meter = meter
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: asyncio.StreamReader
        self._pipe: asyncio.BaseTransport | None = None

    async def __aenter__(self) -> Bare:
        self._meter.say("the bare script")
        self._directory.mkdir(mode=0o700)
        self._log = os.open(self._directory / "log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            process = await unbroken(asyncio.to_thread(self._start), "start the bare script")
            reader = self._answers = asyncio.StreamReader()
            self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), process.stdout
            )
            await self._read(_Answer, READY_DEADLINE)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await unbroken(self._close(), "end the bare script")

    def _start(self) -> subprocess.Popen[bytes]:
        # In a session of its own: what interrupts this process must not cut it off from its QEMUs.
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        return self._process

    async def _close(self) -> None:
        process = self._process
        if process is not None:
            assert process.stdin is not None  # noqa: S101
            with contextlib.suppress(OSError):
                process.stdin.close()  # at which it ends its VMs and itself
            await asyncio.to_thread(self._wait, process)
        if self._pipe is not None:
            self._pipe.close()
        os.close(self._log)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(END_DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._directory / "log").read_text(errors="replace").strip()
            return text[-300:]
        return ""

    async def _read(self, kind: type[T], deadline: float) -> T:
        try:
            async with asyncio.timeout(deadline):
                line = await self._answers.readline()
        except TimeoutError as error:
            raise RuntimeFailure(f"the bare script did not answer within {deadline:.0f} s") from error
        if not line:
            raise RuntimeFailure(f"the bare script has ended: {self._last_words()}")
        if problem := msgspec.json.decode(line, type=_Answer).error:
            raise RuntimeFailure(f"the bare script failed: {problem}")
        return msgspec.json.decode(line, type=kind)

    async def _ask(self, kind: type[T], do: str, **arguments: int) -> T:
        assert self._process is not None  # noqa: S101
        assert self._process.stdin is not None  # noqa: S101
        try:
            # A line is far below what a pipe takes at once.
            self._process.stdin.write(msgspec.json.encode({"do": do, **arguments}) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeFailure(f"the bare script has ended: {self._last_words()}") from error
        return await self._read(kind, STEP_DEADLINE)

    async def begin(self) -> None:
        await self._ask(_Answer, "begin")

    async def grow(self, mib: int) -> None:
        await self._ask(_Answer, "grow", mib=mib)

    async def snapshot(self) -> Took:
        return await self._ask(Took, "snapshot")

    async def start(self) -> Took:
        return await self._ask(Took, "start")

    async def held(self, children: int) -> Held:
        return await self._ask(Held, "held", children=children)

    async def fork(self, children: int) -> Took:
        return await self._ask(Took, "fork", children=children)

    async def pause(self) -> Took:
        return await self._ask(Took, "pause")

    async def resume(self) -> Took:
        return await self._ask(Took, "resume")

    async def rest(self) -> None:
        """Nothing goes on here between two steps."""

    async def end(self) -> None:
        await self._ask(_Answer, "end")
