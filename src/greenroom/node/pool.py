"""One warm pool as a pure state machine: events in, instructions out, no I/O, no clock of its own.

Claims wait in the order they came. A claim that arrives while a member is warm and nobody waits gets it at
once; otherwise it queues, and each waiting claim adds one to what refill should start, so that a burst larger
than the pool (or a pool with target 0) is served as fast as the node can restore. One that wants a member of the
declared stock and no other waits for what the target brings, and adds nothing. Failed members hold refill
back with a doubling pause; a member whose VM ends while it waits is counted as failed too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SetTarget:
    """The pool should hold `target` warm members from now on."""

    target: int


@dataclass(frozen=True, slots=True)
class MemberStarted:
    """Refill began to make a member (the answer to `wanted`)."""


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A member is warm."""

    member: str


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """A member that was being made never became ready."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class MemberEnded:
    """A warm member's VM ended by itself."""

    member: str
    now: float


@dataclass(frozen=True, slots=True)
class ClaimArrived:
    """A claim wants a member before `deadline`; unless it `demands` one, none is made for it."""

    claim: str
    deadline: float
    demands: bool = True


@dataclass(frozen=True, slots=True)
class ClaimLeft:
    """A claim gave up waiting."""

    claim: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now: float


Event = SetTarget | MemberStarted | MemberReady | MemberFailed | MemberEnded | ClaimArrived | ClaimLeft | Tick


@dataclass(frozen=True, slots=True)
class HandOver:
    """`member` now belongs to `claim`."""

    claim: str
    member: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """`claim` gets nothing: `full` when the queue had no place, else its time is up."""

    claim: str
    full: bool


@dataclass(frozen=True, slots=True)
class Destroy:
    """`member` is one too many."""

    member: str


Instruction = HandOver | Refuse | Destroy


class Pool:
    """See the module. Times are seconds of any one clock that never goes back."""

    def __init__(self, *, queue_length: int, backoff_first: float, backoff_last: float) -> None:
        self._queue_length = queue_length
        self._backoff_first = backoff_first
        self._backoff_last = backoff_last
        self.target = 0
        self.warm: deque[str] = deque()
        self.starting = 0
        self.waiting: OrderedDict[str, float] = OrderedDict()
        self._patient: set[str] = set()
        """Those of the waiting ones for which no member is made."""
        self.failed = 0
        """Members that never became ready or ended while warm, in all."""
        self._failures_in_a_row = 0
        self.held_until = 0.0
        self.last_failure = ""

    def __repr__(self) -> str:
        return (
            f"<Pool target={self.target} warm={len(self.warm)} starting={self.starting} "
            f"waiting={len(self.waiting)} failed={self.failed}>"
        )

    @property
    def failing(self) -> bool:
        """The last member that was tried never became ready."""
        return self._failures_in_a_row > 0

    def wanted(self, now: float) -> int:
        """How many members should be started now, over those that are starting already."""
        if now < self.held_until:
            return 0
        demanded = self.target + len(self.waiting) - len(self._patient)
        wanted = max(0, demanded - len(self.warm) - self.starting)
        # After a failure one member tries the way before the rest follow.
        return min(wanted, max(0, 1 - self.starting)) if self._failures_in_a_row else wanted

    def next_member(self) -> str | None:
        """The member that a claim which arrives now gets at once, or None when it would have to queue."""
        return self.warm[0] if self.warm and not self.waiting else None

    def next_deadline(self) -> float | None:
        """When `Tick` is due next, or None."""
        due = [min(self.waiting.values())] if self.waiting else []
        if self._failures_in_a_row:
            due.append(self.held_until)
        return min(due, default=None)

    def handle(self, event: Event) -> list[Instruction]:
        """Apply one event; the instructions are to be carried out in order."""
        match event:
            case SetTarget(target):
                self.target = target
                return self._trim()
            case MemberStarted():
                self.starting += 1
                return []
            case MemberReady(member):
                self.starting -= 1
                self._failures_in_a_row = 0
                self.held_until = 0.0
                self.warm.append(member)
                return [*self._match(), *self._trim()]
            case MemberFailed(reason, now):
                self.starting -= 1
                self._count_failure(reason, now)
                return []
            case MemberEnded(member, now):
                if member in self.warm:
                    self.warm.remove(member)
                    self._count_failure("a warm member ended by itself", now)
                return []
            case ClaimArrived(claim, deadline, demands):
                if not self.warm and len(self.waiting) >= self._queue_length:
                    return [Refuse(claim, full=True)]
                self.waiting[claim] = deadline
                if not demands:
                    self._patient.add(claim)
                return self._match()
            case ClaimLeft(claim):
                self._leave(claim)
                return []
            case Tick(now):
                late = [claim for claim, deadline in self.waiting.items() if deadline <= now]
                for claim in late:
                    self._leave(claim)
                return [Refuse(claim, full=False) for claim in late]

    def _leave(self, claim: str) -> None:
        self.waiting.pop(claim, None)
        self._patient.discard(claim)

    def _match(self) -> list[Instruction]:
        made: list[Instruction] = []
        while self.warm and self.waiting:
            claim = next(iter(self.waiting))
            self._leave(claim)
            made.append(HandOver(claim, self.warm.popleft()))
        return made

    def _trim(self) -> list[Instruction]:
        made: list[Instruction] = []
        while len(self.warm) > self.target and not self.waiting:
            made.append(Destroy(self.warm.pop()))
        return made

    def _count_failure(self, reason: str, now: float) -> None:
        self.failed += 1
        self._failures_in_a_row += 1
        self.last_failure = reason
        pause = self._backoff_first * 2 ** min(self._failures_in_a_row - 1, 20)
        self.held_until = now + min(self._backoff_last, pause)
