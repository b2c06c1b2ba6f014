"""Who belongs to a command: cgroups where the kernel has them, sessions and parents elsewhere."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.guest.sessions import CommandGroups
from tests.guest.harness import IS_ROOT, Agent, alive, collect, eventually, running_agent


def cgroup2() -> Path | None:
    """Where cgroup version 2 is mounted, if its groups can be killed."""
    for line in Path("/proc/mounts").read_text().splitlines():
        fields = line.split()
        if fields[2] == "cgroup2" and os.access(fields[1], os.W_OK):
            return Path(fields[1])
    return None


PLACE = cgroup2()
needs_groups = pytest.mark.skipif(
    not IS_ROOT or PLACE is None, reason="needs root and a writable cgroup version 2"
)


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory of cgroups for this test only."""
    assert PLACE is not None
    place = PLACE / f"greenroom-test-{os.getpid()}"
    yield place

    def removed() -> bool:
        for group in place.glob("*/"):
            group.rmdir()
        place.rmdir()
        return True

    if place.exists():
        eventually(removed, "the groups of the test are empty")


@pytest.fixture
def grouping_agent(tmp_path: Path, root: Path) -> Iterator[Agent]:
    """An agent that gives each command a cgroup."""
    with running_agent(tmp_path / "identity", "--cgroups", str(root)) as running:
        yield running


def groups(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if entry.is_dir()]


@needs_groups
def test_each_command_has_a_group_of_its_own(grouping_agent: Agent, root: Path) -> None:
    outcome = grouping_agent.run("cat /proc/self/cgroup; sleep 0.01 & wait")
    [line] = [line for line in outcome.stdout.decode().splitlines() if line.startswith("0::")]
    assert Path(line[3:]).parent.name == root.name
    assert groups(root) == []


@needs_groups
@pytest.mark.parametrize("user", [None, "nobody"])
def test_nobody_escapes_a_kill(grouping_agent: Agent, folder: Path, root: Path, user: str | None) -> None:
    notes = folder / "pids"
    notes.touch()
    notes.chmod(0o666)
    # A daemon as daemons are made: new session, twice forked, parents gone.
    daemon = f"setsid sh -c '(sleep 600 & echo $! >> {notes}) &'"
    with grouping_agent.started(f"{daemon}; sleep 601 & echo $! >> {notes}; wait", user=user) as (
        stream,
        pid,
    ):
        pids = eventually(
            lambda: len(found := notes.read_text().split()) == 2 and [int(one) for one in found], "two run"
        )
        grouping_agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        assert collect(stream).end["status"] == "signal: killed"
    for one in (pid, *pids):
        eventually(lambda one=one: not alive(one), "nobody is left")  # type: ignore[misc]

    def all_removed() -> bool:
        grouping_agent.run("true")  # whose end removes what could not be removed yet
        return groups(root) == []

    eventually(all_removed, "no group is left")


@needs_groups
def test_a_deadline_kills_the_group(grouping_agent: Agent, folder: Path) -> None:
    note = folder / "pid"
    script = f"setsid sh -c '(sleep 600 & echo $! > {note}) &'; sleep 601"
    with grouping_agent.started(script, headers={"Connect-Timeout-Ms": "4000"}) as (stream, _):
        daemon = int(eventually(lambda: note.exists() and note.read_text().strip(), "the daemon runs"))
        assert (collect(stream).error or {})["code"] == "deadline_exceeded"
    eventually(lambda: not alive(daemon), "the daemon is gone")


@needs_groups
def test_a_daemon_outlives_a_command_that_ended_by_itself(
    grouping_agent: Agent, folder: Path, root: Path
) -> None:
    note = folder / "pid"
    outcome = grouping_agent.run(f"(setsid sleep 600 & echo $! > {note}) >/dev/null 2>&1")
    assert outcome.code == 0
    daemon = int(note.read_text())
    assert alive(daemon)
    [group] = groups(root)
    assert (group / "cgroup.procs").read_text().split() == [str(daemon)]
    os.kill(daemon, 9)
    eventually(lambda: not alive(daemon), "the daemon is gone")
    grouping_agent.run("true")
    assert group not in groups(root)


@needs_groups
def test_groups_made_by_a_command_are_killed_and_removed_with_its_own(
    grouping_agent: Agent, root: Path, folder: Path
) -> None:
    """As a service manager or a container engine inside a sandbox makes them."""
    note = folder / "pid"
    script = (
        f"own={root}/$(basename $(grep ^0:: /proc/self/cgroup)); mkdir -p $own/a/b; "
        f"sleep 600 & echo $! > $own/a/b/cgroup.procs; echo $! > {note}; wait"
    )
    with grouping_agent.started(script) as (stream, pid):
        child = int(eventually(lambda: note.exists() and note.read_text().strip(), "the child runs"))
        grouping_agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        collect(stream)
    eventually(lambda: not alive(child), "the child is gone")

    def all_removed() -> bool:
        grouping_agent.run("true")
        return groups(root) == []

    eventually(all_removed, "no group is left")


@needs_groups
def test_a_command_on_a_terminal_has_a_group_too(grouping_agent: Agent, root: Path) -> None:
    message = {
        "process": {"cmd": "/bin/sh", "args": ["-c", "tty; cat /proc/self/cgroup"]},
        "pty": {"size": {"cols": 80, "rows": 24}},
    }
    with grouping_agent.stream("Start", message) as stream:
        outcome = collect(stream)
    assert outcome.pty.startswith(b"/dev/pts/")
    assert root.name.encode() in outcome.pty


@needs_groups
def test_commands_run_without_groups_when_these_are_taken_away(grouping_agent: Agent, root: Path) -> None:
    root.rmdir()
    assert grouping_agent.run("echo still here").stdout == b"still here\n"
    with grouping_agent.started("setsid sleep 600 & echo $!; wait") as (stream, pid):
        child = int(base64.b64decode(stream.next()["data"]["stdout"]))
        grouping_agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        collect(stream)
    eventually(lambda: not alive(child), "the child was found without a group")


@needs_groups
def test_the_agent_itself_is_in_no_commands_group(grouping_agent: Agent, root: Path) -> None:
    own = Path(f"/proc/{grouping_agent.process.pid}/cgroup")
    before = own.read_text()
    streams = [
        grouping_agent.open_stream("Start", {"process": {"cmd": "sleep", "args": ["600"]}}) for _ in range(8)
    ]
    pids = [stream.next()["start"]["pid"] for stream in streams]
    assert own.read_text() == before
    members = [(group / "cgroup.procs").read_text().split() for group in groups(root)]
    assert sorted(members) == sorted([str(pid)] for pid in pids)
    for stream, pid in zip(streams, pids, strict=True):
        grouping_agent.process_call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        collect(stream)
        stream.close()
    with grouping_agent.stream("Start", {"process": {"cmd": "no-such-program"}}) as stream:
        list(stream.events())
    assert own.read_text() == before


@needs_groups
def test_a_start_that_fails_leaves_no_group(grouping_agent: Agent, root: Path) -> None:
    with grouping_agent.stream("Start", {"process": {"cmd": "no-such-program"}}) as stream:
        list(stream.events())
    assert groups(root) == []


@needs_groups
def test_groups_left_by_an_agent_that_died_are_removed(root: Path) -> None:
    (root / "old").mkdir(parents=True)
    found = CommandGroups.open(str(root))
    assert found is not None
    assert found.statistics() == {"lingering": 1}
    new = found.create("new")
    assert new is not None
    found.discard(new)
    assert groups(root) == []
    assert found.statistics() == {"lingering": 0}


def test_a_directory_that_is_no_cgroup_is_not_used(tmp_path: Path) -> None:
    assert CommandGroups.open(str(tmp_path / "none")) is None
    assert not (tmp_path / "none").exists()
    assert CommandGroups.open("/proc/none") is None
