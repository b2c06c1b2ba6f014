"""`up` and `down` with real processes: the order of things, deaths, and supervisors that die."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from greenroom.cli.processes import ProcessId

from .conftest import DEADLINE, Home, eventually

pytestmark = pytest.mark.slow


def alive(pid: int) -> bool:
    return ProcessId.of(pid) is not None


def test_up_starts_in_order_and_down_stops_in_order(home: Home) -> None:
    reported = home.up("--nodes", "2")
    assert "Greenroom is up at http://127.0.0.1:" in reported
    assert "noise_pid" not in reported
    started = [line for line in home.trace() if not line.startswith("swept")]
    assert started[:2] == ["started master-0", "ready master-0"]
    assert started[-2:] == ["started proxy-0", "ready proxy-0"]
    pids = [home.pid(name) for name in ("master-0", "node-0", "node-1", "api-0", "proxy-0")]
    assert all(os.getsid(pid) == pid for pid in pids), "each role has a session of its own"

    assert "stopped" in home.ok("down")
    ended = [line for line in home.trace() if line.startswith(("ended", "swept"))]
    assert ended[:2] == ["ended proxy-0", "ended api-0"]
    assert set(ended[2:4]) == {"ended node-0", "ended node-1"}
    assert ended[4:] == ["ended master-0", "swept node-0", "swept node-1"]
    assert not any(alive(pid) for pid in pids)
    assert home.ok("down") == "nothing is running\n"


def test_nothing_of_the_state_is_open_to_others(home: Home) -> None:
    home.up()
    for path in [home.state.root, *home.state.root.rglob("*")]:
        mode = path.stat().st_mode
        assert stat.S_IMODE(mode) & 0o077 == 0 or path.name.startswith("store.db-"), path


def test_roles_get_little_of_the_environment_and_no_secret(home: Home) -> None:
    home.environment["E2B_API_KEY"] = "e2b_secret_of_the_user"
    home.environment["AWS_SECRET_ACCESS_KEY"] = "another"
    home.up()
    key = home.state.default_key.read_text(encoding="utf-8").strip()
    token = (home.state.secrets / "node.token").read_text(encoding="utf-8").strip()
    for pid in [*map(home.pid, home.roles()), home.supervisor().pid]:
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        for secret in ("e2b_secret_of_the_user", "another", key, token):
            assert secret not in environment + arguments


def test_a_second_up_is_refused(home: Home) -> None:
    home.up()
    pid = home.supervisor().pid
    for mode in (["--detach"], []):
        refused = home.run("up", *mode, *home.up_options())
        assert refused.returncode == 1
        assert f"already running (pid {pid})" in refused.stderr
    assert home.supervisor().pid == pid


def test_a_dead_role_comes_back_on_its_port(home: Home) -> None:
    home.up()
    before = home.roles()["master-0"]
    assert before.process is not None
    os.kill(before.process.pid, signal.SIGKILL)
    eventually(lambda: home.roles()["master-0"].restarts == 1, "the restart")
    eventually(lambda: home.roles()["master-0"].state == "ready", "the readiness")
    after = home.roles()["master-0"]
    assert after.url == before.url
    assert after.last_exit == "was ended by SIGKILL"
    assert after.last_exit_at is not None
    code, seen = home.status()
    assert (code, seen.state) == (0, "up")
    assert next(role for role in seen.roles if role.name == "master-0").restarts == 1


def test_what_a_role_left_in_its_group_ends_with_it(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_PROXY"] = "child"
    home.up()
    child = int(next(line for line in home.trace() if line.startswith("child-")).split(" ")[0].split("-")[1])
    assert alive(child)
    os.kill(home.pid("proxy-0"), signal.SIGKILL)
    eventually(lambda: not alive(child), "the end of the dead role's child")


def test_a_failing_role_ends_the_start_and_says_why(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_NODE"] = "fail"
    for mode in (["--detach"], []):
        failed = home.run("up", *mode, *home.up_options())
        assert failed.returncode == 1
        assert "error: node-0 ended with exit status 78 before it was ready: " in failed.stderr
        assert "a tool is missing; install it" in failed.stderr
        assert "node-0.log" in failed.stderr
        assert home.marked() == []
    code, seen = home.status()
    assert code == 4
    assert any("the last start failed: node-0" in problem for problem in seen.problems)
    home.ok("down")
    assert home.status()[1].problems == [], "what was seen to is no problem any more"


def test_progress_is_printed_once_a_step(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_NODE"] = "progress"
    reported = home.up().splitlines()
    assert reported.count("node-0: building the image") == 1
    assert reported.count("node-0: booting once") == 1


def test_progress_on_a_terminal(home: Home) -> None:
    home.environment |= {"GREENROOM_STANDIN_NODE": "progress", "TERM": "xterm", "COLUMNS": "100"}
    leader, follower = pty.openpty()
    try:
        process = subprocess.Popen(
            home.command("up", "--detach", *home.up_options()),
            env=home.environment, stdin=follower, stdout=follower, stderr=follower,
        )  # fmt: skip
        os.close(follower)
        shown = b""
        while True:
            try:
                shown += os.read(leader, 65536)
            except OSError:  # EIO: the other side is closed
                break
        assert process.wait(DEADLINE) == 0
    finally:
        os.close(leader)
    text = shown.decode()
    assert "Traceback" not in text
    assert "node-0" in text
    assert "Greenroom is up at" in text


def test_ctrl_c_in_the_foreground_stops_everything_in_order(home: Home) -> None:
    process = home.start("up", *home.up_options())
    eventually(lambda: home.state.running() is not None, "the start")
    eventually(lambda: home.supervisor() and home.status()[0] == 0, "all being up")
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert (
        f'To use it, in another terminal: eval "$(greenroom --state-dir {home.state.root} env)"'
        in err.decode()
    )
    assert b"Ctrl-C stops it" in err
    assert [line for line in home.trace() if line.startswith("ended")] == [
        "ended proxy-0", "ended api-0", "ended node-0", "ended master-0",
    ]  # fmt: skip
    assert home.status()[0] == 4


def test_interrupting_a_detached_start_stops_it_again(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_NODE"] = "mute"
    process = home.start("up", "--detach", *home.up_options())
    eventually(lambda: "started node-0" in home.trace(), "the node's start")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert home.state.running() is None
    assert home.marked() == []


def test_roles_end_with_a_killed_supervisor_and_the_next_up_is_clean(home: Home) -> None:
    home.up()
    first = {name: home.pid(name) for name in home.roles()}
    os.kill(home.supervisor().pid, signal.SIGKILL)
    eventually(lambda: not any(map(alive, first.values())), "the end of all roles")
    code, seen = home.status()
    assert code == 4
    (problem,) = seen.problems
    assert "was killed; VMs of its sandboxes may still run" in problem
    for command in ("up --detach", "down"):
        assert f"`greenroom --state-dir {home.state.root} {command}`" in problem
    told = home.up()
    assert "the last supervisor was killed; taking over what it left" in told
    assert "sandboxes of the last run that go on: 1" in told
    assert home.status()[0] == 0
    home.ok("down")
    assert "the last" not in home.up(), "a stop in order leaves nothing to take over"


def test_up_ends_roles_that_outlived_a_killed_supervisor(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_API"] = "late"
    home.up("--nodes", "2")
    orphan = home.pid("api-0")
    supervisor = home.supervisor()
    os.kill(supervisor.pid, signal.SIGKILL)
    eventually(lambda: "late api-0" in home.trace(), "the SIGTERM that the kernel sends")
    assert alive(orphan), "it ignores the first"
    home.environment["GREENROOM_STANDIN_API"] = ""
    assert "ended what an earlier run left behind: api-0" in home.up()
    assert not alive(orphan)
    assert "swept node-1" in home.trace(), "a node that does not come back is swept"
    assert "swept node-0" not in home.trace(), "one that does sees to itself"


def test_down_cleans_up_after_a_killed_supervisor(home: Home) -> None:
    home.up()
    supervisor = home.supervisor()
    os.kill(supervisor.pid, signal.SIGKILL)
    assert supervisor.wait_gone(DEADLINE)
    done = json.loads(home.ok("down", "--json"))
    assert (done["was_running"], done["crashed"]) == (False, True)
    assert [swept["node"] for swept in done["swept"]] == ["node-0"]
    assert home.marked() == []
    assert home.ok("down") == "nothing is running\n"


def test_down_kills_when_its_time_is_over(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_MASTER"] = "deaf"
    home.up()
    done = home.run("down", "--timeout", "0.5")
    assert done.returncode == 0, done.stderr
    assert "killing what is left" in done.stderr
    assert home.marked() == []


def test_down_reports_what_a_sweep_could_not_remove(home: Home) -> None:
    home.up()
    home.environment["GREENROOM_STANDIN_NODE"] = "left"
    done = home.run("down")
    assert done.returncode == 1
    assert "still there: 1 namespaces" in done.stdout
    assert "not everything could be removed" in done.stderr
    home.environment["GREENROOM_STANDIN_NODE"] = ""
    assert "removed 2 processes" in home.ok("down"), "the spec was kept, so it can be swept again"


def test_down_never_touches_a_process_that_only_has_the_same_pid(home: Home) -> None:
    home.up()
    home.ok("down")
    with subprocess.Popen(["sleep", "300"]) as stranger:
        records = json.loads((home.state.run / "roles.json").read_bytes())
        supervisor = json.loads((home.state.run / "supervisor.json").read_bytes())
        wrong = {**supervisor["process"], "pid": stranger.pid}
        records[0]["process"] = wrong
        supervisor |= {"process": wrong, "state": "running"}
        (home.state.run / "roles.json").write_text(json.dumps(records), encoding="utf-8")
        (home.state.run / "supervisor.json").write_text(json.dumps(supervisor), encoding="utf-8")
        assert "cleaned up after a supervisor that was killed" in home.ok("down")
        assert stranger.poll() is None
        stranger.kill()


def test_a_taken_port_is_named(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = home.run("up", "--detach", *home.up_options("--port", str(port)))
    assert failed.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in failed.stderr
    assert "--port" in failed.stderr
    assert 'make run DEMO_ARGS="--port 0"' in failed.stderr


def test_the_port_asked_for_is_the_port_used(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home.up("--port", str(port), "--domain", "sandboxes.example.test")
    _code, seen = home.status()
    assert seen.entry_url == f"http://127.0.0.1:{port}"
    assert seen.domain == "sandboxes.example.test"


def test_a_foreign_directory_is_not_taken_over(home: Home) -> None:
    home.state.root.mkdir()
    (home.state.root / "thesis.txt").write_text("important", encoding="utf-8")
    before = home.state.root.stat().st_mode
    failed = home.run("up", "--detach", *home.up_options())
    assert failed.returncode == 1
    assert "no Greenroom state directory" in failed.stderr
    assert home.state.root.stat().st_mode == before
    assert [path.name for path in home.state.root.iterdir()] == ["thesis.txt"]
