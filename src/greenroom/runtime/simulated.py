"""An engine without VMs, for tests of the roles and for fleet experiments; only ever chosen by name.

Members pass the same states at the same interface, with delays and failures that the caller sets. Nothing
answers inside: `connect` is refused. Everything it makes says `simulated`.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time

from greenroom.errors import RuntimeFailure, UnknownSnapshot
from greenroom.runtime.engine import (
    Adopted,
    CaptureResult,
    ClockReading,
    EngineInfo,
    Golden,
    Identity,
    Progress,
    Snapshot,
    Vm,
    VmInfo,
    quiet,
)
from greenroom.wire.messages import Size


class SimulatedVm:
    """A name with a state."""

    def __init__(self, name: str, template: str, size: Size) -> None:
        self.name = name
        self.template = template
        self.size = size
        self.ended = asyncio.Event()
        self.state = "paused"
        self.identity: Identity | None = None

    async def connect(self, port: int, deadline: float = 10.0) -> socket.socket:
        raise ConnectionRefusedError(f"{self.name} is simulated: nothing listens on port {port}")

    def describe(self) -> VmInfo:
        return VmInfo(name=self.name, state=self.state, pid=None, uid=None, netns=None)


class SimulatedRuntime:
    """See `engine.Runtime`. Delays are in seconds; `fail_next` makes that many restores fail."""

    def __init__(self, restore_delay: float = 0.0, start_delay: float = 0.0) -> None:
        self.restore_delay = restore_delay
        self.start_delay = start_delay
        self.fail_next = 0
        self.fail_introductions = 0
        self.fail_captures = 0
        self.capture_delay = 0.0
        self.saved: dict[str, tuple[Snapshot, Identity | None]] = {}
        self.vms: dict[str, SimulatedVm] = {}
        self._numbers = itertools.count(1)

    async def describe(self, progress: Progress = quiet) -> EngineInfo:
        return EngineInfo(engine="simulated", accelerator="none", version="1", reason="asked for by name")

    async def prepare_image(self, template: str, progress: Progress) -> None:
        progress("simulating an image", 1.0)

    async def snapshot_golden(self, template: str, size: Size, progress: Progress) -> Golden:
        return Golden(digest=f"simulated-{template}-{size.name}", template=template, size=size)

    async def restore(self, source: Golden | Snapshot) -> Vm:
        await asyncio.sleep(self.restore_delay)
        if self.fail_next > 0:
            self.fail_next -= 1
            raise RuntimeFailure("a simulated restore failed, as asked for")
        vm = SimulatedVm(f"simulated-{next(self._numbers)}", source.template, source.size)
        if isinstance(source, Snapshot):
            if source.name not in self.saved:
                raise UnknownSnapshot(f"there is no snapshot {source.name!r}")
            vm.identity = self.saved[source.name][1]
        self.vms[vm.name] = vm
        return vm

    async def start(self, vm: Vm) -> None:
        await asyncio.sleep(self.start_delay)
        self._own(vm).state = "running"

    async def introduce(self, vm: Vm, identity: Identity, deadline: float) -> ClockReading:
        if self.fail_introductions > 0:
            self.fail_introductions -= 1
            raise RuntimeFailure("a simulated introduction failed, as asked for")
        self._own(vm).identity = identity
        return ClockReading(0.0, 0.0)

    async def pause(self, vm: Vm) -> None:
        self._own(vm).state = "paused"

    async def resume(self, vm: Vm) -> None:
        self._own(vm).state = "running"

    async def capture(self, vm: Vm, name: str, *, memory: bool = True) -> CaptureResult:
        own = self._own(vm)
        if self.fail_captures > 0:
            self.fail_captures -= 1
            raise RuntimeFailure("a simulated capture failed, as asked for")
        if name in self.saved or own.ended.is_set():
            raise RuntimeFailure(f"{name} is taken, or its VM has ended")
        await asyncio.sleep(self.capture_delay)
        snapshot = Snapshot(
            name=name,
            kind="full" if memory else "filesystem",
            template=own.template,
            size=own.size,
            golden=f"simulated-{own.template}-{own.size.name}",
            created_at=time.time(),
        )
        self.saved[name] = (snapshot, own.identity)
        return CaptureResult(snapshot=snapshot, pause_ms=0.0, stages={})

    async def sync(self, vm: Vm, token: str | None, deadline: float) -> None:
        self._own(vm)

    async def snapshots(self) -> list[Snapshot]:
        return [snapshot for snapshot, _ in self.saved.values()]

    async def delete_snapshot(self, name: str) -> None:
        if self.saved.pop(name, None) is None:
            raise UnknownSnapshot(f"there is no snapshot {name!r}")

    async def hold(self, snapshot: Snapshot) -> None:
        if snapshot.name not in self.saved:
            raise UnknownSnapshot(f"there is no snapshot {snapshot.name!r}")

    async def let_go(self, snapshot: Snapshot) -> None:
        """Nothing is held."""

    def disk_use(self, vm: Vm) -> int:
        """It has no disk."""
        self._own(vm)
        return 0

    async def revive(self, vm: Vm) -> bool:
        self._own(vm)
        return False

    async def stop(self, vm: Vm) -> None:
        own = self._own(vm)
        own.state = "stopped"
        self.vms.pop(own.name, None)
        own.ended.set()

    def _own(self, vm: Vm) -> SimulatedVm:
        if not isinstance(vm, SimulatedVm):
            raise RuntimeFailure(f"{vm.name} is not a VM of the simulated engine")
        return vm

    async def hand_out(self, vm: Vm) -> None:
        self._own(vm)

    async def adopt(self) -> list[Adopted]:
        """Nothing outlives the process that simulates it."""
        return []

    def interrupt(self) -> None:
        """Nothing takes long here."""

    async def detach(self) -> None:
        await self.close()

    async def sweep(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        for vm in list(self.vms.values()):
            await self.stop(vm)
