"""The journal: what a node still knows after its process has died."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from greenroom.errors import JournalUnavailable, SetupError
from greenroom.node.journal import Inner, Journal, digest_of
from greenroom.runtime.engine import Snapshot
from greenroom.wire.ids import is_sandbox_id, new_sandbox_id
from greenroom.wire.messages import ClaimRequest, Declared, PoolSpec, Sandbox, Size, SnapshotInfo

SMALL = Size("small", 1, 512, 4096)


def request(**changes: object) -> ClaimRequest:
    fields: dict[str, object] = {"key": "k1", "template": "base", "size": SMALL, "ttl": 60.0, **changes}
    return ClaimRequest(**fields)  # type: ignore[arg-type]


def sandbox(sandbox_id: str) -> Sandbox:
    return Sandbox(
        sandbox_id=sandbox_id, template="base", size=SMALL, state="running", started_at=1.0, ends_at=61.0,
        node="node-0", token="secret-token",
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def test_the_code_is_kept_for_life(path: Path) -> None:
    first = Journal(path)
    code = first.code()
    first.close()
    again = Journal(path)
    assert again.code() == code
    assert is_sandbox_id(new_sandbox_id(code))
    again.close()


def test_a_claim_from_begin_to_end(path: Path) -> None:
    journal = Journal(path)
    sandbox_id = new_sandbox_id(journal.code())
    journal.begin("k1", "d", sandbox_id, 1.0)
    entry = journal.find("k1")
    assert entry is not None
    assert (entry.state, entry.sandbox) == ("pending", None)
    journal.assign("k1", "vm-1")
    journal.save("k1", sandbox(sandbox_id), 2.0)
    entry = journal.find("k1")
    assert entry is not None
    assert entry.sandbox == sandbox(sandbox_id)
    journal.end("k1", "it was killed", 3.0)
    entry = journal.find("k1")
    assert entry is not None
    assert (entry.state, entry.sandbox) == ("ended", None)
    assert journal.forget(3.0) == 0
    assert journal.forget(3.1) == 1
    assert journal.find("k1") is None
    journal.close()


def test_an_ended_sandboxs_token_is_nowhere_in_the_file(path: Path) -> None:
    journal = Journal(path)
    journal.begin("k1", "d", "i1", 1.0)
    journal.save("k1", sandbox("i1"), 2.0)
    journal.end("k1", "it was killed", 3.0)
    journal.close()
    rows = sqlite3.connect(path)
    try:
        assert rows.execute("SELECT record FROM claims").fetchone() == (None,)
    finally:
        rows.close()


def test_a_saved_sandbox_never_comes_back_from_its_end(path: Path) -> None:
    journal = Journal(path)
    journal.begin("k1", "d", "i1", 1.0)
    journal.end("k1", "it was killed", 2.0)
    journal.save("k1", sandbox("i1"), 3.0)
    entry = journal.find("k1")
    assert entry is not None
    assert entry.state == "ended"
    journal.close()


def test_an_aborted_key_may_be_used_again(path: Path) -> None:
    journal = Journal(path)
    journal.begin("k1", "d", "i1", 1.0)
    journal.abort("k1")
    journal.begin("k1", "d", "i2", 1.0)
    journal.close()


def test_a_known_key_is_not_begun_again(path: Path) -> None:
    journal = Journal(path)
    assert journal.begin("k1", "d", "i1", 1.0, "vm-1")
    before = journal.find("k1")
    assert not journal.begin("k1", "other", "i2", 2.0, "vm-2")
    assert journal.find("k1") == before
    journal.save("k1", sandbox("i1"), 2.0)
    assert [vm for _, vm, _ in journal.running()] == ["vm-1"]
    journal.close()


def test_after_a_restart_it_tells_what_was_running_and_forgets_what_was_not_answered(path: Path) -> None:
    journal = Journal(path)
    journal.begin("pending", "d", "i1", 1.0)
    journal.begin("running", "d", "i2", 1.0)
    journal.assign("running", "vm-2")
    journal.save("running", sandbox("i2"), 2.0)
    journal.close()
    again = Journal(path)
    assert again.abort_pending() == 1
    assert again.find("pending") is None
    assert [(entry.key, entry.sandbox, vm) for entry, vm, _ in again.running()] == [
        ("running", sandbox("i2"), "vm-2")
    ]
    again.close()


def test_the_pools_are_remembered(path: Path) -> None:
    journal = Journal(path)
    assert journal.pools() == []
    for target in (1, 2):
        journal.save_pools([PoolSpec(template="base", size=SMALL, target=target)])
    assert journal.pools() == [PoolSpec(template="base", size=SMALL, target=2)]
    journal.close()


def test_the_digest_is_of_what_was_asked_not_of_how_long_it_may_wait() -> None:
    assert digest_of(request()) == digest_of(request(wait=1.0, key="k2"))
    assert digest_of(request()) != digest_of(request(metadata={"a": "b"}))


def test_a_request_that_uses_nothing_new_has_the_digest_it_always_had() -> None:
    """One that is repeated across an upgrade of the node must be known again."""
    assert digest_of(request()) == "1f83ca693d7774ebeb0981f8b4f6b1413f88b0bc6229a1d3c945883c14ae17da"
    declared = Declared(document=msgspec.Raw(b"{}"))
    more = [request(name="box"), request(declared=declared), request(warm="never"), request(warm="require")]
    assert len({digest_of(each) for each in [request(), *more]}) == 5
    assert digest_of(more[1]) != digest_of(request(declared=Declared(document=msgspec.Raw(b'{"a":1}'))))


def test_it_is_readable_by_its_owner_only(path: Path) -> None:
    Journal(path).close()
    assert path.stat().st_mode & 0o077 == 0


def test_a_newer_schema_is_refused_with_what_to_do(path: Path) -> None:
    Journal(path).close()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version=99")
    newer.close()
    with pytest.raises(SetupError, match="newer Greenroom"):
        Journal(path)


@pytest.mark.parametrize("content", [b"garbage" * 1000, b"\0" * 8192, b"SQLite format 3\0" + b"x" * 5000])
def test_a_damaged_journal_names_itself_and_what_to_do(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SetupError, match=r"journal\.db is damaged .*greenroom down"):
        Journal(path)


def test_a_journal_that_cannot_be_written_says_so(path: Path) -> None:
    journal = Journal(path)
    journal._db.execute("PRAGMA max_page_count=1")

    def fill() -> None:
        for number in range(10_000):
            journal.begin(f"k{number}" * 50, "d", f"i{number}", 1.0)

    with pytest.raises(JournalUnavailable, match="free disk space"):
        fill()
    journal.close()


def test_a_journal_of_the_first_version_goes_on_with_what_it_knew(path: Path) -> None:
    before = Journal(path)
    before.begin("k1", "d", "i1", 1.0, "vm-1")
    before.save("k1", sandbox("i1"), 2.0)
    before.close()
    old = sqlite3.connect(path)
    old.executescript("ALTER TABLE claims DROP COLUMN inner; DROP TABLE snapshots; PRAGMA user_version=1;")
    old.close()
    journal = Journal(path)
    ((entry, vm, inner),) = journal.running()
    assert (entry.sandbox, vm, inner) == (sandbox("i1"), "vm-1", Inner())
    assert journal.snapshots() == {}
    journal.close()


def test_a_journal_of_the_second_schema_forgets_by_the_new_index(path: Path) -> None:
    Journal(path).close()
    old = sqlite3.connect(path)
    old.executescript(
        "DROP INDEX claims_ended; CREATE INDEX claims_by_state ON claims (state, changed_at); PRAGMA user_version=2;"
    )
    old.close()
    journal = Journal(path)
    for key, ended in (("k1", 2.0), ("k2", 4.0)):
        journal.begin(key, "d", f"i-{key}", 1.0)
        journal.end(key, "it was killed", ended)
    journal.begin("k3", "d", "i-k3", 1.0)
    plan = journal._db.execute(
        "EXPLAIN QUERY PLAN DELETE FROM claims WHERE state='ended' AND changed_at < ?", (3.0,)
    ).fetchall()
    assert "claims_ended" in plan[0][3]
    assert journal.forget(3.0) == 1
    assert journal.find("k1") is None
    assert journal.find("k2") is not None
    assert journal.find("k3") is not None
    assert journal._db.execute("PRAGMA index_list(claims)").fetchall()[0][1] == "claims_ended"
    journal.close()


def test_what_a_paused_sandbox_needs_is_kept_until_its_end(path: Path) -> None:
    journal = Journal(path)
    asleep = Snapshot(name="asleep-1", kind="full", template="base", size=SMALL, golden="g", created_at=1.0)
    inner = Inner(env={"A": "1"}, machine_id="m", ttl=5.0, asleep=asleep)
    journal.begin("k1", "d", "i1", 1.0, "vm-1")
    journal.settle("k1", sandbox("i1"), inner, None, 2.0)
    assert [(vm, kept) for _, vm, kept in journal.running()] == [(None, inner)]
    journal.end("k1", "it was killed", 3.0)
    assert journal.running() == []
    journal.close()


def test_what_is_still_told_of_an_ended_one_outlives_the_retention_of_its_key(path: Path) -> None:
    journal = Journal(path)
    journal.begin("k1", "d", "i1", 1.0, "vm-1")
    told = msgspec.structs.replace(sandbox("i1"), state="ended", token=None, ended_at=2.0, end_reason="why")
    journal.retain("k1", told, 2.0)
    journal.begin("k2", "d", "i2", 1.0)
    journal.end("k2", "it was killed", 2.0)
    assert journal.forget(3.0) == 1
    assert journal.running() == []
    journal.close()
    again = Journal(path)
    assert [(entry.key, entry.state, entry.sandbox) for entry in again.retained()] == [("k1", "ended", told)]
    again.save("k1", sandbox("i1"), 3.0)
    assert len(again.retained()) == 1
    again.end("k1", "why", 4.0)
    assert (again.retained(), again.forget(5.0)) == ([], 1)
    again.close()


def test_snapshots_are_kept_until_they_are_dropped(path: Path) -> None:
    journal = Journal(path)
    info = SnapshotInfo(
        snapshot_id="s1",
        name="n",
        owner="o",
        sandbox_id="i1",
        template="base",
        size=SMALL,
        created_at=1.0,
        memory=True,
    )
    journal.save_snapshot(info)
    journal.close()
    again = Journal(path)
    assert again.snapshots() == {"s1": info}
    assert again.drop_snapshot("s1")
    assert not again.drop_snapshot("s1")
    assert again.snapshots() == {}
    again.close()
