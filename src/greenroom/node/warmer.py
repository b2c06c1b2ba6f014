"""The shell around the pools: makes members when they are wanted and gives them to claims.

One loop decides for all pools of the node; everything that can change a decision kicks it. Each member is
made in a task of its own, at most `refill_parallel` at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from greenroom.config import Config
from greenroom.errors import GreenroomError, NodeUnavailable, PoolDry
from greenroom.node import metrics as counted
from greenroom.node import pool as machine
from greenroom.node.headroom import Headroom, Shortage
from greenroom.node.pool import Pool
from greenroom.node.refill import allot
from greenroom.runtime.engine import Adopted, Golden, Identity, Progress, Runtime, Vm
from greenroom.wire.messages import PoolCounts, PoolSpec, PoolStatus, Size
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)
PoolKey = tuple[str, Size]
_AFTER_A_CLAIM = 0.001
"""Seconds after which refill looks what a claim has taken: the claim goes first, a restore takes far longer."""
_NEWEST = 0.2
"""Weight of the last member in how long making one takes."""
_QUICKEST = 0.01
"""Seconds for a member below which it makes no difference to say that it was made more quickly."""
_MEASURE_EVERY = 30.0
"""Seconds between two looks at how much memory a waiting member of a pool takes."""
_AFTER_A_FAULT = 1.0
"""Seconds the refill loop rests after a step that failed for a reason nobody foresaw."""


class _Warm:
    """A pool with what the pure part does not know: its golden and how its members wait."""

    def __init__(self, spec: PoolSpec, pool: Pool) -> None:
        self.spec = spec
        self.pool = pool
        self.golden: Golden | None = None
        self.preparing: asyncio.Task[None] | None = None
        self.problem = ""
        self.told: PoolCounts | None = None
        """Its numbers as they were told last."""
        self.make_seconds: float | None = None
        """How long making a member takes, lately."""
        self.member_mib: int | None = None
        """Memory that one takes while it waits."""
        self.measured_at: float | None = None

    @property
    def failing(self) -> bool:
        """The last try to make a member, or what members are made from, came to nothing."""
        without = bool(self.problem) and self.preparing is not None and self.preparing.done()
        return without or self.pool.failing

    def made(self, seconds: float) -> None:
        """A member has been made."""
        before = self.make_seconds
        self.make_seconds = seconds if before is None else before + _NEWEST * (seconds - before)

    def counts(self) -> PoolCounts | None:
        """Its numbers, or None when they are as they were at the last call."""
        pool, told = self.pool, self.told
        numbers = (pool.target, len(pool.warm), pool.starting, len(pool.waiting))
        if told is not None and (told.target, told.warm, told.starting, told.waiting) == numbers:
            return None
        target, warm, starting, waiting = numbers
        self.told = PoolCounts(
            template=self.spec.template,
            size=self.spec.size.name,
            target=target,
            warm=warm,
            starting=starting,
            waiting=waiting,
        )
        return self.told


class Warmer:
    """Use as an async context manager; `runtime` outlives it."""

    def __init__(
        self, runtime: Runtime, config: Config, home: Path, headroom: Headroom | None = None
    ) -> None:
        self._runtime = runtime
        self._config = config
        if headroom is None and config.vm.engine != "simulated":
            headroom = Headroom(config.pools, home)
        self._headroom = headroom
        """None where VMs take nothing of the machine."""
        self._pools: dict[PoolKey, _Warm] = {}
        self._members: dict[str, tuple[Vm, PoolKey]] = {}
        self._adopted: list[Adopted] = []
        self._claims: dict[str, asyncio.Future[Vm]] = {}
        self._numbers = itertools.count(1)
        self._kick = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._making: set[asyncio.Task[None]] = set()
        self._last_served: PoolKey | None = None
        self._parallel = config.pools.refill_parallel or os.cpu_count() or 1
        self._closing = False
        self._targets: list[PoolSpec] = []
        self.tell: Callable[[PoolCounts], None] = _nobody
        """Hears of each change of a pool's numbers."""

    async def __aenter__(self) -> Warmer:
        self._loop_task = spawn(self._run(), "pool refill")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """Stop refilling. Members that are still warm are the runtime's to stop."""
        self._closing = True
        preparing = [warm.preparing for warm in self._pools.values()]
        await stop(self._loop_task, *self._making, *preparing)
        for future in self._claims.values():
            if not future.done():
                future.set_exception(NodeUnavailable("this node is stopping"))

    def adopt(self, members: list[Adopted]) -> None:
        """VMs of an earlier run that belong to nobody: warm members of whichever pool is declared first for them."""
        self._adopted = members

    async def set_pools(self, specs: Iterable[PoolSpec], progress: Progress) -> None:
        """Declare this node's share of every pool; one that is left out drains."""
        self._targets = list(specs)
        wanted = {(spec.template, spec.size): spec for spec in self._targets}
        for key, warm in self._pools.items():
            if key not in wanted and warm.pool.target > 0:
                warm.spec = PoolSpec(template=key[0], size=key[1], target=0)
                self._apply(key, machine.SetTarget(0))
        for key, spec in wanted.items():
            warm = self._pool(key, spec)
            changed, warm.spec = warm.spec.warm != spec.warm, spec
            if changed:
                self._apply(key, machine.SetTarget(0))
            self._apply(key, machine.SetTarget(spec.target))
            self._prepare(key, progress)
        await self._take_in_adopted()
        self._kick.set()

    def declared(self) -> list[PoolSpec]:
        """This node's share of every pool, as it was declared last."""
        return self._targets

    def room_mib(self) -> int | None:
        """MiB of memory that more members may take; None where they take nothing."""
        return None if self._headroom is None else self._headroom.room_mib()

    async def _take_in_adopted(self) -> None:
        adopted, self._adopted = self._adopted, []
        useless = []
        for vm, template, size, claimed, introduced in adopted:
            warm = self._pools.get((template, size))
            running = vm.describe().state == "running"
            fits = warm is not None and (warm.spec.warm == "running") == running == introduced
            if warm is None or claimed or not fits or vm.ended.is_set():
                useless.append(vm)
                continue
            warm.pool.handle(machine.MemberStarted())
            self._join(vm, (template, size))
        await asyncio.gather(*(self._runtime.stop(vm) for vm in useless))

    async def ready(self) -> None:
        """Wait until every declared pool has its golden snapshot. Raises what kept one from it."""
        for warm in list(self._pools.values()):
            if warm.preparing is not None:
                await asyncio.shield(warm.preparing)

    def _pool(self, key: PoolKey, spec: PoolSpec) -> _Warm:
        if key not in self._pools:
            settings = self._config
            self._pools[key] = _Warm(
                spec,
                Pool(
                    queue_length=settings.claims.queue_length,
                    backoff_first=settings.pools.backoff_first,
                    backoff_last=settings.pools.backoff_last,
                ),
            )
        return self._pools[key]

    def _prepare(self, key: PoolKey, progress: Progress) -> None:
        warm = self._pools[key]
        if warm.golden is None and (warm.preparing is None or warm.preparing.done()):
            warm.preparing = spawn(self._make_golden(key, progress), f"golden of {key[0]}")

    async def _make_golden(self, key: PoolKey, progress: Progress) -> None:
        warm = self._pools[key]
        warm.problem = "its golden snapshot is being made"
        try:
            warm.golden = await self._runtime.snapshot_golden(key[0], key[1], progress)
            warm.problem = ""
        except GreenroomError as error:
            warm.problem = error.message
            raise
        finally:
            self._kick.set()

    def next_member(self, template: str, size: Size) -> str | None:
        """Name of the VM that `take` would give away now; None when a claim has to wait or would be refused."""
        warm = self._pools.get((template, size))
        return None if warm is None or self._closing else warm.pool.next_member()

    def take(self, template: str, size: Size) -> Vm:
        """The VM that `next_member` has just named, the caller's from now on."""
        key = (template, size)
        asked = time.perf_counter()
        loop = asyncio.get_running_loop()
        arrived = machine.ClaimArrived(f"claim-{next(self._numbers)}", loop.time())
        (given,) = self._pools[key].pool.handle(arrived)
        assert isinstance(given, machine.HandOver)  # noqa: S101
        vm, _ = self._members.pop(given.member)
        self._tell(self._pools[key])
        loop.call_later(_AFTER_A_CLAIM, self._kick.set)
        counted.came_from_pool(template, size, asked, time.perf_counter())
        return vm

    def stocks(self, template: str, size: Size) -> bool:
        """Whether a pool is declared here for these, or still has a member."""
        warm = self._pools.get((template, size))
        return warm is not None and (warm.pool.target > 0 or bool(warm.pool.warm))

    async def make(self, template: str, size: Size, wait: float) -> Vm:
        """A VM made for the caller alone, from the pool's golden: no member, and no place in the queue. Waits up to
        `wait` seconds for the golden, where that is being made.

        Raises PoolDry when it is not there in time or nothing may be started here now, UnknownTemplate, RuntimeFailure.
        """
        warm = await self._pool_for(template, size)
        if warm.golden is None and warm.preparing is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await asyncio.shield(warm.preparing)
        if (shortage := self._held_back()) is not None or warm.golden is None:
            raise _dry(template, False, warm, shortage)
        return await self._runtime.restore(warm.golden)

    async def _pool_for(self, template: str, size: Size) -> _Warm:
        """The pool, with its golden there or on its way. One that nobody declared has the target 0: its members are
        made on demand. Raises NodeUnavailable, UnknownTemplate."""
        key = (template, size)
        if self._closing:
            raise NodeUnavailable("this node is stopping")
        if key not in self._pools:
            await self._runtime.prepare_image(template, lambda _step, _done: None)
            self._pool(key, PoolSpec(template=template, size=size, target=0))
        self._prepare(key, lambda _step, _done: None)
        return self._pools[key]

    async def claim(self, template: str, size: Size, wait: float, *, stock: bool = False) -> Vm:
        """A member of the pool, the caller's from now on. Waits in the pool's queue up to `wait` seconds.

        With `stock` only one that the pool's target brings: none is made for this claim.

        Raises PoolDry when the queue is full, the time is up, or there is no `stock`; UnknownTemplate.
        """
        key = (template, size)
        if stock and not self.stocks(template, size):
            raise PoolDry(
                f"no {template} sandboxes of size {size.name} are kept warm here; raise the target of a pool of them, "
                "or take one that is made when it is asked for",
                retry_after=2,
            )
        await self._pool_for(template, size)
        name = f"claim-{next(self._numbers)}"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Vm] = loop.create_future()
        self._claims[name] = future
        asked = time.perf_counter()
        self._apply(key, machine.ClaimArrived(name, loop.time() + wait, demands=not stock))
        queued = time.perf_counter()
        self._kick.set()
        try:
            vm = await future
            counted.came_from_pool(template, size, asked, queued)
            return vm
        except asyncio.CancelledError:
            self._apply(key, machine.ClaimLeft(name))
            if future.done() and not future.cancelled() and future.exception() is None:
                await asyncio.shield(self._runtime.stop(future.result()))
            raise
        finally:
            self._claims.pop(name, None)

    def status(self) -> list[PoolStatus]:
        """All pools that have a target, a member or somebody waiting."""
        hold = self._held_back()
        now = asyncio.get_running_loop().time()
        found: list[PoolStatus] = []
        for (template, size), warm in self._pools.items():
            pool = warm.pool
            reason = warm.problem or ("" if hold is None else hold.reason)
            if not reason and now < pool.held_until:
                reason = (
                    f"the last member failed ({pool.last_failure}); next try in {pool.held_until - now:.1f} s"
                )
            found.append(
                PoolStatus(
                    template=template,
                    size=size.name,
                    target=pool.target,
                    warm=len(pool.warm),
                    starting=pool.starting,
                    waiting=len(pool.waiting),
                    failed=pool.failed,
                    reason=reason,
                    failing=warm.failing,
                    make_seconds=warm.make_seconds,
                    refill_rate=self._rate(warm),
                    member_mib=warm.member_mib,
                )
            )
        return found

    def _rate(self, warm: _Warm) -> float | None:
        """Members a second that this node can make for a pool; None before it made one."""
        return None if warm.make_seconds is None else self._parallel / max(_QUICKEST, warm.make_seconds)

    def _apply(self, key: PoolKey, event: machine.Event) -> None:
        """Feed one event to a pool and carry out what it says."""
        for instruction in self._pools[key].pool.handle(event):
            match instruction:
                case machine.HandOver(claim, member):
                    vm, _ = self._members.pop(member)
                    future = self._claims.get(claim)
                    if future is None or future.done():
                        spawn(self._runtime.stop(vm), f"stop {member}, its claim has gone")
                    else:
                        future.set_result(vm)
                case machine.Refuse(claim, full):
                    future = self._claims.get(claim)
                    if future is not None and not future.done():
                        future.set_exception(_dry(key[0], full, self._pools[key], self._held_back()))
                case machine.Destroy(member):
                    vm, _ = self._members.pop(member)
                    spawn(self._runtime.stop(vm), f"stop {member}, one too many")
        self._tell(self._pools[key])
        self._kick.set()

    def _tell(self, warm: _Warm) -> None:
        if (counts := warm.counts()) is not None:
            self.tell(counts)

    def _held_back(self) -> Shortage | None:
        """Why nothing may be started on this node right now."""
        return None if self._headroom is None else self._headroom.shortage()

    def emergency(self) -> Shortage | None:
        """Why nothing can run here now, a warm member neither; None while it can."""
        return None if self._headroom is None else self._headroom.emergency()

    async def _run(self) -> None:
        """Decide for ever. A step that fails is logged and tried again: without this loop no pool is ever filled."""
        while True:
            try:
                await self._step()
            except Exception:
                _log.exception("a refill step failed; trying again")
                await asyncio.sleep(_AFTER_A_FAULT)

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        self._kick.clear()
        now = loop.time()
        for key in self._pools:
            self._apply(key, machine.Tick(now))
        self._kick.clear()
        wants = {key: warm.pool.wanted(now) for key, warm in self._pools.items() if warm.golden is not None}
        held = self._held_back() if any(wants.values()) else None
        if not held:
            for key in allot(wants, self._parallel - len(self._making), self._last_served):
                self._last_served = key
                self._pools[key].pool.handle(machine.MemberStarted())
                self._tell(self._pools[key])
                task = spawn(self._make_member(key), f"member of {key[0]}")
                self._making.add(task)
                task.add_done_callback(self._made)
        due = [warm.pool.next_deadline() for warm in self._pools.values()]
        times = [when - now for when in due if when is not None]
        if held:
            times.append(1.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.001, min(times)) if times else None):
                await self._kick.wait()

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making.discard(task)
        self._kick.set()

    async def _make_member(self, key: PoolKey) -> None:
        warm = self._pools[key]
        vm: Vm | None = None
        loop = asyncio.get_running_loop()
        begun = time.perf_counter()
        try:
            assert warm.golden is not None  # noqa: S101
            vm = await self._runtime.restore(warm.golden)
            if warm.spec.warm == "running":
                await self._runtime.start(vm)
                identity = Identity(
                    entropy=secrets.token_bytes(64),
                    machine_id=secrets.token_hex(16),
                    hostname=f"greenroom-{secrets.token_hex(4)}",
                )
                await self._runtime.introduce(vm, identity, self._config.claims.handover_deadline)
        except GreenroomError as error:
            if vm is not None:
                await self._runtime.stop(vm)
            self._count_failure(key, counted.failure_reason(error))
            self._apply(key, machine.MemberFailed(error.message, loop.time()))
            return
        except BaseException as error:
            if vm is not None:
                await asyncio.shield(self._runtime.stop(vm))
            self._count_failure(key, counted.failure_reason(error))
            self._apply(key, machine.MemberFailed("it was interrupted", loop.time()))
            raise
        seconds = time.perf_counter() - begun
        counted.REFILL_SECONDS.labels(key[0], key[1].name).observe(seconds)
        warm.made(seconds)
        self._join(vm, key)
        if warm.measured_at is None or loop.time() - warm.measured_at > _MEASURE_EVERY:
            warm.measured_at = loop.time()
            spawn(self._measure(vm, warm), f"memory of {vm.name}")

    async def _measure(self, vm: Vm, warm: _Warm) -> None:
        """How much memory a member takes; what has gone meanwhile, or runs for a claim, tells nothing."""
        pid = vm.describe().pid
        taken = None if pid is None else await asyncio.to_thread(own_memory_mib, pid)
        if taken is not None and vm.name in self._members:
            warm.member_mib = max(taken, warm.member_mib or 0)

    def _count_failure(self, key: PoolKey, reason: str) -> None:
        counted.REFILL_FAILURES.labels(key[0], key[1].name, reason).inc()

    def _join(self, vm: Vm, key: PoolKey) -> None:
        """A member is ready."""
        self._members[vm.name] = (vm, key)
        spawn(self._watch(vm), f"watch {vm.name}")
        self._apply(key, machine.MemberReady(vm.name))

    async def _watch(self, vm: Vm) -> None:
        """A warm member that ends by itself leaves its pool, and its remains are cleared away."""
        await vm.ended.wait()
        if vm.name in self._members:
            _, key = self._members.pop(vm.name)
            self._count_failure(key, "vm_ended")
            self._apply(key, machine.MemberEnded(vm.name, asyncio.get_running_loop().time()))
            await self._runtime.stop(vm)


def own_memory_mib(pid: int) -> int | None:
    """MiB that a process has for itself (Private_Dirty of smaps_rollup, proc(5)), rounded up; None when it has gone.

    What it has only read of its golden is as good as everybody's.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    found = [line for line in text.splitlines() if line.startswith("Private_Dirty:")]
    return -(-int(found[0].split()[1]) // 1024) if found else None


def _nobody(_counts: PoolCounts) -> None:
    """Before anybody wants to hear."""


def _dry(template: str, full: bool, warm: _Warm, shortage: Shortage | None) -> PoolDry:
    """The refusal, in words that tell the true reason and what to do about that."""
    what = (
        f"too many requests already wait for a {template} sandbox"
        if full
        else f"no {template} sandbox came free in time"
    )
    if warm.problem:
        why, remedy = f" ({warm.problem})", "try again shortly"
    elif shortage is not None:
        why, remedy = f": {shortage.reason}", f"{shortage.remedy}; then try again"
    elif warm.pool.failing:
        why, remedy = f": the last one failed ({warm.pool.last_failure})", "try again, and see the node's log"
    elif full:
        why, remedy = "", "try again shortly"
    else:
        why, remedy = (
            ": they are asked for faster than they are made",
            "try again shortly, or raise the pool's target",
        )
    return PoolDry(f"{what}{why}; {remedy}", retry_after=2)
