"""The SQLite store: what it keeps, what it refuses, and that several processes can use it."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from greenroom.errors import KeyConflict, SetupError, StaleObject, TemporaryError, UnknownTemplate
from greenroom.store import sqlite
from greenroom.store.records import NodeRecord, StoredObject
from greenroom.store.sqlite import SCHEMA, SqliteStore
from greenroom.wire.messages import PoolSpec, Size, Template
from greenroom.wire.tasks import spawn

SMALL = Size("small", 1, 512, 4096)
BASE = Template(template_id="t" * 20, name="base", size=SMALL, created_at=1.0)
NODE = NodeRecord(
    name="node-0",
    code="aaaa",
    api_url="http://127.0.0.1:1",
    relay_host="127.0.0.1",
    relay_port=2,
    engine="qemu",
    first_seen=1.0,
    last_seen=1.0,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(path)
    yield opened
    await opened.close()


async def test_the_file_and_its_companions_are_private(store, path):
    await store.add_template(BASE)
    files = list(path.parent.iterdir())
    assert {file.name for file in files} == {"store.db", "store.db-wal", "store.db-shm"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


async def test_records_survive_closing(path):
    first = await SqliteStore.open(path)
    pool = PoolSpec(template="base", size=SMALL, target=3, warm="running")
    await first.add_template(BASE)
    await first.put_pool(pool)
    await first.put_node(NODE)
    await first.close()
    again = await SqliteStore.open(path)
    assert await again.templates() == [BASE]
    assert await again.pools() == [pool]
    assert await again.nodes() == [NODE]
    await again.close()


async def test_a_taken_template_name_keeps_its_record(store):
    other = msgspec.structs.replace(BASE, template_id="u" * 20)
    assert await store.add_template(BASE) == BASE
    assert await store.add_template(other) == BASE
    assert await store.templates() == [BASE]


async def test_a_pool_is_replaced_and_removed(store):
    await store.add_template(BASE)
    pool = PoolSpec(template="base", size=SMALL, target=3)
    await store.put_pool(pool)
    larger = msgspec.structs.replace(pool, target=9)
    await store.put_pool(larger)
    assert await store.pools() == [larger]
    await store.put_pool(msgspec.structs.replace(pool, target=0))
    assert await store.pools() == []


async def test_a_pool_needs_its_template(store):
    with pytest.raises(UnknownTemplate, match="nothing"):
        await store.put_pool(PoolSpec(template="nothing", size=SMALL, target=1))
    assert await store.pools() == []


async def test_a_node_moves_and_keeps_when_it_was_first_seen(store):
    await store.put_node(NODE)
    moved = msgspec.structs.replace(NODE, code="bbbb", api_url="http://h", first_seen=9.0, last_seen=9.0)
    await store.put_node(moved)
    assert await store.nodes() == [msgspec.structs.replace(moved, first_seen=1.0)]


async def test_a_node_code_belongs_to_one_node(store):
    await store.put_node(NODE)
    with pytest.raises(KeyConflict, match="aaaa"):
        await store.put_node(msgspec.structs.replace(NODE, name="node-1"))
    assert await store.nodes() == [NODE]


async def test_a_removed_node_frees_its_code(store):
    await store.put_node(NODE)
    assert await store.remove_node("node-0") is True
    assert await store.remove_node("node-0") is False
    await store.put_node(msgspec.structs.replace(NODE, name="node-1"))


async def test_the_version_moves_when_another_has_written_only(store, path):
    before = await store.version()
    await store.add_template(BASE)
    assert await store.version() == before
    other = await SqliteStore.open(path)
    await other.put_node(NODE)
    await other.close()
    assert await store.version() != before


async def test_calls_do_not_block_the_event_loop(store, path):
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    writing = spawn(store.put_node(NODE), "write")
    await asyncio.sleep(0)
    assert not writing.done()
    blocker.execute("ROLLBACK")
    blocker.close()
    await writing
    assert await store.nodes() == [NODE]


async def test_a_store_that_stays_locked_is_a_temporary_error(path, monkeypatch):
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT", 0.02)
    store = await SqliteStore.open(path)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(TemporaryError, match="locked"):
        await store.put_node(NODE)
    blocker.execute("ROLLBACK")
    blocker.close()
    await store.put_node(NODE)
    await store.close()


async def test_a_newer_schema_is_refused_and_left_alone(path):
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    newer.close()
    with pytest.raises(SetupError, match=f"schema {SCHEMA + 1}.*up to {SCHEMA}"):
        await SqliteStore.open(path)
    check = sqlite3.connect(path)
    assert check.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,)
    check.close()


async def test_what_is_no_database_is_refused(path):
    path.write_text("this is no database, whatever its name says" * 100)
    with pytest.raises(SetupError, match="not a database"):
        await SqliteStore.open(path)


async def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot use the store"):
        await SqliteStore.open(tmp_path / "file" / "store.db")


def _write_nodes(path: Path, start: object, prefix: str, count: int) -> None:
    async def main() -> None:
        start.wait()
        store = await SqliteStore.open(path)
        for number in range(count):
            name = f"{prefix}-{number}"
            await store.put_node(msgspec.structs.replace(NODE, name=name, code=f"{prefix}{number:03}"))
        await store.close()

    asyncio.run(main())


async def test_processes_that_start_together_and_write_together_lose_nothing(path):
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    workers = [context.Process(target=_write_nodes, args=(path, start, prefix, 40)) for prefix in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        await asyncio.to_thread(worker.join, 60)
        assert worker.exitcode == 0
        worker.close()
    store = await SqliteStore.open(path)
    assert len(await store.nodes()) == 120
    await store.close()


def warm_pool(name: str = "fast", document: bytes = b'{"spec":{"replicas":1}}') -> StoredObject:
    return StoredObject(
        resource="sandboxwarmpools.x", namespace="default", name=name, document=msgspec.Raw(document)
    )


async def test_an_object_is_changed_only_as_it_was_read(store, path):
    made = await store.put_object(warm_pool(), 0)
    assert made.version == 1
    with pytest.raises(StaleObject, match="already exists"):
        await store.put_object(warm_pool(), 0)
    changed = await store.put_object(warm_pool(document=b'{"spec":{"replicas":2}}'), made.version)
    with pytest.raises(StaleObject, match="has been changed"):
        await store.put_object(warm_pool(), made.version)
    with pytest.raises(StaleObject, match="has been changed"):
        await store.remove_object("sandboxwarmpools.x", "default", "fast", made.version)
    other = await store.put_object(warm_pool("another"), 0)
    again = await SqliteStore.open(path)
    last, found = await again.objects("sandboxwarmpools.x")
    await again.close()
    assert (last, [(each.name, each.version) for each in found]) == (
        3,
        [("another", other.version), ("fast", changed.version)],
    )
    assert bytes(found[1].document) == b'{"spec":{"replicas":2}}'
    assert await store.objects("sandboxtemplates.x") == (3, [])


async def test_versions_of_objects_never_come_again(store):
    made = await store.put_object(warm_pool(), 0)
    gone = await store.remove_object("sandboxwarmpools.x", "default", "fast", made.version)
    with pytest.raises(StaleObject, match="does not exist any more"):
        await store.remove_object("sandboxwarmpools.x", "default", "fast", made.version)
    again = await store.put_object(warm_pool(), 0)
    assert made.version < gone < again.version
