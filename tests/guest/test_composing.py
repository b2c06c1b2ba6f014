"""Putting uploaded parts together."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path
from typing import Any

import pytest

from greenroom.guest import composing
from tests.guest.harness import IS_ROOT, Agent, Answer


def compose(agent: Agent, sources: Any, destination: Any, **fields: Any) -> Answer:
    body = {"source_paths": sources, "destination": destination, **fields}
    return agent.request("POST", "/files/compose", json.dumps(body).encode())


def parts(folder: Path, *contents: bytes) -> list[str]:
    names = []
    for number, content in enumerate(contents):
        place = folder / f"part{number}"
        place.write_bytes(content)
        names.append(str(place))
    return names


def test_parts_become_one_file_in_order(agent: Agent, folder: Path) -> None:
    names = parts(folder, b"one", b"", b"two" * 100_000, b"three")
    answer = compose(agent, names, f"{folder}/new/whole")
    assert answer.status == 200, answer.body
    assert answer.json == {"path": f"{folder}/new/whole", "name": "whole", "type": "file"}
    whole = folder / "new" / "whole"
    assert whole.read_bytes() == b"one" + b"two" * 100_000 + b"three"
    assert whole.stat().st_mode & 0o777 == 0o644
    assert os.listdir(folder) == ["new"]
    assert os.listdir(folder / "new") == ["whole"]


def test_an_existing_destination_is_replaced(agent: Agent, folder: Path) -> None:
    (folder / "whole").write_bytes(b"old" * 100)
    assert compose(agent, parts(folder, b"new"), f"{folder}/whole").status == 200
    assert (folder / "whole").read_bytes() == b"new"


def test_a_failure_leaves_everything_as_it_was(agent: Agent, folder: Path) -> None:
    (folder / "whole").write_bytes(b"old")
    names = parts(folder, b"one")
    assert compose(agent, [*names, f"{folder}/missing"], f"{folder}/whole").status == 404
    assert compose(agent, [*names, str(folder)], f"{folder}/whole").status == 400
    assert compose(agent, names, str(folder)).status in (400, 409)
    assert (folder / "whole").read_bytes() == b"old"
    assert sorted(os.listdir(folder)) == ["part0", "whole"]


@pytest.mark.parametrize(("sources", "destination"), [
    ([], "/tmp/x"), (None, "/tmp/x"), (["/tmp/a"], ""), (["/tmp/a"], None), (["/tmp/a"], "/tmp/a"),
    (["/tmp/./a"], "/tmp/b/../a"), ([""], "/tmp/x"), ([7], "/tmp/x"), ("text", "/tmp/x"), (["/tmp/a"], "/tmp/x/"),
    (["/tmp/a\0"], "/tmp/x"), (["/tmp/a"] * 10_001, "/tmp/x"),
])  # fmt: skip
def test_refused_requests(agent: Agent, sources: object, destination: object) -> None:
    answer = compose(agent, sources, destination)
    assert (answer.status, answer.json["code"]) == (400, 400)


def test_a_full_disk_is_507(agent: Agent, folder: Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        names = parts(folder, bytes(900_000), bytes(900_000))
        answer = compose(agent, names, f"{disk}/whole")
        assert (answer.status, answer.json["code"]) == (507, 507)
        assert os.listdir(disk) == []
        assert all(os.path.exists(name) for name in names)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_between_file_systems(folder: Path) -> None:
    """Where the kernel cannot copy by itself, the bytes take the way through the agent."""
    account = pwd.getpwuid(os.geteuid())
    user = composing.User(account.pw_name, account.pw_uid, account.pw_gid, (account.pw_gid,), account.pw_dir)
    target = f"/dev/shm/greenroom-test-{os.getpid()}"
    try:
        composing.compose(parts(folder, b"one", b"two" * 1_000_000), target, user)
        assert Path(target).read_bytes() == b"one" + b"two" * 1_000_000
    finally:
        Path(target).unlink(missing_ok=True)


@pytest.mark.skipif(not IS_ROOT, reason="only root can act for another user")
def test_the_file_belongs_to_the_user_named(agent: Agent, folder: Path) -> None:
    assert compose(agent, parts(folder, b"x"), f"{folder}/whole", username="nobody").status == 200
    assert (folder / "whole").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    answer = compose(agent, parts(folder, b"x"), f"{folder}/whole", username="no-such-user")
    assert answer.status == 401


def test_it_needs_the_token(fresh_agent: Agent, folder: Path) -> None:
    fresh_agent.request("POST", "/init", b'{"accessToken":"secret"}')
    assert compose(fresh_agent, parts(folder, b"x"), f"{folder}/whole").status == 401
    fresh_agent.token = "secret"
    assert compose(fresh_agent, parts(folder, b"x"), f"{folder}/whole").status == 200
