"""``POST /files/compose``: several files become one, inside the guest.

Beside ``uploads``; ``app`` calls it. Clients upload the parts of a large file at the same time and then have
them put together. The result appears at once and whole: it is written beside its destination and renamed.
The parts are removed afterwards.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from .connect import UNARY_TYPE
from .errors import AgentError, from_os_error, printable
from .exchange import Request, Response
from .messages import decode, encode, text, texts
from .paths import FILE_MODE, give, make_directories, resolve
from .settings import Settings
from .users import User, UserDirectory
from .workers import Workers

MAX_SOURCES = 10_000
_SLICE = 16 * 1024 * 1024
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF})


class ComposeService:
    """Puts files together."""

    def __init__(self, settings: Settings, users: UserDirectory, workers: Workers) -> None:
        self._settings = settings
        self._users = users
        self._workers = workers

    async def post(self, request: Request, response: Response) -> None:
        """Body ``{source_paths, destination, username?}``. Raises :class:`AgentError`; 507 for a full disk."""
        message = decode(await request.body.read_all())
        names = texts(message, "source_paths")
        if not names or not all(names):
            raise AgentError("invalid_argument", "field 'source_paths' must name at least one file")
        if len(names) > MAX_SOURCES:
            raise AgentError("invalid_argument", f"at most {MAX_SOURCES} files can be put together")
        wanted = text(message, "destination")
        if not wanted or wanted.endswith("/"):
            raise AgentError("invalid_argument", "field 'destination' must name a file")
        user = self._users.find(text(message, "username") or self._settings.default_user)
        default = self._settings.default_workdir
        destination = resolve(wanted, user, default)
        sources = [resolve(name, user, default) for name in names]
        if destination in sources:
            raise AgentError("invalid_argument", "the destination cannot be one of the sources")
        try:
            await self._workers.files(compose, sources, destination, user)
        except OSError as error:
            raise from_os_error(error, destination) from None
        answer = {
            "path": printable(destination),
            "name": printable(os.path.basename(destination)),
            "type": "file",
        }
        response.send(200, encode(answer), UNARY_TYPE)


def compose(sources: list[str], destination: str, user: User) -> None:
    """Write the sources one after the other to the destination, then remove them. Raises OSError."""
    for source in sources:
        try:
            info = os.stat(source)
        except (FileNotFoundError, NotADirectoryError):
            raise AgentError("not_found", f"source file {printable(source)!r} does not exist") from None
        if not stat.S_ISREG(info.st_mode):
            raise AgentError("invalid_argument", f"source {printable(source)!r} is not a regular file")
    folder, name = os.path.split(destination)
    make_directories(folder, user)
    # Short enough for a destination whose name has the greatest length.
    temporary = f"{folder}/.{name[:100]}.{os.urandom(8).hex()}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            give(descriptor, user)
            for source in sources:
                _append(source, descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, destination)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    for source in sources:
        with suppress(OSError):
            os.unlink(source)


def _append(source: str, target: int) -> None:
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        in_kernel = True
        while True:
            if in_kernel:
                try:
                    copied = os.copy_file_range(descriptor, target, _SLICE)
                except OSError as error:
                    if error.errno not in _NO_KERNEL_COPY:
                        raise
                    in_kernel = False
                    continue
            else:
                # Both ways move the file offsets, so one can go on where the other has stopped.
                block = os.read(descriptor, _SLICE // 16)
                copied = len(block)
                view = memoryview(block)
                while view:
                    view = view[os.write(target, view) :]
            if not copied:
                return
    finally:
        os.close(descriptor)
