"""What the published SDK's own tests expect of files, watching and signed URLs, by the SDK itself."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2b import FileType
from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    SandboxException,
)
from e2b.sandbox.filesystem.filesystem import WriteEntry

from tests.guest.conftest import Sdk
from tests.guest.harness import ME, eventually

pytestmark = pytest.mark.compat


def write(sdk: Sdk, path: Path | str, data: Any, **options: Any) -> Any:
    return sdk.do(sdk.files.write(str(path), data, **options))


def read(sdk: Sdk, path: Path | str, **options: Any) -> Any:
    return sdk.do(sdk.files.read(str(path), **options))


def streamed(sdk: Sdk, path: Path, **options: Any) -> bytes:
    if not sdk.is_async:
        return b"".join(read(sdk, path, format="stream", **options))

    async def collect() -> bytes:
        stream = await sdk.files.read(str(path), format="stream", **options)
        return b"".join([chunk async for chunk in stream])

    return bytes(sdk.do(collect()))


# -- contents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"gzip": True}, {"use_octet_stream": True}])
@pytest.mark.parametrize("content", ["", "Hello, world.", "é\N{SNOWMAN}\n", "x" * 300_000])
def test_what_is_written_is_read(sdk: Sdk, folder: Path, content: str, options: dict[str, bool]) -> None:
    info = write(sdk, folder / "file", content, **options)
    assert (info.name, info.path, info.type) == ("file", str(folder / "file"), FileType.FILE)
    assert read(sdk, folder / "file") == content
    assert read(sdk, folder / "file", gzip=True) == content
    assert bytes(read(sdk, folder / "file", format="bytes", gzip=True)) == content.encode()
    assert streamed(sdk, folder / "file") == content.encode()
    assert streamed(sdk, folder / "file", gzip=True) == content.encode()


@pytest.mark.parametrize("options", [{}, {"gzip": True}, {"use_octet_stream": False}])
def test_files_and_iterables_are_uploaded(sdk: Sdk, folder: Path, options: dict[str, bool]) -> None:
    data = os.urandom(300_000)
    write(sdk, folder / "binary", io.BytesIO(data), **options)
    assert (folder / "binary").read_bytes() == data
    write(sdk, folder / "text", io.StringIO("text é"), **options)
    assert (folder / "text").read_text() == "text é"


def test_many_files_at_once(sdk: Sdk, folder: Path) -> None:
    assert sdk.do(sdk.files.write_files([])) == []
    entries = [
        WriteEntry(path=f"{folder}/many/{number}.txt", data=data)
        for number, data in enumerate(
            ["text", b"bytes", io.BytesIO(b"io"), io.StringIO("string"), "x" * 100_000]
        )
    ]
    infos = sdk.do(sdk.files.write_files(entries))
    assert [info.path for info in infos] == [entry["path"] for entry in entries]
    assert [(folder / "many" / f"{number}.txt").stat().st_size for number in range(5)] == [
        4,
        5,
        2,
        6,
        100_000,
    ]
    infos = sdk.do(
        sdk.files.write_files([WriteEntry(path=f"{folder}/g{n}", data="x") for n in range(3)], gzip=True)
    )
    assert len(infos) == 3


def test_overwriting(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "file", "a longer text")
    write(sdk, folder / "file", "short")
    assert read(sdk, folder / "file") == "short"


def test_directories_are_made_on_the_way(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "a" / "b" / "file", "x")
    assert read(sdk, folder / "a" / "b" / "file") == "x"


def test_what_does_not_exist(sdk: Sdk, folder: Path) -> None:
    for call in (
        lambda: sdk.files.read(f"{folder}/none"),
        lambda: sdk.files.read(f"{folder}/none", format="stream"),
        lambda: sdk.files.get_info(f"{folder}/none"),
        lambda: sdk.files.list(f"{folder}/none"),
        lambda: sdk.files.rename(f"{folder}/none", f"{folder}/other"),
    ):
        with pytest.raises(NotFoundException):
            sdk.do(call())
    assert sdk.do(sdk.files.exists(f"{folder}/none")) is False
    sdk.do(sdk.files.remove(f"{folder}/none"))


def test_a_directory_is_no_file(sdk: Sdk, folder: Path) -> None:
    with pytest.raises(InvalidArgumentException):
        read(sdk, folder)


def test_a_reader_that_stops_half_way(sdk: Sdk, folder: Path) -> None:
    (folder / "file").write_bytes(bytes(5_000_000))
    if sdk.is_async:

        async def begin() -> None:
            stream = await sdk.files.read(f"{folder}/file", format="stream")
            async for _ in stream:
                break
            await stream.aclose()

        sdk.do(begin())
    else:
        with read(sdk, folder / "file", format="stream") as stream:
            next(stream)
    assert sdk.do(sdk.files.exists(f"{folder}/file")) is True


def test_kernel_files(sdk: Sdk) -> None:
    assert "processor" in read(sdk, "/proc/cpuinfo")


def test_an_unknown_user(sdk: Sdk, folder: Path) -> None:
    with pytest.raises(AuthenticationException):
        write(sdk, folder / "file", "x", user="nosuchuser")
    with pytest.raises(AuthenticationException):
        sdk.do(sdk.files.list(str(folder), user="nosuchuser"))


def test_a_full_disk(sdk: Sdk, folder: Path) -> None:
    (folder / "full").symlink_to("/dev/full")
    # Not a regular file: refused before it could be full. A real full disk is in test_files.
    with pytest.raises((InvalidArgumentException, NotEnoughSpaceException)):
        write(sdk, folder / "full", "x")


# -- entries ----------------------------------------------------------------------------------------------


def test_listing(sdk: Sdk, folder: Path) -> None:
    for name in ("sub1/deep1/deeper", "sub1/deep2", "sub2"):
        (folder / name).mkdir(parents=True)
    (folder / "sub1" / "file").touch()
    expected = {
        None: ["sub1", "sub2"],
        1: ["sub1", "sub2"],
        2: ["sub1", "sub1/deep1", "sub1/deep2", "sub1/file", "sub2"],
        3: ["sub1", "sub1/deep1", "sub1/deep1/deeper", "sub1/deep2", "sub1/file", "sub2"],
    }
    for depth, names in expected.items():
        found = sdk.do(sdk.files.list(str(folder), depth=depth))
        assert [entry.path for entry in found] == [f"{folder}/{name}" for name in names]
    with pytest.raises(InvalidArgumentException):
        sdk.do(sdk.files.list(str(folder), depth=0))
    with pytest.raises(InvalidArgumentException):
        sdk.do(sdk.files.list(f"{folder}/sub1/file"))


def test_details(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "file", "test")
    sdk.do(sdk.files.make_dir(f"{folder}/made"))
    file, made = sdk.do(sdk.files.list(str(folder)))
    assert (file.name, file.type, file.size, file.mode) == ("file", FileType.FILE, 4, 0o644)
    assert (file.permissions, file.owner, file.group) == ("-rw-r--r--", ME, file.group)
    assert abs(file.modified_time.timestamp() - time.time()) < 60
    assert (made.name, made.type, made.mode, made.permissions) == ("made", FileType.DIR, 0o755, "drwxr-xr-x")
    assert made.size > 0
    info = sdk.do(sdk.files.get_info(f"{folder}/file"))
    assert info == file
    assert info.symlink_target is None


def test_a_link(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "file", "test")
    sdk.do(sdk.commands.run("ln -s file link", cwd=str(folder)))
    info = sdk.do(sdk.files.get_info(f"{folder}/link"))
    assert (info.name, info.symlink_target) == ("link", str(folder / "file"))
    assert info.type == FileType.SYMLINK
    assert info.mode == 0o644


def test_making_directories(sdk: Sdk, folder: Path) -> None:
    assert sdk.do(sdk.files.make_dir(f"{folder}/a/b/c")) is True
    assert sdk.do(sdk.files.make_dir(f"{folder}/a/b/c")) is False
    assert sdk.do(sdk.files.exists(f"{folder}/a/b")) is True
    write(sdk, folder / "file", "x")
    with pytest.raises(InvalidArgumentException):
        sdk.do(sdk.files.make_dir(f"{folder}/file"))


def test_removing_and_renaming(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "file", "x")
    info = sdk.do(sdk.files.rename(f"{folder}/file", f"{folder}/new/name"))
    assert (info.name, info.path) == ("name", f"{folder}/new/name")
    assert sdk.do(sdk.files.exists(f"{folder}/file")) is False
    sdk.do(sdk.files.remove(f"{folder}/new"))
    assert sdk.do(sdk.files.exists(f"{folder}/new")) is False


# -- metadata ---------------------------------------------------------------------------------------------


@pytest.fixture
def attributes(folder: Path) -> None:
    try:
        os.setxattr(folder, "user.e2b.probe", b"x")
        os.removexattr(folder, "user.e2b.probe")
    except OSError:
        pytest.skip("this file system has no user attributes")


@pytest.mark.usefixtures("attributes")
@pytest.mark.parametrize("octets", [False, True])
def test_metadata(sdk: Sdk, folder: Path, octets: bool) -> None:
    wanted = {"author": "me", "Purpose": "a test"}
    shown = {"author": "me", "purpose": "a test"}
    info = write(sdk, folder / "file", "x", metadata=wanted, use_octet_stream=octets)
    assert info.metadata == shown
    assert sdk.do(sdk.files.get_info(f"{folder}/file")).metadata == shown
    assert sdk.do(sdk.files.list(str(folder)))[0].metadata == shown
    assert sdk.do(sdk.files.rename(f"{folder}/file", f"{folder}/moved")).metadata == shown
    write(sdk, folder / "moved", "x", metadata={"other": "1"}, use_octet_stream=octets)
    assert sdk.do(sdk.files.get_info(f"{folder}/moved")).metadata == {"other": "1"}
    info = write(sdk, folder / "moved", "x", use_octet_stream=octets)
    assert info.metadata is None
    assert sdk.do(sdk.files.get_info(f"{folder}/moved")).metadata is None
    os.setxattr(folder / "moved", "user.e2b.inside", b"guest")
    assert sdk.do(sdk.files.get_info(f"{folder}/moved")).metadata == {"inside": "guest"}


@pytest.mark.usefixtures("attributes")
def test_metadata_of_many_files(sdk: Sdk, folder: Path) -> None:
    entries = [WriteEntry(path=f"{folder}/{name}", data=name) for name in "abc"]
    infos = sdk.do(sdk.files.write_files(entries, metadata={"k": "v"}))
    assert [info.metadata for info in infos] == [{"k": "v"}] * 3
    assert [entry.metadata for entry in sdk.do(sdk.files.list(str(folder)))] == [{"k": "v"}] * 3


# -- watching ---------------------------------------------------------------------------------------------


class Watch:
    """A watched directory by either half: ``events`` asks or waits, as that half does."""

    def __init__(self, sdk: Sdk, path: Path, **options: Any) -> None:
        self.sdk = sdk
        self.seen: list[Any] = []
        if sdk.is_async:
            self.handle = sdk.do(sdk.files.watch_dir(str(path), on_event=self.seen.append, **options))
        else:
            self.handle = sdk.do(sdk.files.watch_dir(str(path), **options))

    def events(self, until: Callable[[list[Any]], bool]) -> list[Any]:
        """Everything seen so far, once it satisfies a condition."""

        def look() -> bool:
            if self.sdk.is_async:
                self.sdk.do(asyncio.sleep(0.01))
            else:
                self.seen += self.handle.get_new_events()
            return until(self.seen)

        eventually(look, "the events have come")
        return self.seen

    def stop(self) -> None:
        self.sdk.do(self.handle.stop())


def told(events: list[Any]) -> list[tuple[str, str]]:
    return [(event.type.value, event.name) for event in events]


@pytest.mark.parametrize("network", [False, True])
def test_watching(sdk: Sdk, folder: Path, network: bool) -> None:
    watch = Watch(sdk, folder, allow_network_mounts=network)
    write(sdk, folder / "file", "x")
    assert told(watch.events(lambda seen: len(seen) >= 3)) == [
        ("create", "file"),
        ("chmod", "file"),
        ("write", "file"),
    ]
    watch.stop()


def test_watching_with_entries(sdk: Sdk, folder: Path) -> None:
    watch = Watch(sdk, folder, include_entry=True)
    write(sdk, folder / "file", "four")
    events = watch.events(lambda seen: any(event.type.value == "write" for event in seen))
    entry = events[-1].entry
    assert (entry.name, entry.path, entry.size, entry.type) == ("file", f"{folder}/file", 4, FileType.FILE)
    sdk.do(sdk.files.remove(f"{folder}/file"))
    events = watch.events(lambda seen: seen[-1].type.value == "remove")
    assert events[-1].entry is None
    watch.stop()


def test_watching_what_is_below(sdk: Sdk, folder: Path) -> None:
    (folder / "sub").mkdir()
    watch = Watch(sdk, folder, recursive=True)
    write(sdk, folder / "sub" / "file", "x")
    assert told(watch.events(lambda seen: len(seen) >= 3)) == [
        ("create", "sub/file"),
        ("chmod", "sub/file"),
        ("write", "sub/file"),
    ]
    watch.stop()


def test_watching_what_is_made_later(sdk: Sdk, folder: Path) -> None:
    (folder / "sub").mkdir()
    watch = Watch(sdk, folder, recursive=True)
    sdk.do(sdk.files.make_dir(f"{folder}/sub/made"))
    write(sdk, folder / "sub" / "made" / "file", "x")
    events = told(watch.events(lambda seen: ("write", "sub/made/file") in told(seen)))
    assert ("create", "sub/made") in events
    watch.stop()


def test_what_cannot_be_watched(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "file", "x")
    with pytest.raises(NotFoundException):
        Watch(sdk, folder / "none")
    with pytest.raises(SandboxException):
        Watch(sdk, folder / "file")


# -- signed URLs ------------------------------------------------------------------------------------------


def fetch(url: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """A request without any header of the SDK's."""
    request = urllib.request.Request(url, data, headers or {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("options", [{}, {"use_signature_expiration": 600}, {"user": ME}])
def test_signed_urls(sdk: Sdk, folder: Path, options: dict[str, Any]) -> None:
    write(sdk, folder / "file", "signed")
    assert fetch(sdk.sandbox.download_url(f"{folder}/file", **options)) == (200, b"signed")
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nnew\r\n--b--\r\n'
    url = sdk.sandbox.upload_url(f"{folder}/file", **options)
    assert fetch(url, form, {"Content-Type": "multipart/form-data; boundary=b"})[0] == 200
    assert read(sdk, folder / "file") == "new"
    # A signature to write does not allow to read, and the other way round.
    assert fetch(url)[0] == 401
    assert fetch(sdk.sandbox.download_url(f"{folder}/file", **options), form)[0] == 401


def test_an_expired_signature(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "file", "signed")
    url = sdk.sandbox.download_url(f"{folder}/file", use_signature_expiration=-120)
    assert fetch(url) == (401, b'{"code":401,"message":"signature is already expired"}')


def test_a_url_without_a_signature_or_with_a_changed_one(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "file", "signed")
    url = sdk.sandbox.download_url(f"{folder}/file")
    assert fetch(url.partition("&signature")[0])[0] == 401
    assert fetch(url.replace("file&", "other&"))[0] == 401
    assert fetch(url + "x")[0] == 401


def test_a_compressed_upload_is_plain_on_disk(sdk: Sdk, folder: Path) -> None:
    write(sdk, folder / "file", "plain" * 1000, gzip=True)
    data = (folder / "file").read_bytes()
    assert data == b"plain" * 1000
    assert data[:2] != gzip.compress(b"")[:2]
