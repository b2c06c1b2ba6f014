"""What groups of processes hold and use, read from /proc, and the processes that `idle` compares a platform with.

A group is a root process and everything that descends from it. CPU time that the kernel has already moved from
ended children to a parent counts with the parent, so that short-lived helpers are not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

import msgspec
import psutil

from greenroom.errors import SetupError
from greenroom.proxy.envoy import find_binary

_TICK = os.sysconf("SC_CLK_TCK")
_PYTHON = "import aiohttp, uvicorn, time\nprint('ready', flush=True)\ntime.sleep(86400)"
"""A process that imports what every role needs and then does nothing."""
_START_DEADLINE = 60.0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of one group hold now, in MiB, and the CPU time they have used so far, in seconds."""

    processes: int
    threads: int
    pss_mib: float
    """Each shared page counted by the share of it that falls to these processes (proc(5), smaps_rollup)."""
    private_mib: float
    rss_mib: float
    """Shared pages counted in full in each process: an upper bound."""
    cpu_s: float


class ProcessTimes(msgspec.Struct, frozen=True):
    """From /proc/<pid>/stat: seconds of CPU, own and of children that were waited for, and threads."""

    cpu_s: float
    threads: int


def parse_stat(raw: bytes, tick: int = _TICK) -> ProcessTimes:
    """Read a line of /proc/<pid>/stat (proc(5)). The name may hold blanks and brackets. Raises ValueError."""
    fields = raw[raw.rindex(b")") + 2 :].split()
    try:
        return ProcessTimes(cpu_s=sum(map(int, fields[11:15])) / tick, threads=int(fields[17]))
    except IndexError as error:
        raise ValueError(f"not a line of /proc/<pid>/stat: {raw!r}") from error


def grouped(parents: Mapping[int, int], roots: Mapping[str, int]) -> dict[str, list[int]]:
    """Processes by group: each goes to the nearest of the roots on its way up. `parents` maps pid to parent."""
    names = {pid: name for name, pid in roots.items()}
    found: dict[str, list[int]] = {name: [] for name in roots}
    for pid in parents:
        above: int | None = pid
        seen: set[int] = set()
        while above is not None and above not in names and above not in seen:
            seen.add(above)
            above = parents.get(above)
        if above in names:
            found[names[above]].append(pid)
    return found


def _parents() -> dict[int, int]:
    found: dict[int, int] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found[process.pid] = process.ppid()
    return found


def usage_of(pids: Iterable[int]) -> Usage:
    """The sum over some processes; one that has ended meanwhile counts nothing."""
    processes = threads = 0
    memory = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0, "Rss": 0}
    cpu = 0.0
    for pid in pids:
        place = Path(f"/proc/{pid}")
        try:
            times = parse_stat((place / "stat").read_bytes())
            rollup = (place / "smaps_rollup").read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        processes += 1
        threads += times.threads
        cpu += times.cpu_s
        for line in rollup.splitlines():
            name, _, value = line.partition(":")
            if name in memory:
                memory[name] += int(value.split()[0])
    return Usage(
        processes=processes,
        threads=threads,
        pss_mib=memory["Pss"] / 1024,
        private_mib=(memory["Private_Clean"] + memory["Private_Dirty"]) / 1024,
        rss_mib=memory["Rss"] / 1024,
        cpu_s=cpu,
    )


def look(roots: Mapping[str, int]) -> dict[str, Usage]:
    """The usage of every group right now."""
    return {name: usage_of(pids) for name, pids in grouped(_parents(), roots).items()}


@contextlib.asynccontextmanager
async def bare_processes(directory: Path, pythons: int) -> AsyncIterator[dict[str, int]]:
    """Start that many idle Pythons and one Envoy without any configuration; yields their groups' roots.

    Envoy gets one worker, as the platform's. Raises SetupError when one of them does not start.
    """
    configuration = directory / "empty-envoy.json"
    configuration.write_text("{}", encoding="ascii")
    envoy = [
        str(find_binary()), "-c", str(configuration), "--concurrency", "1", "--disable-hot-restart",
        "--log-level", "error",
    ]  # fmt: skip
    roots: dict[str, int] = {}
    async with contextlib.AsyncExitStack() as stack:
        for number in range(pythons):
            process = await _started(stack, asyncio.subprocess.PIPE, sys.executable, "-c", _PYTHON)
            assert process.stdout is not None  # noqa: S101
            try:
                async with asyncio.timeout(_START_DEADLINE):
                    line = await process.stdout.readline()
            except TimeoutError:
                line = b""
            if line != b"ready\n":
                raise SetupError("a bare Python process to compare with did not start")
            roots[f"python {number + 1}"] = process.pid
        proxy = await _started(stack, asyncio.subprocess.DEVNULL, *envoy)
        roots["envoy"] = proxy.pid
        yield roots
        if proxy.returncode is not None:
            raise SetupError(
                f"the Envoy to compare with ended by itself (exit status {proxy.returncode}); "
                "see `greenroom doctor`"
            )


async def _started(
    stack: contextlib.AsyncExitStack, stdout: int, *command: str
) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    return process
