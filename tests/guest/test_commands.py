"""Starting, following, feeding and ending commands."""

from __future__ import annotations

import base64
import os
import pwd
import signal
import struct
from pathlib import Path

import pytest

from tests.guest.harness import IS_ROOT, ME, Agent, alive, b64, collect, envelope, eventually, shell

NOBODY = pwd.getpwnam("nobody")
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can run commands as somebody else")


def test_a_command_runs(agent: Agent) -> None:
    outcome = agent.run("echo out; echo err >&2; exit 3")
    assert (outcome.stdout, outcome.stderr, outcome.code) == (b"out\n", b"err\n", 3)
    assert outcome.end == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert outcome.error is None


def test_start_comes_first_and_end_last(agent: Agent) -> None:
    with agent.stream("Start", {"process": shell("echo hi")}) as stream:
        kinds = [next(iter(message["event"])) for message in stream.events()]
        assert stream.response.headers["Content-Type"] == "application/connect+json"
    assert kinds == ["start", "data", "end"]
    assert stream.ended == {}


def test_output_keeps_its_order_and_its_bytes(agent: Agent) -> None:
    script = "for i in $(seq 2000); do echo line $i; done; printf '\\303\\251\\377\\000x'"
    expected = b"".join(b"line %d\n" % i for i in range(1, 2001)) + b"\xc3\xa9\xff\0x"
    assert agent.run(script).stdout == expected


def test_much_output(agent: Agent) -> None:
    outcome = agent.run("head -c 20000000 /dev/zero; echo end >&2")
    assert outcome.stdout == bytes(20_000_000)
    assert outcome.stderr == b"end\n"


def test_chunks_are_at_most_32_kib(agent: Agent) -> None:
    with agent.started("head -c 300000 /dev/zero") as (stream, _):
        sizes = [
            len(base64.b64decode(message["event"]["data"]["stdout"]))
            for message in stream.events()
            if "data" in message["event"]
        ]
    assert sum(sizes) == 300_000
    assert max(sizes) <= 32 * 1024


def test_the_end_of_a_signalled_command(agent: Agent) -> None:
    outcome = agent.run("kill -TERM $$")
    assert outcome.end == {
        "exitCode": -1, "exited": False, "status": "signal: terminated", "error": "signal: terminated",
    }  # fmt: skip


# -- where and as whom ------------------------------------------------------------------------------------


def test_environment_and_directory(agent: Agent, folder: Path) -> None:
    outcome = agent.run(
        "pwd; echo $HOME $USER $LOGNAME $X", process={"cwd": str(folder), "envs": {"X": "y z"}}
    )
    account = pwd.getpwnam(ME)
    assert outcome.stdout.decode() == f"{folder}\n{account.pw_dir} {ME} {ME} y z\n"


@pytest.mark.skipif(not os.path.isdir(pwd.getpwnam(ME).pw_dir), reason="this account has no home")
def test_the_home_is_where_commands_start(agent: Agent) -> None:
    home = pwd.getpwnam(ME).pw_dir
    for cwd in ("", "~", home, "."):
        assert agent.run("pwd", process={"cwd": cwd}).stdout.decode().strip() == os.path.realpath(home)


def test_the_agents_own_environment_stays_outside(agent: Agent) -> None:
    names = {line.partition("=")[0] for line in agent.run("env").stdout.decode().splitlines()}
    assert names <= {"PATH", "HOME", "USER", "LOGNAME", "PWD", "OLDPWD", "SHLVL", "_"}


@needs_root
def test_another_user(agent: Agent) -> None:
    outcome = agent.run("id -u; id -g; id -G; echo $USER; pwd; umask", user="nobody")
    uid, gid, groups, name, cwd, mask = outcome.stdout.decode().split("\n")[:6]
    assert (int(uid), int(gid), name, mask) == (NOBODY.pw_uid, NOBODY.pw_gid, "nobody", "0022")
    assert {int(group) for group in groups.split()} == set(os.getgrouplist("nobody", NOBODY.pw_gid))
    assert cwd == (NOBODY.pw_dir if os.path.isdir(NOBODY.pw_dir) else "/")


def test_an_unknown_user(agent: Agent) -> None:
    outcome = agent.run("id", user="no-such-user")
    assert outcome.error == {"code": "unauthenticated", "message": "invalid username: 'no-such-user'"}


@pytest.mark.parametrize(("process", "code"), [
    ({"cmd": "no-such-program"}, "not_found"),
    ({"cmd": "/no/such/program"}, "not_found"),
    ({"cmd": "/etc/passwd"}, "permission_denied"),
    ({"cmd": "/bin/sh", "cwd": "/no/such/dir"}, "invalid_argument"),
    ({"cmd": "/bin/sh", "cwd": "/etc/passwd"}, "invalid_argument"),
    ({"cmd": ""}, "invalid_argument"),
    ({"cmd": 7}, "invalid_argument"),
    ({"cmd": "a\0b"}, "invalid_argument"),
    ({"cmd": "/bin/echo", "args": ["\ud800"]}, "invalid_argument"),
    ({"cmd": "/bin/echo", "args": "text"}, "invalid_argument"),
    ({"cmd": "/bin/echo", "envs": {"A=B": "c"}}, "invalid_argument"),
    ({"cmd": "/bin/echo", "envs": {"A": "\0"}}, "invalid_argument"),
    ({"cmd": "/bin/echo", "args": ["x" * 3_000_000]}, "invalid_argument"),
])  # fmt: skip
def test_what_cannot_be_started_says_why(agent: Agent, process: object, code: str) -> None:
    with agent.stream("Start", {"process": process}) as stream:
        assert list(stream.events()) == []
    assert stream.ended is not None
    assert stream.ended["error"]["code"] == code
    assert stream.ended["error"]["message"]


def test_unknown_methods_are_unimplemented(agent: Agent) -> None:
    for method in ("process.Process/Nonsense", "process.Process/", "filesystem.Filesystem/Nonsense"):
        answer = agent.call(method, {})
        assert (answer.status, answer.json["code"]) == (501, "unimplemented")


def test_one_message_in_one_envelope(agent: Agent) -> None:
    for body in (b"", b"{}", envelope(b"{}") * 2, envelope(b"{}")[:-1], envelope(b"x"), b"\1" + bytes(4)):
        answer = agent.request(
            "POST", "/process.Process/Start", body, {"Content-Type": "application/connect+json"}
        )
        assert answer.status == 200
        assert answer.body[0] == 2


# -- listing and following --------------------------------------------------------------------------------


def listed(agent: Agent) -> dict[int, dict[str, object]]:
    return {process["pid"]: process for process in agent.process_call("List", {}).json["processes"]}


def test_live_commands_are_listed(agent: Agent, folder: Path) -> None:
    process = {**shell("read line"), "envs": {"A": "b"}, "cwd": str(folder)}
    with agent.stream("Start", {"process": process, "tag": "my-tag", "stdin": True}) as stream:
        pid = stream.next()["start"]["pid"]
        shown = listed(agent)[pid]
        assert shown.pop("executionId")
        assert shown == {"config": process, "pid": pid, "tag": "my-tag"}
        agent.process_call("CloseStdin", {"process": {"tag": "my-tag"}})
        collect(stream)
    assert pid not in listed(agent)


def test_following_a_running_command(agent: Agent) -> None:
    with agent.started("echo early; while read line; do echo got $line; done", stdin=True) as (stream, pid):
        assert base64.b64decode(stream.next()["data"]["stdout"]) == b"early\n"
        with agent.stream("Connect", {"process": {"pid": pid}}) as second:
            assert second.next()["start"]["pid"] == pid
            for word in (b"one\n", b"two\n"):
                assert (
                    agent.process_call(
                        "SendInput", {"process": {"pid": pid}, "input": {"stdin": b64(word)}}
                    ).json
                    == {}
                )
            agent.process_call("CloseStdin", {"process": {"pid": pid}})
            first_outcome, second_outcome = collect(stream), collect(second)
    assert first_outcome.stdout == second_outcome.stdout == b"got one\ngot two\n"
    assert first_outcome.end == second_outcome.end


def test_a_command_that_has_ended_can_still_be_asked_for_its_end(agent: Agent) -> None:
    pid = agent.run("echo gone; exit 4").pid
    with agent.stream("Connect", {"process": {"pid": pid}}) as stream:
        outcome = collect(stream)
    assert (outcome.pid, outcome.stdout, outcome.code) == (pid, b"", 4)


@pytest.mark.parametrize("selector", [{"pid": 4194000}, {"tag": "nothing"}])
def test_an_unknown_command(agent: Agent, selector: dict[str, object]) -> None:
    with agent.stream("Connect", {"process": selector}) as stream:
        assert list(stream.events()) == []
    assert stream.ended is not None
    assert stream.ended["error"]["code"] == "not_found"
    for method, rest in (
        ("SendInput", {"input": {"stdin": "eA=="}}), ("CloseStdin", {}), ("SendSignal", {"signal": "SIGNAL_SIGKILL"}),
    ):  # fmt: skip
        answer = agent.process_call(method, {"process": selector, **rest})
        assert (answer.status, answer.json["code"]) == (404, "not_found")


def test_a_selector_is_needed(agent: Agent) -> None:
    messages: list[dict[str, object]] = [
        {},
        {"process": {}},
        {"process": {"pid": "x"}},
        {"process": {"pid": True}},
    ]
    for message in messages:
        assert agent.process_call("SendSignal", message).json["code"] == "invalid_argument"


def test_a_client_that_leaves_does_not_end_the_command(agent: Agent, folder: Path) -> None:
    marker = folder / "marker"
    with agent.started(
        f"read line; head -c 10000000 /dev/zero; echo done > {marker}; read line", stdin=True
    ) as (_, pid):
        pass
    with agent.socket():  # the agent has seen the first connection close before it serves a later one
        pass
    # With nobody listening ten megabytes go nowhere, and the command does not wait for a reader.
    agent.process_call("SendInput", {"process": {"pid": pid}, "input": {"stdin": b64(b"\n")}})
    eventually(marker.exists, "the command goes on without its client")
    assert pid in listed(agent)
    agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    eventually(lambda: not alive(pid), "the command has ended")


def test_a_slow_reader_slows_the_command_and_not_the_agent(agent: Agent, folder: Path) -> None:
    marker = folder / "marker"
    size = 30_000_000
    with agent.started(f"head -c {size} /dev/zero; echo done > {marker}") as (stream, pid):
        io = Path(f"/proc/{agent.process.pid}/io")
        seen: list[str] = []

        def at_rest() -> bool:
            seen.append(next(line for line in io.read_text().splitlines() if line.startswith("rchar")))
            return len(seen) > 20 and len(set(seen[-20:])) == 1

        eventually(at_rest, "the agent has stopped reading output")
        assert not marker.exists()
        status = Path(f"/proc/{agent.process.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]
        assert int(resident) < 150_000
        assert agent.run("echo others work").stdout == b"others work\n"
        assert len(collect(stream, pid).stdout) == size
    assert marker.exists()


def test_a_lagging_follower_that_leaves_frees_the_command(agent: Agent) -> None:
    with agent.started("read line; head -c 30000000 /dev/zero", stdin=True) as (stream, pid):
        with agent.stream("Connect", {"process": {"pid": pid}}) as second:
            second.next()
            agent.process_call("SendInput", {"process": {"pid": pid}, "input": {"stdin": b64(b"\n")}})
            assert "data" in stream.next()
            # Reset: the follower has unread output in its socket.
        outcome = collect(stream, pid)
    assert outcome.code == 0


def test_silence_is_filled_with_keepalives(agent: Agent) -> None:
    with agent.started("read line", stdin=True, headers={"Keepalive-Ping-Interval": "1"}) as (stream, pid):
        assert stream.next() == {"keepalive": {}}
        agent.process_call("CloseStdin", {"process": {"pid": pid}})
        collect(stream)


# -- input ------------------------------------------------------------------------------------------------


def test_much_input_in_order(agent: Agent) -> None:
    with agent.started("wc -c; wc -l", stdin=True) as (stream, pid):
        for _ in range(3):
            data = b"0123456\n" * 100_000
            answer = agent.process_call("SendInput", {"process": {"pid": pid}, "input": {"stdin": b64(data)}})
            assert answer.status == 200
        for _ in range(2):
            assert agent.process_call("CloseStdin", {"process": {"pid": pid}}).json == {}
        assert collect(stream).stdout.split() == [b"2400000", b"0"]


def test_stdin_is_open_unless_declined(agent: Agent) -> None:
    with agent.stream("Start", {"process": {"cmd": "cat"}}) as stream:
        pid = stream.next()["start"]["pid"]
        agent.process_call("SendInput", {"process": {"pid": pid}, "input": {"stdin": b64(b"x")}})
        agent.process_call("CloseStdin", {"process": {"pid": pid}})
        assert collect(stream).stdout == b"x"
    assert agent.run("cat; echo empty").stdout == b"empty\n"


def test_input_that_cannot_be_taken(agent: Agent) -> None:
    with agent.started("sleep 60") as (_, pid):
        selector = {"process": {"pid": pid}}
        answer = agent.process_call("SendInput", {**selector, "input": {"stdin": "eA=="}})
        assert (answer.status, answer.json["code"]) == (500, "internal")
        answer = agent.process_call("SendInput", {**selector, "input": {"pty": "eA=="}})
        assert answer.json["code"] == "internal"
        assert agent.process_call("SendInput", {**selector, "input": {"stdin": "!"}}).status == 400
        assert agent.process_call("SendInput", selector).status == 400
        agent.process_call("SendSignal", {**selector, "signal": "SIGNAL_SIGKILL"})


def test_input_to_a_command_that_closed_its_stdin(agent: Agent) -> None:
    with agent.started("exec 0</dev/null; echo closed; sleep 60", stdin=True) as (stream, pid):
        assert base64.b64decode(stream.next()["data"]["stdout"]) == b"closed\n"
        answer = agent.process_call("SendInput", {"process": {"pid": pid}, "input": {"stdin": "eA=="}})
        assert answer.json["code"] == "internal"
        agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        collect(stream)


def test_input_nobody_reads_waits_and_its_client_may_leave(agent: Agent) -> None:
    with agent.started("read line; sleep 60", stdin=True) as (stream, pid):
        with agent.socket() as peer:
            body = b'{"process":{"pid":%d},"input":{"stdin":"%b"}}' % (pid, b64(bytes(500_000)).encode())
            peer.sendall(
                b"POST /process.Process/SendInput HTTP/1.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
        # The writer's connection is gone, so this close is not held up by its unfinished write for ever.
        assert agent.process_call("CloseStdin", {"process": {"pid": pid}}).status == 200
        agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        collect(stream)


def test_streamed_input(agent: Agent) -> None:
    with agent.started("wc -c", stdin=True) as (stream, pid):
        frames = [envelope(b'{"start":{"process":{"pid":%d}}}' % pid), envelope(b'{"keepalive":{}}')]
        frames += [envelope(b'{"data":{"input":{"stdin":"%b"}}}' % b64(bytes(10_000)).encode())] * 40
        answer = agent.request(
            "POST", "/process.Process/StreamInput", iter(frames), {"Content-Type": "application/connect+json"}
        )
        assert answer.body == envelope(b"{}") + envelope(b"{}", 2)
        agent.process_call("CloseStdin", {"process": {"pid": pid}})
        assert collect(stream).stdout.strip() == b"400000"


def test_streamed_input_needs_a_process(agent: Agent) -> None:
    headers = {"Content-Type": "application/connect+json"}
    for frames, code in (
        ([envelope(b'{"start":{"process":{"pid":4194000}}}')], b"not_found"),
        ([envelope(b'{"data":{"input":{"stdin":""}}}')], b"invalid_argument"),
        ([], b"invalid_argument"),
    ):
        answer = agent.request("POST", "/process.Process/StreamInput", iter(frames), headers)
        assert answer.status == 200
        assert code in answer.body


# -- ending -----------------------------------------------------------------------------------------------


def gone(pid: int) -> None:
    """Wait for a process to have ended."""
    eventually(lambda: not alive(pid), f"process {pid} is gone")


def pids_in(path: Path, count: int) -> list[int]:
    """Wait for a script to have written this many process ids."""
    return eventually(  # type: ignore[no-any-return]
        lambda: (
            (found := [int(word) for word in path.read_text().split()]) and len(found) >= count and found
            if path.exists()
            else None
        ),
        f"{count} children are running",
    )


def test_a_kill_reaches_everybody(agent: Agent, folder: Path) -> None:
    notes = folder / "pids"
    script = (
        f"sleep 600 & echo $! >> {notes}; (sleep 601 & echo $! >> {notes}; wait) & "
        f"setsid sh -c 'echo $$ >> {notes}; sleep 602' & wait"
    )
    with agent.started(script) as (stream, pid):
        children = pids_in(notes, 3)
        answer = agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        assert answer.json == {}
        outcome = collect(stream)
    assert outcome.end["status"] == "signal: killed"
    assert outcome.code == -1
    for child in (pid, *children):
        gone(child)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # not even a zombie is left


def test_sigterm_reaches_the_group(agent: Agent, folder: Path) -> None:
    notes = folder / "pids"
    script = f"trap 'echo bye; exit 5' TERM; sleep 600 & echo $! >> {notes}; wait"
    with agent.started(script) as (stream, pid):
        [child] = pids_in(notes, 1)
        # Until it has become sleep, the child is a shell that may swallow the signal.
        comm = Path(f"/proc/{child}/comm")
        eventually(lambda: comm.read_text() == "sleep\n", "the child has become sleep")
        agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"})
        outcome = collect(stream)
    assert (outcome.stdout, outcome.code) == (b"bye\n", 5)
    eventually(lambda: not alive(child), "the child is gone")


def test_signalling_what_has_ended(agent: Agent) -> None:
    pid = agent.run("true").pid
    for name in ("SIGNAL_SIGKILL", "SIGNAL_SIGTERM", 9):
        answer = agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": name})
        assert (answer.status, answer.json["code"]) == (404, "not_found")


def test_other_signals_are_unimplemented(agent: Agent) -> None:
    with agent.started("sleep 60") as (stream, pid):
        for name in ("SIGNAL_SIGHUP", "SIGNAL_UNSPECIFIED", 1, None, ["x"]):
            answer = agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": name})
            assert (answer.status, answer.json["code"]) == (501, "unimplemented")
        agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"})
        collect(stream)


def test_a_deadline_kills_everybody(agent: Agent, folder: Path) -> None:
    notes = folder / "pids"
    with agent.started(f"sleep 600 & echo $! >> {notes}; wait", headers={"Connect-Timeout-Ms": "700"}) as (
        stream,
        pid,
    ):
        [child] = pids_in(notes, 1)
        outcome = collect(stream)
    assert outcome.error is not None
    assert outcome.error["code"] == "deadline_exceeded"
    assert outcome.end == {}
    for process in (pid, child):
        gone(process)
    assert pid not in listed(agent)


def test_a_deadline_counts_when_the_client_has_left(agent: Agent) -> None:
    with agent.started("sleep 600", headers={"Connect-Timeout-Ms": "700"}) as (_, pid):
        assert alive(pid)
    eventually(lambda: not alive(pid), "the command was killed at its deadline")


def test_a_followers_deadline_ends_only_its_stream(agent: Agent) -> None:
    with agent.started("sleep 600") as (stream, pid):
        selector = {"process": {"pid": pid}}
        with agent.stream("Connect", selector, headers={"Connect-Timeout-Ms": "50"}) as second:
            assert (collect(second).error or {})["code"] == "deadline_exceeded"
        assert alive(pid)
        agent.process_call("SendSignal", {**selector, "signal": "SIGNAL_SIGKILL"})
        collect(stream)


def test_a_malformed_deadline_is_refused(agent: Agent) -> None:
    with agent.stream("Start", {"process": shell("true")}, headers={"Connect-Timeout-Ms": "soon"}) as stream:
        assert list(stream.events()) == []
    assert stream.ended is not None
    assert stream.ended["error"]["code"] == "invalid_argument"


def test_a_background_child_keeps_the_stream_open(agent: Agent, folder: Path) -> None:
    fifo = folder / "go"
    os.mkfifo(fifo)
    with agent.started(f"(read word < {fifo}; echo late $word) & exit 6") as (stream, pid):
        # The leader is a zombie by now or soon, yet listed, as its output is not complete.
        eventually(lambda: not alive(pid), "the leader has exited")
        assert pid in listed(agent)
        fifo.write_text("child\n")
        outcome = collect(stream)
    assert (outcome.stdout, outcome.code) == (b"late child\n", 6)


def test_a_kill_ends_what_the_leader_left_behind(agent: Agent) -> None:
    with agent.started("sleep 600 & exit 0") as (stream, pid):
        eventually(lambda: not alive(pid), "the leader has exited")
        assert (
            agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}).json == {}
        )
        assert collect(stream).code == 0
    assert pid not in listed(agent)


def test_a_detached_survivor_does_not_hold_up_the_end(agent: Agent, folder: Path) -> None:
    notes = folder / "pids"
    script = f"setsid sh -c 'echo $$ > {notes}; exec sleep 600' & exit 0"
    with agent.started(script) as (stream, pid):
        [survivor] = pids_in(notes, 1)
        eventually(lambda: not alive(pid), "the leader has exited")
        agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        collect(stream)
    if alive(survivor):  # it has left session and ancestors, so it may live on
        os.kill(survivor, signal.SIGKILL)


def test_many_commands_at_once(agent: Agent) -> None:
    streams = [
        agent.open_stream("Start", {"process": shell(f"echo {number}; exit {number}")})
        for number in range(40)
    ]
    try:
        outcomes = [collect(stream) for stream in streams]
    finally:
        for stream in streams:
            stream.close()
    assert [(outcome.stdout, outcome.code) for outcome in outcomes] == [(b"%d\n" % n, n) for n in range(40)]
    assert len({outcome.pid for outcome in outcomes}) == 40


def test_a_client_that_resets_its_connection(agent: Agent) -> None:
    stream = agent.open_stream("Start", {"process": shell("yes")})
    pid = stream.next()["start"]["pid"]
    assert stream.connection.sock is not None
    stream.connection.sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER 0: close sends a reset
    stream.close()
    assert alive(pid)
    agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    eventually(lambda: not alive(pid), "the command was killed")


def test_no_descriptor_is_lost(agent: Agent) -> None:
    folder = Path(f"/proc/{agent.process.pid}/fd")
    agent.run("true")
    before = eventually(lambda: len(list(folder.iterdir())), "descriptors can be counted")
    for _ in range(10):
        agent.run("echo x")
        agent.run("x", user="no-such-user")
        with agent.stream("Start", {"process": {"cmd": "no-such-program"}}) as stream:
            list(stream.events())
    eventually(lambda: len(list(folder.iterdir())) <= before, "all descriptors are closed again")
