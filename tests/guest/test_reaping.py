"""Orphans do not stay as zombies where the agent is the one to reap them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guest.harness import ME, SOURCE, Agent, eventually, running_agent


def zombies(agent: Agent) -> list[int]:
    """Children of the agent that have ended and were not reaped."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] == "Z" and int(fields[1]) == agent.process.pid:
            found.append(int(folder.name))
    return found


def test_orphans_are_reaped(tmp_path: Path, folder: Path) -> None:
    notes = folder / "pids"
    with running_agent(tmp_path / "identity", "--subreaper") as agent:
        # Ten processes whose parent, a subshell, ends first.
        script = f"for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 0.2 & echo $! >> {notes}); done >/dev/null 2>&1"
        assert agent.run(script).code == 0
        pids = [int(word) for word in notes.read_text().split()]
        assert len(pids) == 10
        eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "all are reaped")
        assert zombies(agent) == []


def test_commands_keep_their_exit_where_orphans_are_reaped(tmp_path: Path) -> None:
    with running_agent(tmp_path / "identity", "--subreaper") as agent:
        for number in range(20):
            outcome = agent.run(f"(sleep 0.01 &) >/dev/null 2>&1; exit {number}")
            assert outcome.code == number
        # The leader has exited, its child holds the output: the leader must stay until its end is told.
        with agent.started("(sleep 0.3; echo late) & exit 7") as (stream, pid):
            kinds = [next(iter(message["event"])) for message in stream.events()]
        assert kinds == ["data", "end"]
        eventually(lambda: not os.path.exists(f"/proc/{pid}"), "the leader is reaped in the end")


def test_the_first_process_of_a_machine_reaps_without_being_told(tmp_path: Path) -> None:
    """In a process namespace of its own the agent is process 1, as in a guest without another init."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("process namespaces are not allowed here")
    process = subprocess.Popen(
        [
            *unshare, sys.executable, "-m", "greenroom.guest", "--host", "127.0.0.1", "--port", "0",
            "--default-user", ME, "--dry-identity", str(tmp_path / "identity"),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        assert line.startswith("agent listening on ")
        agent = Agent(process, int(line.rpartition(":")[2]), tmp_path / "identity")
        script = "for i in 1 2 3 4 5; do (sleep 0.1 &); done >/dev/null 2>&1; cat /proc/1/cmdline"
        assert b"greenroom.guest" in agent.run(script).stdout

        def zombies_inside() -> bytes:
            return agent.run("grep -l '^State:.Z' /proc/[0-9]*/status; pgrep sleep; true").stdout.strip()

        eventually(lambda: zombies_inside() == b"", "all orphans are reaped")
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
