"""What is counted on the host: it is seen when it is there, and the journal is read as the node writes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.bench import faults_host as host
from greenroom.node.journal import Journal
from greenroom.runtime.slots import tag_of
from greenroom.wire.ids import new_node_code, new_sandbox_id
from greenroom.wire.messages import Sandbox
from tests.bench.results import SIZE


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "state" / "node-0"
    (made / "vms").mkdir(parents=True)
    return made


def test_nothing_is_left_of_a_node_that_did_nothing(home: Path) -> None:
    state = home.parent
    assert host.tags_in(state) == [tag_of(home)]
    assert host.count(state, host.tags_in(state)).total() == 0
    assert host.vms(home) == []


def test_slots_processes_and_uid_blocks_are_seen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, tag = home.parent, tag_of(home)
    (home / "vms" / "7").mkdir()
    registry = home / "uids"
    registry.mkdir()
    (registry / "3").write_text(f"{tag}\n{home}\n", encoding="utf-8")
    (registry / "4").write_text("another\n", encoding="utf-8")
    monkeypatch.setattr(host, "_UIDS", registry)
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", str(state)], stdin=subprocess.PIPE
    )
    try:
        found = host.count(state, [tag])
    finally:
        process.communicate()
    assert found.slots == ["node-0/vms/7"]
    assert found.uid_blocks == ["3"]
    assert [line for line in found.processes if f"pid {process.pid}:" in line] == found.processes
    assert found.total() == len(found.lines()) == 3


def test_the_journal_gives_vms_to_claims_that_are_not_over(home: Path) -> None:
    journal, code = Journal(home / "journal.db"), new_node_code()
    try:
        for key in ("queued", "begun", "running", "over"):
            journal.begin(key, "digest", new_sandbox_id(code), 1.0)
            if key != "queued":
                journal.assign(key, f"gr-1-{key}")
        for key in ("running", "over"):
            sandbox = Sandbox(
                sandbox_id=new_sandbox_id(code), template="base", size=SIZE, state="running",
                started_at=1.0, ends_at=2.0, node="node-0",
            )  # fmt: skip
            journal.save(key, sandbox, 1.0)
        journal.end("over", "it was killed", 2.0)
        assert host.journalled(home) == {"gr-1-begun", "gr-1-running"}
    finally:
        journal.close()
