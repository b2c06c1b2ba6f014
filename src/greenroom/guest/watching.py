"""Directory watching of ``filesystem.Filesystem``: WatchDir as a stream, and watchers that are asked.

Stands on ``watchtree``, whose jobs run on the file pool, and on ``following`` for the stream; ``app`` calls
it. A watcher hangs on the loop by its inotify descriptor. When the reader of a stream lags, the descriptor is
not read: the kernel's queue is the buffer, and its overflow ends the watch with a clear error. A watcher that
is asked is read when something happens and once more when it is asked, so that an answer holds everything
that came before the question.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from typing import Any

from .connect import (
    UNARY_TYPE,
    end_error,
    frame,
    reply,
    start_stream,
    stream_request,
    timeout_seconds,
    unary_request,
)
from .entries import describe
from .errors import AgentError, from_os_error, printable
from .exchange import Request, Response
from .following import Stream, keepalive_seconds
from .messages import Message, encode, flag, text
from .mounts import network_type
from .paths import resolve
from .settings import Settings
from .tasks import spawn
from .users import UserDirectory, requested_name
from .watchtree import Event, WatchTree, lost_events
from .workers import Workers

_log = logging.getLogger(__name__)

MAX_WATCHERS = 100
"""Of both kinds together; the kernel's default is 128 for a user."""

ABANDONED_SECONDS = 3600.0
"""A watcher nobody has asked for so long gives way when there is no place for a new one."""

MAX_WAITING = 32768
"""Events that wait to be asked for, of one watcher."""

MAX_WAITING_BYTES = 32 * 1024 * 1024
"""And of all watchers together, in bytes as they are sent."""

_BATCHES = 32
_START = frame(b'{"start":{}}')
_KEEPALIVE = frame(b'{"keepalive":{}}')


class Watcher:
    """One watched directory on the loop. ``on_events`` is called with what happened, or with why it ended."""

    def __init__(
        self, workers: Workers, tree: WatchTree, on_events: Callable[[list[Event], AgentError | None], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = workers
        self._tree = tree
        self._on_events = on_events
        self._collecting = asyncio.Lock()
        self._wanted = False
        self._registered = False
        self._pending = False
        self._state = "watching"

    def read(self, wanted: bool) -> None:
        """Whether to take notice of what happens."""
        self._wanted = wanted
        self._register()

    async def collect(self) -> None:
        """Take notice of a batch now; returns after ``on_events`` was called, if there was anything."""
        async with self._collecting:
            if self._state != "watching":
                return
            events: list[Event] = []
            error = None
            try:
                events = await self._workers.files(self._tree.collect)
            except AgentError as failure:
                error = failure
            except OSError as failure:
                error = from_os_error(failure)
            except Exception:
                _log.exception("watching failed")
                error = AgentError("internal", "the agent failed to read the events")
            if self._is_closed():  # meanwhile
                self._tree.close()
                return
            if error is not None:
                self._state = "failed"
                self._register()
            if events or error is not None:
                self._on_events(events, error)

    @property
    def drained(self) -> bool:
        """Whether nothing is left to take notice of, for now or for ever."""
        return self._state != "watching" or self._tree.drained

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        if self._is_closed():
            return
        self._state = "closed"
        self._register()
        if not self._collecting.locked():  # else a thread is using it
            self._tree.close()

    def _is_closed(self) -> bool:
        return self._state == "closed"

    def _register(self) -> None:
        wanted = self._wanted and self._state == "watching" and not self._pending
        if wanted == self._registered:
            return
        self._registered = wanted
        if wanted:
            self._loop.add_reader(self._tree.descriptor, self._on_readable)
        else:
            self._loop.remove_reader(self._tree.descriptor)

    def _on_readable(self) -> None:
        self._pending = True
        self._register()
        spawn(self._collect_and_go_on())

    async def _collect_and_go_on(self) -> None:
        try:
            await self.collect()
        finally:
            self._pending = False
            self._register()


class Waiting:
    """Bytes of events that wait to be asked for, of all watchers together."""

    def __init__(self) -> None:
        self.size = 0


class PolledWatcher:
    """Keeps events, encoded, until somebody asks."""

    def __init__(self, workers: Workers, tree: WatchTree, waiting: Waiting) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[bytes] = []
        self._size = 0
        self._waiting = waiting
        self._error: AgentError | None = None
        self._watcher = Watcher(workers, tree, self._take)
        self._watcher.read(True)
        self.asked_at = self._loop.time()

    async def drain(self) -> list[bytes]:
        """All events so far. Raises what ended the watcher, after the events before it."""
        self.asked_at = self._loop.time()
        # What had happened by the question is in a full kernel queue at most; a busy writer adds for ever.
        for _ in range(_BATCHES):
            await self._watcher.collect()
            if self._watcher.drained or self._error is not None:
                break
        events = self._clear()
        if not events and self._error is not None:
            raise self._error
        return events

    def close(self) -> None:
        """Watch no longer, and forget what waits. Idempotent."""
        self._watcher.close()
        self._clear()

    def _clear(self) -> list[bytes]:
        events, self._events = self._events, []
        self._waiting.size -= self._size
        self._size = 0
        return events

    def _take(self, events: list[Event], error: AgentError | None) -> None:
        if self._error is not None:
            return
        encoded = [encode(event.message()) for event in events]
        size = sum(map(len, encoded))
        if len(self._events) + len(events) > MAX_WAITING or self._waiting.size + size > MAX_WAITING_BYTES:
            error = lost_events()
        if error is not None:
            self._error = error
            self._watcher.read(False)
            return
        self._events += encoded
        self._size += size
        self._waiting.size += size


class WatchStream(Stream):
    """A WatchDir response."""

    keepalive_event = _KEEPALIVE
    deadline_text = "the watch ran into its timeout"

    def __init__(self, response: Response, keepalive: float, workers: Workers, tree: WatchTree) -> None:
        super().__init__(response, keepalive)
        self._watcher = Watcher(workers, tree, self._take)
        self._watcher.read(True)

    def flow(self, writable: bool) -> None:
        super().flow(writable)
        self._watcher.read(writable)

    def _leave(self) -> None:
        self._watcher.close()

    def _take(self, events: list[Event], error: AgentError | None) -> None:
        if self._over.done():
            return
        if events:
            self._write(b"".join(frame(encode({"filesystem": event.message()})) for event in events))
        if error is not None:
            self._end(end_error(error))


class WatchService:
    """The methods, by name: :attr:`unary` and :attr:`streaming`."""

    def __init__(self, settings: Settings, users: UserDirectory, workers: Workers) -> None:
        self._settings = settings
        self._users = users
        self._workers = workers
        self._polled: dict[str, PolledWatcher] = {}
        self._waiting = Waiting()
        self._places = 0
        self.unary = {
            "CreateWatcher": self.create,
            "GetWatcherEvents": self.events,
            "RemoveWatcher": self.remove,
        }
        self.streaming = {"WatchDir": self.watch}

    async def watch(self, request: Request, response: Response) -> None:
        """Stream the changes of a directory until the client leaves or its deadline comes."""
        message = await stream_request(request)
        seconds = timeout_seconds(request)
        keepalive = keepalive_seconds(request)
        tree = await self._tree(request, message)
        try:
            start_stream(response, _START)
            stream = WatchStream(response, keepalive, self._workers, tree)
            if seconds is not None:
                left = seconds - (asyncio.get_running_loop().time() - request.started)
                stream.stop_after(max(0.0, left))
            await stream.run()
        finally:
            self._places -= 1

    async def create(self, request: Request, response: Response) -> None:
        """Watch a directory; the answer names the watcher to ask."""
        message = await unary_request(request)
        tree = await self._tree(request, message)
        watcher_id = os.urandom(10).hex()
        self._polled[watcher_id] = PolledWatcher(self._workers, tree, self._waiting)
        reply(response, {"watcherId": watcher_id})

    async def events(self, request: Request, response: Response) -> None:
        """What has happened since the last question."""
        watcher = self._find(await unary_request(request))
        response.send(200, b'{"events":[%b]}' % b",".join(await watcher.drain()), UNARY_TYPE)

    async def remove(self, request: Request, response: Response) -> None:
        """Watch no longer."""
        message = await unary_request(request)
        self._find(message)
        self._drop(text(message, "watcherId"))
        reply(response, {})

    def close(self) -> None:
        """Give back everything, when the agent itself stops."""
        for watcher_id in list(self._polled):
            self._drop(watcher_id)

    def _find(self, message: Message) -> PolledWatcher:
        watcher = self._polled.get(text(message, "watcherId"))
        if watcher is None:
            shown = printable(text(message, "watcherId"))[:80]
            raise AgentError("not_found", f"watcher with id {shown!r} not found")
        return watcher

    def _drop(self, watcher_id: str) -> None:
        self._polled.pop(watcher_id).close()
        self._places -= 1

    async def _tree(self, request: Request, message: Message) -> WatchTree:
        """A tree in place, and a place taken for it."""
        user = self._users.find(requested_name(request.headers, self._settings.default_user))
        path = resolve(text(message, "path"), user, self._settings.default_workdir)
        recursive = flag(message, "recursive", False)
        with_entries = flag(message, "includeEntry", False)
        network = flag(message, "allowNetworkMounts", False)
        self._take_place()
        try:
            return await self._workers.files(self._open, path, recursive, with_entries, network)
        except BaseException as error:
            self._places -= 1
            if isinstance(error, OSError):
                raise from_os_error(error, path) from None
            raise

    def _take_place(self) -> None:
        if self._places >= MAX_WATCHERS:
            horizon = asyncio.get_running_loop().time() - ABANDONED_SECONDS
            for watcher_id in [key for key, one in self._polled.items() if one.asked_at < horizon]:
                self._drop(watcher_id)
        if self._places >= MAX_WATCHERS:
            raise AgentError("resource_exhausted", f"{MAX_WATCHERS} watchers exist already; remove some")
        self._places += 1

    def _open(self, path: str, recursive: bool, with_entries: bool, network: bool) -> WatchTree:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise AgentError("invalid_argument", f"path {printable(path)!r} is not a directory")
        kind = None if network else network_type(os.path.realpath(path))
        if kind is not None:
            raise AgentError(
                "invalid_argument",
                f"cannot watch {printable(path)!r}: it is on a network file system ({kind}), where changes made "
                "elsewhere are not seen; allow network mounts to watch it all the same",
            )
        tree = WatchTree(path, recursive=recursive, describe=self._entry if with_entries else None)
        try:
            tree.begin()
        except BaseException:
            tree.close()
            raise
        return tree

    def _entry(self, path: str) -> dict[str, Any]:
        return describe(path, self._users)
