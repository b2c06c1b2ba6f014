"""``GET`` and ``HEAD /files``: files of the guest as HTTP responses.

Small files are read in one job and answered in one write. Larger ones go from the page cache to the socket
by ``sendfile``, which matters where every copied byte is emulated. Files whose size means nothing
(``/proc``) are read to their end. Compression is only done for a client that asks for gzip and nothing
else: clients that merely list what they could decode get the plain bytes, as the guest's processor is
scarcer than the local network.
"""

from __future__ import annotations

import mimetypes
import os
import re
import stat
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import AgentError, ClientGone, from_os_error, printable
from .exchange import Request, Response
from .paths import resolve
from .settings import Settings
from .signing import authorize_file
from .users import UserDirectory
from .workers import Workers

SMALL = 64 * 1024
_BLOCK = 256 * 1024
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)

# A table of its own: the module's default one would be read from disk on first use.
_TYPES = mimetypes.MimeTypes(filenames=())


@dataclass(slots=True)
class OpenFile:
    """A file opened for reading with its first block; ``whole`` when there is no more than that."""

    descriptor: int
    info: os.stat_result
    first: bytes
    whole: bool


class DownloadService:
    """Sends files."""

    def __init__(self, settings: Settings, users: UserDirectory, workers: Workers) -> None:
        self._settings = settings
        self._users = users
        self._workers = workers

    async def get(self, request: Request, response: Response) -> None:
        """Answer with the file named by the query. Raises :class:`AgentError`."""
        arguments = request.head.arguments()
        authorize_file(request.headers, arguments, "read", self._settings.access_token)
        user = self._users.find(arguments.get("username") or self._settings.default_user)
        if not arguments.get("path"):
            raise AgentError("invalid_argument", "the query parameter 'path' is missing")
        path = resolve(arguments["path"], user)
        compress = wants_gzip(request.headers.get("accept-encoding", ""))
        try:
            file = await self._workers.files(_open, path)
        except OSError as error:
            raise _open_error(error, path) from None
        try:
            await self._send(request, response, file, path, compress)
        finally:
            os.close(file.descriptor)

    async def _send(
        self, request: Request, response: Response, file: OpenFile, path: str, compress: bool
    ) -> None:
        modified = http_date(file.info.st_mtime)
        tag = f'"{file.info.st_mtime_ns:x}-{file.info.st_size:x}"'
        headers = [
            ("Content-Type", _TYPES.guess_type(path)[0] or "application/octet-stream"),
            ("Content-Disposition", "inline"),
            ("Last-Modified", modified),
            ("ETag", tag),
            ("Vary", "Accept-Encoding"),
        ]
        if _unchanged(request.headers, tag, modified):
            response.send(304, headers=headers[2:])
            return
        # A size of zero may belong to a file made up by the kernel, whose content nobody has counted.
        counted = file.info.st_size > 0 or file.whole
        size = len(file.first) if file.whole else file.info.st_size
        span = None
        if counted:
            headers.append(("Accept-Ranges", "bytes"))
            if request.headers.get("if-range", tag) in (tag, modified):
                span = parse_range(request.headers.get("range"), size)
        if span is not None:
            start, end = span
            headers.append(("Content-Range", f"bytes {start}-{end}/{size}"))
            await self._send_span(response, file, 206, headers, start, end + 1 - start)
        elif compress:
            await self._send_compressed(response, file, headers)
        elif counted:
            await self._send_span(response, file, 200, headers, 0, size)
        else:
            await self._send_to_end(response, file, headers)

    async def _send_span(
        self,
        response: Response,
        file: OpenFile,
        status: int,
        headers: list[tuple[str, str]],
        start: int,
        count: int,
    ) -> None:
        if start + count <= len(file.first):
            response.start(status, headers, count, file.first[start : start + count])
            response.finish()
            return
        response.start(status, headers, count)
        if response.method != "HEAD" and await response.send_file(file.descriptor, start, count) < count:
            raise ClientGone("the file became shorter while it was sent")
        response.finish()

    async def _send_to_end(self, response: Response, file: OpenFile, headers: list[tuple[str, str]]) -> None:
        response.start(200, headers, None, file.first)
        if response.method != "HEAD":
            offset = len(file.first)
            while block := await self._read(file, offset):
                response.write(block)
                offset += len(block)
                await response.drain()
        response.finish()

    async def _send_compressed(
        self, response: Response, file: OpenFile, headers: list[tuple[str, str]]
    ) -> None:
        headers.append(("Content-Encoding", "gzip"))
        deflater = zlib.compressobj(level=1, wbits=31)
        if file.whole:
            body = deflater.compress(file.first) + deflater.flush()
            response.start(200, headers, len(body), body)
            response.finish()
            return
        response.start(200, headers)
        if response.method != "HEAD":
            block = file.first or await self._read(file, 0)
            offset = len(block)
            while block:
                response.write(await self._workers.files(deflater.compress, block))
                await response.drain()
                block = await self._read(file, offset)
                offset += len(block)
        response.finish(deflater.flush())

    async def _read(self, file: OpenFile, offset: int) -> bytes:
        try:
            return await self._workers.files(os.pread, file.descriptor, _BLOCK, offset)
        except OSError as error:
            raise ClientGone(f"the file cannot be read any further: {error}") from None


def _open(path: str) -> OpenFile:
    # O_NONBLOCK keeps a FIFO from waiting for its writer; it is refused below.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        info = os.fstat(descriptor)
        if stat.S_ISDIR(info.st_mode):
            raise AgentError("invalid_argument", f"path {printable(path)!r} is a directory")
        if not stat.S_ISREG(info.st_mode):
            raise AgentError("invalid_argument", f"path {printable(path)!r} is not a regular file")
        first, whole = b"", False
        if info.st_size <= SMALL:
            parts: list[bytes] = []
            taken = 0
            # One byte more than fits tells whether the end has been reached.
            while taken <= SMALL and (block := os.pread(descriptor, SMALL + 1 - taken, taken)):
                parts.append(block)
                taken += len(block)
            first, whole = b"".join(parts), taken <= SMALL
        return OpenFile(descriptor, info, first, whole)
    except BaseException:
        os.close(descriptor)
        raise


def wants_gzip(accept: str) -> bool:
    """Whether to compress for this Accept-Encoding. Raises 406 when nothing acceptable can be sent."""
    wishes: dict[str, float] = {}
    for item in accept.split(","):
        name, _, quality = item.strip().lower().partition(";")
        if name.strip():
            wishes[name.strip()] = _quality(quality)
    gzip = wishes.get("gzip", wishes.get("x-gzip", wishes.get("*", 0.0)))
    identity = wishes.get("identity", wishes.get("*", 1.0))
    if identity <= 0:
        if gzip <= 0:
            raise AgentError("invalid_argument", "only gzip and identity can be sent", status=406)
        return True
    return gzip > 0 and set(wishes) - {"identity"} == {"gzip"}


def _quality(text: str) -> float:
    name, _, value = text.partition("=")
    if name.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First and last byte of a single range; None for no range, several, or one not understood.

    Raises 416 when the range lies outside the file (RFC 9110, section 14).
    """
    if header is None or (match := _RANGE.fullmatch(header.strip())) is None:
        return None
    first, last = match.groups()
    if not first and not last:
        return None
    if not first:
        start, end = max(0, size - int(last)), size - 1
        satisfiable = size > 0 and int(last) > 0
    else:
        start, end = int(first), min(int(last), size - 1) if last else size - 1
        if last and int(last) < start:
            return None
        satisfiable = start < size
    if not satisfiable:
        raise AgentError("out_of_range", f"the range lies outside the {size} bytes of the file", status=416)
    return start, end


def http_date(seconds: float) -> str:
    """The date format of HTTP (RFC 9110, section 5.6.7), whatever the locale."""
    moment = time.gmtime(min(max(seconds, 0.0), 253402300799.0))
    return (
        f"{_DAYS[moment.tm_wday]}, {moment.tm_mday:02d} {_MONTHS[moment.tm_mon - 1]} {moment.tm_year:04d} "
        f"{moment.tm_hour:02d}:{moment.tm_min:02d}:{moment.tm_sec:02d} GMT"
    )


def _unchanged(headers: Mapping[str, str], tag: str, modified: str) -> bool:
    known = headers.get("if-none-match")
    if known is not None:
        return known.strip() == "*" or tag in (item.strip().removeprefix("W/") for item in known.split(","))
    # Clients send back the date they were given, so equality is enough and needs no date parser.
    return headers.get("if-modified-since") == modified


def _open_error(error: OSError, path: str) -> AgentError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return AgentError("not_found", f"path {printable(path)!r} does not exist")
    return from_os_error(error, path)
