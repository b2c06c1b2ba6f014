"""Pausing a sandbox to disk and bringing it back; waking one for a request.

A pause is: stop the CPUs, save memory, devices and disk as a snapshot that is on disk for good, write that down, stop
the VM. The journal turns the switch: until it says `paused` the VM counts, from then on the snapshot does, and
whichever does not count is removed, at once or by the next run. A resume goes the other way. So a sandbox is never
in both states or in none, wherever the node dies.

A paused sandbox has no process, no memory and no time-out, keeps its id, token, metadata and variables, and its
guest gets fresh entropy and the right time before anybody is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable

import msgspec

from greenroom.errors import (
    AlreadyPaused,
    BadRequest,
    GreenroomError,
    InternalError,
    SnapshotDamaged,
    UnknownSnapshot,
)
from greenroom.node import lifecycle
from greenroom.node import metrics as counted
from greenroom.node.journal import Inner
from greenroom.node.reaching import Reaching
from greenroom.node.residents import Live, unknown
from greenroom.runtime.engine import Identity, Snapshot, Vm, disk_of
from greenroom.wire.ids import ASLEEP
from greenroom.wire.messages import Resumed, Sandbox
from greenroom.wire.tasks import spawn

_log = logging.getLogger(__name__)
LEAST_WOKEN = 300.0
"""Seconds that a sandbox woken by a request runs at least; else as long as it was made for (E2B's rule)."""
SYNC_DEADLINE = 20.0
"""Seconds that a guest gets to write its file systems out before its disk alone is saved."""
BRIEF_SYNC = 3.0
"""The same before its memory is saved too: what it has not written by then is in there, and missed only by who boots
its disk without it."""


def identity_of(sandbox: Sandbox, inner: Inner) -> Identity:
    """All that makes a guest this sandbox, with entropy that it has never had."""
    return Identity(
        entropy=secrets.token_bytes(64),
        machine_id=inner.machine_id or None,
        hostname=sandbox.sandbox_id,
        sandbox_id=sandbox.sandbox_id,
        template_id=sandbox.template,
        env=dict(inner.env),
        token=sandbox.token,
    )


def _told(error: Exception) -> GreenroomError:
    """What is said of an error; one that nobody foresaw is in the log with its traceback."""
    if isinstance(error, GreenroomError):
        return error
    _log.error("a sandbox could not be moved to or from the disk", exc_info=error)
    return InternalError("something went wrong that nobody foresaw; the node's log has it")


class Suspending(Reaching):
    """Residents that can be paused and resumed."""

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> Sandbox:
        """Pause a sandbox. Raises AlreadyPaused, UnknownSandbox, or RuntimeFailure when it could not be and runs on."""
        live = self.known(sandbox_id)
        match await self.settled(live, lifecycle.Pause(memory)):
            case lifecycle.BeginPause():
                await self._worked(live)
                return live.sandbox
            case lifecycle.Unchanged():
                raise AlreadyPaused(f"sandbox {sandbox_id} is paused already")
        raise unknown(sandbox_id)

    async def resume(self, sandbox_id: str, ttl: float, *, memory: bool = True) -> Resumed:
        """Let a paused sandbox run for `ttl` seconds; one that runs is given at least as long.

        Without `memory` it boots from its disk, also where its memory was kept: that is then gone.

        Raises UnknownSandbox, or why it could not be resumed; it stays paused then.
        """
        live = self.known(sandbox_id)
        if ttl <= 0 and live.life.phase in ("pausing", "paused"):
            # It would end at once, and what was kept of it with it.
            raise BadRequest("timeout: a paused sandbox is resumed for 1 second at least")
        match await self.settled(live, lifecycle.Resume(ttl, memory)):
            case lifecycle.BeginResume():
                await self._worked(live)
                return Resumed(live.sandbox, resumed=True)
            case lifecycle.Unchanged():
                await self._change(sandbox_id, lifecycle.Renew(ttl, extend_only=True))
                return Resumed(live.sandbox, resumed=False)
        raise unknown(sandbox_id)

    async def roll_back(self, sandbox_id: str, snapshot: Snapshot) -> Sandbox:
        """Let a running sandbox go on from a snapshot, as itself: its id, token, variables and time-out stay.

        Raises UnknownSandbox, BadRequest for a paused one, or why it could not be; it goes on as it was then.
        """
        live = self.known(sandbox_id)
        match await self.settled(live, lifecycle.Replace()):
            case lifecycle.BeginReplace():
                live.work = spawn(self._roll_back(live, snapshot), f"roll back {sandbox_id}")
                await self._worked(live)
                return live.sandbox
            case lifecycle.Refused() if live.life.phase == "paused":
                raise BadRequest(f"sandbox {sandbox_id} is paused; resume it first")
        raise unknown(sandbox_id)

    async def wake(self, live: Live) -> None:
        while live.life.phase != "running":
            if not live.reachable:
                raise unknown(live.sandbox_id)
            ttl = max(live.inner.ttl, LEAST_WOKEN)
            if not isinstance(await self.settled(live, lifecycle.Resume(ttl)), lifecycle.Unchanged):
                await self._worked(live)

    async def _worked(self, live: Live) -> None:
        """Wait for a pause or resume that was begun. Raises what it failed with, UnknownSandbox when it was ended."""
        work = live.work
        if work is None:
            raise unknown(live.sandbox_id)
        await asyncio.wait({work})
        if work.cancelled() or live.ending:
            raise unknown(live.sandbox_id)
        if (error := work.result()) is not None:
            raise error

    def begin_pause(self, live: Live, memory: bool) -> None:
        live.work = spawn(self._pause(live, memory), f"pause {live.sandbox_id}")

    def begin_resume(self, live: Live, ttl: float, memory: bool) -> None:
        live.work = spawn(self._resume(live, ttl, memory), f"resume {live.sandbox_id}")

    async def _pause(self, live: Live, memory: bool) -> GreenroomError | None:
        begun = time.perf_counter()
        vm = live.vm
        assert vm is not None  # noqa: S101
        with contextlib.suppress(OSError):
            await self.cut(live.sandbox_id)
        snapshot: Snapshot | None = None
        try:
            async with live.capturing:
                # With its memory too: it may be resumed from its disk alone.
                await self.sync(live, BRIEF_SYNC if memory else SYNC_DEADLINE)
                await self._runtime.pause(vm)
                name = f"{ASLEEP}{live.sandbox_id}-{secrets.token_hex(4)}"
                snapshot = (await self._runtime.capture(vm, name, memory=memory)).snapshot
            sandbox = msgspec.structs.replace(live.sandbox, state="paused", paused_memory=memory)
            inner = msgspec.structs.replace(live.inner, asleep=snapshot)
            self._journal.settle(live.key, sandbox, inner, None, self._now())
        except BaseException as error:
            if snapshot is not None:
                await asyncio.shield(self.forget(snapshot))
            if not isinstance(error, Exception):
                raise
            told = _told(error)
            _log.warning("%s could not be paused: %s", live.sandbox_id, told.message)
            live.history.note(self._clock.now(), f"it could not be paused: {told.message}", "error")
            counted.PAUSES.labels("failed").inc()
            if not live.ending:
                await self._go_on(live)
                self.turn(live, lifecycle.PauseFailed())
            return told
        live.sandbox, live.inner, live.vm = sandbox, inner, None
        self.turn(live, lifecycle.Paused())
        counted.PAUSES.labels("ok").inc()
        live.history.note(self._clock.now(), "it was paused", kept="memory and disk" if memory else "disk")
        counted.PAUSE_SECONDS.observe(time.perf_counter() - begun)
        _log.info("paused %s, %s its memory", live.sandbox_id, "with" if memory else "without")
        await asyncio.shield(self.stop_vm(vm))
        return None

    async def sync(self, live: Live, deadline: float = SYNC_DEADLINE) -> None:
        """Have the guest write its file systems out. One that does not answer is saved as its disk is."""
        if live.vm is None:
            return
        try:
            await self._runtime.sync(live.vm, deadline)
        except GreenroomError as error:
            _log.warning(
                "the guest of %s did not sync before its disk is saved: %s", live.sandbox_id, error.message
            )

    async def _resume(self, live: Live, ttl: float, memory: bool) -> GreenroomError | None:
        begun = time.perf_counter()
        kept = live.inner.asleep
        boots = not memory or kept is None or kept.kind == "filesystem"
        try:
            if kept is None:
                raise UnknownSnapshot(f"there is nothing that {live.sandbox_id} could be resumed from")
            vm = await self._restored(live, disk_of(kept) if boots else kept)
            try:
                now = self._now()
                sandbox = msgspec.structs.replace(
                    live.sandbox, state="running", ends_at=now + ttl, paused_memory=None
                )
                inner = msgspec.structs.replace(live.inner, asleep=None, ttl=ttl)
                self._journal.settle(live.key, sandbox, inner, vm.name, now)
            except BaseException:
                await asyncio.shield(self.stop_vm(vm))
                raise
        except Exception as error:
            told = _told(error)
            if isinstance(error, SnapshotDamaged):
                way = "kill it" if boots else "boot its disk alone (connect with memory: false), or kill it"
                told = SnapshotDamaged(
                    f"what was kept of {live.sandbox_id} is damaged ({error.message}); {way}"
                )
            _log.warning("%s could not be resumed: %s", live.sandbox_id, told.message)
            live.history.note(self._clock.now(), f"it could not be resumed: {told.message}", "error")
            counted.RESUMES.labels("failed").inc()
            if not live.ending:
                self.turn(live, lifecycle.ResumeFailed())
            return told
        live.sandbox, live.inner, live.vm = sandbox, inner, vm
        self.turn(live, lifecycle.Resumed(ttl))
        self._watch(live)
        counted.RESUMES.labels("ok").inc()
        how = "it was resumed by booting its disk" if boots else "it was resumed"
        live.history.note(self._clock.now(), how, seconds=f"{ttl:.0f}")
        counted.RESUME_SECONDS.observe(time.perf_counter() - begun)
        _log.info("resumed %s on %s", live.sandbox_id, vm.name)
        await asyncio.shield(self.forget(kept))
        return None

    async def _roll_back(self, live: Live, snapshot: Snapshot) -> GreenroomError | None:
        before = live.vm
        assert before is not None  # noqa: S101
        try:
            async with live.capturing:
                vm = await self._restored(live, snapshot)
            try:
                self._journal.settle(live.key, live.sandbox, live.inner, vm.name, self._now())
            except BaseException:
                await asyncio.shield(self.stop_vm(vm))
                raise
        except Exception as error:
            told = _told(error)
            _log.warning("%s could not be rolled back: %s", live.sandbox_id, told.message)
            live.history.note(self._clock.now(), f"it could not be rolled back: {told.message}", "error")
            if not live.ending:
                self.turn(live, lifecycle.Replaced())
                if before.ended.is_set():
                    # Spawned, because ending it stops this work.
                    spawn(self.feed(live, lifecycle.VmEnded()), f"end {live.sandbox_id}")
            return told
        live.vm = vm
        self.turn(live, lifecycle.Replaced())
        self._watch(live)
        live.history.note(self._clock.now(), "it was rolled back", snapshot=snapshot.name)
        _log.info("rolled %s back to %s", live.sandbox_id, snapshot.name)
        with contextlib.suppress(OSError):
            await self.cut(live.sandbox_id)
        await asyncio.shield(self.stop_vm(before))
        return None

    async def _restored(self, live: Live, snapshot: Snapshot) -> Vm:
        """A running VM from `snapshot` that is this sandbox. Raises after removing what it had made."""
        vm = await self._runtime.restore(snapshot)
        try:
            await self._runtime.hand_out(vm)
            await self.open(vm, live.sandbox_id, live.sandbox.network)
            async with self._returns.of(live.owner):
                await self._runtime.start(vm)
                await self._runtime.introduce(
                    vm, identity_of(live.sandbox, live.inner), self.deadline_for(snapshot)
                )
        except BaseException:
            await asyncio.shield(self.stop_vm(vm))
            raise
        return vm

    def deadline_for(self, snapshot: Snapshot) -> float:
        """Seconds that a guest gets to take its identity: one without memory boots first."""
        extra = 0.0 if snapshot.kind == "full" else self._config.vm.boot_deadline
        return self._config.claims.handover_deadline + extra

    async def forget(self, snapshot: Snapshot) -> None:
        """Remove a snapshot that nothing needs any more; one that cannot be is logged."""
        try:
            await self._runtime.delete_snapshot(snapshot.name)
        except UnknownSnapshot:
            pass
        except GreenroomError as error:
            _log.warning(
                "the snapshot %s is left for the next start to remove: %s", snapshot.name, error.message
            )

    def discard(self, live: Live) -> Awaitable[None]:
        return self._nothing() if live.inner.asleep is None else self.forget(live.inner.asleep)

    async def _nothing(self) -> None:
        """A sandbox that runs keeps nothing."""

    async def tidy(self) -> int:
        """Remove snapshots that a dead node left and nothing needs; call once, after `adopt`. Returns how many."""
        wanted = {live.inner.asleep.name for live in self._live.values() if live.inner.asleep is not None}
        wanted |= set(self._journal.snapshots())
        removed = 0
        for snapshot in await self._runtime.snapshots():
            if snapshot.name not in wanted:
                await self.forget(snapshot)
                removed += 1
        return removed
