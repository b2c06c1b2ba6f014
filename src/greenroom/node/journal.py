"""The node's memory on disk: its own code, and every claim from before it is answered to after it has ended.

SQLite in WAL mode with `synchronous=NORMAL`: a commit survives the death of the process (25 µs); a power cut
may lose the last ones, but it takes the VMs they speak of with it. A commit is short enough for the event loop.

States of a claim: `pending` (in the queue or being handed over) → `running` → `ended`, or `pending` → removed
when nothing came of it. A key is unique, so a repeated request finds what became of the first. An ended one that is
still told of has its record yet (`retained`), any other has none.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from pathlib import Path

import msgspec

from greenroom.errors import JournalUnavailable, SetupError
from greenroom.node.clock import Reference
from greenroom.node.metrics import committed
from greenroom.runtime.engine import Snapshot
from greenroom.wire.ids import new_node_code
from greenroom.wire.messages import ClaimRequest, PoolSpec, Sandbox, SnapshotInfo

WAL_PAGES = 4000
"""Pages (16 MB) from which SQLite brings its WAL into the file, in the commit that finds it so long. That one waits
some 5 ms for the disk; at SQLite's 1000 it was one claim in eighty."""
_VERSION = 3
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE claims (
    key TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    sandbox_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('pending', 'running', 'ended')),
    vm TEXT,
    record BLOB,
    changed_at REAL NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    inner BLOB
) WITHOUT ROWID;
CREATE INDEX claims_ended ON claims (changed_at) WHERE state = 'ended';
CREATE TABLE snapshots (snapshot_id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
"""
_UPGRADES = {
    1: """
ALTER TABLE claims ADD COLUMN inner BLOB;
CREATE TABLE snapshots (snapshot_id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
""",
    # Only ended claims are looked for by more than their key while sandboxes are made: an index over all of them
    # has to be written twice more for each.
    2: """
DROP INDEX IF EXISTS claims_by_state;
CREATE INDEX IF NOT EXISTS claims_ended ON claims (changed_at) WHERE state = 'ended';
""",
}
"""What makes the next version of each: a node that is upgraded keeps its sandboxes."""


class Entry(msgspec.Struct, frozen=True):
    """One claim as the journal has it. `sandbox` is there once it was handed over."""

    key: str
    digest: str
    sandbox_id: str
    state: str
    sandbox: Sandbox | None


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """What only the node needs to know of a sandbox, to make it the same again after a pause."""

    env: dict[str, str] = {}
    machine_id: str = ""
    ttl: float = 300.0
    """Seconds that it was made to run for, or was last resumed for."""
    asleep: Snapshot | None = None
    """What it is resumed from, while it is paused."""


_LATER: dict[str, object] = {"name": "", "declared": None, "warm": "prefer", "pool": ""}
"""What requests have had since the first digests were written, and what it means not to use it."""
_FIRST = tuple(field for field in ClaimRequest.__struct_fields__ if field not in _LATER)


def digest_of(request: ClaimRequest) -> str:
    """What a key was used for; `wait` is how, not what. A request that uses nothing new has the digest it always had,
    so that one repeated across an upgrade is known again."""
    body = {field: getattr(request, field) for field in _FIRST} | {"key": "x", "wait": 0.0}
    for field, unused in _LATER.items():
        if (value := getattr(request, field)) != unused:
            body[field] = value
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()


def set_up(db: sqlite3.Connection) -> None:
    """Give a connection the settings that a commit's price and promise depend on (see the module)."""
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")


class Journal:
    """Use from one thread. Every method raises JournalUnavailable when the file cannot be read or written now."""

    def __init__(self, path: Path) -> None:
        """Raises SetupError when the file is damaged or newer than this program."""
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            path.chmod(0o600)
            set_up(self._db)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
            while 0 < version < _VERSION:
                self._db.executescript(
                    f"BEGIN; {_UPGRADES[version]} PRAGMA user_version={version + 1}; COMMIT;"
                )
                version += 1
            if version > _VERSION:
                raise SetupError(
                    f"{path} was written by a newer Greenroom (schema {version}); update this one"
                )
            damage = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(damage)
        except sqlite3.DatabaseError as error:
            self._db.close()
            if isinstance(error, sqlite3.OperationalError):
                raise SetupError(f"cannot use {path}: {error}; is the disk full or read-only?") from error
            raise SetupError(
                f"{path} is damaged ({error}). Run `greenroom down`, move the file away and start again: "
                "sandboxes that it knew of are then gone"
            ) from error
        except BaseException:
            self._db.close()
            raise

    def _run(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        begun = time.perf_counter()
        try:
            return self._db.execute(statement, values)
        except sqlite3.DatabaseError as error:
            raise JournalUnavailable(
                f"the node cannot use its journal now ({error}); free disk space where its state directory lies"
            ) from error
        finally:
            committed(statement, begun)

    def code(self) -> str:
        """This node's code, drawn at the first call and kept for life."""
        row = self._run("SELECT value FROM facts WHERE name='code'").fetchone()
        if row is None:
            self._run("INSERT INTO facts VALUES ('code', ?)", (new_node_code(),))
            return self.code()
        return str(row[0])

    def find(self, key: str) -> Entry | None:
        """What is known of a key."""
        row = self._run(
            "SELECT key, digest, sandbox_id, state, record FROM claims WHERE key=?", (key,)
        ).fetchone()
        return None if row is None else self._entry(row)

    def begin(self, key: str, digest: str, sandbox_id: str, now: float, vm: str | None = None) -> bool:
        """A claim was taken on, and owns `vm` from now on if one is named. False, and no change, for a known key."""
        return (
            self._run(
                "INSERT INTO claims (key, digest, sandbox_id, state, changed_at, vm)"
                " VALUES (?, ?, ?, 'pending', ?, ?) ON CONFLICT (key) DO NOTHING",
                (key, digest, sandbox_id, now, vm),
            ).rowcount
            == 1
        )

    def assign(self, key: str, vm: str) -> None:
        """The claim, which had none or has lost it, owns this VM from now on."""
        self._run("UPDATE claims SET vm=? WHERE key=?", (vm, key))

    def abort(self, key: str) -> None:
        """Nothing came of the claim: its key may be used again."""
        self._run("DELETE FROM claims WHERE key=? AND state='pending'", (key,))

    def save(self, key: str, sandbox: Sandbox, now: float) -> None:
        """One of the sandbox's properties changed."""
        self._run(
            "UPDATE claims SET state='running', record=?, changed_at=? WHERE key=? AND state!='ended'",
            (msgspec.json.encode(sandbox), now, key),
        )

    def settle(self, key: str, sandbox: Sandbox, inner: Inner, vm: str | None, now: float) -> None:
        """The sandbox was handed over, paused (then it has no VM) or resumed."""
        self._run(
            "UPDATE claims SET state='running', record=?, inner=?, vm=?, changed_at=?"
            " WHERE key=? AND state!='ended'",
            (msgspec.json.encode(sandbox), msgspec.json.encode(inner), vm, now, key),
        )

    def end(self, key: str, reason: str, now: float) -> None:
        """The sandbox is gone; its token is forgotten, its key is kept for the retention time."""
        self._run(
            "UPDATE claims SET state='ended', vm=NULL, record=NULL, inner=NULL, reason=?, changed_at=? WHERE key=?",
            (reason, now, key),
        )

    def retain(self, key: str, sandbox: Sandbox, now: float) -> None:
        """The sandbox is gone, but what is told of it stays, or has changed; `sandbox` has no secret any more."""
        self._run(
            "UPDATE claims SET state='ended', vm=NULL, record=?, inner=NULL, reason=?, changed_at=? WHERE key=?",
            (msgspec.json.encode(sandbox), sandbox.end_reason, now, key),
        )

    def retained(self) -> list[Entry]:
        """Claims whose sandbox has ended and is still told of."""
        rows = self._run(
            "SELECT key, digest, sandbox_id, state, record FROM claims"
            " WHERE state='ended' AND record IS NOT NULL ORDER BY changed_at"
        ).fetchall()
        return [entry for entry in map(self._entry, rows) if entry.sandbox and entry.sandbox.state == "ended"]

    def running(self) -> list[tuple[Entry, str | None, Inner]]:
        """Claims that were handed over and have not ended, each with its VM's name (None for a paused one)."""
        rows = self._run(
            "SELECT key, digest, sandbox_id, state, record, vm, inner FROM claims WHERE state='running'"
        ).fetchall()
        return [
            (
                self._entry(row[:5]),
                row[5],
                Inner() if row[6] is None else msgspec.json.decode(row[6], type=Inner),
            )
            for row in rows
        ]

    def save_snapshot(self, snapshot: SnapshotInfo) -> None:
        """A user's snapshot is on disk."""
        self._run(
            "INSERT INTO snapshots VALUES (?, ?)", (snapshot.snapshot_id, msgspec.json.encode(snapshot))
        )

    def drop_snapshot(self, snapshot_id: str) -> bool:
        """Forget a snapshot. False when it was not known."""
        return self._run("DELETE FROM snapshots WHERE snapshot_id=?", (snapshot_id,)).rowcount == 1

    def snapshots(self) -> dict[str, SnapshotInfo]:
        """All snapshots that users took and did not delete, by id."""
        rows = self._run("SELECT snapshot_id, record FROM snapshots").fetchall()
        return {str(row[0]): msgspec.json.decode(row[1], type=SnapshotInfo) for row in rows}

    def abort_pending(self) -> int:
        """After a restart: claims that were under way were answered by nobody, so nothing came of them."""
        return self._run("DELETE FROM claims WHERE state='pending'").rowcount

    def save_pools(self, pools: list[PoolSpec]) -> None:
        """Remember this node's share of the pools, for a start while no master is there."""
        self._run(
            "INSERT INTO facts VALUES ('pools', ?) ON CONFLICT (name) DO UPDATE SET value=excluded.value",
            (msgspec.json.encode(pools).decode(),),
        )

    def pools(self) -> list[PoolSpec]:
        """What `save_pools` remembered; empty at first."""
        row = self._run("SELECT value FROM facts WHERE name='pools'").fetchone()
        return [] if row is None else msgspec.json.decode(row[0], type=list[PoolSpec])

    def clock(self) -> Reference | None:
        """The clock that the journal's times go by, or None before the first `restamp`."""
        row = self._run("SELECT value FROM facts WHERE name='clock'").fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Reference)

    def restamp(self, clock: Reference, sandboxes: dict[str, Sandbox]) -> None:
        """The clock was set, or this is another boot: its times go by `clock` from now on. All or nothing.

        `sandboxes` are the live ones and those that are still told of by key, with the times they have now.
        """
        before = self.clock()
        step = clock.offset - before.offset if before is not None and before.boot == clock.boot else 0.0
        self._run("BEGIN IMMEDIATE")
        try:
            self._run("UPDATE claims SET changed_at=changed_at+?", (step,))
            for key, sandbox in sandboxes.items():
                self._run("UPDATE claims SET record=? WHERE key=?", (msgspec.json.encode(sandbox), key))
            self._run(
                "INSERT INTO facts VALUES ('clock', ?) ON CONFLICT (name) DO UPDATE SET value=excluded.value",
                (msgspec.json.encode(clock).decode(),),
            )
            self._run("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.rollback()
            raise

    def forget(self, before: float) -> int:
        """Drop claims that ended before this time and are told of no more. Returns how many."""
        return self._run(
            "DELETE FROM claims WHERE state='ended' AND changed_at < ? AND record IS NULL", (before,)
        ).rowcount

    def close(self) -> None:
        self._db.close()

    @staticmethod
    def _entry(row: tuple[str, str, str, str, bytes | None]) -> Entry:
        record = None if row[4] is None else msgspec.json.decode(row[4], type=Sandbox)
        return Entry(row[0], row[1], row[2], row[3], record)
