"""Claims: how a VM becomes somebody's sandbox.

A claim runs in a task of its own, so a caller that goes away cannot leave one half done, and a repeated
request with the same key joins it. From the moment a VM belongs to a claim until it is handed over, every way
out either hands it over or destroys it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

import msgspec

from greenroom.config import Config
from greenroom.errors import (
    GreenroomError,
    KeyConflict,
    NodeUnavailable,
    PoolDry,
    RuntimeFailure,
    SandboxEnded,
    UnknownSandbox,
)
from greenroom.node import metrics as counted
from greenroom.node.clock import NodeClock
from greenroom.node.declaring import checked
from greenroom.node.journal import Entry, Inner, Journal, digest_of
from greenroom.node.residents import Live
from greenroom.node.signatures import is_over, owner_of
from greenroom.node.suspending import Suspending
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import ClockReading, Identity, Runtime, Snapshot, Vm
from greenroom.wire import logs
from greenroom.wire.ids import new_sandbox_id
from greenroom.wire.messages import ClaimRequest, Sandbox, SignedUrl
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)
_ATTEMPTS = 2
"""Members a claim may use up: one whose guest does not come up is destroyed and another is tried."""


Launch = Literal["warm", "cold"]
"""Where a sandbox's VM came from, see `Listed.launch`."""
Source = Callable[[], Awaitable[Snapshot]]
"""What a claim's VM is restored from when it is no pool's; asked only when the claim is new."""


class Keeper(Suspending):
    """The node's sandboxes, from their claim to their end. Use as an async context manager."""

    def __init__(
        self,
        *,
        name: str,
        runtime: Runtime,
        warmer: Warmer,
        journal: Journal,
        config: Config,
        clock: NodeClock | None = None,
    ) -> None:
        super().__init__(runtime, journal, config, clock)
        self._name = name
        self._warmer = warmer
        self.code = journal.code()
        self._pending: dict[str, asyncio.Task[Sandbox]] = {}
        self._restores = asyncio.Semaphore(config.pools.refill_parallel or os.cpu_count() or 1)
        """Restores that no pool bounds: those from snapshots, and of VMs that no pool's member may be."""

    async def __aenter__(self) -> Keeper:
        await super().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await stop(*self._pending.values())
        await super().__aexit__(*exc)

    def signer(self, url: SignedUrl) -> str | None:
        """The sandbox whose signature a URL has, if one here has it.

        None also for a signature that is over, where a sandbox would have to be resumed to say so itself.
        """
        found = owner_of(url, self.tokens())
        live = None if found is None else self._live.get(found)
        if live is not None and live.life.phase in ("pausing", "paused") and is_over(url, self._clock.now()):
            return None
        return found

    def tokens(self) -> Iterator[tuple[str, str]]:
        """Id and token of each sandbox that `lookup` finds and that has one."""
        for live in self._live.values():
            if live.reachable and live.sandbox.token is not None:
                yield live.sandbox_id, live.sandbox.token

    async def by_key(self, key: str) -> Sandbox:
        """What the claim with this key becomes: one that is under way is waited for.

        Raises UnknownSandbox when this node knows nothing of the key, SandboxEnded, or what the claim raises.
        """
        if (running := self._pending.get(key)) is not None:
            return await asyncio.shield(running)
        entry = self._journal.find(key)
        if entry is None:
            raise UnknownSandbox("no sandbox was made with this key on this node")
        return self._known(entry)

    def _known(self, entry: Entry) -> Sandbox:
        """The live sandbox of a claim that is over. Raises SandboxEnded."""
        live = self._live.get(entry.sandbox_id)
        if live is None or live.ending:
            raise SandboxEnded(
                "the sandbox made with this idempotency key has ended; use a new key for another"
            )
        return live.sandbox

    async def claim(self, request: ClaimRequest, source: Source | None = None) -> Sandbox:
        """Take a warm VM, or restore one from `source`, give it its identity and answer; the same key again gives the
        same sandbox.

        Raises KeyConflict for a key with another body, SandboxEnded for one whose sandbox has ended, NameTaken,
        PoolDry, NodeUnavailable where the disk is too full for anything to run, RuntimeFailure, UnknownTemplate,
        BadRequest for what cannot be declared, or what `source` raises.
        """
        if request.declared is not None:
            request = msgspec.structs.replace(request, declared=checked(request.declared))
        digest = digest_of(request)
        if (full := self._warmer.emergency()) is not None and self._journal.find(request.key) is None:
            raise NodeUnavailable(f"{full.reason}; {full.remedy}", retry_after=10)
        if self.names.holder(request.owner, request.name) and self._journal.find(request.key) is None:
            self.names.refuse_taken(request.owner, request.name)
        sandbox_id = new_sandbox_id(self.code)
        # Looked at, written down, and only then taken, without giving way in between: a warm claim is taken on with
        # one commit, and where that fails the member is still warm.
        pooled = source is None and request.warm != "never"
        member = self._warmer.next_member(request.template, request.size) if pooled else None
        if self._journal.begin(request.key, digest, sandbox_id, self._now(), member):
            self.names.take(sandbox_id, request.owner, request.name)
            vm = None if member is None else self._warmer.take(request.template, request.size)
            answer: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
            task = spawn(self._claim(request, sandbox_id, vm, source, answer), f"claim {sandbox_id}")
            task.add_done_callback(functools.partial(_pass_on, answer))
            self._pending[request.key] = task
            return await answer
        entry = self._journal.find(request.key)
        if entry is None or entry.digest != digest:
            raise KeyConflict("this idempotency key was used before with another request")
        if (running := self._pending.get(request.key)) is not None:
            return await asyncio.shield(running)
        return self._known(entry)

    async def _claim(
        self,
        request: ClaimRequest,
        sandbox_id: str,
        vm: Vm | None,
        source: Source | None,
        answer: asyncio.Future[Sandbox],
    ) -> Sandbox:
        """Hand over `vm`, which the journal names already, or else the next that comes free.

        `answer` is its first caller's, who is woken by it one turn of the event loop sooner than by the task's end.
        """
        logs.about(sandbox_id)
        try:
            begun = time.perf_counter()
            end = begun + request.wait
            launch: Launch = "cold" if vm is None else "warm"
            for attempt in range(1, _ATTEMPTS + 1):
                written = vm is not None
                deadline = self._config.claims.handover_deadline
                if source is not None:
                    snapshot = await source()
                    deadline = self.deadline_for(snapshot)
                    async with self._restores:
                        vm = await self._from(snapshot, source)
                elif vm is None:
                    vm, launch = await self._another(request, max(0.1, end - time.perf_counter()))
                try:
                    sandbox = await self._hand_over(
                        request, sandbox_id, vm, begun, written, deadline, source is None, launch
                    )
                    if not answer.done():
                        answer.set_result(sandbox)
                    # The line about the request tells of every claim; a second one would cost it as much as a commit.
                    _log.debug("handed over on %s", vm.name)
                    return sandbox
                except GreenroomError as error:
                    _log.warning("hand-over of %s on %s failed: %s", sandbox_id, vm.name, error.message)
                    if attempt == _ATTEMPTS or source is not None:
                        raise  # the next guest from the same snapshot is the same guest
                    vm = None
            raise RuntimeFailure("no attempt was made")
        except BaseException:
            with contextlib.suppress(GreenroomError):
                self._journal.abort(request.key)
            if sandbox_id not in self._live:
                self.names.free(sandbox_id, request.owner, request.name)
            raise
        finally:
            self._pending.pop(request.key, None)

    async def _another(self, request: ClaimRequest, wait: float) -> tuple[Vm, Launch]:
        """A VM for a claim that had none at once, within `wait` seconds, and where it came from."""
        template, size = request.template, request.size
        if request.warm != "never":
            vm = await self._warmer.claim(template, size, wait, stock=request.warm == "require")
            return vm, "warm" if self._warmer.stocks(template, size) else "cold"
        end = time.perf_counter() + wait
        try:
            async with asyncio.timeout(wait):
                await self._restores.acquire()
        except TimeoutError:
            raise PoolDry(
                f"too many sandboxes are being made here for a {template} one to be made in time; try again shortly",
                retry_after=2,
            ) from None
        try:
            return await self._warmer.make(template, size, max(0.1, end - time.perf_counter())), "cold"
        finally:
            self._restores.release()

    async def _from(self, snapshot: Snapshot, source: Source) -> Vm:
        """A VM from what `source` gave. Raises what `Runtime.restore` does, or `source` when it is asked again."""
        try:
            return await self._runtime.restore(snapshot)
        except GreenroomError:
            # One that is deleted while it is read looks damaged, or as if it could not be read.
            await source()
            raise

    async def _hand_over(
        self,
        request: ClaimRequest,
        sandbox_id: str,
        vm: Vm,
        begun: float,
        written: bool,
        deadline: float,
        pooled: bool,
        launch: Launch,
    ) -> Sandbox:
        """Start `vm` as `sandbox_id`; whatever goes wrong, it is destroyed. `written`: the journal names it already."""
        steps = {"queue": time.perf_counter() - begun}
        try:
            if not written:
                self._journal.assign(request.key, vm.name)
            await self._runtime.hand_out(vm)
            assigned = time.perf_counter() - begun - steps["queue"]
            # A guest that comes from a snapshot may ask for another's token until it gets one of its own.
            token = secrets.token_hex(32) if request.secure or not pooled else None
            identity = Identity(
                entropy=secrets.token_bytes(64),
                machine_id=secrets.token_hex(16),
                hostname=sandbox_id,
                sandbox_id=sandbox_id,
                template_id=request.template,
                env=dict(request.env),
                token=token,
            )
            await self.open(vm, sandbox_id, request.network)
            async with self._handovers if pooled else self._returns.of(request.owner):
                waited = time.perf_counter()
                steps["turn"] = waited - begun - steps["queue"]
                reading = await self._start(vm, identity, steps, deadline)
            steps["total"] = time.perf_counter() - begun
            now = self._now()
            sandbox = Sandbox(
                sandbox_id=sandbox_id,
                template=request.template,
                size=request.size,
                state="running",
                started_at=now,
                ends_at=now + request.ttl,
                confirm_by=now + self._config.claims.confirm_within,
                node=self._name,
                metadata=dict(request.metadata),
                owner=request.owner,
                token=token,
                inbound=request.inbound,
                traffic_token=None if request.inbound.public else secrets.token_hex(32),
                claim_ms={name: round(seconds * 1000, 2) for name, seconds in steps.items()},
                clock_offset_ms=round(reading.offset_ms, 3),
                clock_error_ms=round(reading.error_ms, 3),
                lifespan=request.lifespan,
                network=request.network,
                name=request.name,
                declared=request.declared,
                launch=launch,
            )
            inner = Inner(env=identity.env or {}, machine_id=identity.machine_id or "", ttl=request.ttl)
            saved = time.perf_counter()
            self._journal.settle(request.key, sandbox, inner, vm.name, now)
            saved = time.perf_counter() - saved
        except BaseException:
            await asyncio.shield(self.stop_vm(vm))
            raise
        self._enter(Live(request.key, sandbox, vm, inner))
        counted.served(
            request.template, request.size, steps, reading, begun=begun, assigned=assigned, saved=saved
        )
        return sandbox

    async def _start(
        self, vm: Vm, identity: Identity, steps: dict[str, float], deadline: float
    ) -> ClockReading:
        begun = time.perf_counter()
        info = vm.describe()
        if info.state != "running":
            await self._runtime.start(vm)
        steps["start"] = time.perf_counter() - begun
        begun = time.perf_counter()
        reading = await self._runtime.introduce(vm, identity, deadline)
        steps["identity"] = time.perf_counter() - begun
        return reading


def _pass_on(answer: asyncio.Future[Sandbox], task: asyncio.Task[Sandbox]) -> None:
    """End an answer that its task has not given."""
    if answer.done():
        return
    if task.cancelled():
        answer.cancel()
    elif (error := task.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())
