"""Watching directories, as a stream and by asking."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest import inotify, watchtree
from greenroom.guest.entries import describe
from greenroom.guest.errors import AgentError
from greenroom.guest.mounts import network_type
from greenroom.guest.users import UserDirectory
from greenroom.guest.watchtree import Event, WatchTree
from tests.guest.harness import IS_ROOT, ME, Agent, Stream, descriptors, eventually, running_agent

WATCH = "filesystem.Filesystem/WatchDir"
OCTETS = {"Content-Type": "application/octet-stream"}


@contextmanager
def tree(path: Path, recursive: bool = False, entries: bool = False) -> Iterator[WatchTree]:
    users = UserDirectory()
    found = WatchTree(
        str(path), recursive=recursive, describe=(lambda one: describe(one, users)) if entries else None
    )
    try:
        found.begin()
        yield found
    finally:
        found.close()


def collected(watched: WatchTree) -> list[Event]:
    """Everything until now, in however many batches."""
    events = watched.collect()
    while not watched.drained:
        events += watched.collect()
    return events


def seen(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.kind, event.name) for event in events]


# -- the tree ---------------------------------------------------------------------------------------------


def test_what_happens_to_a_file(folder: Path) -> None:
    with tree(folder) as watched:
        place = folder / "file"
        place.write_bytes(b"x")
        place.chmod(0o600)
        place.rename(folder / "other")
        (folder / "other").unlink()
        assert seen(watched.collect()) == [
            ("CREATE", "file"),
            ("WRITE", "file"),
            ("CHMOD", "file"),
            ("RENAME", "file"),
            ("CREATE", "other"),
            ("REMOVE", "other"),
        ]
        assert watched.collect() == []


def test_what_is_moved_in_and_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x")
    (folder / "out").write_bytes(b"x")
    with tree(folder) as watched:
        (tmp_path / "in").rename(folder / "in")
        (folder / "out").rename(tmp_path / "out")
        assert seen(watched.collect()) == [("CREATE", "in"), ("RENAME", "out")]


def test_what_happens_below_is_seen_by_a_recursive_watch_only(folder: Path) -> None:
    (folder / "sub" / "deep").mkdir(parents=True)
    with tree(folder) as flat, tree(folder, recursive=True) as deep:
        (folder / "sub" / "deep" / "file").write_bytes(b"x")
        (folder / "sub" / "deep" / "file").unlink()
        assert flat.collect() == []
        assert seen(deep.collect()) == [
            ("CREATE", "sub/deep/file"),
            ("WRITE", "sub/deep/file"),
            ("REMOVE", "sub/deep/file"),
        ]


def test_a_directory_that_appears_with_its_content(folder: Path) -> None:
    with tree(folder, recursive=True) as watched:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "file").write_bytes(b"x")
        (folder / "a" / "empty").touch()
        # All of it was there before the first watch below the root could be set.
        assert seen(watched.collect()) == [
            ("CREATE", "a"),
            ("CREATE", "a/b"),
            ("CREATE", "a/empty"),
            ("CREATE", "a/b/file"),
            ("WRITE", "a/b/file"),
        ]
        (folder / "a" / "b" / "later").touch()
        assert ("CREATE", "a/b/later") in seen(watched.collect())


def test_what_was_listed_and_made_again_is_told_again(folder: Path) -> None:
    with tree(folder, recursive=True) as watched:
        (folder / "a").mkdir()
        (folder / "a" / "x").touch()
        assert seen(watched.collect()) == [("CREATE", "a"), ("CREATE", "a/x")]
        (folder / "a" / "x").unlink()
        (folder / "a" / "x").touch()
        kinds = [event for event in seen(watched.collect()) if event[0] != "CHMOD"]
        assert kinds == [("REMOVE", "a/x"), ("CREATE", "a/x")]
        assert watched.statistics()["listed"] == 0


def test_nothing_is_missed_or_doubled_while_directories_appear(folder: Path) -> None:
    """A writer makes directories and files as fast as it can while the watcher sets its watches."""
    expected = {f"d{number}" for number in range(150)}
    expected |= {f"d{number}/sub" for number in range(150)}
    expected |= {
        f"d{number}/{place}f{n}" for number in range(150) for n in range(2) for place in ("", "sub/")
    }

    def write() -> None:
        for number in range(150):
            place = folder / f"d{number}"
            place.mkdir()
            (place / "f0").touch()
            (place / "sub").mkdir()
            for n in range(2):
                (place / f"f{n}").touch()
                (place / "sub" / f"f{n}").touch()

    created: list[str] = []
    with tree(folder, recursive=True) as watched:
        writer = threading.Thread(target=write)
        writer.start()

        def all_told() -> bool:
            created.extend(event.name for event in collected(watched) if event.kind == "CREATE")
            return not writer.is_alive() and expected <= set(created)

        eventually(all_told, "everything is told")
        writer.join()
        created.extend(event.name for event in watched.collect() if event.kind == "CREATE")
    assert sorted(created) == sorted(expected)


def test_a_renamed_directory_goes_on_under_its_new_name(folder: Path) -> None:
    (folder / "old").mkdir()
    with tree(folder, recursive=True) as watched:
        (folder / "old").rename(folder / "new")
        assert seen(watched.collect()) == [("RENAME", "old"), ("CREATE", "new")]
        (folder / "new" / "file").touch()
        assert ("CREATE", "new/file") in seen(watched.collect())
        assert watched.statistics()["directories"] == 2


def test_a_directory_moved_away_is_watched_no_longer(folder: Path, tmp_path: Path) -> None:
    (folder / "sub" / "deep").mkdir(parents=True)
    with tree(folder, recursive=True) as watched:
        (folder / "sub").rename(tmp_path / "gone")
        (tmp_path / "gone" / "deep" / "file").touch()
        events = seen(watched.collect())
        assert events[0] == ("RENAME", "sub")
        (tmp_path / "gone" / "deep" / "other").touch()
        assert watched.collect() == []
        assert watched.statistics()["directories"] == 1


def test_a_removed_directory_is_told_once(folder: Path) -> None:
    (folder / "sub" / "deep").mkdir(parents=True)
    with tree(folder, recursive=True) as watched:
        (folder / "sub" / "deep").rmdir()
        (folder / "sub").rmdir()
        assert seen(watched.collect()) == [("REMOVE", "sub/deep"), ("REMOVE", "sub")]
        assert watched.statistics()["directories"] == 1


def test_what_happens_to_the_root_itself(folder: Path, tmp_path: Path) -> None:
    with tree(folder) as watched:
        folder.chmod(0o700)
        folder.rename(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rmdir()
        assert seen(watched.collect()) == [("CHMOD", "."), ("RENAME", "."), ("REMOVE", ".")]


def test_links_are_not_followed_below_the_root(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (folder / "link").symlink_to(tmp_path / "target")
    with tree(folder, recursive=True) as watched:
        (tmp_path / "target" / "file").touch()
        assert watched.collect() == []
    root = tmp_path / "root"
    root.symlink_to(folder)
    with tree(root) as watched:
        (folder / "file").touch()
        assert ("CREATE", "file") in seen(watched.collect())


def test_entries_come_with_what_still_exists(folder: Path) -> None:
    with tree(folder, entries=True) as watched:
        (folder / "kept").write_bytes(b"four")
        (folder / "gone").touch()
        (folder / "gone").unlink()
        events = watched.collect()
        by_name = {(event.kind, event.name): event.entry for event in events}
    kept = by_name["WRITE", "kept"]
    assert kept is not None
    assert (kept["path"], kept["size"]) == (str(folder / "kept"), "4")
    assert by_name["CREATE", "gone"] is None
    assert by_name["REMOVE", "gone"] is None


def test_names_that_are_no_text(folder: Path) -> None:
    with tree(folder) as watched:
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).touch()
        events = watched.collect()
    assert events[0].message() == {"name": "\N{REPLACEMENT CHARACTER}", "type": "EVENT_TYPE_CREATE"}


def test_too_many_directories(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchtree, "MAX_DIRECTORIES", 3)
    for name in "abc":
        (folder / name).mkdir()
    with pytest.raises(AgentError, match="3 directories") as refused, tree(folder, recursive=True):
        pass
    assert refused.value.code == "resource_exhausted"


def test_an_overflow_is_a_clear_error(folder: Path) -> None:
    with tree(folder) as watched:
        limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
        names = [f"{folder}/{number}" for number in range(8)]
        for name in names:
            Path(name).touch()
        for number in range(limit + 8):
            os.utime(names[number % 8])

        def drain() -> None:
            while watched.collect():
                pass

        with pytest.raises(AgentError, match="lost") as lost:
            drain()
        assert lost.value.code == "data_loss"


@given(st.lists(st.tuples(st.integers(-1, 2**31 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=40))))
def test_records_are_read_as_the_kernel_writes_them(items: list[tuple[int, int, bytes]]) -> None:
    raw = b""
    names = []
    for watch, mask, name in items:
        name = name.replace(b"\0", b"n")
        padded = name + bytes(-len(name) % 16 or 16) if name else b""
        raw += struct.pack("iIII", watch, mask, 7, len(padded)) + padded
        names.append((watch, mask, os.fsdecode(name)))
    assert [(found.watch, found.mask, found.name) for found in inotify.records(raw)] == names


MOUNTS = """
21 26 0:20 / /proc rw,nosuid - proc proc rw
26 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 26 0:50 / /mnt/share rw - nfs4 server:/x rw
41 40 0:51 / /mnt/share/disk rw - ext4 /dev/vdb rw
42 26 0:52 / /mnt/two\\040words rw - fuse.sshfs host:/ rw
43 26 0:53 / /mnt/host rw shared:5 master:1 - 9p host rw
44 40 0:54 / /mnt/over rw - nfs server:/y rw
45 44 0:55 / /mnt/over rw - tmpfs tmpfs rw
broken line
"""


@pytest.mark.parametrize(("path", "kind"), [
    ("/", None), ("/home/user", None), ("/mnt/share", "nfs4"), ("/mnt/share/a/b", "nfs4"), ("/mnt/shared", None),
    ("/mnt/share/disk/x", None), ("/mnt/two words/x", "fuse.sshfs"), ("/mnt/host", "9p"), ("/mnt/over/x", None),
])  # fmt: skip
def test_network_mounts_are_told_by_the_mount_table(path: str, kind: str | None) -> None:
    assert network_type(path, MOUNTS) == kind


def test_the_real_mount_table_can_be_read() -> None:
    assert network_type("/proc") is None


# -- the service ------------------------------------------------------------------------------------------


def events_of(message: dict[str, Any]) -> tuple[str, str]:
    event = message["filesystem"]
    return event["type"].removeprefix("EVENT_TYPE_"), event["name"]


def take(stream: Stream, count: int) -> list[tuple[str, str]]:
    messages = stream.events()
    return [events_of(next(messages)) for _ in range(count)]


def create(agent: Agent, path: Path, **fields: object) -> str:
    answer = agent.call("CreateWatcher", {"path": str(path), **fields})
    assert answer.status == 200, answer.body
    return str(answer.json["watcherId"])


def polled(agent: Agent, watcher: str) -> list[tuple[str, str]]:
    answer = agent.call("GetWatcherEvents", {"watcherId": watcher})
    assert answer.status == 200, answer.body
    return [(one["type"].removeprefix("EVENT_TYPE_"), one["name"]) for one in answer.json["events"]]


def test_an_upload_is_exactly_three_events_at_once(agent: Agent, folder: Path) -> None:
    watcher = create(agent, folder)
    with agent.stream(WATCH, {"path": str(folder)}) as stream:
        assert next(stream.events()) == {"start": {}}
        agent.request("POST", f"/files?path={folder}/new", b"content", OCTETS)
        expected = [("CREATE", "new"), ("CHMOD", "new"), ("WRITE", "new")]
        assert take(stream, 3) == expected
        # An answer holds what came before the question, however soon it is asked.
        assert polled(agent, watcher) == expected
        assert polled(agent, watcher) == []
    assert agent.call("RemoveWatcher", {"watcherId": watcher}).json == {}


def test_a_recursive_watch_with_entries(agent: Agent, folder: Path) -> None:
    (folder / "sub").mkdir()
    message = {"path": str(folder), "recursive": True, "includeEntry": True}
    with agent.stream(WATCH, message) as stream:
        messages = stream.events()
        assert next(messages) == {"start": {}}
        agent.request("POST", f"/files?path={folder}/sub/new", b"content", OCTETS)
        found = [next(messages)["filesystem"] for _ in range(3)]
    assert [(one["type"], one["name"]) for one in found] == [
        ("EVENT_TYPE_CREATE", "sub/new"),
        ("EVENT_TYPE_CHMOD", "sub/new"),
        ("EVENT_TYPE_WRITE", "sub/new"),
    ]
    assert found[2]["entry"]["path"] == f"{folder}/sub/new"
    assert found[2]["entry"]["owner"] == ME


def test_a_directory_made_while_watching(agent: Agent, folder: Path) -> None:
    watcher = create(agent, folder, recursive=True)
    agent.call("MakeDir", {"path": f"{folder}/made"})
    assert polled(agent, watcher)[0] == ("CREATE", "made")
    agent.request("POST", f"/files?path={folder}/made/file", b"x", OCTETS)
    assert ("WRITE", "made/file") in polled(agent, watcher)
    agent.call("RemoveWatcher", {"watcherId": watcher})


@pytest.mark.parametrize(("path", "code"), [("nothing", "not_found"), ("file", "invalid_argument")])
def test_what_cannot_be_watched(agent: Agent, folder: Path, path: str, code: str) -> None:
    (folder / "file").touch()
    message = {"path": str(folder / path)}
    assert agent.call("CreateWatcher", message).json["code"] == code
    with agent.stream(WATCH, message) as stream:
        assert list(stream.events()) == []
    assert stream.ended is not None
    assert stream.ended["error"]["code"] == code


@pytest.mark.parametrize("method", ["GetWatcherEvents", "RemoveWatcher"])
def test_an_unknown_watcher(agent: Agent, method: str) -> None:
    for message in ({"watcherId": "x"}, {}):
        answer = agent.call(method, message)
        assert (answer.status, answer.json["code"]) == (404, "not_found")


def test_a_removed_watcher_is_unknown(agent: Agent, folder: Path) -> None:
    watcher = create(agent, folder)
    agent.call("RemoveWatcher", {"watcherId": watcher})
    assert agent.call("GetWatcherEvents", {"watcherId": watcher}).status == 404


def test_silence_is_filled_with_keepalives(agent: Agent, folder: Path) -> None:
    with agent.stream(WATCH, {"path": str(folder)}, headers={"Keepalive-Ping-Interval": "1"}) as stream:
        messages = stream.events()
        assert [next(messages), next(messages)] == [{"start": {}}, {"keepalive": {}}]


def test_a_deadline_ends_the_stream(agent: Agent, folder: Path) -> None:
    with agent.stream(WATCH, {"path": str(folder)}, headers={"Connect-Timeout-Ms": "300"}) as stream:
        assert list(stream.events()) == [{"start": {}}]
    assert stream.ended is not None
    assert stream.ended["error"]["code"] == "deadline_exceeded"


def test_watchers_are_bounded_and_leave_nothing(tmp_path: Path, folder: Path) -> None:
    with running_agent(tmp_path / "identity") as agent:

        def queues() -> int:
            return [target for _, target in descriptors(agent.process.pid)].count("anon_inode:inotify")

        limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
        watchers = []
        while True:
            answer = agent.call("CreateWatcher", {"path": str(folder)})
            if answer.status != 200:
                break
            watchers.append(answer.json["watcherId"])
            assert len(watchers) <= limit
        assert (answer.status, answer.json["code"]) == (429, "resource_exhausted")
        assert queues() == len(watchers)
        for watcher in watchers:
            agent.call("RemoveWatcher", {"watcherId": watcher})
        assert queues() == 0
        for _ in range(3):
            with agent.stream(WATCH, {"path": str(folder), "recursive": True}) as stream:
                next(stream.events())
        eventually(lambda: queues() == 0, "streams that were left are cleaned up")


def test_a_slow_reader_is_told_that_events_were_lost(agent: Agent, folder: Path) -> None:
    names = [folder / f"{'n' * 200}{number}" for number in range(50)]
    for name in names:
        name.touch()
    watcher = create(agent, folder)
    with agent.stream(WATCH, {"path": str(folder), "includeEntry": True}) as stream:
        messages = stream.events()
        assert next(messages) == {"start": {}}
        # More than fits into the agent, the kernel's queue and the sockets together.
        for number in range(150_000):
            os.utime(names[number % len(names)])
        for _ in range(20):
            answer = agent.call("GetWatcherEvents", {"watcherId": watcher})
            if answer.status != 200:
                break
        assert answer.json["code"] == "data_loss"
        assert agent.call("GetWatcherEvents", {"watcherId": watcher}).json["code"] == "data_loss"
        agent.call("RemoveWatcher", {"watcherId": watcher})
        for _ in messages:
            pass
    assert stream.ended is not None
    assert stream.ended["error"]["code"] == "data_loss"


@pytest.mark.skipif(not IS_ROOT, reason="only root can act for another user")
def test_another_users_home_is_where_paths_begin(agent: Agent) -> None:
    answer = agent.call("CreateWatcher", {"path": "no/such/place"}, user="nobody")
    assert "/nonexistent/no/such/place" in answer.json["message"] or answer.json["code"] == "not_found"
    assert agent.call("CreateWatcher", {"path": "/"}, user="no-such-user").status == 401
