"""Ctrl-C, SIGTERM and a closed terminal: whichever comes, at whatever moment, nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
from collections.abc import Iterator

import pytest

from greenroom.cli.interrupts import Interrupted, Interrupts

from .conftest import DEADLINE, Home, eventually

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
every_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)


def me(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@every_signal
def test_the_first_signal_counts_and_breaks_nothing_that_comes_after(number: signal.Signals) -> None:
    cleaned = []

    def story() -> None:
        with Interrupts():
            try:
                me(number)
            finally:
                for other in SIGNALS:
                    me(other)
                cleaned.append(True)

    with pytest.raises(Interrupted) as raised:
        story()
    assert cleaned == [True]
    assert raised.value.status == 128 + number


@every_signal
def test_held_signals_are_raised_on_release(number: signal.Signals) -> None:
    steps = []

    def story() -> None:
        with Interrupts() as interrupts:
            with interrupts.held():
                me(number)
                steps.append("both steps done")
            steps.append("never")

    with pytest.raises(Interrupted):
        story()
    assert steps == ["both steps done"]
    with Interrupts() as interrupts:
        interrupts.hold()
        me(number)
    assert interrupts.received == number


@every_signal
def test_what_runs_is_cancelled_and_cleans_up(number: signal.Signals) -> None:
    told, cleaned = [], []

    async def work() -> None:
        try:
            me(number)
            await asyncio.sleep(DEADLINE)
        finally:
            me(signal.SIGHUP)
            await asyncio.sleep(0.01)
            cleaned.append(True)

    with Interrupts() as interrupts:
        with pytest.raises(Interrupted):
            interrupts.run(work, on_stop=lambda: told.append(True))
        assert (told, cleaned) == ([True], [True])
        me(signal.SIGTERM)  # still no end: the clean-up that follows is not to be broken


def test_what_runs_to_its_end_gives_its_result() -> None:
    async def work() -> int:
        return 7

    with Interrupts() as interrupts:
        assert interrupts.run(work) == 7
        with pytest.raises(Interrupted):
            me(signal.SIGTERM)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            me(signal.SIGHUP)
            assert not interrupts.received
    finally:
        signal.signal(signal.SIGHUP, before)


# The commands

COMMANDS = [["demo"], ["up", "--detach"], ["up"]]
every_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@pytest.mark.slow
@every_command
@every_signal
def test_a_start_that_is_interrupted_leaves_nothing(
    home: Home, command: list[str], number: signal.Signals
) -> None:
    home.environment["GREENROOM_STANDIN_NODE"] = "mute"
    process = home.start(*command, *home.up_options())
    eventually(lambda: "started node-0" in home.trace(), "the node's start")
    process.send_signal(number)
    process.send_signal(signal.SIGHUP)
    _out, err = process.communicate(timeout=DEADLINE)
    # Which of the two comes first is the kernel's choice.
    assert process.returncode in ([0] if command == ["up"] else [128 + number, 128 + signal.SIGHUP]), err
    assert home.state.running() is None
    assert home.marked() == []
    assert b"Traceback" not in err
    assert (b"interrupted; it is safe to run it again" in err) == (command == ["demo"])


@pytest.mark.slow
@every_signal
def test_a_demo_that_is_interrupted_later_stops_what_it_started(home: Home, number: signal.Signals) -> None:
    home.environment["GREENROOM_STANDIN_REFUSALS"] = "1000000"  # it goes on asking for its sandbox
    process = home.start("demo", *home.up_options())
    eventually(lambda: "ready proxy-0" in home.trace(), "the platform's start")
    process.send_signal(number)
    _out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + number, err
    assert home.state.running() is None
    assert home.marked() == []
    assert b"interrupted; it is safe to run it again" in err


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["mute", ""], ids=["during the start", "afterwards"])
@every_command
def test_a_terminal_that_closes_takes_with_it_what_it_started(
    home: Home, command: list[str], habit: str
) -> None:
    if command == ["up", "--detach"] and not habit:
        pytest.skip("what is detached is to outlive its terminal")
    home.environment |= {"GREENROOM_STANDIN_NODE": habit, "TERM": "xterm"}
    if command == ["demo"] and not habit:
        home.environment["GREENROOM_STANDIN_REFUSALS"] = "1000000"
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *home.command(*command, *home.up_options())],
        env=home.environment, stdin=follower, stdout=follower, stderr=follower,
    )  # fmt: skip
    os.close(follower)
    awaited = "started node-0" if habit else "ready proxy-0"
    eventually(lambda: awaited in home.trace(), f"that it {awaited}")
    os.close(leader)
    process.wait(DEADLINE)
    eventually(lambda: home.state.running() is None, "the supervisor's end")
    record = home.state.supervisor()
    assert record is not None
    assert record.state == "stopped", "it stopped in order and did not just die"
    assert home.marked() == []


@pytest.mark.slow
def test_a_start_that_somebody_stops_is_told_as_that(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_NODE"] = "mute"
    process = home.start("up", "--detach", *home.up_options())
    eventually(lambda: "started node-0" in home.trace(), "the node's start")
    assert "stopped" in home.ok("down")
    _out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert b"error: it was stopped before all of it was up" in err
