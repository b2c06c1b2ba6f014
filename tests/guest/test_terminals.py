"""Commands on a pseudo-terminal."""

from __future__ import annotations

import base64
import os
import pwd
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest.errors import AgentError
from greenroom.guest.terminals import Size, requested_size
from tests.guest.harness import IS_ROOT, Agent, Stream, alive, b64, collect, eventually, shell

SIZE = {"size": {"cols": 100, "rows": 40}}


@contextmanager
def terminal(
    agent: Agent, script: str, user: str | None = None, **fields: Any
) -> Iterator[tuple[Stream, int]]:
    """A script on a terminal of 100 by 40; its stream after the start event, and its pid."""
    message = {"process": shell(script), "pty": SIZE, **fields}
    with agent.stream("Start", message, user) as stream:
        yield stream, stream.next()["start"]["pid"]


def typed(agent: Agent, pid: int, data: bytes) -> None:
    answer = agent.process_call("SendInput", {"process": {"pid": pid}, "input": {"pty": b64(data)}})
    assert answer.json == {}, answer.body


def read_until(stream: Stream, wanted: bytes) -> bytes:
    """What the terminal shows until it shows this."""
    seen = b""
    while wanted not in seen:
        event = stream.next()
        assert "data" in event, (event, seen)
        seen += base64.b64decode(event["data"]["pty"])
    return seen


def test_a_command_has_a_terminal_of_the_size_asked_for(agent: Agent, folder: Path) -> None:
    process = {**shell("tty; stty size; echo $TERM $A; pwd; exit 3"), "envs": {"A": "b"}, "cwd": str(folder)}
    with agent.stream("Start", {"process": process, "pty": SIZE}) as stream:
        outcome = collect(stream)
    tty, size, words, cwd = outcome.pty.decode().split("\r\n")[:4]
    assert tty.startswith("/dev/pts/")
    assert (size, words, cwd) == ("40 100", "xterm-256color b", str(folder))
    assert (outcome.code, outcome.stdout, outcome.stderr) == (3, b"", b"")


def test_a_size_left_out_is_80_by_24(agent: Agent) -> None:
    for pty in ({}, {"size": {}}, {"size": {"cols": 0, "rows": 0}}):
        with agent.stream("Start", {"process": shell("stty size"), "pty": pty}) as stream:
            assert collect(stream).pty == b"24 80\r\n"


def test_input_is_echoed_and_read(agent: Agent) -> None:
    with terminal(agent, "read word; echo got $word") as (stream, pid):
        typed(agent, pid, b"hello\n")
        assert b"hello\r\ngot hello\r\n" in collect(stream).pty


def test_an_interactive_shell(agent: Agent) -> None:
    process = {"cmd": "/bin/bash", "args": ["-i", "-l"], "envs": {"TERM": "xterm-256color"}}
    with agent.stream("Start", {"process": process, "pty": SIZE}) as stream:
        pid = stream.next()["start"]["pid"]
        typed(agent, pid, b"echo $((6 * 7))$TERM; sleep 600 &\n")
        read_until(stream, b"42xterm-256color")
        typed(agent, pid, b"exit 5\n")
        outcome = collect(stream)
    assert outcome.code == 5


def test_control_c_reaches_what_runs_in_front(agent: Agent) -> None:
    script = "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.1; done"
    with terminal(agent, script) as (stream, pid):
        read_until(stream, b"ready")
        typed(agent, pid, b"\x03")
        outcome = collect(stream)
    assert b"caught" in outcome.pty
    assert outcome.code == 7


def test_control_d_ends_the_input(agent: Agent) -> None:
    with terminal(agent, "echo ready; cat; echo over") as (stream, pid):
        read_until(stream, b"ready")
        typed(agent, pid, b"\x04")
        assert b"over" in collect(stream).pty


def test_resizing(agent: Agent) -> None:
    script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.1; done"
    with terminal(agent, script) as (stream, pid):
        read_until(stream, b"ready")
        answer = agent.process_call(
            "Update", {"process": {"pid": pid}, "pty": {"size": {"cols": 91, "rows": 32}}}
        )
        assert answer.json == {}
        assert collect(stream).pty == b"32 91\r\n"
    gone = agent.process_call("Update", {"process": {"pid": pid}, "pty": SIZE})
    assert gone.json["code"] == "not_found"


def test_what_has_no_terminal_cannot_be_resized_and_the_other_way_round(agent: Agent) -> None:
    with agent.started("cat", stdin=True) as (stream, pid):
        answer = agent.process_call("Update", {"process": {"pid": pid}, "pty": SIZE})
        assert (answer.status, answer.json["code"]) == (500, "internal")
        answer = agent.process_call("SendInput", {"process": {"pid": pid}, "input": {"pty": "eA=="}})
        assert answer.json["code"] == "internal"
        agent.process_call("CloseStdin", {"process": {"pid": pid}})
        collect(stream)
    with terminal(agent, "read word") as (stream, pid):
        answer = agent.process_call("SendInput", {"process": {"pid": pid}, "input": {"stdin": "eA=="}})
        assert answer.json["code"] == "internal"
        answer = agent.process_call("CloseStdin", {"process": {"pid": pid}})
        assert answer.json["code"] == "failed_precondition"
        typed(agent, pid, b"\n")
        collect(stream)


@pytest.mark.parametrize("size", [{"cols": -1}, {"rows": 65536}, {"cols": "wide"}, 7])
def test_an_impossible_size(agent: Agent, size: object) -> None:
    with agent.stream("Start", {"process": shell("true"), "pty": {"size": size}}) as stream:
        assert list(stream.events()) == []
    assert stream.ended is not None
    assert stream.ended["error"]["code"] == "invalid_argument"


@given(st.integers(-10, 70_000), st.integers(-10, 70_000))
def test_a_size_fits_or_is_refused(columns: int, rows: int) -> None:
    message = {"size": {"cols": columns, "rows": rows}}
    if 0 <= columns < 65536 and 0 <= rows < 65536:
        assert requested_size(message) == Size(columns or 80, rows or 24)
    else:
        with pytest.raises(AgentError, match="65535"):
            requested_size(message)


def test_a_terminal_survives_its_client(agent: Agent) -> None:
    with terminal(agent, "read a; echo one-$a; read b; echo two-$b") as (_, pid):
        pass
    with agent.stream("Connect", {"process": {"pid": pid}}) as stream:
        assert stream.next()["start"]["pid"] == pid
        typed(agent, pid, b"x\n")
        read_until(stream, b"one-x")
        typed(agent, pid, b"y\n")
        assert b"two-y" in collect(stream).pty


def test_a_kill_ends_everybody_on_the_terminal(agent: Agent, folder: Path) -> None:
    note = folder / "pid"
    with terminal(agent, f"sleep 600 & echo $! > {note}; wait") as (stream, pid):
        child = int(eventually(lambda: note.exists() and note.read_text().strip(), "the child runs"))
        agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        assert collect(stream).end["status"] == "signal: killed"
    for process in (pid, child):
        eventually(lambda process=process: not alive(process), "nobody is left")  # type: ignore[misc]


def test_what_is_left_running_does_not_hold_the_terminal(agent: Agent, folder: Path) -> None:
    note = folder / "pid"
    # Ignoring the hang-up, as a server started with nohup does.
    with terminal(agent, f"trap '' HUP; sleep 600 & echo $! > {note}; echo bye") as (stream, _):
        outcome = collect(stream)
    assert (outcome.pty, outcome.code) == (b"bye\r\n", 0)
    os.kill(int(note.read_text()), signal.SIGKILL)


@pytest.mark.skipif(not IS_ROOT, reason="only root can run commands as somebody else")
def test_the_terminal_belongs_to_its_user(agent: Agent) -> None:
    with terminal(agent, "stat -c %u $(tty); echo x > $(tty)", user="nobody") as (stream, _):
        outcome = collect(stream)
    assert outcome.pty == b"%d\r\nx\r\n" % pwd.getpwnam("nobody").pw_uid


def test_much_output_on_a_terminal(agent: Agent) -> None:
    with terminal(agent, "seq 1 50000; echo end") as (stream, _):
        outcome = collect(stream)
    assert outcome.pty == b"".join(b"%d\r\n" % number for number in range(1, 50001)) + b"end\r\n"
