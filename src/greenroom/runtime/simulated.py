"""An engine without VMs, for tests of the roles and for fleet experiments; only ever chosen by name.

Members pass the same states at the same interface, with delays and failures that the caller sets. Nothing
answers inside: `connect` is refused. Everything it makes says `simulated`.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import socket
import time
from typing import Any, NamedTuple

from greenroom.errors import BadRequest, RuntimeFailure, UnknownSnapshot
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
from greenroom.runtime.namespaces import Outlets
from greenroom.wire.messages import Size
from greenroom.wire.network import Rules


class SimulatedVm:
    """A name with a state, and two dictionaries where a guest has its memory and its disk: a test writes them."""

    def __init__(self, name: str, template: str, size: Size, golden: str) -> None:
        self.name = name
        self.template = template
        self.size = size
        self.golden = golden
        self.parent = ""
        self.memory: dict[str, Any] = {}
        self.disk: dict[str, Any] = {}
        self.ended = asyncio.Event()
        self.state = "paused"
        self.identity: Identity | None = None

    async def connect(self, port: int, deadline: float = 10.0) -> socket.socket:
        raise ConnectionRefusedError(f"{self.name} is simulated: nothing listens on port {port}")

    async def connect_inside(self, port: int) -> socket.socket:
        return await self.connect(port)

    def describe(self) -> VmInfo:
        return VmInfo(name=self.name, state=self.state, pid=None, uid=None, netns=None)


class _Saved(NamedTuple):
    """What a simulated snapshot holds: copies."""

    snapshot: Snapshot
    memory: dict[str, Any]
    disk: dict[str, Any]
    identity: Identity | None


class Pace:
    """How fast one node makes members: one after the other, `rate` a second on average, whoever asks for how many.

    The times that they take are gamma-distributed, never negative, with standard deviation over mean `variation`; the
    same seed gives the same times. A time that is over late is not added to the next.
    """

    def __init__(self, rate: float, variation: float = 0.0, seed: str = "") -> None:
        """`rate` is members a second, above 0; `variation` from 0 to 1."""
        self.rate = rate
        self.variation = variation
        self._random = random.Random(seed)  # noqa: S311
        self._free_at = 0.0

    def __repr__(self) -> str:
        return f"<Pace {self.rate:g}/s variation={self.variation:g}>"

    def interval(self) -> float:
        """Seconds that the next member takes."""
        mean = 1 / self.rate
        if self.variation < 0.001:
            return mean
        shape = self.variation**-2
        return self._random.gammavariate(shape, mean / shape)

    def due(self, now: float) -> float:
        """When a member that is asked for at `now` is there, on the same clock."""
        self._free_at = max(now, self._free_at) + self.interval()
        return self._free_at


class SimulatedRuntime:
    """See `engine.Runtime`. Delays are in seconds; `fail_next` and its like make that many calls fail."""

    def __init__(
        self, restore_delay: float = 0.0, start_delay: float = 0.0, *, pace: Pace | None = None
    ) -> None:
        self.pace = pace
        """None: a restore takes `restore_delay`, however many there are at a time."""
        self.restore_delay = restore_delay
        self.start_delay = start_delay
        self.fail_next = 0
        self.fail_introductions = 0
        self.fail_captures = 0
        self.capture_delay = 0.0
        self.vms: dict[str, SimulatedVm] = {}
        self.held: dict[str, int] = {}
        """How often each snapshot is held."""
        self.saved: dict[str, _Saved] = {}
        self._numbers = itertools.count(1)

    async def describe(self, progress: Progress = quiet) -> EngineInfo:
        return EngineInfo(engine="simulated", accelerator="none", version="1", reason="asked for by name")

    async def prepare_image(self, template: str, progress: Progress) -> None:
        progress("simulating an image", 1.0)

    async def snapshot_golden(self, template: str, size: Size, progress: Progress) -> Golden:
        return Golden(digest=f"simulated-{template}-{size.name}", template=template, size=size)

    async def restore(self, source: Golden | Snapshot) -> Vm:
        saved = self._find(source.name) if isinstance(source, Snapshot) else None
        await asyncio.sleep(self._restore_takes())
        if self.fail_next > 0:
            self.fail_next -= 1
            raise RuntimeFailure("a simulated restore failed, as asked for")
        name = f"simulated-{next(self._numbers)}"
        digest = source.golden if isinstance(source, Snapshot) else source.digest
        vm = SimulatedVm(name, source.template, source.size, digest)
        if saved is not None:
            vm.parent = saved.snapshot.name
            vm.disk = copy.deepcopy(saved.disk)
            if isinstance(source, Snapshot) and source.kind == "full":
                vm.memory, vm.identity = copy.deepcopy(saved.memory), saved.identity
        self.vms[vm.name] = vm
        return vm

    def _restore_takes(self) -> float:
        if self.pace is None:
            return self.restore_delay
        now = asyncio.get_running_loop().time()
        return self.pace.due(now) - now

    async def capture(self, vm: Vm, name: str, *, memory: bool = True, durable: bool = True) -> CaptureResult:
        own = self._own(vm)
        await asyncio.sleep(self.capture_delay)
        if self.fail_captures > 0:
            self.fail_captures -= 1
            raise RuntimeFailure("a simulated capture failed, as asked for")
        if name in self.saved:
            raise BadRequest(f"there is a snapshot named {name} already; delete it or take another name")
        if own.state not in ("running", "paused"):
            raise RuntimeFailure(f"a VM whose state is {own.state!r} cannot be captured")
        snapshot = Snapshot(
            name=name,
            kind="full" if memory else "filesystem",
            template=own.template,
            size=own.size,
            golden=own.golden,
            created_at=time.time(),
            parent=own.parent,
        )
        kept = copy.deepcopy(own.memory) if memory else {}
        self.saved[name] = _Saved(snapshot, kept, copy.deepcopy(own.disk), own.identity if memory else None)
        return CaptureResult(snapshot=snapshot, pause_ms=0.0, stages={})

    async def sync(self, vm: Vm, deadline: float) -> None:
        """Its disk is written at once."""
        self._own(vm)

    async def snapshots(self) -> list[Snapshot]:
        return [self.saved[name].snapshot for name in sorted(self.saved)]

    async def snapshot(self, name: str) -> Snapshot:
        return self._find(name).snapshot

    async def delete_snapshot(self, name: str) -> None:
        self._find(name)
        del self.saved[name]

    async def hold(self, snapshot: Snapshot) -> None:
        self._find(snapshot.name)
        self.held[snapshot.name] = self.held.get(snapshot.name, 0) + 1

    async def let_go(self, snapshot: Snapshot) -> None:
        left = self.held.pop(snapshot.name, 0) - 1
        if left > 0:
            self.held[snapshot.name] = left

    def _find(self, name: str) -> _Saved:
        saved = self.saved.get(name)
        if saved is None:
            raise UnknownSnapshot(f"there is no snapshot {name} on this node")
        return saved

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

    @property
    def service_uid(self) -> int:
        return 65534

    def confine(self, name: str, pid: int, memory: int) -> None:
        """It has no cgroups."""

    async def restrict(self, vm: Vm, rules: Rules) -> None:
        self._own(vm)

    def open_outlets(self, vm: Vm) -> Outlets | None:
        """It has no network."""
        self._own(vm)
        return None

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
