"""Snapshots on disk: whole or absent, whatever happens while one is made, and refused when they are not as written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.errors import BadRequest, RuntimeFailure, SnapshotDamaged, UnknownSnapshot
from greenroom.images.base import Image
from greenroom.runtime.command import Machine
from greenroom.runtime.engine import Golden, Snapshot
from greenroom.runtime.snapshots import Draft, Manifest, Store, no_room
from greenroom.wire.messages import Size

SIZE = Size("s", 1, 64, 1024)
GOLDEN = Golden(digest="golden-x", template="base", size=SIZE, build="b")
FILES = {"controls": b"[]", "state": b"s" * 5000, "ram.index": b"", "ram": b"r" * 70_000}


def manifest_of(draft: Draft) -> Manifest:
    return Manifest(
        snapshot=Snapshot(
            name=draft.name, kind="full", template="base", size=SIZE, golden="golden-x", created_at=1.0
        ),
        build="build",
        golden=GOLDEN,
        image=Image(
            digest="i", disk="a/b", disk_mib=1024, kernel="c/d", initramfs="c/e", kernel_version="6.1"
        ),
        machine=Machine(binary="/usr/bin/qemu", accelerator="tcg", cpu_model="Nehalem", size=SIZE),
        command="command",
        qemu="7.2.22 Debian",
        layers=("layer-1",),
        parts=draft.parts,
    )


def fill(store: Store, layer: Path, name: str = "one", *, durable: bool = True) -> Manifest:
    """Make a whole snapshot as `capture` does."""
    draft = store.begin(name, durable=durable)
    try:
        for part, content in FILES.items():
            draft.write(part, [content[:1000], memoryview(content)[1000:]])
        fd = os.open(layer, os.O_RDONLY)
        try:
            draft.take("layer-1", f"/proc/self/fd/{fd}", link=True)
        finally:
            os.close(fd)
        manifest = manifest_of(draft)
        draft.publish(manifest)
    except BaseException:
        draft.drop()
        raise
    return manifest


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "overlay.qcow2"
    path.write_bytes(b"q" * 10_000)
    return path


def whole(store: Store, name: str = "one") -> bool:
    """All of the snapshot is there and as it was written."""
    manifest = store.manifest(name)
    for part, content in FILES.items():
        assert store.read(manifest, part) == content
        fd = store.open(manifest, part)
        assert os.pread(fd, len(content) + 1, 0) == content
        os.close(fd)
    for fd in store.open_layers(manifest):
        os.close(fd)
    return True


def test_what_was_written_is_read(tmp_path: Path, layer: Path) -> None:
    store = Store(tmp_path / "home", "tag")
    (tmp_path / "home").mkdir()
    manifest = fill(store, layer)
    assert whole(Store(tmp_path / "home", "tag"))
    assert store.all() == [manifest]
    assert layer.stat().st_nlink == 2
    assert (store.directory.stat().st_mode & 0o777, store.making) == (0o700, set())
    with pytest.raises(BadRequest, match="already"):
        store.begin("one")
    store.remove("one")
    assert list(store.directory.iterdir()) == []
    assert layer.stat().st_nlink == 1
    with pytest.raises(UnknownSnapshot):
        store.manifest("one")
    with pytest.raises(UnknownSnapshot):
        store.remove("one")


@pytest.mark.parametrize("name", ["", ".", "..", "../one", "a/b", ".making-one", "A", "-", "x" * 64, "a\n"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path, "tag")
    with pytest.raises(BadRequest):
        store.begin(name)
    with pytest.raises(UnknownSnapshot):
        store.manifest(name)
    with pytest.raises(UnknownSnapshot):
        store.remove(name)


def test_the_owner_record_comes_before_all_else(tmp_path: Path) -> None:
    store = Store(tmp_path, "tag")
    store.begin("one")
    (directory,) = store.directory.iterdir()
    assert [entry.name for entry in directory.iterdir()] == ["owner.json"]
    assert b'"tag":"tag"' in (directory / "owner.json").read_bytes()
    assert store.left() == []
    assert store.sweep() == 0
    # To the next run it is somebody's who is dead.
    assert Store(tmp_path, "tag").left() == [directory]
    assert Store(tmp_path, "tag").sweep() == 1
    assert not directory.exists()


@pytest.mark.parametrize("part", [*FILES, "layer-1", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "short", "long", "gone", "pipe", "link", "directory"])
@pytest.mark.parametrize("run", ["the same", "another"])
def test_any_damage_is_noticed(tmp_path: Path, layer: Path, part: str, how: str, run: str) -> None:
    store = Store(tmp_path, "tag")
    fill(store, layer)
    path = tmp_path / "snapshots" / "one" / part
    content = path.read_bytes()
    if how in ("flipped", "short") and not content:
        pytest.skip("it is empty")
    path.chmod(0o600)
    middle = len(content) // 2
    match how:
        case "flipped":
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :])
        case "short":
            path.write_bytes(content[:-1])
        case "long":
            path.write_bytes(content + b"x")
        case "gone":
            path.unlink()
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "link":
            path.unlink()
            path.symlink_to("/dev/zero")
        case "directory":
            path.unlink()
            path.mkdir()
    with pytest.raises(SnapshotDamaged, match=r"one cannot be used.*delete it"):
        whole(store if run == "the same" else Store(tmp_path, "tag"))


def test_a_manifest_under_another_name_is_refused(tmp_path: Path, layer: Path) -> None:
    store = Store(tmp_path, "tag")
    fill(store, layer)
    (store.directory / "one").rename(store.directory / "two")
    with pytest.raises(SnapshotDamaged, match="not its own"):
        store.manifest("two")
    assert store.all() == []
    store.remove("two")


def test_a_layer_without_a_name_or_that_may_be_written_is_copied(tmp_path: Path, layer: Path) -> None:
    store = Store(tmp_path, "tag")
    draft = store.begin("one")
    fd = os.open(layer, os.O_RDONLY)
    try:
        draft.take("layer-1", f"/proc/self/fd/{fd}", link=False)
        assert layer.stat().st_nlink == 1
        layer.unlink()
        draft.take("layer-2", f"/proc/self/fd/{fd}", link=True)
    finally:
        os.close(fd)
    directory = store.directory / ".making-one"
    assert {(directory / name).read_bytes() for name in ("layer-1", "layer-2")} == {b"q" * 10_000}
    assert draft.parts["layer-1"] == draft.parts["layer-2"]


def test_what_is_to_be_durable_is_flushed_before_it_has_its_name(
    tmp_path: Path, layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted(fd: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def named(path: Path, target: Path) -> Path:
        flushed.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", named)
    store = Store(tmp_path, "tag")
    fill(store, layer)
    assert flushed == [*FILES, "layer-1", "manifest.json", ".making-one", "renamed", "snapshots"]
    flushed.clear()
    fill(store, layer, "two", durable=False)
    assert flushed == ["renamed"]
    assert whole(store, "two")


def test_a_layer_is_read_once_while_it_stays_as_it_is(tmp_path: Path, layer: Path) -> None:
    store = Store(tmp_path, "tag")
    manifest = fill(store, layer)
    seen = dict(store._seen)
    for fd in store.open_layers(manifest):
        os.close(fd)
    assert store._seen == seen


KILLED = """
import os, pathlib, signal, sys
from greenroom.runtime.snapshots import Store
from tests.runtime import test_snapshots as tests

home, layer, at = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
count = 0

def counted(plain):
    def call(*arguments, **options):
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **options)
    return call

for name in ("open", "writev", "fsync", "mkdir", "rename", "link", "chmod", "unlink"):
    setattr(os, name, counted(getattr(os, name)))
tests.fill(Store(home, "tag"), layer)
print(count)
"""


@pytest.mark.fault
@pytest.mark.slow
def test_a_kill_between_any_two_steps_leaves_all_of_a_snapshot_or_nothing(
    tmp_path: Path, layer: Path
) -> None:
    outcomes = []
    for at in range(1, 200):
        home = tmp_path / str(at)
        home.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(home), str(layer), str(at)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        heir = Store(home, "tag")
        heir.sweep()
        assert heir.left() == []
        if heir.all():
            assert whole(heir)
            assert len(list(heir.directory.iterdir())) == 1
        else:
            assert not heir.directory.exists() or not list(heir.directory.iterdir())
        outcomes.append(bool(heir.all()))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        pytest.fail("it never came to its end")
    # First never, then always: one step publishes it.
    assert outcomes == sorted(outcomes)
    assert outcomes[-1]
    assert outcomes.count(False) > 15


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k,nr_inodes=64", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.fault
def test_a_full_disk_leaves_nothing_wherever_it_becomes_full(small_disk: Path, layer: Path) -> None:
    """With each further page taken up by something else, another step of it finds the disk full."""
    filler, succeeded = small_disk / "filler", 0
    failed: list[OSError] = []
    for pages in range(33):
        filler.write_bytes(b"f" * 4096 * pages)
        store = Store(small_disk / "home", "tag")
        try:
            (small_disk / "home").mkdir(exist_ok=True)
            fill(store, layer)
        except OSError as error:
            failed.append(error)
            assert not store.directory.exists() or list(store.directory.iterdir()) == []
            assert store.making == set()
        else:
            succeeded += 1
            assert whole(store)
            store.remove("one")
        filler.unlink()
    assert succeeded > 3
    assert len(failed) > 3
    assert {error.errno for error in failed} == {errno.ENOSPC}
    assert all("no room" in no_room(error).message for error in failed)


def test_an_error_of_the_disk_is_told_in_words() -> None:
    error = no_room(OSError(errno.EIO, "Input/output error"))
    assert isinstance(error, RuntimeFailure)
    assert error.message == "the snapshot could not be written: Input/output error"
