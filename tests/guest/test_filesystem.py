"""Stat, ListDir, MakeDir, Move, Remove."""

from __future__ import annotations

import grp
import os
import pwd
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest.entries import timestamp
from greenroom.guest.errors import AgentError
from greenroom.guest.paths import resolve
from greenroom.guest.users import User, UserDirectory, requested_name
from tests.guest.harness import IS_ROOT, ME, Agent, basic


def entry(agent: Agent, path: Path | str) -> dict[str, Any]:
    answer = agent.call("Stat", {"path": str(path)})
    assert answer.status == 200, answer.body
    found = answer.json["entry"]
    assert isinstance(found, dict)
    return found


def code(agent: Agent, method: str, message: object) -> str:
    answer = agent.call(method, message)
    assert answer.json["message"]
    return str(answer.json["code"])


def test_a_file(agent: Agent, folder: Path) -> None:
    path = folder / "file.txt"
    path.write_bytes(b"test")
    path.chmod(0o640)
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    account = pwd.getpwuid(path.stat().st_uid)
    assert entry(agent, path) == {
        "name": "file.txt",
        "type": "FILE_TYPE_FILE",
        "path": str(path),
        "size": "4",
        "mode": 0o640,
        "permissions": "-rw-r-----",
        "owner": account.pw_name,
        "group": grp.getgrgid(path.stat().st_gid).gr_name,
        "modifiedTime": "2023-11-14T22:13:20.123456789Z",
    }


def test_a_directory(agent: Agent, folder: Path) -> None:
    folder.chmod(0o755)
    found = entry(agent, folder)
    assert (found["type"], found["mode"], found["permissions"]) == (
        "FILE_TYPE_DIRECTORY",
        0o755,
        "drwxr-xr-x",
    )
    assert entry(agent, "/")["name"] == "/"
    home = pwd.getpwnam(ME).pw_dir
    if os.path.isdir(home):
        assert entry(agent, "")["path"] == home


def test_links(agent: Agent, folder: Path) -> None:
    (folder / "target").write_bytes(b"x")
    (folder / "target").chmod(0o600)
    (folder / "one").symlink_to("target")
    (folder / "two").symlink_to("one")
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    (folder / "up").symlink_to("..")
    found = entry(agent, folder / "two")
    assert (found["type"], found["mode"], found["isSymlink"]) == ("FILE_TYPE_FILE", 0o600, True)
    assert found["symlinkTarget"] == str((folder / "target").resolve())
    assert found["permissions"] == "Lrwxrwxrwx"
    assert entry(agent, folder / "up")["type"] == "FILE_TYPE_DIRECTORY"
    for name in ("dangling", "loop"):
        found = entry(agent, folder / name)
        assert (found["type"], found["isSymlink"]) == ("FILE_TYPE_UNSPECIFIED", True)


def test_other_kinds_have_no_known_type(agent: Agent, folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as unix:
        os.chdir(folder)
        unix.bind("socket")
        for name in ("fifo", "socket"):
            assert entry(agent, folder / name)["type"] == "FILE_TYPE_UNSPECIFIED"


def test_what_does_not_exist(agent: Agent, folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    for path in (folder / "no", folder / "no" / "no", folder / "file" / "no"):
        assert code(agent, "Stat", {"path": str(path)}) == "not_found"
        assert code(agent, "ListDir", {"path": str(path)}) == "not_found"
        assert code(agent, "Move", {"source": str(path), "destination": str(folder / "x")}) == "not_found"
        assert agent.call("Remove", {"path": str(path)}).json == {}


@pytest.mark.parametrize("path", ["a\0b", "\ud800", 7, "x" * 5000])
def test_impossible_paths(agent: Agent, path: object) -> None:
    assert code(agent, "Stat", {"path": path}) == "invalid_argument"


def test_an_unknown_user(agent: Agent) -> None:
    answer = agent.call("Stat", {"path": "/"}, user="no-such-user")
    assert (answer.status, answer.json) == (
        401, {"code": "unauthenticated", "message": "invalid username: 'no-such-user'"},
    )  # fmt: skip
    answer = agent.call("Stat", {"path": "/"}, Authorization="Basic !")
    assert answer.status == 401


def test_listing_depth_and_order(agent: Agent, folder: Path) -> None:
    for name in ("b/z", "b/a/deep", "a", "c/x"):
        (folder / name).mkdir(parents=True)
    for name in ("b.txt", "b/file", "b-file", "Z"):
        (folder / name).write_bytes(b"")
    (folder / "link").symlink_to("b")

    def names(depth: int, path: Path = folder) -> list[str]:
        answer = agent.call("ListDir", {"path": str(path), "depth": depth})
        return [os.path.relpath(found["path"], path) for found in answer.json["entries"]]

    flat = ["Z", "a", "b", "b-file", "b.txt", "c", "link"]
    assert names(0) == names(1) == flat
    assert names(2) == ["Z", "a", "b", "b/a", "b/file", "b/z", "b-file", "b.txt", "c", "c/x", "link"]
    assert names(3) == [
        "Z", "a", "b", "b/a", "b/a/deep", "b/file", "b/z", "b-file", "b.txt", "c", "c/x", "link",
    ]  # fmt: skip
    assert names(1, folder / "link") == ["a", "file", "z"]
    assert agent.call("ListDir", {"path": str(folder / "a")}).json == {"entries": []}
    assert code(agent, "ListDir", {"path": str(folder / "Z")}) == "invalid_argument"


def test_names_that_are_no_text(agent: Agent, folder: Path) -> None:
    (folder / os.fsdecode(b"\xff\xfe")).write_bytes(b"")
    (folder / "日本").write_bytes(b"")
    entries = agent.call("ListDir", {"path": str(folder)}).json["entries"]
    assert [found["name"] for found in entries] == ["日本", "\ufffd\ufffd"]


def test_making_directories(agent: Agent, folder: Path) -> None:
    user = "nobody" if IS_ROOT else ME
    account = pwd.getpwnam(user)
    path = folder / "a" / "b" / "ü"
    answer = agent.call("MakeDir", {"path": str(path)}, user=user)
    assert answer.json["entry"]["path"] == str(path)
    assert answer.json["entry"]["owner"] == user
    for made in (path, *list(path.parents)[:2]):
        info = made.stat()
        assert (info.st_mode & 0o777, info.st_uid, info.st_gid) == (0o755, account.pw_uid, account.pw_gid)
    assert code(agent, "MakeDir", {"path": str(path)}) == "already_exists"
    (folder / "file").write_bytes(b"")
    assert code(agent, "MakeDir", {"path": str(folder / "file")}) == "invalid_argument"
    assert code(agent, "MakeDir", {"path": str(folder / "file" / "x")}) == "invalid_argument"


def test_moving(agent: Agent, folder: Path) -> None:
    (folder / "x").write_bytes(b"content")
    answer = agent.call(
        "Move", {"source": str(folder / "x"), "destination": str(folder / "new" / "place" / "y")}
    )
    assert answer.json["entry"]["name"] == "y"
    assert (folder / "new" / "place" / "y").read_bytes() == b"content"
    assert not (folder / "x").exists()
    (folder / "dir" / "sub").mkdir(parents=True)
    agent.call("Move", {"source": str(folder / "dir"), "destination": str(folder / "dir2")})
    assert (folder / "dir2" / "sub").is_dir()
    message = {"source": str(folder / "new" / "place" / "y"), "destination": str(folder / "dir2")}
    assert code(agent, "Move", message) == "invalid_argument"
    (folder / "link").symlink_to("nowhere")
    agent.call("Move", {"source": str(folder / "link"), "destination": str(folder / "link2")})
    assert os.readlink(folder / "link2") == "nowhere"


def test_moving_between_file_systems(agent: Agent, folder: Path) -> None:
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or other.stat().st_dev == folder.stat().st_dev:
        pytest.skip("no second file system here")
    (folder / "dir").mkdir()
    (folder / "dir" / "x").write_bytes(b"content")
    target = other / f"greenroom-test-{os.getpid()}"
    try:
        answer = agent.call("Move", {"source": str(folder / "dir"), "destination": str(target)})
        assert answer.status == 200
        assert (target / "x").read_bytes() == b"content"
        assert not (folder / "dir").exists()
    finally:
        agent.call("Remove", {"path": str(target)})
    assert not target.exists()


def test_removing(agent: Agent, folder: Path) -> None:
    (folder / "dir" / "sub").mkdir(parents=True)
    (folder / "dir" / "sub" / "x").write_bytes(b"")
    (folder / "keep").mkdir()
    (folder / "keep" / "x").write_bytes(b"")
    (folder / "link").symlink_to("keep")
    for name in ("dir", "link", "link"):
        assert agent.call("Remove", {"path": str(folder / name)}).json == {}
    assert [found.name for found in folder.iterdir()] == ["keep"]
    assert (folder / "keep" / "x").exists()
    for path in ("/", "//", "/tmp/..", ""):
        assert code(agent, "Remove", {"path": path}) == "invalid_argument"


# -- the small parts --------------------------------------------------------------------------------------

SOMEBODY = User("somebody", 1000, 1000, (1000,), "/home/somebody")


@pytest.mark.parametrize(("path", "resolved"), [
    ("", "/home/somebody"), ("~", "/home/somebody"), ("~/x", "/home/somebody/x"), ("x/y", "/home/somebody/x/y"),
    ("/a/../b", "/b"), ("//a", "/a"), ("/", "/"), ("../other", "/home/other"), ("~x", "/home/somebody/~x"),
    ("/../..", "/"), ("/a/", "/a"),
])  # fmt: skip
def test_paths_are_relative_to_the_home(path: str, resolved: str) -> None:
    assert resolve(path, SOMEBODY) == resolved


@given(st.text(max_size=60))
def test_every_path_becomes_absolute_and_plain_or_is_refused(path: str) -> None:
    try:
        resolved = resolve(path, SOMEBODY)
    except AgentError as error:
        assert error.code == "invalid_argument"  # noqa: PT017 - both outcomes are fine
    else:
        assert resolved == "/" + os.path.normpath(resolved).lstrip("/")


@pytest.mark.parametrize(("nanoseconds", "text"), [
    (0, "1970-01-01T00:00:00.000000000Z"),
    (-1, "1969-12-31T23:59:59.999999999Z"),
    (10**30, "9999-12-31T23:59:59.000000000Z"),
    (-(10**30), "0001-01-01T00:00:00.000000000Z"),
])  # fmt: skip
def test_timestamps(nanoseconds: int, text: str) -> None:
    assert timestamp(nanoseconds) == text


def test_the_user_a_request_names() -> None:
    assert requested_name({}, "user") == "user"
    assert requested_name({"authorization": basic("root")}, "user") == "root"
    assert requested_name({"authorization": basic("")}, "user") == "user"
    assert requested_name({"authorization": "Bearer x"}, "user") == "user"
    for broken in ("Basic !!", "Basic /w==", "Basic é", "Basic ="):
        with pytest.raises(AgentError):
            requested_name({"authorization": broken}, "user")


def test_names_of_ids() -> None:
    users = UserDirectory()
    assert users.find(ME).uid == os.geteuid()
    assert users.user_name(os.geteuid()) == ME
    assert users.user_name(3_999_999_999) == "3999999999"
    assert users.group_name(3_999_999_999) == "3999999999"
    for name in ("", "a\0b", "x" * 1000, "no-such-user"):
        with pytest.raises(AgentError):
            users.find(name)
