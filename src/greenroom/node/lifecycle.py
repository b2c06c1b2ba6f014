"""One sandbox from its hand-over to its end, as a pure state machine: no I/O and no clock of its own.

    provisional --confirm--> running --release, time-out, VM gone----------> ended
         |                    |   ^                                           ^
         |     pause, time-out|   |could not be paused                        |
         |                    v   |                                           |
         |                   pausing --> paused --resume--> resuming ---------|  release, at any time
         |                                  ^----could not be----|  |         |
         |                                                  running<          |
         |------release, nobody confirmed, VM gone----------------------------^

A rollback gives a running one another VM (`replacing`), and it runs on whether that went well or not.

A sandbox that was handed over is *provisional*: its caller may never have heard of it. The api confirms it just
before it answers its client; one that nobody confirmed in time is ended, so that a lost answer costs seconds
and not the whole time-out. A provisional one is not shown, not reached and not renewed. Whatever comes in
whatever order, an ended one stays ended, and it is ended once.

Pausing and resuming take a while. They are begun by an outcome (`BeginPause`, `BeginResume`) and finished by an
event that tells how they went; what comes meanwhile and cannot be judged yet is `Busy` and is asked again after.
A sandbox that is to be paused at its time-out and cannot be (a full disk) goes on running and is tried again: what
is in it is worth more than the time that it takes. A paused one has no time-out.

Apart from its time-out it may have a *shutdown time*, which ends it wherever it stands, a paused one too. It counts
from its confirmation on: what somebody asked for with a time that has passed was theirs, and then ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["provisional", "running", "pausing", "paused", "resuming", "replacing", "ended"]

UNCONFIRMED = "nobody confirmed it in time"
TIME_UP = "its time was up"
SHUT_DOWN = "its shutdown time came"
VM_GONE = "its VM ended by itself"

RETRY_FIRST, RETRY_LAST = 5.0, 60.0
"""Seconds until a pause at the time-out that failed is tried again: doubling from the first to the last."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """The api is about to answer its client."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Let it end `ttl` seconds from now; with `extend_only`, never earlier than it would already."""

    ttl: float
    extend_only: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """End it, for this reason. `asked` when somebody whose it is wants it; else the node does, for its own sake."""

    reason: str
    asked: bool = True


@dataclass(frozen=True, slots=True)
class ShutDownAt:
    """This is its shutdown time from now on, or it has none."""

    when: float | None


@dataclass(frozen=True, slots=True)
class VmEnded:
    """Its VM is gone."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class ClockStepped:
    """The wall clock was set forward by this many seconds (back, if negative): deadlines go with it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Somebody wants it paused, with what is in its memory or with its disk alone."""

    memory: bool = True


@dataclass(frozen=True, slots=True)
class Paused:
    """It was: all of it is on disk, and its VM is no more."""


@dataclass(frozen=True, slots=True)
class PauseFailed:
    """It was not, and its VM runs on."""


@dataclass(frozen=True, slots=True)
class Resume:
    """It is wanted to run for `ttl` seconds: where it stood, or else booted from its disk."""

    ttl: float
    memory: bool = True


@dataclass(frozen=True, slots=True)
class Resumed:
    """It runs again, and ends `ttl` seconds from now."""

    ttl: float


@dataclass(frozen=True, slots=True)
class ResumeFailed:
    """It stays paused."""


@dataclass(frozen=True, slots=True)
class Replace:
    """It is wanted to go on from an earlier state."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """It does, or it could not be and goes on as it was."""


Event = (
    Confirm
    | Renew
    | Release
    | ShutDownAt
    | VmEnded
    | Tick
    | ClockStepped
    | Pause
    | Paused
    | PauseFailed
    | Resume
    | Resumed
    | ResumeFailed
    | Replace
    | Replaced
)


@dataclass(frozen=True, slots=True)
class Changed:
    """Something that must be remembered is different now."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """All was so already, or there is nothing to do yet."""


@dataclass(frozen=True, slots=True)
class End:
    """Destroy it, now and only this once. `by_itself`: it was somebody's, and nobody has asked for its end."""

    reason: str
    by_itself: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no such sandbox (any more, or for this caller yet)."""


@dataclass(frozen=True, slots=True)
class BeginPause:
    """Write it to disk and stop its VM, then tell how it went. `memory` is None when nobody asked: as it was made."""

    memory: bool | None = None


@dataclass(frozen=True, slots=True)
class BeginResume:
    """Let it run again, for `ttl` seconds, then tell how it went. Without `memory` what was kept of it is left."""

    ttl: float
    memory: bool = True


@dataclass(frozen=True, slots=True)
class BeginReplace:
    """Give it another VM, then tell."""


@dataclass(frozen=True, slots=True)
class Busy:
    """It is being paused, resumed or rolled back: ask again when that is over."""


Outcome = Changed | Unchanged | End | Refused | BeginPause | BeginResume | BeginReplace | Busy


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """See the module. Times are Unix seconds, because they outlive the process. Events give a new one."""

    confirm_by: float
    ends_at: float
    phase: Phase = "provisional"
    pauses: bool = False
    """At its time-out it is paused instead of ended."""
    shutdown_at: float | None = None
    failures: int = 0
    """Pauses at its time-out that failed since it was last renewed or resumed."""
    retry_at: float = 0.0

    def due(self) -> float | None:
        """When `Tick` will end or pause it, unless something comes between."""
        match self.phase:
            case "provisional":
                return min(self.confirm_by, self.ends_at)
            case "ended":
                return None
            case _:
                times = [when for when in (self._time_up_at(), self.shutdown_at) if when is not None]
                return min(times, default=None)

    def _time_up_at(self) -> float | None:
        """When its time-out counts, of which only a running one has any."""
        if self.phase != "running":
            return None
        return max(self.ends_at, self.retry_at) if self.failures else self.ends_at

    def _must_shut_down(self, now: float) -> bool:
        return self.shutdown_at is not None and now >= self.shutdown_at

    def handle(self, event: Event, now: float) -> tuple[Lifecycle, Outcome]:
        """What becomes of it when `event` comes at `now`. Nothing is changed here, so a caller that cannot
        write the change down can go on with what was."""
        if isinstance(event, ClockStepped) and self.phase != "ended":
            # Before time decides: by the clock that was set, it is another time than its deadlines mean.
            step = event.seconds
            moved = replace(
                self,
                confirm_by=self.confirm_by + step,
                ends_at=self.ends_at + step,
                retry_at=self.retry_at + step if self.failures else 0.0,
                shutdown_at=None if self.shutdown_at is None else self.shutdown_at + step,
            )
            return moved, Changed()
        if self.phase not in ("provisional", "ended"):
            if isinstance(event, ShutDownAt):
                # Before time decides too: until the old one is carried out, it may be moved.
                return replace(self, shutdown_at=event.when), Changed()
            if isinstance(event, Tick | Renew | Pause | Resume | Replace) and self._must_shut_down(now):
                return self._ended(SHUT_DOWN)
        match self.phase:
            case "provisional":
                return self._provisional(event, now)
            case "running":
                return self._running(event, now)
            case "pausing":
                return self._pausing(event, now)
            case "paused":
                return self._paused(event)
            case "resuming":
                return self._resuming(event, now)
            case "replacing":
                return self._replacing(event)
            case "ended":
                over = isinstance(event, Confirm | Renew | Release | ShutDownAt | Pause | Resume | Replace)
                return self, Refused() if over else Unchanged()

    def _provisional(self, event: Event, now: float) -> tuple[Lifecycle, Outcome]:
        due = self.due()
        if due is not None and now >= due:
            # Time decides before anything else: a confirmation that comes too late is too late.
            return self._ended(UNCONFIRMED if self.confirm_by <= self.ends_at else TIME_UP)
        match event:
            case Confirm():
                return replace(self, phase="running"), Changed()
            case Release(reason, asked):
                return self._ended(reason, asked)
            case VmEnded():
                return self._ended(VM_GONE)
            case Tick():
                return self, Unchanged()
            case _:
                return self, Refused()

    def _running(self, event: Event, now: float) -> tuple[Lifecycle, Outcome]:
        match event:
            case Release(reason, asked):
                return self._ended(reason, asked)
            case VmEnded():
                return self._ended(VM_GONE)
        time_up_at = self._time_up_at()
        if time_up_at is not None and now >= time_up_at:
            return self._begin_pause() if self.pauses else self._ended(TIME_UP)
        match event:
            case Renew(ttl, extend_only):
                ends_at = now + max(0.0, ttl)
                if ends_at == self.ends_at or (extend_only and ends_at < self.ends_at):
                    return self, Unchanged()
                return replace(self, ends_at=ends_at, failures=0, retry_at=0.0), Changed()
            case Pause(memory):
                return self._begin_pause(memory)
            case Replace():
                return replace(self, phase="replacing"), BeginReplace()
            case _:
                return self, Unchanged()

    def _pausing(self, event: Event, now: float) -> tuple[Lifecycle, Outcome]:
        match event:
            case Release(reason, asked):
                return self._ended(reason, asked)
            case VmEnded():
                return self._ended(VM_GONE)
            case Paused():
                return replace(self, phase="paused", failures=0, retry_at=0.0), Changed()
            case PauseFailed():
                if now < self.ends_at:
                    return replace(self, phase="running"), Changed()
                wait = min(RETRY_FIRST * 2.0**self.failures, RETRY_LAST)
                failures = min(self.failures + 1, 16)
                return replace(self, phase="running", failures=failures, retry_at=now + wait), Changed()
            case Pause() | Resume() | Renew() | Replace():
                return self, Busy()
            case _:
                return self, Unchanged()

    def _paused(self, event: Event) -> tuple[Lifecycle, Outcome]:
        match event:
            case Release(reason, asked):
                return self._ended(reason, asked)
            case Resume(ttl, memory):
                return replace(self, phase="resuming"), BeginResume(ttl, memory)
            case Renew() | Replace():
                return self, Refused()
            case _:
                return self, Unchanged()

    def _resuming(self, event: Event, now: float) -> tuple[Lifecycle, Outcome]:
        match event:
            case Release(reason, asked):
                return self._ended(reason, asked)
            case Resumed(ttl):
                return replace(self, phase="running", ends_at=now + max(0.0, ttl)), Changed()
            case ResumeFailed():
                return replace(self, phase="paused"), Changed()
            case Pause() | Resume() | Renew() | Replace():
                return self, Busy()
            case _:
                return self, Unchanged()

    def _replacing(self, event: Event) -> tuple[Lifecycle, Outcome]:
        match event:
            case Release(reason, asked):
                return self._ended(reason, asked)
            case Replaced():
                return replace(self, phase="running"), Changed()
            case Pause() | Resume() | Renew() | Replace():
                return self, Busy()
            case _:
                return self, Unchanged()

    def _begin_pause(self, memory: bool | None = None) -> tuple[Lifecycle, BeginPause]:
        return replace(self, phase="pausing"), BeginPause(memory)

    def _ended(self, reason: str, asked: bool = False) -> tuple[Lifecycle, End]:
        by_itself = not asked and self.phase != "provisional"
        return replace(self, phase="ended"), End(reason, by_itself)
