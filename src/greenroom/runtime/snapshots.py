"""Snapshots on disk: directories `<node home>/snapshots/<name>` that are whole or absent, and stay until deleted.

A snapshot is made as `.making-<name>`, whose owner record is written before anything else of it; every file, then
the directory is flushed, and one rename publishes it. One that lives no longer than a fork takes is not flushed.
What a dead node left half made or half removed begins with a dot and is swept. `capture` fills it, `loading` makes
VMs of it.

    manifest.json   what it was made of and what it consists of, under a digest of its own
    controls        the secrets one of which its guest knows its node by
    state           of the devices                  } absent when only
    ram.index       which pages (see `pages.encode`) } the file system
    ram             those pages, one after the other } was captured
    layer-<n>       the disk above the golden's, the lowest first; hard links to what QEMU had open

RAM is kept as the difference to the golden alone, so that no snapshot needs another one to be read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

import msgspec

from greenroom.errors import BadRequest, RuntimeFailure, SnapshotDamaged, UnknownSnapshot
from greenroom.images.base import Image
from greenroom.runtime import disks, memory
from greenroom.runtime.command import Machine
from greenroom.runtime.engine import Golden, Snapshot
from greenroom.runtime.writing import Chunk, flush, written

FORMAT = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_CHUNK = 1 << 20
_MANIFEST_MAX = 16 << 20
"""Bytes of a manifest that are read."""
_SEEN_MAX = 10_000
"""Files whose digests are remembered."""


class Part(msgspec.Struct, frozen=True):
    """A file of a snapshot: bytes and SHA-256."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot is. All that a restore needs beside its own files is named here."""

    format: int = FORMAT
    snapshot: Snapshot
    build: str
    """Drawn for each snapshot, since names come again."""
    golden: Golden
    image: Image
    machine: Machine
    command: str
    """`command.digest` of the machine when the state was saved."""
    qemu: str
    """Version and package of the QEMU that saved it."""
    layers: tuple[str, ...]
    parts: dict[str, Part]


class _Sealed(msgspec.Struct, frozen=True):
    """How a manifest lies on disk."""

    sha256: str
    manifest: msgspec.Raw


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The owner record of a snapshot that is being made."""

    home: str
    tag: str
    name: str


class Draft:
    """A snapshot that is being made; `publish` it or `drop` it. Everything here blocks and raises OSError."""

    def __init__(self, store: Store, directory: Path, name: str, *, durable: bool) -> None:
        self._store = store
        self._directory = directory
        self._durable = durable
        self.name = name
        self.parts: dict[str, Part] = {}

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write a file; it is on the disk when this returns."""
        fd = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            self.parts[name] = Part(*written(fd, chunks, durable=self._durable))
            self._store.note(fd, self.parts[name])
        finally:
            os.close(fd)

    def take(self, name: str, source: str, *, link: bool) -> None:
        """Have the file behind `source`, a path below `/proc/<pid>/fd`, by a hard link where that can be, else copied.

        Nobody may be writing it any more.
        """
        target = self._directory / name
        if link and disks.link(source, target):
            target.chmod(0o400)
        else:
            self._copy(source, target)
        with open(target, "rb", buffering=0) as file:
            if self._durable:
                os.fsync(file.fileno())
            self.parts[name] = self._store.digest(file.fileno())

    def _copy(self, source: str, target: Path) -> None:
        origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
            try:
                os.ftruncate(fd, os.fstat(origin).st_size)
                memory.copy_data(origin, fd)
            finally:
                os.close(fd)
        finally:
            os.close(origin)

    def publish(self, manifest: Manifest) -> None:
        """Make it a snapshot, for good when this returns, unless it is one that need not outlive the host."""
        raw = msgspec.json.encode(manifest)
        sealed = _Sealed(hashlib.sha256(raw).hexdigest(), msgspec.Raw(raw))
        (self._directory / "manifest.json").write_bytes(msgspec.json.encode(sealed))
        if self._durable:
            flush(self._directory / "manifest.json")
            flush(self._directory)
        self._directory.rename(self._store.directory / self.name)
        try:
            if self._durable:
                flush(self._store.directory)
        except OSError:
            self._store.remove(self.name)
            raise
        self._store.making.discard(self.name)

    def drop(self) -> None:
        """Remove what there is of it, after an error."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._store.making.discard(self.name)


class Store:
    """The snapshots of one node. Blocks; may be used from several threads."""

    def __init__(self, home: Path, tag: str) -> None:
        self.directory = home / "snapshots"
        self._home, self._tag = home, tag
        self.making: set[str] = set()
        """Names that this process is making now."""
        self._seen: dict[tuple[int, int, int, int], Part] = {}
        """Digests of files that this process has read to their end: a large disk is not read for each restore."""

    def begin(self, name: str, *, durable: bool = True) -> Draft:
        """A new draft; its owner record is on disk. Raises BadRequest for a name that cannot be or is taken.

        One that is not `durable` outlives this process but not a power cut.
        """
        if not _NAME.fullmatch(name):
            raise BadRequest("a snapshot's name has 1 to 63 of a-z, 0-9, '.', '_' and '-', no sign first")
        if name in self.making or (self.directory / name).exists():
            raise BadRequest(f"there is a snapshot named {name} already; delete it or take another name")
        self.making.add(name)
        directory = self.directory / f".making-{name}"
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
            record = Record(home=str(self._home), tag=self._tag, name=name)
            (directory / "owner.json").write_bytes(msgspec.json.encode(record))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            self.making.discard(name)
            raise
        return Draft(self, directory, name, durable=durable)

    def manifest(self, name: str) -> Manifest:
        """Raises UnknownSnapshot, SnapshotDamaged."""
        if not _NAME.fullmatch(name):
            raise UnknownSnapshot("there is no such snapshot on this node")
        try:
            with _opened(self.directory / name / "manifest.json") as file:
                sealed = msgspec.json.decode(file.read(_MANIFEST_MAX), type=_Sealed)
        except FileNotFoundError:
            if (self.directory / name).is_dir():
                raise _damaged(name, "it has no manifest") from None
            raise UnknownSnapshot(f"there is no snapshot {name} on this node") from None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(name, "its manifest cannot be read") from error
        if hashlib.sha256(sealed.manifest).hexdigest() != sealed.sha256:
            raise _damaged(name, "its manifest is not what was written")
        try:
            manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
        except msgspec.DecodeError as error:
            raise _damaged(name, "its manifest is of a format that this version does not know") from error
        if manifest.format != FORMAT or manifest.snapshot.name != name:
            raise _damaged(name, "its manifest is not its own")
        return manifest

    def read(self, manifest: Manifest, part: str) -> bytes:
        """The content of a file that is what was written. Raises SnapshotDamaged."""
        with FileIO(self.open(manifest, part), "rb") as file:
            try:
                return file.readall()
            except OSError as error:
                raise _damaged(manifest.snapshot.name, f"its file {part} cannot be read") from error

    def open(self, manifest: Manifest, part: str) -> int:
        """A descriptor of a file that is what was written; the caller closes it. Raises SnapshotDamaged."""
        name = manifest.snapshot.name
        try:
            with _opened(self.directory / name / part, manifest.parts[part].size) as file:
                fd = os.dup(file.fileno())
            try:
                if self.digest(fd) != manifest.parts[part]:
                    raise _damaged(name, f"its file {part} is not what was written")
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise _damaged(name, f"its file {part} cannot be read") from error
        return fd

    def open_layers(self, manifest: Manifest) -> list[int]:
        """Descriptors of the disk's layers, checked; the caller closes them. Raises SnapshotDamaged."""
        opened: list[int] = []
        try:
            opened.extend(self.open(manifest, layer) for layer in manifest.layers)
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        return opened

    def note(self, fd: int, part: Part) -> None:
        """Remember the digest of a file that was written to its end just now."""
        if len(self._seen) >= _SEEN_MAX:
            self._seen.clear()
        self._seen[_state_of(fd)] = part

    def digest(self, fd: int) -> Part:
        """Size and digest of a file that nobody writes any more; read once while the file is as it was."""
        key = _state_of(fd)
        if key not in self._seen:
            total, position = hashlib.sha256(), 0
            while chunk := os.pread(fd, _CHUNK, position):
                total.update(chunk)
                position += len(chunk)
            self.note(fd, Part(position, total.hexdigest()))
        return self._seen[key]

    def all(self) -> list[Manifest]:
        """Every snapshot that has a readable manifest, by name."""
        found = []
        for name in self._names():
            try:
                found.append(self.manifest(name))
            except (SnapshotDamaged, UnknownSnapshot):
                continue
        return found

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.directory.iterdir() if _NAME.fullmatch(entry.name))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Delete a snapshot, damaged or not. Raises UnknownSnapshot."""
        aside = self.directory / f".removing-{name}-{secrets.token_hex(4)}"
        if not _NAME.fullmatch(name):
            raise UnknownSnapshot("there is no such snapshot on this node")
        try:
            (self.directory / name).rename(aside)
        except FileNotFoundError:
            raise UnknownSnapshot(f"there is no snapshot {name} on this node") from None
        shutil.rmtree(aside, ignore_errors=True)

    def left(self) -> list[Path]:
        """What is half made or half removed and nobody of this process is at it."""
        try:
            entries = sorted(self.directory.iterdir())
        except FileNotFoundError:
            return []
        mine = {f".making-{name}" for name in self.making}
        return [entry for entry in entries if entry.name.startswith(".") and entry.name not in mine]

    def sweep(self) -> int:
        """Remove what `left` names; returns how many."""
        entries = self.left()
        for entry in entries:
            shutil.rmtree(entry, ignore_errors=True)
        return len(entries)


def _state_of(fd: int) -> tuple[int, int, int, int]:
    """What is another one as soon as the file is, or is another file's."""
    file = os.fstat(fd)
    return (file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns)


def _opened(path: Path, size: int | None = None) -> FileIO:
    """A regular file, of `size` bytes where that is given; whatever else lies there is an OSError, never a wait."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or size not in (None, found.st_size):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not the file that was written")
    return FileIO(fd, "rb")


def no_room(error: OSError) -> RuntimeFailure:
    """What to tell of a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RuntimeFailure(
            "the node's disk has no room for the snapshot; delete snapshots or end sandboxes, then try again",
            retry_after=30,
        )
    return RuntimeFailure(f"the snapshot could not be written: {error.strerror or error}")


def _damaged(name: str, what: str) -> SnapshotDamaged:
    return SnapshotDamaged(f"the snapshot {name} cannot be used: {what}; delete it")
