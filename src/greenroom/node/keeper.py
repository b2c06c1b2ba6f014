"""The node's sandboxes: claims, hand-overs, timeouts, ends.

A claim runs in a task of its own, so a caller that goes away cannot leave one half done, and a repeated
request with the same key joins it. From the moment a VM belongs to a claim until it is handed over, every way
out either hands it over or destroys it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from greenroom.config import Config
from greenroom.errors import GreenroomError, KeyConflict, RuntimeFailure, SandboxEnded, UnknownSandbox
from greenroom.node import lifecycle
from greenroom.node import metrics as counted
from greenroom.node.clock import NodeClock
from greenroom.node.deadlines import Deadlines
from greenroom.node.journal import Entry, Journal, digest_of
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted, ClockReading, Identity, Runtime, Vm
from greenroom.wire import logs
from greenroom.wire.ids import new_sandbox_id
from greenroom.wire.messages import ClaimRequest, Inbound, Sandbox, TimeoutRequest
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)
_LOOK_AT_CLOCK = 5.0
"""Seconds after which a wall clock that was set is noticed at the latest."""
_ATTEMPTS = 2
"""Members a claim may use up: one whose guest does not come up is destroyed and another is tried."""


class Live:
    """A sandbox that was handed over, with its VM; also what the relay connects to (`relay_targets.Target`)."""

    def __init__(self, key: str, sandbox: Sandbox, vm: Vm) -> None:
        self.key = key
        self.sandbox = sandbox
        self.vm = vm
        confirmed = sandbox.confirm_by is None
        self.life = lifecycle.Lifecycle(
            confirm_by=sandbox.ends_at if sandbox.confirm_by is None else sandbox.confirm_by,
            ends_at=sandbox.ends_at,
            phase="running" if confirmed else "provisional",
        )

    def __repr__(self) -> str:
        return f"<Live {self.sandbox.sandbox_id} on {self.vm.name} {self.life.phase}>"

    @property
    def ending(self) -> bool:
        return self.life.phase == "ended"

    @property
    def sandbox_id(self) -> str:
        return self.sandbox.sandbox_id

    @property
    def owner(self) -> str:
        return self.sandbox.owner

    @property
    def inbound(self) -> Inbound:
        return self.sandbox.inbound

    @property
    def traffic_token(self) -> str | None:
        return self.sandbox.traffic_token

    async def connect(self, port: int) -> socket.socket:
        """A connected socket to a port in the guest."""
        return await self.vm.connect(port)

    async def connect_inside(self, port: int) -> socket.socket:
        """Always refused: the agent of today's guests offers no way to their loopback."""
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"the agent offers no way to port {port}")


class Keeper:
    """Use as an async context manager; also the relay's `Directory`."""

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
        self._name = name
        self._clock = clock or NodeClock()
        self._stamped = self._clock.reference
        self._runtime = runtime
        self._warmer = warmer
        self._journal = journal
        self._config = config
        self.cut: Callable[[str], Awaitable[None]] = _nothing_to_cut
        """Ends a sandbox's relayed connections at once; the relay's, once there is one."""
        self.code = journal.code()
        self._live: dict[str, Live] = {}
        self._pending: dict[str, asyncio.Task[Sandbox]] = {}
        self._deadlines = Deadlines()
        self._moved = asyncio.Event()
        self._looks_at = 0.0
        """When the reaper looks next, in Unix seconds; an earlier deadline has to wake it."""
        self._handovers = asyncio.Semaphore(config.claims.parallel_handovers or 2 * (os.cpu_count() or 1))
        self._reaper: asyncio.Task[None] | None = None
        self._leaving = False

    def adopt(self, found: list[Adopted]) -> list[Adopted]:
        """Go on with the sandboxes of an earlier run; call before anything else. Returns the VMs of no sandbox.

        The journal says which sandboxes there were, `found` which VMs still live. A sandbox whose VM is gone
        has ended; a claim that was not answered yet is undone: its VM is among those returned.
        """
        step = self._clock.step_since(self._journal.clock())
        undone = self._journal.abort_pending()
        by_vm = {adopted.vm.name: adopted for adopted in found}
        kept = lost = 0
        for entry, vm_name in self._journal.running():
            adopted = by_vm.pop(vm_name, None)
            if adopted is None or entry.sandbox is None:
                self._journal.end(entry.key, "its VM was gone when the node came back", self._clock.now())
                lost += 1
                continue
            live = Live(entry.key, entry.sandbox, adopted.vm)
            if step:
                self._move(live, step)
            self._enter(live)
            kept += 1
        for outcome, number in (("kept", kept), ("lost", lost), ("undone", undone), ("spare", len(by_vm))):
            counted.ADOPTED.labels(outcome).inc(number)
        if kept or lost or undone:
            _log.warning(
                "of an earlier run: %d sandboxes go on, %d are gone, %d claims undone", kept, lost, undone
            )
        self._stamped = self._clock.reference
        self._restamp()
        if step:
            self._tell_of(step)
        return list(by_vm.values())

    def _now(self) -> float:
        """Unix seconds; deadlines have been moved with the wall clock if it was set since the last call."""
        if step := self._clock.take_step():
            for live in self._live.values():
                self._move(live, step)
                self._set_deadline(live)
            self._moved.set()
            self._restamp()
            self._tell_of(step)
        return self._clock.now()

    def _move(self, live: Live, step: float) -> None:
        """Move one sandbox's times by `step` seconds, in memory."""
        live.life, _ = live.life.handle(lifecycle.ClockStepped(step), 0.0)
        sandbox = live.sandbox
        live.sandbox = msgspec.structs.replace(
            sandbox,
            started_at=sandbox.started_at + step,
            ends_at=sandbox.ends_at + step,
            confirm_by=None if sandbox.confirm_by is None else sandbox.confirm_by + step,
        )

    def _restamp(self) -> None:
        """Let the journal's times go by the clock as it is. Where that fails the reaper tries again."""
        try:
            self._journal.restamp(
                self._clock.reference, {live.key: live.sandbox for live in self._live.values()}
            )
        except GreenroomError as error:
            _log.error("that the clock was set could not be written down: %s", error.message)
        else:
            self._stamped = self._clock.reference

    def _tell_of(self, step: float) -> None:
        counted.CLOCK_STEPS.inc()
        _log.warning("the wall clock was set by %+.3f s; deadlines were moved with it", step)
        for live in self._live.values():
            if not live.ending:
                spawn(self._set_guest_clock(live), f"clock of {live.sandbox_id}")

    async def _set_guest_clock(self, live: Live) -> None:
        """A guest's clock runs on by itself: give it the right time as at its hand-over."""
        with contextlib.suppress(GreenroomError):
            async with self._handovers:
                await self._runtime.introduce(
                    live.vm, Identity(entropy=secrets.token_bytes(64)), self._config.claims.handover_deadline
                )

    def _enter(self, live: Live) -> None:
        """A sandbox counts from here on."""
        self._live[live.sandbox_id] = live
        self._set_deadline(live)
        spawn(self._watch(live), f"watch {live.sandbox_id}")

    async def __aenter__(self) -> Keeper:
        self._reaper = spawn(self._reap(), "timeouts")
        return self

    def leave_running(self) -> None:
        """At the end, let go of the sandboxes instead of ending them: the next run adopts them."""
        self._leaving = True

    async def __aexit__(self, *_exc: object) -> None:
        await stop(self._reaper, *self._pending.values())
        if self._leaving:
            return
        ends = (
            self._feed(live, lifecycle.Release("the node was stopped")) for live in list(self._live.values())
        )
        await asyncio.gather(*ends)

    def __len__(self) -> int:
        return len(self._live)

    def lookup(self, sandbox_id: str) -> Live | None:
        """The running sandbox with this id; one that is provisional or ending counts as absent."""
        live = self._live.get(sandbox_id)
        return live if live is not None and live.life.phase == "running" else None

    def get(self, sandbox_id: str) -> Sandbox:
        """Raises UnknownSandbox."""
        live = self.lookup(sandbox_id)
        if live is None:
            raise _unknown(sandbox_id)
        return live.sandbox

    def list(self) -> list[Sandbox]:
        """All running sandboxes; provisional ones are nobody's yet."""
        return [live.sandbox for live in self._live.values() if live.life.phase == "running"]

    def tokens(self) -> Iterator[tuple[str, str]]:
        """Id and token of each sandbox that `lookup` finds and that has one."""
        for live in self._live.values():
            if live.life.phase == "running" and live.sandbox.token is not None:
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

    async def claim(self, request: ClaimRequest) -> Sandbox:
        """Take a warm VM, give it its identity and answer; the same key again gives the same sandbox.

        Raises KeyConflict for a key with another body, SandboxEnded for one whose sandbox has ended, PoolDry,
        RuntimeFailure, UnknownTemplate.
        """
        digest = digest_of(request)
        sandbox_id = new_sandbox_id(self.code)
        # Looked at, written down, and only then taken, without giving way in between: a warm claim is taken on with
        # one commit, and where that fails the member is still warm.
        member = self._warmer.next_member(request.template, request.size)
        if self._journal.begin(request.key, digest, sandbox_id, self._now(), member):
            vm = None if member is None else self._warmer.take(request.template, request.size)
            answer: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
            task = spawn(self._claim(request, sandbox_id, vm, answer), f"claim {sandbox_id}")
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
        self, request: ClaimRequest, sandbox_id: str, vm: Vm | None, answer: asyncio.Future[Sandbox]
    ) -> Sandbox:
        """Hand over `vm`, which the journal names already, or else the next that comes free.

        `answer` is its first caller's, who is woken by it one turn of the event loop sooner than by the task's end.
        """
        logs.about(sandbox_id)
        try:
            begun = time.perf_counter()
            end = begun + request.wait
            for attempt in range(1, _ATTEMPTS + 1):
                written = vm is not None
                if vm is None:
                    vm = await self._warmer.claim(
                        request.template, request.size, max(0.1, end - time.perf_counter())
                    )
                try:
                    sandbox = await self._hand_over(request, sandbox_id, vm, begun, written)
                    if not answer.done():
                        answer.set_result(sandbox)
                    # The line about the request tells of every claim; a second one would cost it as much as a commit.
                    _log.debug("handed over on %s", vm.name)
                    return sandbox
                except GreenroomError as error:
                    _log.warning("hand-over of %s on %s failed: %s", sandbox_id, vm.name, error.message)
                    if attempt == _ATTEMPTS:
                        raise
                    vm = None
            raise RuntimeFailure("no attempt was made")
        except BaseException:
            with contextlib.suppress(GreenroomError):
                self._journal.abort(request.key)
            raise
        finally:
            self._pending.pop(request.key, None)

    async def _hand_over(
        self, request: ClaimRequest, sandbox_id: str, vm: Vm, begun: float, written: bool
    ) -> Sandbox:
        """Start `vm` as `sandbox_id`; whatever goes wrong, it is destroyed. `written`: the journal names it already."""
        steps = {"queue": time.perf_counter() - begun}
        try:
            if not written:
                self._journal.assign(request.key, vm.name)
            await self._runtime.hand_out(vm)
            assigned = time.perf_counter() - begun - steps["queue"]
            token = secrets.token_hex(32) if request.secure else None
            identity = Identity(
                entropy=secrets.token_bytes(64),
                machine_id=secrets.token_hex(16),
                hostname=sandbox_id,
                sandbox_id=sandbox_id,
                template_id=request.template,
                env=dict(request.env),
                token=token,
            )
            async with self._handovers:
                waited = time.perf_counter()
                steps["turn"] = waited - begun - steps["queue"]
                reading = await self._start(vm, identity, steps)
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
            )
            saved = time.perf_counter()
            self._journal.save(request.key, sandbox, now)
            saved = time.perf_counter() - saved
        except BaseException:
            await asyncio.shield(self._runtime.stop(vm))
            raise
        self._enter(Live(request.key, sandbox, vm))
        counted.served(
            request.template, request.size, steps, reading, begun=begun, assigned=assigned, saved=saved
        )
        return sandbox

    async def _start(self, vm: Vm, identity: Identity, steps: dict[str, float]) -> ClockReading:
        begun = time.perf_counter()
        info = vm.describe()
        if info.state != "running":
            await self._runtime.start(vm)
        steps["start"] = time.perf_counter() - begun
        begun = time.perf_counter()
        reading = await self._runtime.introduce(vm, identity, self._config.claims.handover_deadline)
        steps["identity"] = time.perf_counter() - begun
        return reading

    async def _watch(self, live: Live) -> None:
        await live.vm.ended.wait()
        if not live.ending:
            _log.warning("sandbox %s ended by itself", live.sandbox.sandbox_id)
            await self._feed(live, lifecycle.VmEnded())

    async def confirm(self, sandbox_id: str) -> Sandbox:
        """Its caller is about to be told of it; may be repeated. Raises UnknownSandbox when it came too late."""
        return await self._change(sandbox_id, lifecycle.Confirm())

    async def set_timeout(self, sandbox_id: str, request: TimeoutRequest) -> Sandbox:
        """Move the sandbox's end. Raises UnknownSandbox."""
        return await self._change(sandbox_id, lifecycle.Renew(request.ttl, request.extend_only))

    async def release(self, sandbox_id: str, reason: str = "it was killed") -> None:
        """End a sandbox and give everything of it back. Raises UnknownSandbox."""
        live = self._live.get(sandbox_id)
        if live is None or isinstance(await self._feed(live, lifecycle.Release(reason)), lifecycle.Refused):
            raise _unknown(sandbox_id)

    async def _change(self, sandbox_id: str, event: lifecycle.Event) -> Sandbox:
        live = self._live.get(sandbox_id)
        if live is None or isinstance(await self._feed(live, event), lifecycle.Refused | lifecycle.End):
            raise _unknown(sandbox_id)
        return live.sandbox

    async def _feed(self, live: Live, event: lifecycle.Event) -> lifecycle.Outcome:
        """Give an event to a sandbox's state machine and do what it says.

        A change counts once it is written down; an end does not wait for the journal.
        """
        now = self._now()
        after, outcome = live.life.handle(event, now)
        match outcome:
            case lifecycle.Changed():
                confirm_by = None if after.phase == "running" else after.confirm_by
                changed = msgspec.structs.replace(live.sandbox, ends_at=after.ends_at, confirm_by=confirm_by)
                self._journal.save(live.key, changed, now)
                live.life, live.sandbox = after, changed
                self._set_deadline(live)
            case lifecycle.End(reason):
                live.life = after
                await self._end(live, reason)
        return outcome

    def _set_deadline(self, live: Live) -> None:
        due = live.life.due()
        if due is not None:
            self._deadlines.set(live.sandbox_id, due)
            if due < self._looks_at:
                self._moved.set()

    def disk_use(self) -> dict[str, int]:
        """Bytes of host disk that each running sandbox takes."""
        return {
            live.sandbox_id: self._runtime.disk_use(live.vm)
            for live in self._live.values()
            if not live.ending
        }

    async def revive(self) -> int:
        """Let guests go on that a full disk had stopped. Returns how many there were."""
        revived = 0
        for live in list(self._live.values()):
            with contextlib.suppress(GreenroomError):
                revived += not live.ending and await self._runtime.revive(live.vm)
        return revived

    async def _end(self, live: Live, reason: str) -> None:
        """Take a sandbox down that its state machine has ended."""
        counted.ENDED.labels(counted.end_reason(reason)).inc()
        sandbox_id = live.sandbox_id
        self._deadlines.drop(sandbox_id)
        try:
            self._journal.end(live.key, reason, self._clock.now())
        except GreenroomError as error:
            # An end must never wait for a disk: it is what makes room on it. The next start sees that the VM
            # is gone and ends the claim.
            _log.error("the end of %s could not be written down: %s", sandbox_id, error.message)
        with contextlib.suppress(OSError):
            await self.cut(sandbox_id)
        try:
            await asyncio.shield(self._runtime.stop(live.vm))
        finally:
            self._live.pop(sandbox_id, None)

    async def _reap(self) -> None:
        """End sandboxes whose time is up, and forget keys whose retention is over."""
        forget_at = 0.0
        while True:
            self._moved.clear()
            now = self._now()
            if self._stamped != self._clock.reference:
                self._restamp()
            for sandbox_id in self._deadlines.due(now):
                if (live := self._live.get(sandbox_id)) is not None:
                    spawn(self._feed(live, lifecycle.Tick()), f"time-out of {sandbox_id}")
            if now >= forget_at:
                with contextlib.suppress(GreenroomError):
                    self._journal.forget(now - self._config.claims.retention)
                forget_at = now + 60
            next_end = self._deadlines.next()
            now = self._clock.now()
            left = _LOOK_AT_CLOCK if next_end is None else next_end - now
            pause = min(_LOOK_AT_CLOCK, max(0.0, left))
            self._looks_at = now + pause
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._moved.wait()


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


async def _nothing_to_cut(_sandbox_id: str) -> None:
    """Before there is a relay there are no connections."""


def _unknown(sandbox_id: str) -> UnknownSandbox:
    return UnknownSandbox(f"sandbox {sandbox_id} does not exist on this node, or has ended")
