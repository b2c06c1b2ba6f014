"""Greenroom's side of the lifecycle: a whole node but for its HTTP, in this process, on real VMs.

`Keeper`, `Warmer`, `Branching` and `Journal` are the node's own, on the engine with its stock, so that owner records,
places, digests, manifests, the journal, identity and clock are all in what is measured. The engine tells when each of
its steps began and ended; that is how the first answer of a guest is seen, which is the one to its identity. Samples
of the guests are not taken meanwhile, since the baseline's guests are asked nothing either.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from greenroom.bench.channels import Channel
from greenroom.bench.claim_engine import logging_as_a_node
from greenroom.bench.lanes import unbroken
from greenroom.bench.lifecycle_sides import MARK, Held, SideName, Took, growing
from greenroom.bench.report import Meter
from greenroom.bench.stages import StagedRuntime, memory_of
from greenroom.bench.supply import vm_settings
from greenroom.config import RoleSpec
from greenroom.errors import RuntimeFailure
from greenroom.node.branching import Branching
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.warmer import Warmer
from greenroom.runtime import guestclient
from greenroom.runtime.engine import (
    CaptureResult,
    ClockReading,
    EngineInfo,
    Golden,
    Identity,
    Snapshot,
    Vm,
)
from greenroom.runtime.loading import Holds, LoadedSnapshot, Loading
from greenroom.wire.messages import ClaimRequest, ForkRequest, PoolSpec, Sandbox, Size, SnapshotRequest

TTL = 3600.0
"""Seconds that a sandbox of this run lives should nobody end it."""
ANSWER_DEADLINE = 120.0
REFILL_DEADLINE = 15.0
"""Seconds; where the host has no memory to spare the stock stays empty."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the engine, by readings of `time.perf_counter`."""

    name: str
    began: float
    ended: float
    answered: float | None = None
    """Of an introduction: when the guest first answered."""
    captured: CaptureResult | None = None

    @property
    def ms(self) -> float:
        return (self.ended - self.began) * 1000


class _TimedLoading(Loading):
    """Tells how long a snapshot took to be in memory."""

    marks: list[Mark]

    async def use(self, name: str) -> LoadedSnapshot:
        began = time.perf_counter()
        loaded = await super().use(name)
        self.marks.append(Mark(name="load", began=began, ended=time.perf_counter()))
        return loaded


class TimedRuntime(StagedRuntime):
    """The engine, and what it did since `marks` was emptied."""

    def __init__(self, spec: RoleSpec) -> None:
        super().__init__(spec)
        self.marks: list[Mark] = []
        loading = _TimedLoading(self._store, self._on_hand.of, self._holders)
        loading.marks = self.marks
        self._loading = loading
        self._holds = Holds(loading, self._stock)

    async def filled(self) -> None:
        """Wait, but not for ever, until the stock is as it was before a step took from it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFILL_DEADLINE):
                await self._stock.filled()

    def _mark(self, name: str, began: float, **more: Any) -> None:
        self.marks.append(Mark(name=name, began=began, ended=time.perf_counter(), **more))

    async def restore(self, source: Golden | Snapshot) -> Vm:
        began = time.perf_counter()
        vm = await super().restore(source)
        self._mark("restore", began)
        return vm

    async def start(self, vm: Vm) -> None:
        began = time.perf_counter()
        await super().start(vm)
        self._mark("start", began)

    async def stop(self, vm: Vm) -> None:
        began = time.perf_counter()
        await super().stop(vm)
        self._mark("stop", began)

    async def introduce(self, vm: Vm, identity: Identity, deadline: float) -> ClockReading:
        began = time.perf_counter()
        reading = await super().introduce(vm, identity, deadline)
        self._mark("introduce", began, answered=began + reading.answer_s)
        return reading

    async def capture(self, vm: Vm, name: str, *, memory: bool = True, durable: bool = True) -> CaptureResult:
        began = time.perf_counter()
        result = await super().capture(vm, name, memory=memory, durable=durable)
        self._mark("capture", began, captured=result)
        return result


def took(began: float, ended: float, marks: list[Mark]) -> Took:
    """A step of the node between two readings of the clock, from what the engine did meanwhile; pure.

    Of what was done for several guests the longest counts. `rest` is what no step of the engine explains, of a single
    guest.
    """
    stages: dict[str, float] = {}

    def stage(name: str, ms: float) -> None:
        stages[name] = max(stages.get(name, 0.0), ms)

    answer = stop_ms = ram_mib = None
    for mark in marks:
        if mark.captured is not None:
            found = mark.captured
            stop_ms, ram_mib = found.pause_ms, found.snapshot.ram_bytes / (1 << 20)
            for name, ms in found.stages.items():
                stage(f"capture: {name}", ms)
        elif mark.answered is not None:
            answer = max(answer or 0.0, (mark.answered - began) * 1000)
            stage("first answer", (mark.answered - mark.began) * 1000)
            stage("clock", (mark.ended - mark.answered) * 1000)
        else:
            stage(mark.name, mark.ms)
    if "load" in stages and "restore" in stages:
        # Loading is the first part of a restore; of several, all but one wait for it.
        stages["restore"] = max(0.0, stages["restore"] - stages["load"])
    whole = (ended - began) * 1000
    if sum(mark.answered is not None for mark in marks) <= 1:
        stages["rest"] = max(0.0, whole - sum(stages.values()))
    return Took(ms=whole, answer_ms=answer, stop_ms=stop_ms, ram_mib=ram_mib, stages=stages)


class Node:
    """The side. Use as an async context manager, at whose end nothing that was made is left on the host."""

    name: SideName = "greenroom"

    def __init__(self, spec: RoleSpec, template: str, size: Size, meter: Meter) -> None:
        """`spec` names a state directory that nothing else uses."""
        quiet = msgspec.structs.replace(spec.config.nodes, sample_interval=0.0)
        spec = msgspec.structs.replace(spec, config=msgspec.structs.replace(spec.config, nodes=quiet))
        self._spec = vm_settings(spec, restore_mode="cow")
        self._template, self._size, self._meter = template, size, meter
        self._stack = contextlib.AsyncExitStack()
        self._runtime: TimedRuntime | None = None
        self._sandbox: Sandbox | None = None
        self._snapshot = ""
        self._mark = b""

    async def __aenter__(self) -> Node:
        spec, config = self._spec, self._spec.config
        spec.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._stack.enter_context(logging_as_a_node(spec.home / "node.log"))
            runtime = self._runtime = TimedRuntime(spec)
            self._stack.push_async_callback(self._close, runtime)
            journal = self._journal = Journal(spec.home / "journal.db")
            self._stack.callback(journal.close)
            self.engine: EngineInfo = await unbroken(runtime.describe(), "probe")
            warmer = await self._stack.enter_async_context(Warmer(runtime, config, spec.home))
            self._keeper = await self._stack.enter_async_context(
                Keeper(name=spec.name, runtime=runtime, warmer=warmer, journal=journal, config=config)
            )
            self._branching = Branching(self._keeper, runtime, journal)
            pool = PoolSpec(template=self._template, size=self._size, target=1)
            await warmer.set_pools([pool], lambda step, _done: self._meter.say(step))
            await warmer.ready()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await unbroken(self._stack.aclose(), "close the node")

    async def _close(self, runtime: TimedRuntime) -> None:
        await runtime.close()
        left = {kind: count for kind, count in runtime.left().items() if count}
        if left:
            raise RuntimeFailure(f"the benchmark could not remove all it had made: {left}")

    @property
    def _marks(self) -> list[Mark]:
        assert self._runtime is not None  # noqa: S101
        return self._runtime.marks

    @property
    def _parent(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeFailure("there is no sandbox; begin first")
        return self._sandbox

    def _vm(self, sandbox_id: str) -> Vm:
        vm = self._keeper.known(sandbox_id).vm
        if vm is None:
            raise RuntimeFailure(f"the sandbox {sandbox_id} has no VM")
        return vm

    async def _claimed(self, sandbox: Sandbox) -> Sandbox:
        return await self._keeper.confirm(sandbox.sandbox_id)

    def _request(self) -> ClaimRequest:
        key = f"bench-{secrets.token_hex(8)}"
        return ClaimRequest(key=key, template=self._template, size=self._size, ttl=TTL, wait=60.0)

    @contextlib.asynccontextmanager
    async def _channel(self, sandbox: Sandbox) -> AsyncIterator[Channel]:
        vm = self._vm(sandbox.sandbox_id)
        headers = {"X-Access-Token": sandbox.token} if sandbox.token else {}
        channel = Channel("guest", lambda: vm.connect(guestclient.AGENT_PORT, ANSWER_DEADLINE), headers)
        try:
            yield channel
        finally:
            channel.close()

    async def _check(self, sandbox: Sandbox) -> None:
        async with self._channel(sandbox) as channel:
            if (seen := await channel.run(MARK)) != self._mark:
                raise RuntimeFailure(f"a VM that was brought back has not what its parent had: {seen!r}")

    async def begin(self) -> None:
        self._sandbox = await self._claimed(await self._keeper.claim(self._request()))

    async def grow(self, mib: int) -> None:
        async with self._channel(self._parent) as channel:
            await channel.run(growing(mib))
            self._mark = await channel.run(MARK)

    async def snapshot(self) -> Took:
        if self._snapshot:
            await self._branching.delete(self._snapshot)
            self._snapshot = ""
        self._marks.clear()
        began = time.perf_counter()
        made = await self._branching.take(self._parent.sandbox_id, SnapshotRequest())
        ended = time.perf_counter()
        self._snapshot = made.snapshot_id
        return took(began, ended, self._marks)

    async def _source(self) -> Snapshot:
        return await self._branching.snapshot_of(self._snapshot)

    async def start(self) -> Took:
        request = self._request()
        self._marks.clear()
        began = time.perf_counter()
        made = await self._keeper.claim(request, self._source)
        found = took(began, time.perf_counter(), self._marks)
        child = await self._claimed(made)
        await self._check(child)
        await self._keeper.release(child.sandbox_id)
        return found

    async def held(self, children: int) -> Held:
        assert self._runtime is not None  # noqa: S101
        runtime, snapshot = self._runtime, await self._source()
        vms: list[Vm] = []
        try:
            vms.append(await runtime.restore(snapshot))
            first = _pss(vms)
            for _ in range(1, children):
                vms.append(await runtime.restore(snapshot))  # noqa: PERF401 (what was made is ended below)
            paused = _pss(vms)
            for vm in vms:
                await runtime.start(vm)
                await guestclient.wait_ready(vm, ANSWER_DEADLINE)
                await runtime.pause(vm)
            answered = _pss(vms)
        finally:
            for vm in vms:
                await runtime.stop(vm)
        return Held(children=children, first_mib=first, paused_mib=paused, answered_mib=answered)

    async def fork(self, children: int) -> Took:
        request = ForkRequest(keys=[f"bench-{secrets.token_hex(8)}" for _ in range(children)], ttl=TTL)
        self._marks.clear()
        began = time.perf_counter()
        forks = (await self._branching.fork(self._parent.sandbox_id, request)).forks
        found = took(began, time.perf_counter(), self._marks)
        made = [await self._claimed(fork.sandbox) for fork in forks if fork.sandbox is not None]
        for child in made:
            await self._check(child)
            await self._keeper.release(child.sandbox_id)
        if errors := [fork.error for fork in forks if fork.sandbox is None]:
            raise RuntimeFailure(f"{len(errors)} of {children} forks were not made: {errors[0]}")
        return found

    async def pause(self) -> Took:
        self._marks.clear()
        began = time.perf_counter()
        await self._keeper.pause(self._parent.sandbox_id)
        found = took(began, time.perf_counter(), self._marks)
        # A VM that is given up has nothing to go on to.
        return msgspec.structs.replace(found, stop_ms=None)

    async def resume(self) -> Took:
        self._marks.clear()
        began = time.perf_counter()
        self._sandbox = (await self._keeper.resume(self._parent.sandbox_id, TTL)).sandbox
        found = took(began, time.perf_counter(), self._marks)
        await self._check(self._parent)
        return found

    async def rest(self) -> None:
        assert self._runtime is not None  # noqa: S101
        await self._runtime.filled()

    async def end(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._keeper.release(sandbox.sandbox_id)
        if self._snapshot:
            await self._branching.delete(self._snapshot)
            self._snapshot = ""


def _pss(vms: list[Vm]) -> float:
    """Of all together, MiB. Raises RuntimeFailure when one has ended."""
    total = 0.0
    for vm in vms:
        pid = vm.describe().pid
        try:
            total += memory_of(pid or 0).pss_mib
        except OSError as error:
            raise RuntimeFailure(f"{vm.name} has ended") from error
    return total
