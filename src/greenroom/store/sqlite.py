"""The store of one machine: a SQLite file in WAL mode that all roles' processes share.

SQLite was chosen because the first machine then needs no server: readers never wait for the writer, writers
wait for each other (`BUSY_TIMEOUT`), and a killed process leaves nothing behind. Records are kept as JSON
next to the columns that must be unique, so a new field of a record needs no new schema; `PRAGMA user_version`
numbers the schema and a file from a newer Greenroom is refused instead of guessed at.

All calls run on one thread of this store's own: sqlite3 blocks, and one connection serialises itself anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from greenroom.errors import KeyConflict, SetupError, StaleObject, TemporaryError, UnknownTemplate
from greenroom.store.records import ApiKey, NodeRecord, Rule, StoredObject
from greenroom.wire.messages import PoolSpec, Template

T = TypeVar("T")

BUSY_TIMEOUT = 5.0
"""Seconds a statement waits for another process's lock; writes here take milliseconds."""

MIGRATIONS = (
    """
    CREATE TABLE templates (
        template_id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, record BLOB NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE pools (
        template TEXT NOT NULL REFERENCES templates (name), size TEXT NOT NULL, record BLOB NOT NULL,
        PRIMARY KEY (template, size)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE nodes (
        name TEXT PRIMARY KEY, code TEXT NOT NULL UNIQUE, record BLOB NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE api_keys (
        digest TEXT PRIMARY KEY, key_id TEXT NOT NULL UNIQUE, record BLOB NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
    """
    CREATE TABLE objects (
        resource TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL,
        document BLOB NOT NULL, PRIMARY KEY (resource, namespace, name)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE versions (last INTEGER NOT NULL) STRICT;
    INSERT INTO versions VALUES (0);
    """,
)
"""Statement `i` brings a file from schema `i` to `i + 1`."""

SCHEMA = len(MIGRATIONS)


class SqliteStore:
    """Keeps the `Store` interface on one SQLite file. Make it with `open`, end it with `close`."""

    def __init__(self, path: Path, thread: ThreadPoolExecutor, connection: sqlite3.Connection) -> None:
        self._path = path
        self._thread = thread
        self._connection = connection

    def __repr__(self) -> str:
        return f"SqliteStore({str(self._path)!r})"

    @classmethod
    async def open(cls, path: Path) -> SqliteStore:
        """Open the file, making it (mode 0600) and its schema when they are not there.

        Raises SetupError when the file cannot be used: not writable, no database, or of a newer schema.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        try:
            connection = await asyncio.get_running_loop().run_in_executor(thread, _connect, path)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(path, thread, connection)

    async def close(self) -> None:
        """Close the file and end the thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def guarded() -> T:
            try:
                return work(self._connection)
            except sqlite3.OperationalError as error:
                raise TemporaryError(f"the store does not answer ({error}); try again") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    async def version(self) -> int:
        """SQLite's own counter: it moves when another connection has committed."""
        return await self._run(lambda db: int(db.execute("PRAGMA data_version").fetchone()[0]))

    async def templates(self) -> list[Template]:
        """All templates, oldest first."""
        found = await self._run(lambda db: _all(db, "SELECT record FROM templates", Template))
        return sorted(found, key=lambda template: (template.created_at, template.template_id))

    async def add_template(self, template: Template) -> Template:
        """Keep `template` unless its name is taken; two masters that start together agree on one record."""

        def work(db: sqlite3.Connection) -> Template:
            with _transaction(db):
                db.execute(
                    "INSERT INTO templates VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING",
                    (template.template_id, template.name, msgspec.json.encode(template)),
                )
                row = db.execute("SELECT record FROM templates WHERE name = ?", (template.name,)).fetchone()
            return msgspec.json.decode(row[0], type=Template)

        return await self._run(work)

    async def pools(self) -> list[PoolSpec]:
        """All declared pools, by template and size name."""
        query = "SELECT record FROM pools ORDER BY template, size"
        return await self._run(lambda db: _all(db, query, PoolSpec))

    async def put_pool(self, pool: PoolSpec) -> None:
        """Declare or, with target 0, remove a pool. Raises UnknownTemplate."""

        def work(db: sqlite3.Connection) -> None:
            place = (pool.template, pool.size.name)
            with _transaction(db):
                if pool.target == 0:
                    db.execute("DELETE FROM pools WHERE template = ? AND size = ?", place)
                    return
                try:
                    db.execute(
                        "INSERT INTO pools VALUES (?, ?, ?)"
                        " ON CONFLICT (template, size) DO UPDATE SET record = excluded.record",
                        (*place, msgspec.json.encode(pool)),
                    )
                except sqlite3.IntegrityError as error:
                    raise UnknownTemplate(f"there is no template called {pool.template!r}") from error

        await self._run(work)

    async def nodes(self) -> list[NodeRecord]:
        """All nodes, by name."""
        return await self._run(lambda db: _all(db, "SELECT record FROM nodes ORDER BY name", NodeRecord))

    async def put_node(self, node: NodeRecord) -> None:
        """Write a node by name, keeping its `first_seen`. Raises KeyConflict when another has its code."""

        def work(db: sqlite3.Connection) -> None:
            with _transaction(db):
                row = db.execute("SELECT record FROM nodes WHERE name = ?", (node.name,)).fetchone()
                written = node
                if row is not None:
                    before = msgspec.json.decode(row[0], type=NodeRecord)
                    written = msgspec.structs.replace(node, first_seen=before.first_seen)
                try:
                    db.execute(
                        "INSERT INTO nodes VALUES (?, ?, ?)"
                        " ON CONFLICT (name) DO UPDATE SET code = excluded.code, record = excluded.record",
                        (node.name, node.code, msgspec.json.encode(written)),
                    )
                except sqlite3.IntegrityError as error:
                    raise KeyConflict(f"the node code {node.code} belongs to another node") from error

        await self._run(work)

    async def remove_node(self, name: str) -> bool:
        """Forget a node; False when there was none of this name."""
        statement = "DELETE FROM nodes WHERE name = ?"
        return await self._run(lambda db: db.execute(statement, (name,)).rowcount == 1)

    async def api_keys(self) -> list[ApiKey]:
        """All API keys, revoked ones too, oldest first."""
        found = await self._run(lambda db: _all(db, "SELECT record FROM api_keys", ApiKey))
        return sorted(found, key=lambda key: (key.created_at, key.key_id))

    async def add_api_key(self, key: ApiKey, digest: str) -> None:
        """Keep a key under its secret's digest. Raises KeyConflict when id or digest is taken."""

        def work(db: sqlite3.Connection) -> None:
            try:
                db.execute(
                    "INSERT INTO api_keys VALUES (?, ?, ?)", (digest, key.key_id, msgspec.json.encode(key))
                )
            except sqlite3.IntegrityError as error:
                raise KeyConflict("an API key with this id or secret exists") from error

        await self._run(work)

    async def find_api_key(self, digest: str) -> ApiKey | None:
        """The key with this digest, revoked or not."""

        def work(db: sqlite3.Connection) -> ApiKey | None:
            row = db.execute("SELECT record FROM api_keys WHERE digest = ?", (digest,)).fetchone()
            return None if row is None else msgspec.json.decode(row[0], type=ApiKey)

        return await self._run(work)

    async def revoke_api_key(self, key_id: str, at: float) -> bool:
        """Mark a key as revoked; False when there is none of this id or it already was."""

        def revoked(key: ApiKey) -> ApiKey | None:
            return None if key.revoked_at is not None else msgspec.structs.replace(key, revoked_at=at)

        return await self._change_api_key(key_id, revoked)

    async def set_api_key_rules(self, key_id: str, rules: list[Rule]) -> bool:
        """Let a key have these rules; False when there is none of this id."""
        return await self._change_api_key(key_id, lambda key: msgspec.structs.replace(key, rules=rules))

    async def _change_api_key(self, key_id: str, change: Callable[[ApiKey], ApiKey | None]) -> bool:
        """Keep what `change` makes of a key, unless it makes nothing of it; False when nothing was kept."""

        def work(db: sqlite3.Connection) -> bool:
            with _transaction(db):
                row = db.execute("SELECT record FROM api_keys WHERE key_id = ?", (key_id,)).fetchone()
                changed = None if row is None else change(msgspec.json.decode(row[0], type=ApiKey))
                if changed is None:
                    return False
                db.execute(
                    "UPDATE api_keys SET record = ? WHERE key_id = ?", (msgspec.json.encode(changed), key_id)
                )
            return True

        return await self._run(work)

    async def objects(self, resource: str) -> tuple[int, list[StoredObject]]:
        """All objects of a resource by namespace and name, and the version of the last change of any object."""

        def work(db: sqlite3.Connection) -> tuple[int, list[StoredObject]]:
            with _reading(db):
                rows = db.execute(
                    "SELECT namespace, name, version, document FROM objects WHERE resource = ?"
                    " ORDER BY namespace, name",
                    (resource,),
                ).fetchall()
                last = int(db.execute("SELECT last FROM versions").fetchone()[0])
            found = [
                StoredObject(
                    resource=resource,
                    namespace=row[0],
                    name=row[1],
                    version=row[2],
                    document=msgspec.Raw(row[3]),
                )
                for row in rows
            ]
            return last, found

        return await self._run(work)

    async def put_object(self, stored: StoredObject, expect: int) -> StoredObject:
        """Keep an object if its version is `expect` (0: there is none). Raises StaleObject."""
        place = (stored.resource, stored.namespace, stored.name)

        def work(db: sqlite3.Connection) -> StoredObject:
            with _transaction(db):
                _expect(db, place, expect)
                version = _next_version(db)
                db.execute(
                    "INSERT INTO objects VALUES (?, ?, ?, ?, ?) ON CONFLICT (resource, namespace, name)"
                    " DO UPDATE SET version = excluded.version, document = excluded.document",
                    (*place, version, bytes(stored.document)),
                )
            return msgspec.structs.replace(stored, version=version)

        return await self._run(work)

    async def remove_object(self, resource: str, namespace: str, name: str, expect: int) -> int:
        """Forget an object that has this version; returns the version of its end. Raises StaleObject."""
        place = (resource, namespace, name)

        def work(db: sqlite3.Connection) -> int:
            with _transaction(db):
                _expect(db, place, expect)
                db.execute("DELETE FROM objects WHERE resource = ? AND namespace = ? AND name = ?", place)
                return _next_version(db)

        return await self._run(work)


def _expect(db: sqlite3.Connection, place: tuple[str, str, str], version: int) -> None:
    row = db.execute(
        "SELECT version FROM objects WHERE resource = ? AND namespace = ? AND name = ?", place
    ).fetchone()
    found = 0 if row is None else int(row[0])
    if found != version:
        what = "has been changed" if found else "does not exist any more"
        raise StaleObject(f"{place[2]!r} {what}" if version else f"{place[2]!r} already exists")


def _next_version(db: sqlite3.Connection) -> int:
    db.execute("UPDATE versions SET last = last + 1")
    return int(db.execute("SELECT last FROM versions").fetchone()[0])


def _connect(path: Path) -> sqlite3.Connection:
    try:
        # Made before SQLite does, so that it never exists with a wider mode; -wal and -shm take after it.
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise SetupError(f"cannot use the store {path}: {error.strerror}") from error
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    try:
        _prepare(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise SetupError(f"cannot use the store {path}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    _write_ahead(db)
    db.execute("PRAGMA synchronous = FULL")  # writes are rare, and a key handed out must survive a power cut
    db.execute("PRAGMA foreign_keys = ON")
    if _schema_of(db) == SCHEMA:
        return
    with _transaction(db):
        # Read again under the write lock: another process may have brought the file up meanwhile.
        found = _schema_of(db)
        if found > SCHEMA:
            raise SetupError(
                f"the store {path} has schema {found}, this Greenroom knows up to {SCHEMA}; "
                "use the newer Greenroom that wrote it, or another state directory"
            )
        for statements in MIGRATIONS[found:]:
            for statement in filter(str.strip, statements.split(";")):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA}")


def _write_ahead(db: sqlite3.Connection) -> None:
    """Switch to WAL. The switch ignores the busy timeout, so processes that start together try again."""
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _schema_of(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


@contextlib.contextmanager
def _reading(db: sqlite3.Connection) -> Iterator[None]:
    """What is read in the block was all there at one moment."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("COMMIT")


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """A write transaction. IMMEDIATE: a lock taken late could not wait, it would have to fail."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _all(db: sqlite3.Connection, query: str, kind: type[T]) -> list[T]:
    decode = msgspec.json.Decoder(kind).decode
    return [decode(row[0]) for row in db.execute(query)]
