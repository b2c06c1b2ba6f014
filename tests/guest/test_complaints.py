"""What people complain about elsewhere and what we do: commands. docs/complaints.md has all of it.

The published SDK, both halves, in front of a real agent that needs no VM. Each test names the complaint it answers.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from e2b import CommandExitException
from e2b.exceptions import NotFoundException, TimeoutException

from tests.guest.conftest import Sdk
from tests.guest.harness import Agent, alive, b64, collect, eventually

pytestmark = pytest.mark.compat


def number_in(note: Path) -> int:
    """The number that a command writes into a file, once it is there."""
    return int(eventually(lambda: note.exists() and note.read_text().strip(), f"{note} is written"))


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


SERVER = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


def test_a_command_past_its_time_out_takes_its_children_and_their_ports_along(sdk: Sdk, folder: Path) -> None:
    """E2B#1031: at the 60 s default the leader dies and is listed no more, while its children keep ports open."""
    note = folder / "port"
    script = f'tail -f /dev/null | python3 -c "{SERVER}" > {note} & wait'
    handle = sdk.do(sdk.commands.run(script, background=True, timeout=3))
    port = number_in(note)
    with pytest.raises(TimeoutException):
        sdk.do(handle.wait())
    eventually(lambda: not is_open(port), "the child's port is closed")
    assert handle.pid not in [process.pid for process in sdk.do(sdk.commands.list())]


def test_without_a_time_out_a_command_has_none(sdk: Sdk, folder: Path) -> None:
    """E2B#1031: what is to stay says `timeout=0`, and then nothing but a kill ends it."""
    note = folder / "pid"
    handle = sdk.do(sdk.commands.run(f"echo $$ > {note}; exec sleep 600", background=True, timeout=0))
    sdk.do(handle.disconnect())
    pid = number_in(note)
    assert alive(pid)
    assert handle.pid in [process.pid for process in sdk.do(sdk.commands.list())]
    assert sdk.do(sdk.commands.kill(handle.pid)) is True


def test_a_kill_reaches_grandchildren(sdk: Sdk, folder: Path) -> None:
    """E2B#1034: kill() leaves child processes running. All that a command started goes with it."""
    note = folder / "pid"
    script = f"(sleep 600 & echo $! > {note}; wait) & wait"
    handle = sdk.do(sdk.commands.run(script, background=True, timeout=0))
    grandchild = number_in(note)
    assert sdk.do(handle.kill()) is True
    eventually(lambda: not alive(grandchild), "the grandchild is gone")


def test_output_goes_on_after_a_command_was_connected_to_again(sdk: Sdk, folder: Path) -> None:
    """E2B#1074, E2B#1352: reconnecting by pid fails after a while, or brings no more output."""
    gate = folder / "gate"
    handle = sdk.do(
        sdk.commands.run(
            f"echo first; until [ -e {gate} ]; do sleep 0.05; done; echo last; exit 4",
            background=True,
            timeout=0,
        )
    )
    sdk.do(handle.disconnect())
    again = sdk.do(sdk.commands.connect(handle.pid, timeout=0))
    gate.touch()
    with pytest.raises(CommandExitException) as caught:
        sdk.do(again.wait())
    assert caught.value.stdout.endswith("last\n")
    assert caught.value.exit_code == 4


def test_an_end_is_learnt_by_who_connects_after_it(sdk: Sdk, folder: Path) -> None:
    """mitos-run/mitos#774: a command that ended while nobody was connected. Its exit code is kept for a while."""
    note = folder / "done"
    handle = sdk.do(sdk.commands.run(f"touch {note}; exit 5", background=True, timeout=0))
    sdk.do(handle.disconnect())
    eventually(lambda: note.exists() and not alive(handle.pid), "the command has ended")
    again = sdk.do(sdk.commands.connect(handle.pid))
    with pytest.raises(CommandExitException) as caught:
        sdk.do(again.wait())
    assert caught.value.exit_code == 5


def test_what_reads_a_declined_stdin_gets_its_end_and_does_not_hang(sdk: Sdk) -> None:
    """E2B#927: stdin became opt-in, and scripts that read it broke. Without it they read an end at once."""
    result = sdk.do(sdk.commands.run("cat; read line || echo no line; wc -c", timeout=30))
    assert result.stdout == "no line\n0\n"


def test_clients_that_do_not_know_of_the_stdin_choice_have_one(agent: Agent) -> None:
    """E2B#927: older clients do not say `stdin`, and mean that there is one."""
    with agent.stream("Start", {"process": {"cmd": "cat"}}) as stream:
        selector = {"process": {"pid": stream.next()["start"]["pid"]}}
        assert agent.process_call("SendInput", {**selector, "input": {"stdin": b64(b"yes")}}).status == 200
        assert agent.process_call("CloseStdin", selector).status == 200
        assert collect(stream).stdout == b"yes"


def test_a_signal_after_the_exit_is_told_as_such(sdk: Sdk) -> None:
    """openkruise/agents#651: a signal to what has ended must not be an internal error."""
    handle = sdk.do(sdk.commands.run("true", background=True))
    sdk.do(handle.wait())
    assert sdk.do(sdk.commands.kill(handle.pid)) is False
    with pytest.raises(NotFoundException):
        sdk.do(sdk.commands.send_stdin(handle.pid, "late"))


def test_a_long_and_busy_stream_comes_whole(sdk: Sdk) -> None:
    """code-interpreter#181: "peer closed connection" in the middle of much output. The last byte is as the first."""
    script = "import sys\nfor n in range(200000): print(n, 'x' * 40)\nprint('end', file=sys.stderr)"
    result = sdk.do(sdk.commands.run(f'python3 -c "{script}"', timeout=120))
    lines = result.stdout.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (200_000, "0 " + "x" * 40, "199999 " + "x" * 40)
    assert result.stderr == "end\n"
