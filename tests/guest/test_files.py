"""Uploads, downloads, signatures."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pwd
import stat
import subprocess
import time
import urllib.parse
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.guest.downloads import parse_range, wants_gzip
from greenroom.guest.errors import AgentError
from tests.guest.harness import IS_ROOT, ME, Agent, Answer

OCTETS = {"Content-Type": "application/octet-stream"}


def url(path: Path | str, **query: str) -> str:
    return "/files?" + urllib.parse.urlencode({"path": str(path), **query})


def put(agent: Agent, path: Path | str, data: bytes, **headers: str) -> Answer:
    return agent.request("POST", url(path), data, {**OCTETS, **headers})


def form(parts: list[tuple[str, bytes]], name: str = "file") -> tuple[bytes, dict[str, str]]:
    body = b"".join(
        f'--b0undary\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'.encode()
        + data
        + b"\r\n"
        for filename, data in parts
    )
    return body + b"--b0undary--\r\n", {"Content-Type": "multipart/form-data; boundary=b0undary"}


# -- uploads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 65_535, 262_144, 262_145, 5_000_000])
def test_what_was_stored_is_read_back(agent: Agent, folder: Path, size: int) -> None:
    data = os.urandom(size)
    path = folder / "sub" / "über 日本.bin"
    answer = put(agent, path, data)
    assert answer.status == 200
    assert answer.json == [{"path": str(path), "name": "über 日本.bin", "type": "file"}]
    assert path.read_bytes() == data
    assert agent.request("GET", url(path)).body == data


def test_owner_and_modes(agent: Agent, folder: Path) -> None:
    user = "nobody" if IS_ROOT else ME
    account = pwd.getpwnam(user)
    path = folder / "a" / "b" / "file"
    answer = agent.request("POST", url(path, username=user), b"x", OCTETS)
    assert answer.status == 200
    for part, mode in ((path, 0o644), (path.parent, 0o755), (path.parent.parent, 0o755)):
        info = part.stat()
        assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (
            mode,
            account.pw_uid,
            account.pw_gid,
        )
    assert folder.stat().st_uid == os.geteuid()


def test_overwriting_truncates_and_keeps_the_file(agent: Agent, folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"a long old content")
    path.chmod(0o600)
    inode = path.stat().st_ino
    put(agent, path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_ino == inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_written_through(agent: Agent, folder: Path) -> None:
    (folder / "link").symlink_to("target")
    assert put(agent, folder / "link", b"x").status == 200
    assert (folder / "target").read_bytes() == b"x"


def test_a_form_with_one_file_goes_to_the_path(agent: Agent, folder: Path) -> None:
    body, headers = form([("ignored.txt", b"content\r\n--b0und")])
    answer = agent.request("POST", url(folder / "target"), body, headers)
    assert answer.json == [{"path": str(folder / "target"), "name": "target", "type": "file"}]
    assert (folder / "target").read_bytes() == b"content\r\n--b0und"


def test_a_form_with_many_files_uses_their_full_names(agent: Agent, folder: Path) -> None:
    files = [(f"{folder}/deep/{number}/ü.txt", bytes([number]) * number * 40_000) for number in range(10)]
    body, headers = form(files)
    answer = agent.request("POST", "/files", body, headers)
    assert [entry["path"] for entry in answer.json] == [name for name, _ in files]
    for name, data in files:
        assert Path(name).read_bytes() == data


def test_plain_fields_of_a_form_are_read_over(agent: Agent, folder: Path) -> None:
    field = b'--b0undary\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
    body, headers = form([(str(folder / "x"), b"data")])
    assert agent.request("POST", "/files", field + body, headers).status == 200
    assert (folder / "x").read_bytes() == b"data"
    assert [entry.name for entry in folder.iterdir()] == ["x"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_gzipped_upload_is_unpacked(agent: Agent, folder: Path, chunked: bool) -> None:
    data = b"hello " * 200_000
    packed = gzip.compress(data)
    body = iter([packed[:100], packed[100:]]) if chunked else packed
    answer = agent.request("POST", url(folder / "x"), body, {**OCTETS, "Content-Encoding": "gzip"})
    assert answer.status == 200
    assert (folder / "x").read_bytes() == data
    body, headers = form([("f", data)])
    answer = agent.request(
        "POST", url(folder / "y"), gzip.compress(body), {**headers, "Content-Encoding": "gzip"}
    )
    assert answer.status == 200
    assert (folder / "y").read_bytes() == data


def test_a_large_upload_needs_little_memory(agent: Agent, folder: Path) -> None:
    block = os.urandom(1_000_000)

    def blocks() -> Iterator[bytes]:
        for _ in range(100):
            yield block

    answer = agent.request("POST", url(folder / "large"), blocks(), OCTETS)
    assert answer.status == 200
    assert (folder / "large").stat().st_size == 100_000_000
    connection = agent.connect()
    connection.request("GET", url(folder / "large"))
    response = connection.getresponse()
    digest = hashlib.sha256()
    while data := response.read(1_000_000):
        digest.update(data)
    connection.close()
    assert digest.digest() == hashlib.sha256(block * 100).digest()
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    assert int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) < 150_000


@pytest.mark.parametrize(("query", "body", "headers", "status"), [
    ({}, b"x", OCTETS, 400),
    ({"path": "/tmp/"}, b"x", OCTETS, 400),
    ({"path": "/tmp/x", "username": "no-such-user"}, b"x", OCTETS, 401),
    ({"path": "/tmp"}, b"x", OCTETS, 400),
    ({"path": "/etc/passwd/x"}, b"x", OCTETS, 404),
    ({"path": "/tmp/\0"}, b"x", OCTETS, 400),
    ({"path": "/tmp/" + "x" * 300}, b"x", OCTETS, 400),
    ({"path": "/tmp/x"}, b"x", {"Content-Type": "text/plain"}, 400),
    ({"path": "/tmp/x"}, b"x", {**OCTETS, "Content-Encoding": "br"}, 400),
    ({"path": "/tmp/x"}, b"x", {"Content-Type": "multipart/form-data"}, 400),
    ({}, *form([]), 400),
    ({}, *form([("", b"x")]), 400),
    ({}, *form([("a", b"x")], name="other"), 400),
])  # fmt: skip
def test_refused_uploads(
    agent: Agent, query: dict[str, str], body: bytes, headers: dict[str, str], status: int
) -> None:
    answer = agent.request("POST", "/files?" + urllib.parse.urlencode(query), body, headers)
    assert answer.status == status
    assert answer.json["code"] == status
    assert answer.json["message"]


def test_an_upload_that_breaks_off_leaves_no_new_file(agent: Agent, folder: Path) -> None:
    packed = gzip.compress(os.urandom(600_000))
    answer = put(agent, folder / "new", packed[:-100], **{"Content-Encoding": "gzip"})
    assert answer.status == 400
    assert not (folder / "new").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_devices_and_pipes_are_no_files(agent: Agent, folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    for path in (folder / "fifo", Path("/dev/full")):
        assert put(agent, path, b"x").status == 400
        assert agent.request("GET", url(path)).status == 400


@pytest.mark.skipif(not IS_ROOT, reason="mounting needs root")
def test_a_full_disk_is_507(agent: Agent, folder: Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        answer = put(agent, disk / "file", bytes(3_000_000))
        assert (answer.status, answer.json["code"]) == (507, 507)
        assert "No space left" in answer.json["message"]
        assert not (disk / "file").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# -- metadata ---------------------------------------------------------------------------------------------


@pytest.fixture
def attributes(folder: Path) -> None:
    try:
        os.setxattr(folder, "user.e2b.probe", b"x")
        os.removexattr(folder, "user.e2b.probe")
    except OSError:
        pytest.skip("this file system has no user attributes")


@pytest.mark.usefixtures("attributes")
def test_metadata_is_stored_echoed_and_replaced(agent: Agent, folder: Path) -> None:
    path = folder / "file"
    answer = put(agent, path, b"x", **{"X-Metadata-Author": "me", "x-metadata-n": "1"})
    assert answer.json[0]["metadata"] == {"author": "me", "n": "1"}
    assert os.getxattr(path, "user.e2b.author") == b"me"
    assert agent.call("Stat", {"path": str(path)}).json["entry"]["metadata"] == {"author": "me", "n": "1"}
    put(agent, path, b"y", **{"X-Metadata-n": "2"})
    assert agent.call("Stat", {"path": str(path)}).json["entry"]["metadata"] == {"n": "2"}
    put(agent, path, b"z")
    assert "metadata" not in agent.call("Stat", {"path": str(path)}).json["entry"]


@pytest.mark.parametrize("headers", [
    {"X-Metadata-": "v"}, {"X-Metadata-" + "k" * 247: "v"}, {"X-Metadata-a": "v" * 4090},
])  # fmt: skip
def test_metadata_is_bounded(agent: Agent, folder: Path, headers: dict[str, str]) -> None:
    assert put(agent, folder / "file", b"x", **headers).status == 400
    assert not (folder / "file").exists()


# -- downloads --------------------------------------------------------------------------------------------


def test_a_download(agent: Agent, folder: Path) -> None:
    (folder / "page.html").write_bytes(b"<p>")
    answer = agent.request("GET", url(folder / "page.html"))
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html"
    assert answer.headers["Content-Disposition"] == "inline"
    assert answer.headers["Content-Length"] == "3"
    head = agent.request("HEAD", url(folder / "page.html"))
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", "3")


def test_kernel_files_are_read_to_their_end(agent: Agent) -> None:
    assert b"cpu" in agent.request("GET", url("/proc/stat")).body
    symbols = Path("/proc/kallsyms")
    if symbols.exists() and os.access(symbols, os.R_OK):
        assert agent.request("GET", url(symbols)).body == symbols.read_bytes()


def test_relative_and_home_paths(agent: Agent, folder: Path) -> None:
    home = pwd.getpwnam(ME).pw_dir
    (folder / "x").write_bytes(b"found")
    for path in (
        os.path.relpath(folder / "x", home),
        "~/" + os.path.relpath(folder / "x", home),
        f"{folder}/../work/x",
    ):
        assert agent.request("GET", url(path)).body == b"found"


@pytest.mark.parametrize(("path", "status"), [
    ("/no/such", 404), ("/etc/passwd/x", 404), ("/etc", 400), ("", 400), ("/" + "x" * 300, 400),
])  # fmt: skip
def test_refused_downloads(agent: Agent, path: str, status: int) -> None:
    answer = agent.request("GET", url(path))
    assert (answer.status, answer.json["code"]) == (status, status)
    assert agent.request("GET", url("/etc/passwd", username="no-such-user")).status == 401


@pytest.mark.parametrize("size", [1000, 300_000])
def test_ranges(agent: Agent, folder: Path, size: int) -> None:
    data = os.urandom(size)
    (folder / "x").write_bytes(data)
    for header, part in (
        ("bytes=0-9", data[:10]), (f"bytes={size - 5}-", data[-5:]), ("bytes=-7", data[-7:]),
        (f"bytes=10-{size * 2}", data[10:]), (f"bytes=-{size * 2}", data),
    ):  # fmt: skip
        answer = agent.request("GET", url(folder / "x"), headers={"Range": header})
        assert (answer.status, answer.body) == (206, part)
        assert answer.headers["Content-Range"].endswith(f"/{size}")
    assert agent.request("GET", url(folder / "x"), headers={"Range": "bytes=0-1,4-5"}).body == data
    assert agent.request("GET", url(folder / "x"), headers={"Range": f"bytes={size}-"}).status == 416
    tag = agent.request("HEAD", url(folder / "x")).headers["ETag"]
    assert agent.request("GET", url(folder / "x"), headers={"If-None-Match": tag}).status == 304
    stale = {"Range": "bytes=0-9", "If-Range": '"other"'}
    assert agent.request("GET", url(folder / "x"), headers=stale).body == data


@pytest.mark.parametrize(("header", "size", "span"), [
    (None, 10, None), ("bytes=0-0", 10, (0, 0)), ("bytes=5-", 10, (5, 9)), ("bytes=-3", 10, (7, 9)),
    ("bytes=2-99", 10, (2, 9)), ("bytes=3-2", 10, None), ("bytes=-", 10, None), ("lines=1-2", 10, None),
    ("bytes=1-2,4-5", 10, None),
])  # fmt: skip
def test_range_headers(header: str | None, size: int, span: tuple[int, int] | None) -> None:
    assert parse_range(header, size) == span


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=0-", 0), ("bytes=-5", 0), ("bytes=-0", 10)]
)
def test_unsatisfiable_ranges(header: str, size: int) -> None:
    with pytest.raises(AgentError) as caught:
        parse_range(header, size)
    assert caught.value.status == 416


@pytest.mark.parametrize("size", [0, 10, 60_000, 1_000_000])
def test_gzip_when_asked(agent: Agent, folder: Path, size: int) -> None:
    data = (b"hello world " * 100_000)[:size]
    (folder / "x").write_bytes(data)
    answer = agent.request("GET", url(folder / "x"), headers={"Accept-Encoding": "gzip"})
    assert answer.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(answer.body) == data
    plain = agent.request("GET", url(folder / "x"), headers={"Accept-Encoding": "gzip, deflate"})
    assert plain.headers["Content-Encoding"] is None
    assert plain.body == data


@pytest.mark.parametrize(("header", "gzipped"), [
    ("", False), ("gzip", True), ("gzip, deflate, br", False), ("gzip;q=0", False), ("identity", False),
    ("gzip, identity;q=0", True), ("*", False), ("GZIP;q=0.5", True), ("identity;q=0, *", True),
])  # fmt: skip
def test_accept_encoding(header: str, gzipped: bool) -> None:
    assert wants_gzip(header) is gzipped


def test_no_acceptable_encoding(agent: Agent, folder: Path) -> None:
    (folder / "x").write_bytes(b"x")
    headers = {"Accept-Encoding": "br, identity;q=0"}
    assert agent.request("GET", url(folder / "x"), headers=headers).status == 406


def test_a_client_that_stops_downloading(agent: Agent, folder: Path) -> None:
    (folder / "x").write_bytes(bytes(20_000_000))
    for _ in range(5):
        connection = agent.connect()
        connection.request("GET", url(folder / "x"))
        assert connection.getresponse().read(10) == bytes(10)
        connection.close()
    assert len(agent.request("GET", url(folder / "x")).body) == 20_000_000


# -- signatures -------------------------------------------------------------------------------------------


def signed(path: Path, operation: str, token: str, user: str = "", expiration: int | None = None) -> str:
    text = f"{path}:{operation}:{user}:{token}" + ("" if expiration is None else f":{expiration}")
    signature = "v1_" + b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    query = {"signature": signature}
    if user:
        query["username"] = user
    if expiration is not None:
        query["signature_expiration"] = str(expiration)
    return url(path, **query)


def test_signatures_open_one_file(fresh_agent: Agent, folder: Path) -> None:
    agent, path = fresh_agent, folder / "a+b ü"
    token = "a-token"
    path.write_bytes(b"secret")
    assert agent.request("POST", "/init", json.dumps({"accessToken": token}).encode()).status == 200
    assert agent.request("GET", url(path)).status == 401
    assert agent.request("GET", url(path), headers={"X-Access-Token": "wrong"}).status == 401
    assert agent.request("GET", url(path), headers={"X-Access-Token": token}).body == b"secret"
    later = int(time.time()) + 100
    for good in (
        signed(path, "read", token), signed(path, "read", token, expiration=later),
        signed(path, "read", token, user=ME),
    ):  # fmt: skip
        assert agent.request("GET", good).body == b"secret"
    for bad in (
        signed(path, "write", token), signed(path, "read", "wrong"), signed(path, "read", "wrong", expiration=1),
        signed(path, "read", token, expiration=later).replace(str(later), str(later + 1)),
        url(path, signature="", signature_expiration="x"),
    ):  # fmt: skip
        answer = agent.request("GET", bad)
        assert answer.status == 401
        assert answer.body != b'{"code":401,"message":"signature is already expired"}'
    expired = agent.request("GET", signed(path, "read", token, expiration=int(time.time()) - 10))
    assert (expired.status, expired.body) == (401, b'{"code":401,"message":"signature is already expired"}')
    body, headers = form([("x", b"uploaded")])
    assert agent.request("POST", signed(path, "write", token), body, headers).status == 200
    assert path.read_bytes() == b"uploaded"
    assert agent.request("POST", signed(path, "read", token), body, headers).status == 401
