"""The supervision's decisions, fed with events and a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.cli.supervision import (
    BACKOFF_FIRST,
    BACKOFF_LAST,
    START_ORDER,
    STEADY_AFTER,
    STOP_ORDER,
    AllReady,
    Announce,
    BecameReady,
    Begin,
    Elapsed,
    Event,
    Exited,
    Finished,
    Instruction,
    Kill,
    MadeProgress,
    Phase,
    RolePlan,
    Spawn,
    StopAsked,
    Supervision,
    Terminate,
)


def plan(kind: str, replica: int = 0, start: float = 10.0, stop: float = 5.0) -> RolePlan:
    return RolePlan(name=f"{kind}-{replica}", kind=kind, start_deadline=start, stop_deadline=stop)


def cluster() -> list[RolePlan]:
    return [plan("master"), plan("node"), plan("node", 1), plan("api"), plan("proxy")]


class Story:
    """A supervision with a clock; remembers every instruction."""

    def __init__(self, plans: Sequence[RolePlan]) -> None:
        self.machine = Supervision(plans)
        self.now = 100.0
        self.told: list[Instruction] = []

    def feed(self, event: Event) -> list[Instruction]:
        out = self.machine.handle(event, self.now)
        self.told += out
        return out

    def ready(self, *names: str) -> list[Instruction]:
        return [instruction for name in names for instruction in self.feed(BecameReady(name))]

    def wait(self) -> list[Instruction]:
        """Go to the next deadline."""
        assert self.machine.wake_at is not None
        self.now = max(self.now, self.machine.wake_at)
        return self.feed(Elapsed())

    def up(self) -> Story:
        self.feed(Begin())
        self.ready("master-0", "node-0", "node-1", "api-0", "proxy-0")
        assert self.machine.state == "running"
        return self


def test_roles_start_in_stages() -> None:
    story = Story(cluster())
    assert story.feed(Begin()) == [Spawn("master-0")]
    assert story.ready("master-0") == [Spawn("node-0"), Spawn("node-1"), Spawn("api-0")]
    assert story.ready("api-0", "node-1") == []
    assert story.ready("node-0") == [Spawn("proxy-0")]
    assert story.ready("proxy-0") == [AllReady()]
    assert story.machine.wake_at is None


def test_roles_stop_in_order_each_kind_after_the_one_before() -> None:
    story = Story(cluster()).up()
    assert story.feed(StopAsked()) == [Terminate("proxy-0")]
    assert story.feed(Exited("proxy-0", "ended")) == [Terminate("api-0")]
    assert story.feed(Exited("api-0", "ended")) == [Terminate("node-0"), Terminate("node-1")]
    assert story.feed(Exited("node-1", "ended")) == []
    assert story.feed(Exited("node-0", "ended")) == [Terminate("master-0")]
    assert story.feed(Exited("master-0", "ended")) == [Finished("")]
    assert story.machine.state == "stopped"


def test_a_role_that_ignores_sigterm_is_killed_after_its_deadline() -> None:
    story = Story([plan("master", stop=30.0)])
    story.feed(Begin())
    story.ready("master-0")
    story.feed(StopAsked())
    before = story.now
    assert Kill("master-0") in story.wait()
    assert story.now - before == 30.0
    assert story.feed(Exited("master-0", "was ended by SIGKILL")) == [Finished("")]


def test_a_second_stop_kills_everything_at_once() -> None:
    story = Story(cluster()).up()
    story.feed(StopAsked())
    killed = story.feed(StopAsked())
    assert {instruction.name for instruction in killed if isinstance(instruction, Kill)} == {
        spec.name for spec in cluster()
    }


def test_pauses_double_up_to_a_bound_and_are_forgotten_after_steady_life() -> None:
    story = Story([plan("master")])
    story.feed(Begin())
    story.ready("master-0")
    pauses = []
    for _ in range(9):
        story.feed(Exited("master-0", "was ended by SIGKILL"))
        began = story.now
        assert story.wait() == [Spawn("master-0")]
        pauses.append(story.now - began)
        story.ready("master-0")
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    story.now += STEADY_AFTER
    story.feed(Exited("master-0", "was ended by SIGKILL"))
    assert story.machine.wake_at == story.now + BACKOFF_FIRST
    assert story.machine.roles["master-0"].restarts == 9


def test_the_longest_pause_may_be_shortened() -> None:
    machine = Supervision([plan("master")], backoff_last=0.5)
    machine.handle(Begin(), 0.0)
    for death in range(5):
        machine.handle(BecameReady("master-0"), float(death))
        machine.handle(Exited("master-0", "was ended by SIGKILL"), float(death))
        assert machine.wake_at == death + 0.5
        assert machine.handle(Elapsed(), death + 0.5) == [Spawn("master-0")]


def test_an_end_before_the_first_readiness_ends_the_start() -> None:
    story = Story(cluster())
    story.feed(Begin())
    story.ready("master-0")
    assert story.feed(Exited("node-0", "ended with exit status 78")) == [Terminate("api-0")]
    story.feed(Exited("api-0", "ended"))
    story.feed(Exited("node-1", "ended"))
    assert story.feed(Exited("master-0", "ended")) == [
        Finished("node-0 ended with exit status 78 before it was ready")
    ]


def test_a_role_that_was_ready_once_comes_back_even_while_others_still_start() -> None:
    story = Story(cluster())
    story.feed(Begin())
    story.ready("master-0", "node-0")
    story.feed(Exited("master-0", "was ended by SIGSEGV"))
    assert story.ready("node-1", "api-0") == []  # the proxy waits until the master is back
    assert story.wait() == [Spawn("master-0")]
    assert story.ready("master-0") == [Spawn("proxy-0")]


def test_progress_puts_the_start_deadline_off() -> None:
    story = Story([plan("master", start=10.0)])
    story.feed(Begin())
    story.now += 9
    story.feed(MadeProgress("master-0"))
    assert story.machine.wake_at == story.now + 10
    failed = story.wait()
    assert failed == [Terminate("master-0")]
    assert story.feed(Exited("master-0", "ended")) == [
        Finished("master-0 was not ready and reported no progress for 10 s")
    ]


def test_a_restarted_role_that_never_gets_ready_is_killed_and_tried_again() -> None:
    story = Story([plan("master", start=10.0)])
    story.feed(Begin())
    story.ready("master-0")
    story.feed(Exited("master-0", "was ended by SIGKILL"))
    story.wait()
    said = story.wait()
    assert [type(instruction) for instruction in said] == [Announce, Kill]
    story.feed(Exited("master-0", "was ended by SIGKILL"))
    assert story.machine.roles["master-0"].phase is Phase.BACKOFF


def test_a_late_ready_changes_nothing() -> None:
    story = Story([plan("master")])
    story.feed(Begin())
    story.feed(StopAsked())
    assert story.ready("master-0") == []
    assert story.machine.roles["master-0"].phase is Phase.STOPPING


def test_stopping_while_a_role_waits_to_come_back_does_not_start_it() -> None:
    story = Story([plan("master")])
    story.feed(Begin())
    story.ready("master-0")
    story.feed(Exited("master-0", "was ended by SIGKILL"))
    assert story.feed(StopAsked()) == [Finished("")]


def test_plans_are_checked() -> None:
    with pytest.raises(ValueError, match="one name"):
        Supervision([plan("master"), plan("master")])
    with pytest.raises(ValueError, match="unknown kinds"):
        Supervision([plan("janitor")])


def test_the_machine_tells_its_state() -> None:
    story = Story(cluster())
    story.feed(Begin())
    assert story.machine.statistics() == {
        "waiting": 4, "starting": 1, "ready": 0, "backoff": 0, "stopping": 0, "gone": 0,
    }  # fmt: skip
    assert "starting: master-0=starting" in repr(story.machine)


class World:
    """What the machine's instructions did to processes; checks each against the rules."""

    def __init__(self, plans: Sequence[RolePlan]) -> None:
        self.story = Story(plans)
        self.kinds = {role.name: role.kind for role in plans}
        self.alive: set[str] = set()
        self.ready: set[str] = set()
        self.ever_ready: set[str] = set()
        self.stopping = False
        self.finished = 0
        self.ups = 0
        self.died_at: dict[str, float] = {}

    def feed(self, event: Event) -> None:
        if isinstance(event, StopAsked):
            self.stopping = True
        if isinstance(event, Exited):
            self.alive.discard(event.name)
            self.ready.discard(event.name)
            self.died_at[event.name] = self.story.now
        if isinstance(event, BecameReady):
            self.ready.add(event.name)
            self.ever_ready.add(event.name)
        for instruction in self.story.feed(event):
            self.check(instruction)

    def check(self, instruction: Instruction) -> None:
        assert not self.finished, "nothing follows the end"
        match instruction:
            case Spawn(name):
                assert name not in self.alive, "a role runs once"
                assert not self.stopping, "nothing starts while stopping"
                if name in self.died_at:
                    pause = self.story.now - self.died_at[name]
                    assert pause >= BACKOFF_FIRST, "a dead role is not started in a hurry"
                    role = self.story.machine.roles[name]
                    assert role.deaths >= 1
                if name not in self.ever_ready:
                    stage = next(i for i, kinds in enumerate(START_ORDER) if self.kinds[name] in kinds)
                    before = {
                        n for n, kind in self.kinds.items() if any(kind in k for k in START_ORDER[:stage])
                    }
                    assert before <= self.ready, "a stage waits for those before it"
                self.alive.add(name)
            case Terminate(name):
                self.stopping = True
                assert name in self.alive
                rank = STOP_ORDER.index(self.kinds[name])
                assert not [n for n in self.alive if STOP_ORDER.index(self.kinds[n]) < rank], (
                    "order of stopping"
                )
            case Kill(name):
                assert name in self.alive
            case AllReady():
                self.ups += 1
                assert self.ups == 1
                assert self.ready == set(self.kinds)
            case Finished():
                self.finished += 1
                assert not self.alive, "nothing lives at the end"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_sequence_of_events_breaks_the_rules(data: st.DataObject) -> None:
    world = World(cluster())
    world.feed(Begin())
    for _ in range(data.draw(st.integers(0, 60))):
        if world.finished:
            break
        starting = sorted(world.alive - world.ready)
        choices: list[Event] = [Elapsed(), *(Exited(name, "died") for name in sorted(world.alive))]
        # Ready is offered more often than the rest, or few runs would ever come up.
        choices += [BecameReady(name) for name in starting] * 4 + [MadeProgress(name) for name in starting]
        if data.draw(st.integers(0, 19)) == 0:
            choices = [StopAsked()]
        event = data.draw(st.sampled_from(choices))
        if isinstance(event, Elapsed):
            wake = world.story.machine.wake_at
            world.story.now = max(world.story.now + 0.1, wake if wake is not None else 0.0)
        world.feed(event)
        role_due = [role.due for role in world.story.machine.roles.values() if role.due is not None]
        assert all(due - world.story.now <= BACKOFF_LAST for due in role_due)
    # However it went: asked to stop, and every process ending in its turn, it finishes.
    for _ in range(50):
        if world.finished:
            break
        world.feed(StopAsked())
        for name in sorted(world.alive):
            world.feed(Exited(name, "died"))
    assert world.finished == 1
    assert world.story.machine.handle(Begin(), world.story.now) == []
