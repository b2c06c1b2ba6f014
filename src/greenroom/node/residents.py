"""The sandboxes that live on this node: their state machines, deadlines and ends, and going on after a restart.

`keeper` makes them by claims, `suspending` writes them to disk and brings them back. Here is what they have in common:
every event goes through `feed`, which asks the state machine (`lifecycle`), writes down what must be remembered and
carries out what it says.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from greenroom.config import Config
from greenroom.errors import GreenroomError, InternalError
from greenroom.node import lifecycle
from greenroom.node import metrics as counted
from greenroom.node.changelog import ChangeLog
from greenroom.node.clock import NodeClock
from greenroom.node.deadlines import Deadlines
from greenroom.node.egress import Gate, NoGate
from greenroom.node.journal import Entry, Journal
from greenroom.node.live import Live, unknown
from greenroom.node.names import Names
from greenroom.node.observing import Asked, Sampler
from greenroom.node.remains import Remains, moved, stays
from greenroom.node.turns import Turns
from greenroom.runtime.engine import Adopted, Identity, Runtime, Vm
from greenroom.wire.messages import Network, Past, Sandbox, TimeoutRequest
from greenroom.wire.tasks import spawn, stop

__all__ = ["Live", "Residents", "unknown"]
LOST = "its VM was gone when the node came back"

_log = logging.getLogger(__name__)
_TRY_AGAIN = 60.0
"""Seconds after which a record that could not be dropped is tried again."""
_LOOK_AT_CLOCK = 5.0
"""Seconds after which a wall clock that was set is noticed at the latest."""


class Residents(abc.ABC):
    """Use as an async context manager; also the relay's `Directory`."""

    def __init__(self, runtime: Runtime, journal: Journal, config: Config, clock: NodeClock | None) -> None:
        self._clock = clock or NodeClock()
        self._stamped = self._clock.reference
        self._runtime = runtime
        self._journal = journal
        self._config = config
        self.cut: Callable[[str], Awaitable[None]] = _nothing_to_cut
        """Ends a sandbox's relayed connections at once; the relay's, once there is one."""
        self.gate: Gate | NoGate = NoGate()
        """The way out of sandboxes, where there is one."""
        self.changes = ChangeLog(journal.code())
        """What `list` says, as it changes, what stays of ended ones, and names that are taken already."""
        self.names = Names(self.changes)
        self.remains = Remains(journal, self.changes, self.names)
        self._live: dict[str, Live] = {}
        self._deadlines = Deadlines()
        self._moved = asyncio.Event()
        self._looks_at = 0.0
        """When the reaper looks next, in Unix seconds; an earlier deadline has to wake it."""
        parallel = config.claims.parallel_handovers or 2 * (os.cpu_count() or 1)
        self._handovers = asyncio.Semaphore(parallel)
        self._returns = Turns(parallel, max(1, parallel // 2))
        """Of guests that were somebody's before: from snapshots, and resumed ones."""
        self._reaper: asyncio.Task[None] | None = None
        self._sampler: asyncio.Task[None] | None = None
        self._leaving = False

    def adopt(self, found: list[Adopted]) -> list[Adopted]:
        """Go on with the sandboxes of an earlier run; call before anything else. Returns the VMs of no sandbox.

        The journal says which sandboxes there were, `found` which VMs still live. A sandbox whose VM is gone
        has ended, unless it was paused and has none; a claim that was not answered yet is undone: its VM is among
        those returned.
        """
        step = self._clock.step_since(self._journal.clock())
        self.remains.adopt()
        if step:
            self.remains.move(step)
        undone = self._journal.abort_pending()
        by_vm = {adopted.vm.name: adopted for adopted in found}
        kept = lost = 0
        for entry, vm_name, inner in self._journal.running():
            paused = entry.sandbox is not None and entry.sandbox.state == "paused"
            adopted = by_vm.pop(vm_name, None) if vm_name else None
            if entry.sandbox is None or (adopted is None and not paused):
                self._lose(entry)
                lost += 1
                continue
            live = Live(entry.key, entry.sandbox, None if adopted is None else adopted.vm, inner)
            if step:
                self._move(live, step)
            self._enter(live)
            if live.vm is not None and live.vm.describe().state == "paused":
                # The earlier run was about to pause it, or had it stand still for a snapshot.
                spawn(self._go_on(live), f"go on with {live.sandbox_id}")
            kept += 1
        for outcome, number in (("kept", kept), ("lost", lost), ("undone", undone), ("spare", len(by_vm))):
            counted.ADOPTED.labels(outcome).inc(number)
        if kept or lost or undone:
            _log.warning(
                "of an earlier run: %d sandboxes go on, %d are gone, %d claims undone", kept, lost, undone
            )
        for sandbox_id in self.remains:
            self._set_drop(sandbox_id)
        self._stamped = self._clock.reference
        self._restamp()
        if step:
            self._tell_of(step)
        return list(by_vm.values())

    def _lose(self, entry: Entry) -> None:
        """A sandbox of an earlier run has no VM any more."""
        sandbox, now = entry.sandbox, self._clock.now()
        if sandbox is not None and sandbox.confirm_by is None and stays(sandbox, by_itself=True):
            self.remains.keep(entry.key, sandbox, LOST, now)
        else:
            self._journal.end(entry.key, LOST, now)

    def _now(self) -> float:
        """Unix seconds; deadlines have been moved with the wall clock if it was set since the last call."""
        if step := self._clock.take_step():
            for live in self._live.values():
                self._move(live, step)
                self._set_deadline(live)
            self.remains.move(step)
            for sandbox_id in self.remains:
                self._set_drop(sandbox_id)
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
            declared=moved(sandbox.declared, step),
        )

    def _restamp(self) -> None:
        """Let the journal's times go by the clock as it is. Where that fails the reaper tries again."""
        try:
            live = {live.key: live.sandbox for live in self._live.values() if not live.ending}
            self._journal.restamp(self._clock.reference, live | self.remains.records())
        except GreenroomError as error:
            _log.error("that the clock was set could not be written down: %s", error.message)
        else:
            self._stamped = self._clock.reference

    def _tell_of(self, step: float) -> None:
        counted.CLOCK_STEPS.inc()
        _log.warning("the wall clock was set by %+.3f s; deadlines were moved with it", step)
        for live in self._live.values():
            if not live.ending and live.vm is not None:
                spawn(self._set_guest_clock(live.vm), f"clock of {live.sandbox_id}")

    async def _set_guest_clock(self, vm: Vm) -> None:
        """A guest's clock runs on by itself, and stands while it is paused: give it the right time."""
        with contextlib.suppress(GreenroomError):
            async with self._returns.of("the node's own"):
                await self._runtime.introduce(
                    vm, Identity(entropy=secrets.token_bytes(64)), self._config.claims.handover_deadline
                )

    async def _go_on(self, live: Live) -> None:
        if live.vm is not None:
            with contextlib.suppress(GreenroomError):
                await self._runtime.resume(live.vm)
                await self._set_guest_clock(live.vm)

    def _enter(self, live: Live) -> None:
        """A sandbox counts from here on."""
        self._live[live.sandbox_id] = live
        live.wake = self.wake
        live.told = self._tell
        self._tell(live)
        self.names.take(live.sandbox_id, live.owner, live.sandbox.name)
        live.history.note(self._clock.now(), "it runs" if live.vm is not None else "it is paused")
        self._set_deadline(live)
        self._watch(live)

    def _tell(self, live: Live) -> None:
        """Let followers know what `list` says of a sandbox from now on, or what stays of it. Called wherever its record
        is replaced, so no way of changing one can forget it."""
        shown = live.sandbox if live.shown else self.remains.get(live.sandbox_id)
        if shown is live.published:
            return
        live.published = shown
        if shown is None:
            self.changes.drop(live.sandbox_id)
        else:
            self.changes.put(shown)

    def _watch(self, live: Live) -> None:
        """See when its present VM ends."""
        if live.vm is not None:
            spawn(self._watch_vm(live, live.vm), f"watch {live.sandbox_id}")

    async def _watch_vm(self, live: Live, vm: Vm) -> None:
        await vm.ended.wait()
        if live.vm is vm and not live.ending:
            _log.warning("sandbox %s ended by itself", live.sandbox.sandbox_id)
            await self.feed(live, lifecycle.VmEnded())

    async def open(self, vm: Vm, sandbox_id: str, network: Network) -> None:
        """Give a VM, which should not run yet, its sandbox's way out. Raises RuntimeFailure, BadRequest."""
        await self.gate.apply(vm, sandbox_id, network)

    async def stop_vm(self, vm: Vm) -> None:
        """End a VM, and its way out before it."""
        try:
            await self.gate.close(vm)
        finally:
            await self._runtime.stop(vm)

    async def __aenter__(self) -> Residents:
        self._reaper = spawn(self._reap(), "timeouts")
        if (interval := self._config.nodes.sample_interval) > 0 and self._config.vm.engine != "simulated":
            self._sampler = spawn(Sampler(self.sampled, self._clock.now, interval).run(), "samples")
        return self

    def leave_running(self) -> None:
        """At the end, let go of the sandboxes instead of ending them: the next run adopts them."""
        self._leaving = True

    async def __aexit__(self, *_exc: object) -> None:
        working = [live.work for live in self._live.values()]
        await stop(self._reaper, self._sampler, *working)
        if self._leaving:
            return
        # A paused sandbox needs nobody: it waits for the next run.
        running = [live for live in self._live.values() if live.life.phase != "paused"]
        await asyncio.gather(
            *(self.feed(live, lifecycle.Release("the node was stopped", asked=False)) for live in running)
        )

    def __len__(self) -> int:
        return len(self._live)

    def paused(self) -> int:
        """How many of them are paused."""
        return sum(live.life.phase == "paused" for live in self._live.values())

    def lookup(self, sandbox_id: str) -> Live | None:
        """The sandbox with this id for a request; one that is provisional, paused for good or ending is absent."""
        live = self._live.get(sandbox_id)
        return live if live is not None and live.reachable else None

    def known(self, sandbox_id: str) -> Live:
        """The sandbox with this id, running or paused. Raises UnknownSandbox."""
        live = self._live.get(sandbox_id)
        if live is None or not live.shown:
            raise unknown(sandbox_id)
        return live

    def get(self, sandbox_id: str, *, ended: bool = False) -> Sandbox:
        """Its record; with `ended` also one that stays of a sandbox that has ended. Raises UnknownSandbox."""
        stayed = self.remains.get(sandbox_id) if ended else None
        return self.known(sandbox_id).sandbox if stayed is None else stayed

    def list(self) -> list[Sandbox]:
        """All running and paused sandboxes; provisional ones are nobody's yet."""
        return [live.sandbox for live in self._live.values() if live.shown]

    def past(self, sandbox_id: str) -> Past:
        """Samples and log of a sandbox. Raises UnknownSandbox."""
        history = self.known(sandbox_id).history
        return Past(list(history.samples), list(history.entries))

    def sampled(self) -> Iterable[Asked]:
        """The guests of which samples are taken."""
        for live in self._live.values():
            if live.life.phase == "running" and live.vm is not None:
                yield live.history, live.vm, live.sandbox.token

    async def confirm(self, sandbox_id: str) -> Sandbox:
        """Its caller is about to be told of it; may be repeated. Raises UnknownSandbox when it came too late."""
        return await self._change(sandbox_id, lifecycle.Confirm())

    async def set_timeout(self, sandbox_id: str, request: TimeoutRequest) -> Sandbox:
        """Move the sandbox's end. Raises UnknownSandbox, also for a paused one, which has no end to move."""
        return await self._change(sandbox_id, lifecycle.Renew(request.ttl, request.extend_only))

    async def release(self, sandbox_id: str, reason: str = "it was killed", *, ended: bool = False) -> None:
        """End a sandbox and give everything of it back. Raises UnknownSandbox.

        With `ended` nothing of it stays, whatever is declared, and what stays of one that has ended is dropped.
        """
        if ended and self.remains.drop(sandbox_id, self._now()):
            return
        if ended and (live := self._live.get(sandbox_id)) is not None:
            live.stays = False
        await self._release(sandbox_id, lifecycle.Release(reason))

    async def evict(self, sandbox_id: str, reason: str) -> None:
        """End a sandbox that nobody wants to end, for the node's sake. Raises UnknownSandbox."""
        await self._release(sandbox_id, lifecycle.Release(reason, asked=False))

    async def _release(self, sandbox_id: str, event: lifecycle.Release) -> None:
        live = self._live.get(sandbox_id)
        if live is None or isinstance(await self.feed(live, event), lifecycle.Refused):
            raise unknown(sandbox_id)

    async def _change(self, sandbox_id: str, event: lifecycle.Event) -> Sandbox:
        live = self._live.get(sandbox_id)
        if live is None:
            raise unknown(sandbox_id)
        match await self.settled(live, event):
            case lifecycle.Refused() | lifecycle.End() | lifecycle.BeginPause():
                raise unknown(sandbox_id)
        return live.sandbox

    async def settled(self, live: Live, event: lifecycle.Event) -> lifecycle.Outcome:
        """Feed an event, once no pause or resume is in its way."""
        while isinstance(outcome := await self.feed(live, event), lifecycle.Busy):
            await self.unoccupied(live)
        return outcome

    async def unoccupied(self, live: Live) -> None:
        """Return when what pauses, resumes or rolls a sandbox back at present is done with it."""
        if live.work is None or live.work.done():
            # Its end is told in the same turn as it ends: to be here is a fault, and must not become a busy loop.
            raise InternalError(
                f"sandbox {live.sandbox_id} is {live.life.phase}, and nothing works on it; kill it"
            )
        await asyncio.wait({live.work})

    async def feed(self, live: Live, event: lifecycle.Event) -> lifecycle.Outcome:
        """Give an event to a sandbox's state machine and do what it says.

        A change counts once it is written down; an end does not wait for the journal.
        """
        now = self._now()
        after, outcome = live.life.handle(event, now)
        match outcome:
            case lifecycle.Changed():
                confirm_by = after.confirm_by if after.phase == "provisional" else None
                changed = msgspec.structs.replace(live.sandbox, ends_at=after.ends_at, confirm_by=confirm_by)
                self._journal.save(live.key, changed, now)
                # The record first: what is confirmed is not shown as it was before.
                live.sandbox = changed
                live.life = after
                if isinstance(event, lifecycle.Renew):
                    live.history.note(now, "its end was moved", seconds=f"{after.ends_at - now:.0f}")
                self._set_deadline(live)
            case lifecycle.End(reason, by_itself):
                if stayed := live.shown and live.stays and stays(live.sandbox, by_itself=by_itself):
                    # Before its life: at no time is it told that it is gone.
                    self.remains.keep(live.key, live.sandbox, reason, now)
                live.life = after
                live.history.note(now, f"it ends: {reason}")
                await self._end(live, reason, stayed)
            case lifecycle.BeginPause(memory):
                live.life = after
                self._set_deadline(live)
                self.begin_pause(live, live.sandbox.lifespan.pause_memory if memory is None else memory)
            case lifecycle.BeginResume(ttl, memory):
                live.life = after
                self.begin_resume(live, ttl, memory)
            case lifecycle.BeginReplace():
                live.life = after
                self._set_deadline(live)
        return outcome

    @abc.abstractmethod
    async def wake(self, live: Live) -> None:
        """Have a sandbox run for a request; see `suspending`."""

    @abc.abstractmethod
    def begin_pause(self, live: Live, memory: bool) -> None:
        """Start the work of a pause; see `suspending`."""

    @abc.abstractmethod
    def begin_resume(self, live: Live, ttl: float, memory: bool) -> None:
        """Start the work of a resume; see `suspending`."""

    @abc.abstractmethod
    def discard(self, live: Live) -> Awaitable[None]:
        """Remove what a sandbox keeps on disk while it is paused; see `suspending`."""

    def turn(self, live: Live, event: lifecycle.Event) -> None:
        """Tell the state machine how a pause or resume went; the journal knows it already, or never will."""
        live.life, _ = live.life.handle(event, self._now())
        self._set_deadline(live)

    def _set_deadline(self, live: Live) -> None:
        if not live.ending:
            self._set_due(live.sandbox_id, live.life.due())

    def _set_drop(self, sandbox_id: str) -> None:
        """Let what stays of an ended sandbox be dropped in time."""
        self._set_due(sandbox_id, self.remains.until(sandbox_id))

    def _set_due(self, sandbox_id: str, due: float | None) -> None:
        if due is None:
            self._deadlines.drop(sandbox_id)
            return
        self._deadlines.set(sandbox_id, due)
        if due < self._looks_at:
            self._moved.set()

    def disk_use(self) -> dict[str, int]:
        """Bytes of host disk that each running sandbox takes."""
        return {
            live.sandbox_id: self._runtime.disk_use(live.vm)
            for live in self._live.values()
            if not live.ending and live.vm is not None
        }

    async def revive(self) -> int:
        """Let guests go on that a full disk had stopped. Returns how many there were."""
        revived = 0
        for live in list(self._live.values()):
            with contextlib.suppress(GreenroomError):
                revived += live.life.phase == "running" and (
                    live.vm is not None and await self._runtime.revive(live.vm)
                )
        return revived

    async def _end(self, live: Live, reason: str, stayed: bool) -> None:
        """Take a sandbox down that its state machine has ended; its record may have `stayed`."""
        counted.ENDED.labels(counted.end_reason(reason)).inc()
        sandbox_id = live.sandbox_id
        self._set_drop(sandbox_id)
        if not stayed:
            self._write_end(live, reason)
            self.names.free(sandbox_id, live.owner, live.sandbox.name)
        with contextlib.suppress(OSError):
            await self.cut(sandbox_id)
        try:
            if live.work is not None:
                # It undoes what it had begun; a VM that it has just made is `live.vm` by then, or gone.
                await stop(live.work)
            if live.vm is not None:
                await asyncio.shield(self.stop_vm(live.vm))
            await asyncio.shield(self.discard(live))
        finally:
            self._live.pop(sandbox_id, None)

    def _write_end(self, live: Live, reason: str) -> None:
        try:
            self._journal.end(live.key, reason, self._clock.now())
        except GreenroomError as error:
            # An end must never wait for a disk: it is what makes room on it. The next start sees that the VM
            # is gone and ends the claim.
            _log.error("the end of %s could not be written down: %s", live.sandbox_id, error.message)

    def _drop_stayed(self, sandbox_id: str, now: float) -> bool:
        """The time of what stays of an ended sandbox is over. False when there is none."""
        try:
            return self.remains.drop(sandbox_id, now)
        except GreenroomError as error:
            _log.error("the record of %s could not be dropped yet: %s", sandbox_id, error.message)
            self._set_due(sandbox_id, now + _TRY_AGAIN)
            return True

    async def _reap(self) -> None:
        """End or pause sandboxes whose time is up, and forget what has been kept of ended ones for long enough."""
        forget_at = 0.0
        while True:
            self._moved.clear()
            now = self._now()
            if self._stamped != self._clock.reference:
                self._restamp()
            for sandbox_id in self._deadlines.due(now):
                if self._drop_stayed(sandbox_id, now):
                    continue
                if (live := self._live.get(sandbox_id)) is not None:
                    spawn(self.feed(live, lifecycle.Tick()), f"time-out of {sandbox_id}")
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


async def _nothing_to_cut(_sandbox_id: str) -> None:
    """Before there is a relay there are no connections."""
