#!/usr/bin/env python3
"""The baseline of `greenroom bench restore`: start QEMU and load the golden's state, one after the other.

Each of 1 to 4 threads starts a QEMU with the arguments that Greenroom's clones have, waits for its QMP, loads the
state and goes on to the next; the best number of threads counts. No slot is made: no owner record, cgroup,
namespace, uid or rules; all share one tap, made before. All VMs of a batch stay alive until its end.

    .venv/bin/python bench/bare_loop.py [--count 40] [--threads 1,2,3,4] [--memory 512] [--json]

Needs root. The golden is loaded from the cache, or made when it is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from greenroom.bench.stages import StagedRuntime
from greenroom.config import Config, RoleSpec, VmConfig, default_cache_dir
from greenroom.master.catalogue import BASE, BASE_SIZE
from greenroom.runtime import golden as goldens
from greenroom.runtime import namespaces
from greenroom.runtime.command import Descriptors, qemu
from greenroom.runtime.golden import Loaded
from greenroom.wire.messages import Size

DEADLINE = 60.0
"""Seconds for one answer of a QEMU."""


class Vm:
    """A paused QEMU: its process and the open QMP connection."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, answers: BinaryIO) -> None:
        self.process = process
        self._link = link
        self._answers = answers

    def ask(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run one QMP command, passing over events."""
        message = {"execute": command} | ({"arguments": arguments} if arguments else {})
        self._link.sendall(json.dumps(message).encode())
        while True:
            answer = json.loads(self._answers.readline())
            if "error" in answer:
                raise RuntimeError(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._answers.close()
        self._link.close()


def restore(loaded: Loaded, blank: Path, tap: int, directory: Path, name: str) -> Vm:
    """Start a QEMU and load the state."""
    with contextlib.ExitStack() as stack:
        state = loaded.open_state()
        stack.callback(os.close, state)
        # By the directory's descriptor: a socket's path has 107 bytes, wherever the directory lies.
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        overlay_path, socket_path = directory / f"{name}.qcow2", Path(f"/proc/self/fd/{place}/{name}.qmp")
        shutil.copyfile(blank, overlay_path)
        overlay = os.open(overlay_path, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, overlay)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(socket_path))
        listener.listen(1)
        fds = Descriptors(
            ram=loaded.ram,
            qmp=listener.fileno(),
            tap=tap,
            overlay=overlay,
            backing=loaded.backing,
            state=state,
        )
        process = subprocess.Popen(
            qemu(loaded.machine, fds), stdin=subprocess.DEVNULL, pass_fds=fds.all(), start_new_session=True
        )
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(DEADLINE)
    vm = Vm(process, link, link.makefile("rb"))
    try:
        link.connect(str(socket_path))
        vm._answers.readline()  # the greeting
        vm.ask("qmp_capabilities")
        capabilities = [{"capability": "x-ignore-shared", "state": True}]
        vm.ask("migrate-set-capabilities", {"capabilities": capabilities})
        vm.ask("migrate-incoming", {"uri": f"fd:{state}"})
        while (status := vm.ask("query-migrate").get("status")) != "completed":
            if status in ("failed", "cancelled"):
                raise RuntimeError(f"loading the state: {status}")
            time.sleep(0.001)
    except BaseException:
        vm.end()
        raise
    finally:
        socket_path.unlink(missing_ok=True)
        os.close(place)
        overlay_path.unlink(missing_ok=True)
    return vm


def batch(loaded: Loaded, blank: Path, tap: int, directory: Path, count: int, threads: int) -> float:
    """VMs a second over `count` VMs."""
    alive: list[Vm] = []
    failures: list[BaseException] = []
    numbers = iter(range(count))
    lock = threading.Lock()

    def lane() -> None:
        while not failures:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                alive.append(restore(loaded, blank, tap, directory, f"{threads}-{number}"))
            except BaseException as error:  # raised below, when the others have stopped
                failures.append(error)

    lanes = [threading.Thread(target=lane) for _ in range(threads)]
    began = time.perf_counter()
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    seconds = time.perf_counter() - began
    for vm in alive:
        vm.end()
    if failures:
        raise failures[0]
    return count / seconds


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All batches."""
    base = BASE_SIZE
    memory = arguments.memory or base.memory_mib
    size = base if memory == base.memory_mib else Size(f"loop-{memory}", base.cpus, memory, base.disk_mib)
    settings = VmConfig(stock_slots=0, stock_waiting=0, restore_mode="cow", accelerator=arguments.accelerator)
    cache = arguments.cache_dir or default_cache_dir()
    spec = RoleSpec(
        role="node", replica=0, state_dir=str(directory), cache_dir=str(cache), config=Config(vm=settings)
    )
    runtime = StagedRuntime(spec)
    netns = f"gr-{runtime.tag}-loop"
    try:
        golden = await runtime.snapshot_golden(BASE, size, lambda step, _done: print(step, file=sys.stderr))
        loaded = runtime.loaded(golden)
        blank = goldens.blank_overlay(spec.cache, size.disk_mib)
        tap = namespaces.create(netns)
        try:
            work = (loaded, blank, tap, directory)
            batch(*work, 1, 1)  # brings files into the page cache; does not count
            rates = {threads: batch(*work, arguments.count, threads) for threads in arguments.threads}
        finally:
            namespaces.remove(netns)
            os.close(tap)
    finally:
        await runtime.close()
    return {
        "benchmark": "bare_loop",
        "count": arguments.count,
        "size": msgspec.to_builtins(size),
        "per_second": {str(threads): rate for threads, rate in rates.items()},
        "best": max(rates.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="VMs in a batch (default 40)")
    parser.add_argument(
        "--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4]
    )
    parser.add_argument("--memory", type=int, default=0, help="MiB of each guest (default: the base size)")
    parser.add_argument("--accelerator", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="greenroom-loop-") as directory:
        found = asyncio.run(measure(arguments, Path(directory)))
    if arguments.json:
        print(json.dumps(found))
    else:
        for threads, rate in found["per_second"].items():
            print(f"{threads} thread(s): {rate:.1f} VMs/s")
        print(f"best: {found['best']:.1f} VMs/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
