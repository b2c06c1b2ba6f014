"""One watched directory, with all below it on request: kernel records in, events of the contract out.

Between ``inotify`` and ``watching``. Blocking, so it runs on the file pool, one job at a time.

A recursive watch is a watch per directory, and the hard part is a directory that appears: between its
creation and the moment its watch is in place things may be created in it. So it is listed after the watch is
set, and what is found is reported as created (and written, if it has content). Whatever was created between
the two is then found twice, in the listing and in a record; such a record must already be in the queue, so
names from listings are remembered until the queue has been read empty, and a record for one of them is
dropped unless the name was removed meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import inotify
from .errors import AgentError, printable

MAX_DIRECTORIES = 8192
"""Directories of one recursive watch."""

MAX_EVENTS = 16384
"""Events that one directory may bring when it appears; the kernel's own queue has the same default."""

_BATCH = 1024
_READ = 16 * 1024
_WITH_ENTRY = ("CREATE", "WRITE", "CHMOD")


@dataclass(frozen=True, slots=True)
class Event:
    """A change: ``name`` relative to the watched directory, ``kind`` as in the contract's EVENT_TYPE names."""

    name: str
    kind: str
    entry: dict[str, Any] | None = None

    def message(self) -> dict[str, Any]:
        """The FilesystemEvent message."""
        shown: dict[str, Any] = {"name": printable(self.name), "type": f"EVENT_TYPE_{self.kind}"}
        if self.entry is not None:
            shown["entry"] = self.entry
        return shown


class WatchTree:
    """See the module. ``describe`` gives the entry of a path (may raise OSError), or is None for no entries."""

    def __init__(
        self, root: str, *, recursive: bool, describe: Callable[[str], dict[str, Any]] | None = None
    ) -> None:
        self._root = root
        self._recursive = recursive
        self._describe = describe
        self._names: dict[int, str] = {}
        self._watches: dict[str, int] = {}
        self._listed: set[str] = set()
        self.drained = True
        """Whether the last :meth:`collect` took all there was."""
        try:
            self.descriptor = inotify.open_queue()
        except OSError as error:
            raise _exhausted(error, "watchers") from None

    def begin(self) -> None:
        """Set the watches. Raises :class:`AgentError`, OSError when the root is gone."""
        self._watch("", follow=True)
        if self._recursive:
            for name, is_directory, _ in self._children(""):
                if is_directory:
                    self._adopt(name, None)

    def collect(self) -> list[Event]:
        """Some of what has happened since the last time. Raises ``data_loss`` when some of it was lost."""
        events: list[Event] = []
        self.drained = False
        while len(events) < _BATCH:
            try:
                raw = os.read(self.descriptor, _READ)
            except BlockingIOError:
                self._listed.clear()
                self.drained = True
                break
            for record in inotify.records(raw):
                self._digest(record, events)
        return events

    def close(self) -> None:
        """Give back the descriptor, and with it all watches."""
        os.close(self.descriptor)

    def statistics(self) -> dict[str, int]:
        """Watched directories, and names remembered for the moment."""
        return {"directories": len(self._names), "listed": len(self._listed)}

    def _digest(self, record: inotify.Record, events: list[Event]) -> None:
        mask = record.mask
        if mask & inotify.OVERFLOW:
            raise lost_events()
        folder = self._names.get(record.watch)
        if folder is None:
            return
        if mask & inotify.IGNORED:
            self._forget(folder)
            return
        if not record.name:
            # Of a directory below the root its parent has told already.
            if not folder:
                self._about_root(mask, events)
            return
        name = f"{folder}/{record.name}" if folder else record.name
        is_directory = bool(mask & inotify.IS_DIRECTORY)
        if mask & (inotify.CREATE | inotify.MOVED_TO):
            self._on_created(name, is_directory, events)
        elif mask & inotify.MODIFY:
            self._report(name, "WRITE", events)
        elif mask & inotify.ATTRIB:
            self._report(name, "CHMOD", events)
        elif mask & (inotify.DELETE | inotify.MOVED_FROM):
            self._listed.discard(name)
            self._report(name, "REMOVE" if mask & inotify.DELETE else "RENAME", events)
            if is_directory:
                # A moved directory would go on reporting under its old name.
                self._forget(name)

    def _about_root(self, mask: int, events: list[Event]) -> None:
        for bit, kind in (
            (inotify.ATTRIB, "CHMOD"),
            (inotify.MOVE_SELF, "RENAME"),
            (inotify.DELETE_SELF, "REMOVE"),
        ):
            if mask & bit:
                self._report(".", kind, events)

    def _on_created(self, name: str, is_directory: bool, events: list[Event]) -> None:
        if name in self._listed:
            self._listed.discard(name)
            return
        self._report(name, "CREATE", events)
        if is_directory and self._recursive:
            self._adopt(name, events)

    def _adopt(self, top: str, events: list[Event] | None) -> None:
        """Watch a directory and all below it; report what is in there unless ``events`` is None."""
        stack = [top]
        while stack:
            folder = stack.pop()
            try:
                self._watch(folder, follow=False)
                children = self._children(folder)
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone again, which the next records will tell
            below: list[str] = []
            for name, is_directory, has_content in children:
                if is_directory:
                    below.append(name)
                if events is not None and name not in self._listed:
                    self._listed.add(name)
                    self._report(name, "CREATE", events)
                    if has_content:
                        self._report(name, "WRITE", events)
            stack += reversed(below)

    def _children(self, folder: str) -> list[tuple[str, bool, bool]]:
        """Name, whether a directory, whether a file with content; in order of names."""
        found: list[tuple[str, bool, bool]] = []
        with os.scandir(os.path.join(self._root, folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                is_directory = entry.is_dir(follow_symlinks=False)
                has_content = False
                if not is_directory:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    has_content = stat.S_ISREG(info.st_mode) and info.st_size > 0
                found.append((name, is_directory, has_content))
        return sorted(found)

    def _watch(self, name: str, *, follow: bool) -> None:
        if len(self._names) >= MAX_DIRECTORIES:
            raise AgentError(
                "resource_exhausted", f"more than {MAX_DIRECTORIES} directories would have to be watched"
            )
        try:
            watch = inotify.add_watch(self.descriptor, os.path.join(self._root, name), follow=follow)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise _exhausted(error, "watches") from None
            raise
        old = self._names.get(watch)
        if old is not None:
            self._watches.pop(old, None)
        self._names[watch] = name
        self._watches[name] = watch

    def _forget(self, name: str) -> None:
        """Drop the watches of a directory and of all below it."""
        inside = name + "/"
        for one in [known for known in self._watches if known == name or known.startswith(inside)]:
            watch = self._watches.pop(one)
            self._names.pop(watch, None)
            inotify.remove_watch(self.descriptor, watch)
        self._listed = {known for known in self._listed if not known.startswith(inside)}

    def _report(self, name: str, kind: str, events: list[Event]) -> None:
        if len(events) >= MAX_EVENTS:
            raise lost_events()
        entry = None
        if self._describe is not None and kind in _WITH_ENTRY:
            path = self._root if name == "." else os.path.join(self._root, name)
            try:
                entry = self._describe(path)
            except OSError:
                entry = None  # gone again
        events.append(Event(name, kind, entry))


def lost_events() -> AgentError:
    """The end of a watcher whose reader is too slow."""
    return AgentError("data_loss", "events were lost as they came faster than they were read; watch anew")


def _exhausted(error: OSError, what: str) -> AgentError:
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM):
        return AgentError("resource_exhausted", f"the guest's kernel allows no more {what}: {error.strerror}")
    return AgentError("internal", f"the directory cannot be watched: {error.strerror}")
