"""What the supervisor decides: a state machine that takes events and returns instructions, with no I/O.

`supervisor` is its shell: it starts and signals processes, reads their pipes, and feeds what happens in here
together with a monotonic time in seconds. One role process goes through

    waiting ─▶ starting ─▶ ready ─▶ backoff ─▶ starting … ─▶ stopping ─▶ gone

Roles start in stages (a stage begins when every role of the stages before it is ready) and stop kind by kind,
each kind after the one before it is gone. A role that ends before it was ever ready, while the platform is
still coming up, ends the whole start: its cause is nearly always a setting or a missing tool, and repeating
would hide it. Later the same role is started again after a pause that doubles.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

START_ORDER: tuple[tuple[str, ...], ...] = (("master",), ("node", "api"), ("proxy",))
"""Kinds of role by stage: a node and an api register with a master, a proxy needs an api to send to."""
STOP_ORDER: tuple[str, ...] = ("proxy", "api", "node", "master")
"""Kinds of role in the order in which they stop: first what clients reach, last what the others report to."""

BACKOFF_FIRST = 0.5
"""Seconds before the first restart of a role that died; doubles with each further death."""
BACKOFF_LAST = 30.0
"""Upper bound of that pause, seconds."""
STEADY_AFTER = 60.0
"""Seconds of life after which a role's earlier deaths are forgotten."""


class Phase(enum.StrEnum):
    """Where one role process is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    GONE = "gone"


class RolePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One role to keep alive: its unique name, its kind, seconds to get ready and to end after SIGTERM."""

    name: str
    kind: str
    start_deadline: float
    """A role that reports progress gets this long again from each report on."""
    stop_deadline: float


# Events


class Begin(msgspec.Struct, frozen=True):
    """Start the platform."""


class BecameReady(msgspec.Struct, frozen=True):
    """A role said that it takes requests."""

    name: str


class MadeProgress(msgspec.Struct, frozen=True):
    """A role that is still starting said how far it is."""

    name: str


class Exited(msgspec.Struct, frozen=True):
    """A role's process ended (or could not be started); `how` says it in plain words."""

    name: str
    how: str


class StopAsked(msgspec.Struct, frozen=True):
    """Somebody wants the platform to stop; a second time means at once."""


class Elapsed(msgspec.Struct, frozen=True):
    """`wake_at` has come."""


Event = Begin | BecameReady | MadeProgress | Exited | StopAsked | Elapsed

# Instructions


class Spawn(msgspec.Struct, frozen=True):
    """Start the role's process."""

    name: str


class Terminate(msgspec.Struct, frozen=True):
    """Ask the role to end (SIGTERM)."""

    name: str


class Kill(msgspec.Struct, frozen=True):
    """End the role and what it left in its process group (SIGKILL)."""

    name: str


class Announce(msgspec.Struct, frozen=True):
    """Tell the user and the log something worth a line about a role."""

    name: str
    text: str


class AllReady(msgspec.Struct, frozen=True):
    """Every role has become ready: the start is over. Given once."""


class Finished(msgspec.Struct, frozen=True):
    """No role lives and none will be started. `failure` says why the start failed; empty when it did not."""

    failure: str


Instruction = Spawn | Terminate | Kill | Announce | AllReady | Finished


class RoleState(msgspec.Struct, kw_only=True):
    """What is known of one role. `due` is the monotonic second at which its phase needs attention."""

    plan: RolePlan
    phase: Phase = Phase.WAITING
    due: float | None = None
    spawned_at: float = 0.0
    spawns: int = 0
    deaths: int = 0
    """Deaths in a row without `STEADY_AFTER` seconds of life in between."""
    was_ready: bool = False

    @property
    def restarts(self) -> int:
        """How often the role was started again."""
        return max(0, self.spawns - 1)

    @property
    def live(self) -> bool:
        """Whether a process of it exists."""
        return self.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING)


class Supervision:
    """The machine. Feed events with `handle`; feed `Elapsed` when `wake_at` has come.

    `backoff_last` bounds the pause before a role that died is started again, in seconds.
    """

    def __init__(self, plans: Sequence[RolePlan], backoff_last: float = BACKOFF_LAST) -> None:
        self._backoff_last = backoff_last
        self._roles = {plan.name: RoleState(plan=plan) for plan in plans}
        if len(self._roles) != len(plans):
            raise ValueError("two roles have one name")
        known = {kind for stage in START_ORDER for kind in stage}
        if unknown := {plan.kind for plan in plans} - known:
            raise ValueError(f"unknown kinds of role: {sorted(unknown)}")
        self._up = False
        self._stopping = False
        self._finished = False
        self._failure = ""

    def __repr__(self) -> str:
        roles = ", ".join(f"{name}={role.phase}" for name, role in self._roles.items())
        return f"<Supervision {self.state}: {roles}>"

    @property
    def state(self) -> str:
        """`starting`, `running`, `stopping` or `stopped`."""
        if self._finished:
            return "stopped"
        if self._stopping:
            return "stopping"
        return "running" if self._up else "starting"

    @property
    def roles(self) -> dict[str, RoleState]:
        """The roles by name; to look at, not to change."""
        return self._roles

    @property
    def wake_at(self) -> float | None:
        """The monotonic second at which `Elapsed` is due, None when only other events can move it."""
        return min((role.due for role in self._roles.values() if role.due is not None), default=None)

    def statistics(self) -> dict[str, int]:
        """How many roles are in each phase."""
        count = {str(phase): 0 for phase in Phase}
        for role in self._roles.values():
            count[role.phase] += 1
        return count

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take `event` at monotonic second `now`; returns what the shell has to do, in order."""
        if self._finished:
            return []
        match event:
            case Begin():
                return self._start_stages(now)
            case BecameReady(name):
                return self._ready(self._roles[name], now)
            case MadeProgress(name):
                role = self._roles[name]
                if role.phase is Phase.STARTING and role.due is not None:
                    role.due = now + role.plan.start_deadline
                return []
            case Exited(name, how):
                return self._exited(self._roles[name], how, now)
            case StopAsked():
                return self._stop_asked(now)
            case Elapsed():
                return self._elapsed(now)

    # Starting

    def _start_stages(self, now: float) -> list[Instruction]:
        """Start the first stage that has waiting roles, if every stage before it is ready."""
        if self._stopping:
            return []
        for stage in START_ORDER:
            members = [role for role in self._roles.values() if role.plan.kind in stage]
            waiting = [role for role in members if role.phase is Phase.WAITING]
            if waiting:
                return [self._spawn(role, now) for role in waiting]
            if any(role.phase is not Phase.READY for role in members):
                return []
        if self._up:
            return []
        self._up = True
        return [AllReady()]

    def _spawn(self, role: RoleState, now: float) -> Instruction:
        role.phase = Phase.STARTING
        role.spawned_at = now
        role.spawns += 1
        role.due = now + role.plan.start_deadline
        return Spawn(role.plan.name)

    def _ready(self, role: RoleState, now: float) -> list[Instruction]:
        if role.phase is not Phase.STARTING:
            return []  # it was told to stop, or its end was seen first
        role.phase = Phase.READY
        role.was_ready = True
        role.due = None
        return self._start_stages(now)

    # Dying and coming back

    def _exited(self, role: RoleState, how: str, now: float) -> list[Instruction]:
        if not role.live:
            return []
        name = role.plan.name
        was = role.phase
        role.due = None
        if self._stopping:
            role.phase = Phase.GONE
            said = [] if was is Phase.STOPPING else [Announce(name, how)]
            return [*said, *self._stop_next(now)]
        if not self._up and not role.was_ready:
            role.phase = Phase.GONE
            return self._fail(f"{name} {how} before it was ready", now)
        if now - role.spawned_at >= STEADY_AFTER:
            role.deaths = 0
        pause = min(BACKOFF_FIRST * 2.0**role.deaths, self._backoff_last)
        role.deaths += 1
        role.phase = Phase.BACKOFF
        role.due = now + pause
        return [Announce(name, f"{how}; starting again in {pause:g} s")]

    def _elapsed(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for role in self._roles.values():
            if role.due is None or now < role.due:
                continue
            name = role.plan.name
            if role.phase is Phase.BACKOFF:
                out.append(self._spawn(role, now))
                continue
            # A deadline passed. What is killed is reported as exited, which moves the role on.
            role.due = None
            if role.phase is Phase.STARTING and not self._up and not role.was_ready:
                waited = f"{role.plan.start_deadline:g} s"
                out += self._fail(f"{name} was not ready and reported no progress for {waited}", now)
                return out
            what = "end on SIGTERM" if role.phase is Phase.STOPPING else "get ready"
            limit = role.plan.stop_deadline if role.phase is Phase.STOPPING else role.plan.start_deadline
            out += [Announce(name, f"did not {what} within {limit:g} s; killed"), Kill(name)]
        return out

    # Stopping

    def _fail(self, failure: str, now: float) -> list[Instruction]:
        self._failure = failure
        return self._begin_stop(now)

    def _stop_asked(self, now: float) -> list[Instruction]:
        if not self._stopping:
            return self._begin_stop(now)
        out: list[Instruction] = []
        for role in self._roles.values():
            if role.live:
                role.phase = Phase.STOPPING
                role.due = None
                out.append(Kill(role.plan.name))
        return out

    def _begin_stop(self, now: float) -> list[Instruction]:
        self._stopping = True
        for role in self._roles.values():
            if not role.live:
                role.phase = Phase.GONE
            if role.phase is not Phase.STOPPING:
                role.due = None
        return self._stop_next(now)

    def _stop_next(self, now: float) -> list[Instruction]:
        """Ask the first kind that still lives to end; finish when none does."""
        for kind in STOP_ORDER:
            live = [role for role in self._roles.values() if role.plan.kind == kind and role.live]
            if not live:
                continue
            out: list[Instruction] = []
            for role in live:
                if role.phase is not Phase.STOPPING:
                    role.phase = Phase.STOPPING
                    role.due = now + role.plan.stop_deadline
                    out.append(Terminate(role.plan.name))
            return out
        self._finished = True
        return [Finished(self._failure)]
