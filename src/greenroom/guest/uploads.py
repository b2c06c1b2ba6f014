"""``POST /files``: bytes from the network into files, never more than a few blocks in memory.

The body is either the file itself (``application/octet-stream``) or a form whose parts are files, either of
them gzipped or not. Blocks of 256 KiB go to the file pool; while one is written the next is received, and
the socket waits when both are full. A small file is opened, given to its user, written and closed in one
job, with a single write, so that somebody watching the directory sees exactly create, attributes, modify.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from .connect import UNARY_TYPE
from .entries import check_metadata, replace_metadata
from .errors import AgentError, from_os_error, printable
from .exchange import Request, Response
from .messages import encode
from .multipart import MultipartParser, PartBegin, PartData, boundary_of
from .paths import FILE_MODE, give, make_directories, resolve
from .settings import Settings
from .signing import authorize_file
from .users import User, UserDirectory
from .workers import Workers

BLOCK = 256 * 1024
MAX_FILES = 10_000
"""Files in one form."""

METADATA_HEADER = "x-metadata-"


class UploadService:
    """Receives files for the users of the guest."""

    def __init__(self, settings: Settings, users: UserDirectory, workers: Workers) -> None:
        self._settings = settings
        self._users = users
        self._workers = workers

    async def post(self, request: Request, response: Response) -> None:
        """Store what the body holds. Raises :class:`AgentError`; 507 when the disk is full."""
        arguments = request.head.arguments()
        authorize_file(request.headers, arguments, "write", self._settings.access_token)
        user = self._users.find(arguments.get("username") or self._settings.default_user)
        metadata = _metadata(request.headers)
        path = arguments.get("path") or None
        content_type = request.headers.get("content-type", "")
        media_type = content_type.partition(";")[0].strip().lower()
        pieces = _pieces(request)
        if media_type == "multipart/form-data":
            written = await self._form(pieces, boundary_of(content_type), path, user, metadata)
        elif media_type in ("application/octet-stream", ""):
            if path is None:
                raise AgentError("invalid_argument", "the query parameter 'path' is missing")
            written = [await self._single(pieces, path, user, metadata)]
        else:
            raise AgentError(
                "invalid_argument", "the content type must be multipart/form-data or application/octet-stream"
            )
        response.send(200, encode([_answer(name, metadata) for name in written]), UNARY_TYPE)

    async def _single(
        self, pieces: AsyncIterator[bytes], path: str, user: User, metadata: dict[str, str]
    ) -> str:
        upload = Upload(self._workers, self._target(path, user), user, metadata)
        try:
            async for piece in pieces:
                await upload.write(piece)
            await upload.finish()
        finally:
            await upload.abandon()
        return upload.path

    async def _form(
        self,
        pieces: AsyncIterator[bytes],
        boundary: bytes,
        path: str | None,
        user: User,
        metadata: dict[str, str],
    ) -> list[str]:
        parser = MultipartParser(boundary)
        written: list[str] = []
        upload: Upload | None = None
        try:
            async for piece in pieces:
                for event in parser.feed(piece):
                    if isinstance(event, PartData):
                        if upload is not None:
                            await upload.write(event.data)
                    elif isinstance(event, PartBegin):
                        # Form fields that are no files are read over.
                        if event.name == "file":
                            target = self._part_target(event, path, len(written), user)
                            upload = Upload(self._workers, target, user, metadata)
                    elif upload is not None:
                        await upload.finish()
                        written.append(upload.path)
                        upload = None
            parser.finish()
        finally:
            if upload is not None:
                await upload.abandon()
        if not written:
            raise AgentError("invalid_argument", "the form has no part named 'file'")
        return written

    def _part_target(self, part: PartBegin, path: str | None, index: int, user: User) -> str:
        if index >= MAX_FILES:
            raise AgentError("invalid_argument", f"a form may have at most {MAX_FILES} files")
        if path is not None:
            if index:
                raise AgentError("invalid_argument", "'path' names one file, but the form has several")
            return self._target(path, user)
        if not part.filename:
            raise AgentError("invalid_argument", "a file needs a file name, or 'path' in the query")
        return self._target(part.filename, user)

    def _target(self, path: str, user: User) -> str:
        if path.endswith("/"):
            raise AgentError("invalid_argument", f"{printable(path)!r} names a directory")
        return resolve(path, user)


class Upload:
    """One file on its way to the disk: collects a block, then has it written while the next arrives."""

    def __init__(self, workers: Workers, path: str, user: User, metadata: dict[str, str]) -> None:
        self.path = path
        self._workers = workers
        self._file = TargetFile(path, user, metadata)
        self._pieces: list[bytes] = []
        self._size = 0
        self._finished = False

    async def write(self, data: bytes) -> None:
        """Take some bytes. Raises :class:`AgentError` when the disk refuses a block."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= BLOCK:
            await self._flush(last=False)

    async def finish(self) -> None:
        """Write the rest and close."""
        await self._flush(last=True)
        self._finished = True

    async def abandon(self) -> None:
        """After a failure: close, and remove the file if it did not exist before. Idempotent."""
        if not self._finished:
            self._finished = True
            await self._workers.files(self._file.abandon)

    async def _flush(self, *, last: bool) -> None:
        pieces, self._pieces, self._size = self._pieces, [], 0
        block = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        try:
            await self._workers.files(self._file.put, block, last)
        except OSError as error:
            raise from_os_error(error, self.path) from None


class TargetFile:
    """The blocking half of :class:`Upload`; one job at a time."""

    def __init__(self, path: str, user: User, metadata: dict[str, str]) -> None:
        self._path = path
        self._user = user
        self._metadata = metadata
        self._descriptor: int | None = None
        self._created = False

    def put(self, block: bytes, last: bool) -> None:
        """Append a block, opening the file first and closing it after the last. Raises OSError."""
        if self._descriptor is None:
            self._descriptor = self._open()
        view = memoryview(block)
        while view:
            view = view[os.write(self._descriptor, view) :]
        if last:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def abandon(self) -> None:
        """Close, and take back a file that was created here."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._created:
            with suppress(OSError):
                os.unlink(self._path)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        try:
            descriptor = self._create(flags)
        except FileNotFoundError:
            make_directories(os.path.dirname(self._path), self._user)
            descriptor = self._create(flags)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise AgentError("invalid_argument", f"{printable(self._path)!r} is not a regular file")
            give(descriptor, self._user)
            if not self._created:
                os.ftruncate(descriptor, 0)
            replace_metadata(descriptor, self._metadata, fresh=self._created)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _create(self, flags: int) -> int:
        try:
            descriptor = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, FILE_MODE)
        except FileExistsError:
            # Without O_CREAT: the kernel's protected_regular rule refuses it to root for other users'
            # files in /tmp, although they exist already.
            try:
                return os.open(self._path, flags)
            except FileNotFoundError:  # a dangling symbolic link: create what it points to
                return os.open(self._path, flags | os.O_CREAT, FILE_MODE)
        self._created = True
        return descriptor


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The decoded body, piece by piece."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding in ("", "identity"):
        while piece := await request.body.read():
            yield piece
        return
    if coding != "gzip":
        raise AgentError("invalid_argument", f"content encoding {coding!r} is not supported, send gzip")
    inflater = GzipReader()
    while piece := await request.body.read():
        while piece or inflater.pending:
            if plain := inflater.feed(piece):
                yield plain
            piece = b""
    inflater.finish()


class GzipReader:
    """Inflates gzip members in pieces of at most one block, whatever the compression ratio; pure."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(wbits=31)
        self._input = b""
        self._full = False
        self._used = False

    @property
    def pending(self) -> bool:
        """Whether more can be had without more input."""
        return self._full or bool(self._input)

    def feed(self, data: bytes) -> bytes:
        """Up to one block of plain data; call again with ``b""`` while :attr:`pending`."""
        data = self._input + data
        self._input, self._full = b"", False
        if self._inflater.eof:
            # Another member may follow; zero bytes are padding.
            data = data.lstrip(b"\0")
            if not data:
                return b""
            self._inflater = zlib.decompressobj(wbits=31)
        self._used = True
        try:
            plain = self._inflater.decompress(data, BLOCK)
        except zlib.error as error:
            raise AgentError("invalid_argument", f"the body is not valid gzip: {error}") from None
        self._input = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
        # A full piece may have left output inside the inflater although all input is consumed.
        self._full = len(plain) == BLOCK and not self._inflater.eof
        return plain

    def finish(self) -> None:
        """The input is over. Raises ``invalid_argument`` when it ended inside a member."""
        if self._used and not self._inflater.eof:
            raise AgentError("invalid_argument", "the gzip body ends too early")


def _metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """The metadata headers, keys in lower case as header names are."""
    found = {
        name[len(METADATA_HEADER) :]: value.encode("latin-1").decode("utf-8", "replace")
        for name, value in headers.items()
        if name.startswith(METADATA_HEADER)
    }
    if found:
        check_metadata(found)
    return found


def _answer(path: str, metadata: dict[str, str]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "path": printable(path),
        "name": printable(os.path.basename(path)),
        "type": "file",
    }
    if metadata:
        entry["metadata"] = metadata
    return entry
