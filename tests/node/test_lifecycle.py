"""A sandbox's life: what people rely on, then every order of events there is."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.node.lifecycle import (
    RETRY_FIRST,
    RETRY_LAST,
    SHUT_DOWN,
    TIME_UP,
    UNCONFIRMED,
    VM_GONE,
    BeginPause,
    BeginReplace,
    BeginResume,
    Busy,
    Changed,
    ClockStepped,
    Confirm,
    End,
    Event,
    Lifecycle,
    Outcome,
    Pause,
    Paused,
    PauseFailed,
    Refused,
    Release,
    Renew,
    Replace,
    Replaced,
    Resume,
    Resumed,
    ResumeFailed,
    ShutDownAt,
    Tick,
    Unchanged,
    VmEnded,
)


def fresh(confirm_by: float = 20.0, ends_at: float = 300.0) -> Lifecycle:
    return Lifecycle(confirm_by=confirm_by, ends_at=ends_at)


def after(life: Lifecycle, *events: tuple[float, Event]) -> tuple[Lifecycle, Outcome]:
    outcome: Outcome = Unchanged()
    for now, event in events:
        life, outcome = life.handle(event, now)
    return life, outcome


def test_confirmed_in_time_it_lives_to_its_end() -> None:
    life, outcome = after(fresh(), (19.9, Confirm()))
    assert (life.phase, outcome, life.due()) == ("running", Changed(), 300.0)
    assert after(life, (299.9, Tick()))[1] == Unchanged()
    assert after(life, (300.0, Tick()))[1] == End(TIME_UP, by_itself=True)


def test_unconfirmed_it_is_ended() -> None:
    assert after(fresh(), (20.0, Tick()))[1] == End(UNCONFIRMED)


def test_a_confirmation_that_comes_too_late_is_too_late() -> None:
    life, outcome = after(fresh(), (20.0, Confirm()))
    assert outcome == End(UNCONFIRMED)
    assert after(life, (20.1, Confirm()))[1] == Refused()


def test_confirming_twice_is_confirming_once() -> None:
    assert after(fresh(), (1.0, Confirm()), (2.0, Confirm()))[1] == Unchanged()


def test_a_provisional_one_cannot_be_renewed_but_released() -> None:
    assert after(fresh(), (1.0, Renew(900)))[1] == Refused()
    assert after(fresh(), (1.0, Release("killed")))[1] == End("killed")


def test_renewing_moves_the_end_both_ways_unless_it_may_only_extend() -> None:
    life, _ = after(fresh(), (1.0, Confirm()))
    assert after(life, (10.0, Renew(5)))[0].ends_at == 15.0
    assert after(life, (10.0, Renew(5, extend_only=True)))[0].ends_at == 300.0
    assert after(life, (10.0, Renew(900, extend_only=True)))[0].ends_at == 910.0
    assert after(life, (10.0, Renew(-5)))[0].ends_at == 10.0


def test_a_time_out_shorter_than_the_confirmation_counts() -> None:
    assert after(fresh(ends_at=2.0), (2.0, Tick()))[1] == End(TIME_UP)


def test_a_clock_that_is_set_moves_the_deadlines_before_time_decides() -> None:
    life, outcome = after(fresh(), (3600.0, ClockStepped(3590)))
    assert (outcome, life.confirm_by, life.ends_at) == (Changed(), 3610.0, 3890.0)
    assert after(life, (3609.0, Confirm()))[1] == Changed()
    back, _ = after(fresh(), (1.0, Confirm()), (-3600.0, ClockStepped(-3601)))
    assert after(back, (-3302.0, Tick()))[1] == Unchanged()
    assert after(back, (-3301.0, Tick()))[1] == End(TIME_UP, by_itself=True)


def test_an_ended_one_stays_ended() -> None:
    ended, outcome = after(fresh(), (1.0, VmEnded()))
    assert outcome == End(VM_GONE)
    for event in (Confirm(), Renew(10), Release("again")):
        assert ended.handle(event, 2.0) == (ended, Refused())
    for event in (Tick(), VmEnded(), ClockStepped(3600)):
        assert ended.handle(event, 2.0) == (ended, Unchanged())


def running(pauses: bool = False) -> Lifecycle:
    return Lifecycle(confirm_by=20.0, ends_at=300.0, phase="running", pauses=pauses)


def test_a_pause_and_a_resume() -> None:
    life, outcome = after(running(), (10.0, Pause(memory=False)))
    assert (life.phase, outcome, life.due()) == ("pausing", BeginPause(False), None)
    assert after(life, (11.0, Renew(60)))[1] == Busy()
    life, _ = after(life, (12.0, Paused()))
    assert (life.phase, life.due()) == ("paused", None)
    assert after(life, (1e9, Tick()))[1] == Unchanged()
    assert after(life, (13.0, Pause()))[1] == Unchanged()
    assert after(life, (13.0, Renew(60)))[1] == Refused()
    assert after(life, (13.0, VmEnded()))[1] == Unchanged()
    life, outcome = after(life, (1000.0, Resume(60.0)))
    assert (life.phase, outcome) == ("resuming", BeginResume(60.0))
    assert after(life, (1001.0, Resume(30)))[1] == Busy()
    assert after(life, (1001.0, ResumeFailed()))[0].phase == "paused"
    life, _ = after(life, (1002.0, Resumed(60.0)))
    assert (life.phase, life.due()) == ("running", 1062.0)
    assert after(life, (1003.0, Resume(1.0)))[1] == Unchanged()


def test_at_its_time_out_it_is_paused_when_it_was_made_so() -> None:
    assert after(running(pauses=True), (300.0, Tick()))[1] == BeginPause(None)
    assert after(running(pauses=True), (301.0, Renew(60)))[1] == BeginPause(None)
    assert after(running(pauses=True), (301.0, Release("killed")))[1] == End("killed")


def test_a_pause_at_the_time_out_that_fails_is_tried_again_and_again() -> None:
    life, now, waits = running(pauses=True), 300.0, []
    for _ in range(8):
        life, outcome = after(life, (now, Tick()))
        assert outcome == BeginPause(None)
        life, _ = after(life, (now + 1, PauseFailed()))
        due = life.due()
        assert due is not None
        assert after(life, (due - 0.001, Tick()))[1] == Unchanged()
        waits.append(due - now - 1)
        now = due
    assert waits[0] == RETRY_FIRST
    assert waits[-1] == RETRY_LAST
    assert sorted(waits) == waits
    assert after(life, (now - 1, Renew(60)))[0].due() == now + 59


def test_a_pause_that_somebody_wanted_and_that_fails_leaves_its_time_out_alone() -> None:
    life, outcome = after(running(), (10.0, Pause()), (11.0, PauseFailed()))
    assert (life, outcome) == (running(), Changed())


def test_it_can_be_ended_in_every_phase_and_once() -> None:
    for events in ((), (Pause(),), (Pause(), Paused()), (Pause(), Paused(), Resume(30))):
        life, _ = after(running(), *((10.0, event) for event in events))
        life, outcome = after(life, (11.0, Release("killed")))
        assert outcome == End("killed")
        for late in (Paused(), PauseFailed(), Resumed(5), ResumeFailed(), Replaced(), Tick(), VmEnded()):
            assert life.handle(late, 12.0) == (life, Unchanged())
        for asked in (Pause(), Resume(30), Release("again")):
            assert life.handle(asked, 12.0) == (life, Refused())


def test_its_shutdown_time_ends_it_wherever_it_stands() -> None:
    for events in ((), (Pause(),), (Pause(), Paused()), (Pause(), Paused(), Resume(30)), (Replace(),)):
        life, _ = after(replace(running(), shutdown_at=100.0), *((10.0, event) for event in events))
        assert life.due() == 100.0
        assert after(life, (99.9, Tick()))[1] == Unchanged()
        assert after(life, (100.0, Tick()))[1] == End(SHUT_DOWN, by_itself=True)


def test_its_time_out_and_its_shutdown_time_count_apart() -> None:
    both = replace(running(pauses=True), shutdown_at=400.0)
    life, outcome = after(both, (300.0, Tick()))
    assert (outcome, life.due()) == (BeginPause(None), 400.0)
    life, _ = after(life, (301.0, Paused()))
    assert after(life, (400.0, Resume(30)))[1] == End(SHUT_DOWN, by_itself=True)
    assert after(both, (500.0, Tick()))[1] == End(SHUT_DOWN, by_itself=True)
    assert after(replace(running(), shutdown_at=400.0), (300.0, Tick()))[1] == End(TIME_UP, by_itself=True)


def test_what_was_begun_is_finished_before_its_shutdown_time_counts() -> None:
    for begin, done in ((Pause(), Paused()), (Pause(), PauseFailed()), (Replace(), Replaced())):
        life, _ = after(replace(running(), shutdown_at=100.0), (10.0, begin))
        life, outcome = after(life, (101.0, done))
        assert (outcome, life.due()) == (Changed(), 100.0)
        assert after(life, (101.0, Tick()))[1] == End(SHUT_DOWN, by_itself=True)


def test_a_shutdown_time_can_be_set_moved_and_taken_away() -> None:
    life, outcome = after(running(), (10.0, ShutDownAt(50.0)))
    assert (outcome, life.due()) == (Changed(), 50.0)
    assert after(life, (60.0, ShutDownAt(90.0)))[0].due() == 90.0, "it is not carried out yet"
    assert after(life, (20.0, ShutDownAt(None)))[0] == running()
    assert after(life, (20.0, ClockStepped(1000.0)))[0].shutdown_at == 1050.0
    paused, _ = after(running(), (10.0, Pause()), (11.0, Paused()), (12.0, ShutDownAt(5.0)))
    assert after(paused, (12.0, Tick()))[1] == End(SHUT_DOWN, by_itself=True)


def test_a_shutdown_time_counts_from_the_confirmation_on() -> None:
    life = replace(fresh(), shutdown_at=1.0)
    assert after(life, (2.0, Tick()))[1] == Unchanged()
    assert after(life, (2.0, ShutDownAt(9.0)))[1] == Refused()
    life, outcome = after(life, (2.0, Confirm()))
    assert (outcome, life.due()) == (Changed(), 1.0)
    assert after(life, (2.0, Tick()))[1] == End(SHUT_DOWN, by_itself=True)


def test_an_end_that_nobody_asked_for_says_so() -> None:
    assert after(running(), (1.0, Release("killed")))[1] == End("killed")
    assert after(running(), (1.0, Release("a full disk", asked=False)))[1] == End(
        "a full disk", by_itself=True
    )
    assert after(running(), (1.0, VmEnded()))[1] == End(VM_GONE, by_itself=True)
    assert after(fresh(), (1.0, VmEnded()))[1] == End(VM_GONE), "it was nobody's yet"


class EveryInterleaving(RuleBasedStateMachine):
    """Confirm, release, renew, deaths and time in any order, against what each promise says by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.life = fresh(confirm_by=20.0, ends_at=60.0)
        self.working = ""
        """What was begun and has not been told of: exactly then the phase says so."""
        self.ends = 0
        self.confirmed = False
        self.stepped = 0.0
        self.story: list[tuple[float, Event, Outcome]] = []

    def feed(self, event: Event) -> Outcome:
        before = self.life
        self.life, outcome = before.handle(event, self.now)
        assert before.handle(event, self.now) == (self.life, outcome), "the same event gives the same"
        self.story.append((self.now, event, outcome))
        begun: dict[type, str] = {BeginPause: "pausing", BeginResume: "resuming", BeginReplace: "replacing"}
        if type(outcome) in begun:
            assert not self.working
            self.working = begun[type(outcome)]
        if isinstance(outcome, Busy):
            assert self.working
            assert self.life == before
        if isinstance(outcome, End):
            self.working = ""
            self.ends += 1
            assert before.phase != "ended"
            assert self.life.phase == "ended"
            if outcome.reason == UNCONFIRMED:
                assert not self.confirmed
                assert self.now - self.stepped >= 20.0 - 1e-6
            if outcome.reason == TIME_UP:
                assert self.now >= before.ends_at
            if outcome.reason == SHUT_DOWN:
                assert self.confirmed
                assert before.shutdown_at is not None
                assert self.now >= before.shutdown_at
            asked = isinstance(event, Release) and event.asked
            assert outcome.by_itself == (before.phase != "provisional" and not asked)
        elif before.phase == "ended":
            assert self.life == before
        if isinstance(event, Confirm) and isinstance(outcome, Changed | Unchanged):
            self.confirmed = True
        return outcome

    @rule(step=st.floats(0, 25))
    def time_passes(self, step: float) -> None:
        self.now += step

    @rule()
    def tick(self) -> None:
        due = self.life.due()
        outcome = self.feed(Tick())
        assert isinstance(outcome, End | BeginPause) == (due is not None and self.now >= due)
        if isinstance(outcome, BeginPause):
            assert self.life.pauses

    @rule()
    def confirm(self) -> None:
        self.feed(Confirm())

    @rule(ttl=st.floats(-10, 100), extend_only=st.booleans())
    def renew(self, ttl: float, extend_only: bool) -> None:
        before = self.life
        if isinstance(self.feed(Renew(ttl, extend_only)), Changed):
            assert before.phase == "running"
            assert self.life.ends_at >= self.now
            assert not extend_only or self.life.ends_at > before.ends_at

    @rule(step=st.floats(-1000, 1000))
    def the_clock_is_set(self, step: float) -> None:
        """Its time is as long as before: `now` and every deadline move alike."""
        left = None if (due := self.life.due()) is None else due - self.now
        self.now += step
        self.stepped += step
        self.feed(ClockStepped(step))
        due = self.life.due()
        assert (due is None) == (left is None)
        if due is not None and left is not None:
            assert abs(due - self.now - left) < 1e-6

    @rule(left=st.none() | st.floats(-5, 60))
    def shut_down_at(self, left: float | None) -> None:
        before = self.life
        when = None if left is None else self.now + left
        outcome = self.feed(ShutDownAt(when))
        assert isinstance(outcome, Changed) == (before.phase not in ("provisional", "ended"))
        if isinstance(outcome, Changed):
            assert self.life == replace(before, shutdown_at=when)

    @rule()
    def pause(self) -> None:
        before = self.life
        if isinstance(self.feed(Pause()), BeginPause):
            assert before.phase == "running"

    @rule()
    def resume(self) -> None:
        before = self.life
        if isinstance(self.feed(Resume(30)), BeginResume):
            assert before.phase == "paused"

    @rule()
    def roll_back(self) -> None:
        before = self.life
        if isinstance(self.feed(Replace()), BeginReplace):
            assert before.phase == "running"

    @rule(went_well=st.booleans())
    def the_work_is_done(self, went_well: bool) -> None:
        done: dict[str, tuple[Event, Event]] = {
            "pausing": (PauseFailed(), Paused()),
            "resuming": (ResumeFailed(), Resumed(30)),
            "replacing": (Replaced(), Replaced()),
        }
        if self.working:
            event = done[self.working][went_well]
            self.working = ""
            assert self.feed(event) == Changed()
            assert self.life.phase in ("running", "paused")

    @rule()
    def it_was_made_to_be_paused(self) -> None:
        self.life = replace(self.life, pauses=True)

    @rule(asked=st.booleans())
    def release(self, asked: bool) -> None:
        alive = self.life.phase != "ended"
        assert isinstance(self.feed(Release("killed", asked)), End) == alive

    @rule()
    def vm_ends(self) -> None:
        has_none = self.life.phase in ("paused", "resuming", "replacing")
        self.feed(VmEnded())
        assert self.life.phase == "ended" or has_none

    @invariant()
    def it_ends_at_most_once_and_never_comes_back(self) -> None:
        assert self.ends == (self.life.phase == "ended")

    @invariant()
    def only_a_confirmed_one_runs(self) -> None:
        assert self.life.phase in ("provisional", "ended") or self.confirmed

    @invariant()
    def nothing_outlives_its_shutdown_time_by_more_than_a_tick(self) -> None:
        if self.confirmed and self.life.phase != "ended" and self.life.shutdown_at is not None:
            due = self.life.due()
            assert due is not None
            assert due <= self.life.shutdown_at

    @invariant()
    def its_phase_tells_what_is_under_way(self) -> None:
        under_way = self.life.phase in ("pausing", "resuming", "replacing")
        assert self.working == (self.life.phase if under_way else "")


TestEveryInterleaving = EveryInterleaving.TestCase
