"""One sandbox from its hand-over to its end, as a pure state machine: no I/O and no clock of its own.

    provisional --confirm--> running --release, time-out, VM gone--> ended
         |------release, nobody confirmed, VM gone------------------^

A sandbox that was handed over is *provisional*: its caller may never have heard of it. The api confirms it just
before it answers its client; one that nobody confirmed in time is ended, so that a lost answer costs seconds
and not the whole time-out. A provisional one is not shown, not reached and not renewed. Whatever comes in
whatever order, an ended one stays ended, and it is ended once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["provisional", "running", "ended"]

UNCONFIRMED = "nobody confirmed it in time"
TIME_UP = "its time was up"
VM_GONE = "its VM ended by itself"


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
    """End it, for this reason."""

    reason: str


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


Event = Confirm | Renew | Release | VmEnded | Tick | ClockStepped


@dataclass(frozen=True, slots=True)
class Changed:
    """Something that must be remembered is different now."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """All was so already, or there is nothing to do yet."""


@dataclass(frozen=True, slots=True)
class End:
    """Destroy it, now and only this once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no such sandbox (any more, or for this caller yet)."""


Outcome = Changed | Unchanged | End | Refused


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """See the module. Times are Unix seconds, because they outlive the process. Events give a new one."""

    confirm_by: float
    ends_at: float
    phase: Phase = "provisional"

    def due(self) -> float | None:
        """When `Tick` will end it, unless something comes between."""
        match self.phase:
            case "provisional":
                return min(self.confirm_by, self.ends_at)
            case "running":
                return self.ends_at
            case "ended":
                return None

    def handle(self, event: Event, now: float) -> tuple[Lifecycle, Outcome]:
        """What becomes of it when `event` comes at `now`. Nothing is changed here, so a caller that cannot
        write the change down can go on with what was."""
        due = self.due()
        if due is None:
            return self, Unchanged() if isinstance(event, VmEnded | Tick | ClockStepped) else Refused()
        if isinstance(event, ClockStepped):
            # Before time decides: by the clock that was set, it is another time than its deadlines mean.
            step = event.seconds
            return replace(self, confirm_by=self.confirm_by + step, ends_at=self.ends_at + step), Changed()
        if now >= due:
            # Time decides before anything else: a confirmation that comes too late is too late.
            late = self.phase == "provisional" and due == self.confirm_by
            return self._ended(UNCONFIRMED if late else TIME_UP)
        match event:
            case Confirm():
                return (
                    (self, Unchanged())
                    if self.phase == "running"
                    else (replace(self, phase="running"), Changed())
                )
            case Renew(ttl, extend_only):
                if self.phase == "provisional":
                    return self, Refused()
                ends_at = now + max(0.0, ttl)
                if ends_at == self.ends_at or (extend_only and ends_at < self.ends_at):
                    return self, Unchanged()
                return replace(self, ends_at=ends_at), Changed()
            case Release(reason):
                return self._ended(reason)
            case VmEnded():
                return self._ended(VM_GONE)
            case Tick():
                return self, Unchanged()

    def _ended(self, reason: str) -> tuple[Lifecycle, End]:
        return replace(self, phase="ended"), End(reason)
