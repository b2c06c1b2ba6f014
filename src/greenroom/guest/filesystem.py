"""The ``filesystem.Filesystem`` service: Stat, ListDir, MakeDir, Move, Remove.

Each call is one job on the file pool, so that a slow disk delays its caller only. The service's methods for
watching directories are in ``watching``.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from .connect import UNARY_TYPE, unary_request
from .entries import describe
from .errors import AgentError, from_os_error
from .exchange import Request, Response
from .messages import Message, encode, integer, text
from .paths import make_directories, resolve
from .settings import Settings
from .users import User, UserDirectory, requested_name
from .workers import Workers

MAX_ENTRIES = 100_000
"""Entries of one listing; more would not fit into a small guest's memory."""

Method = Callable[[Message, User], bytes]


class FilesystemService:
    """Unary calls about files; every one takes the user from the request."""

    def __init__(self, settings: Settings, users: UserDirectory, workers: Workers) -> None:
        self._settings = settings
        self._users = users
        self._workers = workers
        self.methods: dict[str, Method] = {
            "Stat": self.stat,
            "ListDir": self.list_directory,
            "MakeDir": self.make_directory,
            "Move": self.move,
            "Remove": self.remove,
        }

    def route(self, name: str) -> Callable[[Request, Response], Awaitable[None]]:
        """A handler for one of :attr:`methods`."""
        return partial(self.call, name)

    async def call(self, name: str, request: Request, response: Response) -> None:
        """Serve one call of a method in :attr:`methods`. Raises :class:`AgentError`."""
        message = await unary_request(request)
        user = self._users.find(requested_name(request.headers, self._settings.default_user))
        try:
            answer = await self._workers.files(self.methods[name], message, user)
        except OSError as error:
            raise from_os_error(error) from None
        response.send(200, answer, UNARY_TYPE)

    def stat(self, message: Message, user: User) -> bytes:
        """What one path is; a symbolic link is described, not followed."""
        return self._entry(self._path(message, "path", user))

    def make_directory(self, message: Message, user: User) -> bytes:
        """Create a directory with its parents; one that exists is ``already_exists``."""
        path = self._path(message, "path", user)
        try:
            created = make_directories(path, user)
        except NotADirectoryError:
            raise AgentError("invalid_argument", f"a file is in the way of the directory {path!r}") from None
        if not created:
            raise AgentError("already_exists", f"the directory {path!r} exists already")
        return self._entry(path)

    def move(self, message: Message, user: User) -> bytes:
        """Rename, across file systems too; the parents of the destination are created."""
        source = self._path(message, "source", user)
        destination = self._path(message, "destination", user)
        os.lstat(source)
        make_directories(os.path.dirname(destination), user)
        try:
            os.rename(source, destination)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _move_between_file_systems(source, destination)
        return self._entry(destination)

    def remove(self, message: Message, user: User) -> bytes:
        """Delete a file, or a directory with all it holds; what does not exist counts as deleted."""
        if not text(message, "path"):
            raise AgentError("invalid_argument", "the path to remove is empty")
        path = self._path(message, "path", user)
        if path == "/":
            raise AgentError("invalid_argument", "the root directory cannot be removed")
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return b"{}"

    def list_directory(self, message: Message, user: User) -> bytes:
        """The tree below a directory down to ``depth`` levels (0 means 1), depth first, names in order."""
        path = self._path(message, "path", user)
        depth = max(1, integer(message, "depth"))
        # Following the root only: the entries keep the prefix the caller asked with.
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise AgentError("invalid_argument", f"{path!r} is not a directory")
        self._users.refresh()
        parts: list[bytes] = []
        for entry in self._walk(path, depth):
            parts.append(encode(entry))
            if len(parts) > MAX_ENTRIES:
                raise AgentError("resource_exhausted", f"the listing has more than {MAX_ENTRIES} entries")
        return b'{"entries":[%b]}' % b",".join(parts)

    def _walk(self, root: str, depth: int) -> Iterator[dict[str, Any]]:
        stack = [iter(sorted(os.listdir(root)))]
        folders = [root]
        while stack:
            name = next(stack[-1], None)
            if name is None:
                stack.pop()
                folders.pop()
                continue
            path = os.path.join(folders[-1], name)
            try:
                info = os.lstat(path)
                yield describe(path, self._users, info)
                if stat.S_ISDIR(info.st_mode) and len(stack) < depth:
                    inner = sorted(os.listdir(path))
                    stack.append(iter(inner))
                    folders.append(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed while we looked

    def _entry(self, path: str) -> bytes:
        self._users.refresh()
        return encode({"entry": describe(path, self._users)})

    def _path(self, message: Message, field: str, user: User) -> str:
        return resolve(text(message, field), user, self._settings.default_workdir)


def _move_between_file_systems(source: str, destination: str) -> None:
    """Copy and delete; an existing destination gives way as it would for a rename."""
    if os.path.isdir(destination) and not os.path.islink(destination):
        if not stat.S_ISDIR(os.lstat(source).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), destination)
        os.rmdir(destination)
    shutil.move(source, destination)
