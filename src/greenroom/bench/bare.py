"""The baseline: the same QEMU, restored from the same golden, without what fences a sandbox in.

Alike on both sides: QEMU's arguments (its own seccomp filter among them), the sealed golden RAM, disks and
device state, a copied overlay and a log for each VM, the QMP library and the way it waits. Left out here: the
slot's owner record, the cgroup, the namespace (one for all, made ahead, with one tap, which paused guests can
share because none of them sends), the uid of its own and the chain of tools that changes into all of these.
So the ratio of the two is what the fence costs. The cgroup is part of it: it gives a VM less weight than the
host's own work, so on a machine with other things to do the ratio grows by what those take first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from qemu.qmp import QMPClient, QMPError

from greenroom.bench.stages import Stages
from greenroom.errors import RuntimeFailure
from greenroom.runtime import namespaces
from greenroom.runtime.command import Descriptors, qemu
from greenroom.runtime.golden import Loaded


class BareVm:
    """One QEMU of the baseline."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.client = QMPClient(f"bare-{number}")

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid


class Bare:
    """Makes them. Use as an async context manager, which ends and removes whatever was made."""

    def __init__(self, directory: Path, netns: str, loaded: Loaded, blank: Path, deadline: float) -> None:
        """`directory` must not exist; `deadline` is in seconds and bounds each QMP command."""
        self._directory = directory
        self._netns = netns
        self._loaded = loaded
        self._blank = blank
        self._deadline = deadline
        self._numbers = itertools.count(1)
        self._vms: dict[int, BareVm] = {}
        self._resources = contextlib.ExitStack()
        self._tap = -1
        self._place = -1

    async def __aenter__(self) -> Bare:
        self._directory.mkdir(mode=0o700)
        self._resources.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._place = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._resources.callback(os.close, self._place)
        try:
            self._tap = namespaces.create(self._netns)
        except BaseException:
            self._resources.close()
            raise
        self._resources.callback(namespaces.remove, self._netns)
        self._resources.callback(os.close, self._tap)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for vm in list(self._vms.values()):
            await self.stop(vm)
        self._resources.close()

    async def restore(self) -> tuple[BareVm, Stages]:
        """A paused VM and how long it took. Raises RuntimeFailure after removing what it had made."""
        began = time.perf_counter()
        vm = BareVm(next(self._numbers))
        self._vms[vm.number] = vm
        state = self._loaded.open_state()
        try:
            spawned = await asyncio.to_thread(self._launch, vm, state)
            await self._connect(vm)
            answered = time.perf_counter()
            await self._load(vm, state)
        except BaseException as error:
            words = self._last_words(vm)
            await self.stop(vm)
            if isinstance(error, QMPError | OSError | TimeoutError):
                raise RuntimeFailure(f"a bare QEMU was not restored: {words or error}") from error
            raise
        finally:
            os.close(state)
        return vm, Stages.between(began, spawned, answered, time.perf_counter())

    def _path(self, vm: BareVm, name: str) -> str:
        """A path short enough for a Unix socket, wherever the directory lies."""
        return f"/proc/self/fd/{self._place}/{vm.number}.{name}"

    def _launch(self, vm: BareVm, state: int) -> float:
        """Blocks; returns the moment at which the process was about to be started."""
        machine = self._loaded.machine
        with contextlib.ExitStack() as stack:
            shutil.copyfile(self._blank, self._path(vm, "overlay"))
            overlay = os.open(self._path(vm, "overlay"), os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, overlay)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            stack.callback(listener.close)
            listener.bind(self._path(vm, "qmp"))
            listener.listen(4)
            fds = Descriptors(
                ram=self._loaded.ram,
                qmp=listener.fileno(),
                tap=self._tap,
                overlay=overlay,
                backing=self._loaded.backing,
                state=state,
            )
            log = os.open(self._path(vm, "log"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, log)
            argv = qemu(machine, fds)
            spawned = time.perf_counter()
            vm.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds.all(),
                start_new_session=True,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            )
        return spawned

    async def _connect(self, vm: BareVm) -> None:
        async with asyncio.timeout(self._deadline):
            await vm.client.connect(self._path(vm, "qmp"))

    async def _execute(self, vm: BareVm, command: str, arguments: dict[str, Any] | None = None) -> Any:
        async with asyncio.timeout(self._deadline):
            return await vm.client.execute(command, arguments)

    async def _load(self, vm: BareVm, state: int) -> None:
        """The same commands and the same waiting as `QemuRuntime.restore` and `QemuVm.migrated`."""
        capabilities = [{"capability": "x-ignore-shared", "state": True}]
        await self._execute(vm, "migrate-set-capabilities", {"capabilities": capabilities})
        await self._execute(vm, "migrate-incoming", {"uri": f"fd:{state}"})
        async with asyncio.timeout(self._deadline):
            pause = 0.002
            while True:
                info = await self._execute(vm, "query-migrate")
                if info.get("status") == "completed":
                    return
                if info.get("status") in ("failed", "cancelled"):
                    raise RuntimeFailure(f"loading the snapshot failed: {info.get('error-desc')}")
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 0.05)

    def _last_words(self, vm: BareVm) -> str:
        with contextlib.suppress(OSError):
            return Path(self._path(vm, "log")).read_text(errors="replace").strip()[-400:]
        return ""

    async def stop(self, vm: BareVm) -> None:
        """End a VM and remove its files."""
        if vm.process is not None:
            vm.process.kill()
            await asyncio.to_thread(vm.process.wait)
        with contextlib.suppress(QMPError, OSError, EOFError, TimeoutError):
            async with asyncio.timeout(5):
                await vm.client.disconnect()
        for name in ("overlay", "qmp", "log"):
            with contextlib.suppress(OSError):
                os.unlink(self._path(vm, name))
        self._vms.pop(vm.number, None)
