#!/usr/bin/env python3
"""The baseline of `greenroom bench lifecycle`: a VM saved, brought back and forked by a script and plain QEMU.

The steps are Greenroom's, with what they cannot do without: before a pause the guest's own sync; stop, the devices'
state to a file, the pages that the VM has changed (found and read by the same two system calls) to another with
fsync, a copy of its disk, cont; and back: the golden's RAM copied to a memfd, the pages laid over, a QEMU with the
same arguments, its state, cont, and `POST /init`, by which the guest gets entropy, the time, a name and a token.
There are no slots, owner records, cgroups, uids, journal, digests, manifest or measured clock, and the taps and
namespaces that guests of one address need were all made before. So the ratio of the two is what those cost.

    .venv/bin/python bench/bare_lifecycle.py [--rounds 3] [--dirty 64] [--forks 4] [--memory 256] [--json]

Needs root. With `--serve` it does one step for each line of standard input (JSON, `{"do": "snapshot"}`) and answers
with a line; that is how the benchmark has both sides take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from greenroom.bench.lifecycle_sides import MARK, growing
from greenroom.bench.stages import StagedRuntime, memory_of
from greenroom.bench.supply import spec_size
from greenroom.config import Config, RoleSpec, VmConfig, default_cache_dir
from greenroom.master.catalogue import BASE
from greenroom.runtime import golden as goldens
from greenroom.runtime import memory, namespaces, pagemap, pages
from greenroom.runtime.command import Descriptors, qemu
from greenroom.runtime.golden import Loaded
from greenroom.runtime.guestclient import AGENT_PORT

DEADLINE = 120.0
"""Seconds for one answer of a QEMU or a guest."""
CONTROL = secrets.token_hex(20)
"""What the guests know this script by."""


class Place:
    """A namespace with a tap, made ahead, in which one VM at a time may run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tap = namespaces.create(name)
        self.handle = namespaces.open_handle(name)

    def connect(self, seconds: float) -> socket.socket:
        sock = namespaces.open_socket(self.handle)
        try:
            namespaces.reset_on_close(sock)
            sock.settimeout(seconds)
            sock.connect((namespaces.GUEST_ADDRESS, AGENT_PORT))
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        os.close(self.handle)
        os.close(self.tap)
        namespaces.remove(self.name)


class Vm:
    """A QEMU: its process, the open QMP connection, its disk and its place."""

    def __init__(self, process: subprocess.Popen[bytes], place: Place, overlay: Path) -> None:
        self.process = process
        self.place = place
        self.overlay = overlay
        self._link = socket.socket(socket.AF_UNIX)
        self._link.settimeout(DEADLINE)
        self._answers: BinaryIO = self._link.makefile("rb")
        self._token = ""

    def connect(self, path: Path) -> None:
        self._link.connect(str(path))
        self._answers.readline()  # the greeting
        self.ask("qmp_capabilities")

    def ask(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run one QMP command, passing over events."""
        message = {"execute": command} | ({"arguments": arguments} if arguments else {})
        self._link.sendall(json.dumps(message).encode())
        while True:
            line = self._answers.readline()
            if not line:
                raise RuntimeError(f"{command}: QEMU has ended")
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]

    def load(self, state: int) -> None:
        capabilities = [{"capability": "x-ignore-shared", "state": True}]
        self.ask("migrate-set-capabilities", {"capabilities": capabilities})
        self.ask("migrate-incoming", {"uri": f"fd:{state}"})
        while (status := self.ask("query-migrate").get("status")) != "completed":
            if status in ("failed", "cancelled"):
                raise RuntimeError(f"loading the state: {status}")
            time.sleep(0.001)

    def introduce(self) -> None:
        """Give the guest its identity; return when the agent has answered."""
        end = time.monotonic() + DEADLINE
        while True:
            try:
                fields = identity()
                self._post("/init", json.dumps(fields).encode())
                self._token = fields["accessToken"]
                return
            except (OSError, IndexError):
                if time.monotonic() > end or self.process.poll() is not None:
                    raise RuntimeError("the guest's agent does not answer") from None
            time.sleep(0.01)

    def sync(self) -> None:
        """Have the guest write its file systems out."""
        self._post("/sync", b"{}")

    def _post(self, path: str, body: bytes) -> None:
        """Ask what only the owner of a guest may. Raises OSError, IndexError for no answer or another one."""
        with contextlib.closing(self.place.connect(5.0)) as sock:
            sock.settimeout(DEADLINE)
            head = (
                f"POST {path} HTTP/1.1\r\nHost: guest\r\nConnection: close\r\nContent-Type: application/json\r\n"
                f"X-Greenroom-Control: {CONTROL}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            sock.sendall(head.encode() + body)
            if not sock.recv(4096).split(b" ", 2)[1].startswith(b"2"):
                raise ConnectionError(f"{path} was refused")

    def run(self, line: str) -> str:
        """A command's output. Raises RuntimeError when it fails."""
        asked = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", line]}, "stdin": False})
        link = http.client.HTTPConnection("guest")
        link.sock = self.place.connect(DEADLINE)
        with contextlib.closing(link):
            headers = {
                "Content-Type": "application/connect+json",
                "Connect-Protocol-Version": "1",
                "X-Access-Token": self._token,
            }
            frame = struct.pack(">BI", 0, len(asked)) + asked.encode()
            link.request("POST", "/process.Process/Start", frame, headers)
            stream = link.getresponse().read()
        output, status = b"", None
        while stream:
            length = int.from_bytes(stream[1:5], "big")
            event = json.loads(stream[5 : 5 + length]).get("event", {})
            stream = stream[5 + length :]
            output += b"".join(base64.b64decode(piece) for piece in event.get("data", {}).values())
            status = event["end"].get("exitCode", 0) if "end" in event else status
        if status != 0:
            raise RuntimeError(f"`{line}` ended with status {status}: {output[-200:]!r}")
        return output.decode()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._answers.close()
        self._link.close()


class Saved:
    """What there is of a VM on disk."""

    def __init__(self, directory: Path, name: str) -> None:
        self.state, self.ram = directory / f"{name}.state", directory / f"{name}.ram"
        self.index, self.overlay = directory / f"{name}.index", directory / f"{name}.qcow2"
        self.bytes = 0

    def remove(self) -> None:
        for path in (self.state, self.ram, self.index, self.overlay):
            path.unlink(missing_ok=True)


def identity() -> dict[str, Any]:
    """The body of `POST /init`: what Greenroom tells a guest before anyone can reach it (`guestclient.introduce`)."""
    name = f"bare{secrets.token_hex(8)}"
    return {
        "entropy": base64.b64encode(os.urandom(64)).decode(),
        "timestampNs": time.time_ns(),
        "machineId": secrets.token_hex(16),
        "hostname": name,
        "sandboxId": name,
        "templateId": "base",
        "envVars": {},
        "accessToken": secrets.token_hex(20),
        "controlToken": CONTROL,
    }


def written(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """A file that is on the disk for good."""
    with open(path, "wb", buffering=0) as file:
        for chunk in chunks:
            with memoryview(chunk) as rest:
                done = 0
                while done < len(rest):
                    done += file.write(rest[done:])
        os.fsync(file.fileno())


def flushed(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())


class Bare:
    """The side of the benchmark: the same steps as `greenroom.bench.lifecycle_sides.Side`."""

    def __init__(self, loaded: Loaded, blank: Path, directory: Path, places: list[Place]) -> None:
        self._loaded = loaded
        self._blank = blank
        self._directory = directory
        self._free = list(places)
        self._size = loaded.golden.size.memory_mib << 20
        self._number = 0
        self._vms: list[Vm] = []
        self._vm: Vm | None = None
        self._saved: Saved | None = None
        self._asleep: Saved | None = None
        self._mark = ""

    # Making and ending QEMUs.

    def _spawn(self, ram: int, overlay: Path, state: int, *, bare_state: bool) -> Vm:
        place = self._free.pop()
        self._number += 1
        path = self._directory / f"{self._number}.qmp"
        try:
            with contextlib.ExitStack() as stack:
                disk = os.open(overlay, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, disk)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(path))
                listener.listen(1)
                fds = Descriptors(
                    ram=ram,
                    qmp=listener.fileno(),
                    tap=place.tap,
                    overlay=disk,
                    backing=self._loaded.backing,
                    state=state,
                )
                process = subprocess.Popen(
                    qemu(self._loaded.machine, fds, bare_state=bare_state),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=fds.all(),
                    start_new_session=True,
                )
        except BaseException:
            self._free.append(place)
            raise
        vm = Vm(process, place, overlay)
        self._vms.append(vm)
        vm.connect(path)
        path.unlink()
        vm.load(state)
        return vm

    def _from_golden(self) -> Vm:
        overlay = self._directory / f"{self._number + 1}.qcow2"
        shutil.copyfile(self._blank, overlay)
        with contextlib.ExitStack() as stack:
            state = self._loaded.open_state()
            stack.callback(os.close, state)
            return self._spawn(self._loaded.ram, overlay, state, bare_state=False)

    def _end(self, vm: Vm) -> None:
        vm.end()
        self._vms.remove(vm)
        self._free.append(vm.place)
        vm.overlay.unlink(missing_ok=True)

    # Saving and bringing back.

    def _save(self, vm: Vm, name: str, *, goes_on: bool) -> tuple[Saved, float]:
        """What was saved, and the milliseconds for which the VM stood still."""
        saved = Saved(self._directory, name)
        began = time.perf_counter()
        vm.ask("stop")
        vm.ask("xen-save-devices-state", {"filename": str(saved.state), "live": False})
        flushed(saved.state)
        ram = pagemap.guest_ram(vm.process.pid, self._size)
        runs = pagemap.private_runs(vm.process.pid, ram)
        saved.bytes = pages.total(runs) * pages.PAGE
        buffer = pagemap.Buffer(saved.bytes)
        try:
            buffer.read(vm.process.pid, ram, runs)
            written(saved.ram, buffer.views(0, saved.bytes))
        finally:
            buffer.close()
        written(saved.index, [pages.encode(runs)])
        if goes_on:
            shutil.copyfile(vm.overlay, saved.overlay)
        else:
            vm.overlay.rename(saved.overlay)
        flushed(saved.overlay)
        if goes_on:
            vm.ask("cont")
        return saved, (time.perf_counter() - began) * 1000

    def _ram_of(self, saved: Saved) -> int:
        """The golden's RAM with the pages laid over; the caller closes it."""
        fd = memory.copy(self._loaded.ram, "bare-lifecycle")
        runs = pages.decode(saved.index.read_bytes(), self._size // pages.PAGE)
        with open(saved.ram, "rb", buffering=0) as file:
            pages.lay(fd, runs, file.fileno())
        return fd

    def _restore(self, saved: Saved, ram: int, overlay: Path) -> Vm:
        state = os.open(saved.state, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._spawn(ram, overlay, state, bare_state=True)
        finally:
            os.close(state)

    def _child(self, saved: Saved, ram: int, number: int) -> Vm:
        overlay = self._directory / f"child-{number}.qcow2"
        shutil.copyfile(saved.overlay, overlay)
        return self._restore(saved, ram, overlay)

    def _check(self, vm: Vm) -> None:
        if (seen := vm.run(MARK)) != self._mark:
            raise RuntimeError(f"a VM that was brought back has not what its parent had: {seen!r}")

    # The steps.

    def begin(self) -> None:
        self._vm = self._from_golden()
        self._vm.ask("cont")
        self._vm.introduce()

    @property
    def _parent(self) -> Vm:
        if self._vm is None:
            raise RuntimeError("there is no VM; begin first")
        return self._vm

    def grow(self, mib: int) -> None:
        self._parent.run(growing(mib))
        self._mark = self._parent.run(MARK)

    def snapshot(self) -> dict[str, Any]:
        if self._saved is not None:
            self._saved.remove()
        began = time.perf_counter()
        self._saved, stop = self._save(self._parent, "snapshot", goes_on=True)
        return {
            "ms": (time.perf_counter() - began) * 1000,
            "stop_ms": stop,
            "ram_mib": self._saved.bytes / (1 << 20),
        }

    @property
    def _snapshot(self) -> Saved:
        if self._saved is None:
            raise RuntimeError("there is no snapshot yet")
        return self._saved

    def start(self) -> dict[str, Any]:
        began = time.perf_counter()
        ram = self._ram_of(self._snapshot)
        try:
            vm = self._child(self._snapshot, ram, 0)
        finally:
            os.close(ram)
        vm.ask("cont")
        vm.introduce()
        took = (time.perf_counter() - began) * 1000
        self._check(vm)
        self._end(vm)
        return {"ms": took, "answer_ms": took}

    def held(self, children: int) -> dict[str, Any]:
        ram = self._ram_of(self._snapshot)
        vms: list[Vm] = []
        try:
            vms.append(self._child(self._snapshot, ram, 0))
            first = self._pss(vms)
            vms += [self._child(self._snapshot, ram, number) for number in range(1, children)]
            paused = self._pss(vms)
            for vm in vms:
                vm.ask("cont")
                vm.introduce()
                vm.ask("stop")
            answered = self._pss(vms)
        finally:
            os.close(ram)
        for vm in vms:
            self._end(vm)
        return {"children": children, "first_mib": first, "paused_mib": paused, "answered_mib": answered}

    def _pss(self, vms: list[Vm]) -> float:
        return sum(memory_of(vm.process.pid).pss_mib for vm in vms)

    def fork(self, children: int) -> dict[str, Any]:
        began = time.perf_counter()
        saved, stop = self._save(self._parent, "fork", goes_on=True)
        ram = self._ram_of(saved)
        vms: list[Vm] = []
        failures: list[BaseException] = []

        def one(number: int) -> None:
            try:
                vm = self._child(saved, ram, number)
                vm.ask("cont")
                vm.introduce()
                vms.append(vm)
            except BaseException as error:  # raised below
                failures.append(error)

        try:
            threads = [threading.Thread(target=one, args=(number,)) for number in range(children)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            os.close(ram)
        took = (time.perf_counter() - began) * 1000
        if failures:
            raise failures[0]
        for vm in vms:
            self._check(vm)
            self._end(vm)
        saved.remove()
        return {"ms": took, "answer_ms": took, "stop_ms": stop, "ram_mib": saved.bytes / (1 << 20)}

    def pause(self) -> dict[str, Any]:
        vm = self._parent
        began = time.perf_counter()
        vm.sync()
        self._asleep, _ = self._save(vm, "asleep", goes_on=False)
        self._end(vm)
        self._vm = None
        return {"ms": (time.perf_counter() - began) * 1000, "ram_mib": self._asleep.bytes / (1 << 20)}

    def resume(self) -> dict[str, Any]:
        saved = self._asleep
        if saved is None:
            raise RuntimeError("nothing is paused")
        began = time.perf_counter()
        ram = self._ram_of(saved)
        try:
            self._vm = self._restore(saved, ram, saved.overlay)
        finally:
            os.close(ram)
        self._vm.ask("cont")
        self._vm.introduce()
        took = (time.perf_counter() - began) * 1000
        self._check(self._vm)
        return {"ms": took, "answer_ms": took}

    def end(self) -> None:
        for vm in list(self._vms):
            self._end(vm)
        self._vm = None
        for saved in (self._saved, self._asleep):
            if saved is not None:
                saved.remove()
        self._saved = self._asleep = None


def serve(bare: Bare) -> None:
    """One step a line, until standard input ends."""
    steps: dict[str, Callable[..., Any]] = {
        "begin": bare.begin, "grow": bare.grow, "snapshot": bare.snapshot, "start": bare.start,
        "held": bare.held, "fork": bare.fork, "pause": bare.pause, "resume": bare.resume, "end": bare.end,
    }  # fmt: skip
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = steps[asked.pop("do")](**asked) or {}
        except (RuntimeError, OSError, ValueError, LookupError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def alone(bare: Bare, rounds: int, dirty: int, forks: int) -> dict[str, Any]:
    """Every step `rounds` times."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        bare.begin()
        bare.grow(dirty)
        steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("snapshot", bare.snapshot),
            ("start", bare.start),
            ("fork", lambda: bare.fork(forks)),
            ("pause", bare.pause),
            ("resume", bare.resume),
        ]
        for name, step in steps:
            found.setdefault(name, []).append(step())
        bare.end()
    return {"benchmark": "bare_lifecycle", "dirty_mib": dirty, "forks": forks, "steps": found}


@contextlib.contextmanager
def opened(arguments: argparse.Namespace, directory: Path) -> Iterator[Bare]:
    """Everything that is not measured: the golden in memory, places for all VMs."""
    size = spec_size(arguments.memory)
    settings = VmConfig(stock_slots=0, stock_waiting=0, restore_mode="cow", accelerator=arguments.accelerator)
    spec = RoleSpec(
        role="node",
        replica=0,
        state_dir=str(directory),
        cache_dir=str(arguments.cache_dir or default_cache_dir()),
        config=Config(vm=settings),
    )

    async def load() -> tuple[StagedRuntime, Loaded]:
        runtime = StagedRuntime(spec)
        golden = await runtime.snapshot_golden(BASE, size, lambda step, _done: print(step, file=sys.stderr))
        return runtime, runtime.loaded(golden)

    runtime, loaded = asyncio.run(load())
    try:
        with contextlib.ExitStack() as stack:
            places: list[Place] = []
            for number in range(max(2, arguments.forks) + 1):
                place = Place(f"gr-{runtime.tag}-bare-{number}")
                stack.callback(place.close)
                places.append(place)
            blank = goldens.blank_overlay(spec.cache, size.disk_mib)
            bare = Bare(loaded, blank, directory, places)
            stack.callback(bare.end)
            yield bare
    finally:
        asyncio.run(runtime.close())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="times each step is done (default 3)")
    parser.add_argument("--dirty", type=int, default=64, help="MiB written in the guest (default 64)")
    parser.add_argument("--forks", type=int, default=4, help="children of a fork (default 4)")
    parser.add_argument("--memory", type=int, default=256, help="MiB of each guest (default 256)")
    parser.add_argument("--accelerator", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--directory", type=Path, default=None, help="where files go (default: temporary)")
    parser.add_argument("--serve", action="store_true", help="do what standard input says")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        directory = arguments.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="greenroom-bare-")))
        bare = stack.enter_context(opened(arguments, directory))
        if arguments.serve:
            serve(bare)
            return 0
        found = alone(bare, arguments.rounds, arguments.dirty, arguments.forks)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, rows in found["steps"].items():
            times = sorted(row["ms"] for row in rows)
            print(f"{name}: {times[len(times) // 2]:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
