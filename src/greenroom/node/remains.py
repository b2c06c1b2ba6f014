"""What stays of sandboxes that ended: a record in the journal and in the stream, until it is dropped.

Only where what is declared of a sandbox says so: `Declared.retain` of one that ended by itself, `Declared.held` of any.
No VM is left of it, nothing on disk and no token; it counts as no sandbox. It keeps its name. Its claim's key is
answered as any ended one's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec

from greenroom.errors import GreenroomError
from greenroom.node.changelog import ChangeLog
from greenroom.node.journal import Journal
from greenroom.node.names import Names
from greenroom.wire.messages import Declared, Sandbox

_log = logging.getLogger(__name__)
MOST = 10_000
"""Records that stay on one node; the oldest goes for one more. A stream has a bound, and so has a disk."""


def stays(sandbox: Sandbox, *, by_itself: bool) -> bool:
    """Whether something of this sandbox is to stay after it has ended, by itself or because somebody wished it."""
    declared = sandbox.declared
    return declared is not None and (declared.held or (declared.retain and by_itself))


def moved(declared: Declared | None, step: float) -> Declared | None:
    """What is declared, with its time moved as the wall clock was."""
    if declared is None or declared.shutdown_at is None:
        return declared
    return msgspec.structs.replace(declared, shutdown_at=declared.shutdown_at + step)


class Remains:
    """The records that stay, by the ids of their sandboxes. Use from one thread."""

    def __init__(self, journal: Journal, changes: ChangeLog, names: Names) -> None:
        self._journal = journal
        self._changes = changes
        self._names = names
        self._kept: dict[str, tuple[str, Sandbox]] = {}
        """Each with the key of its claim."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def get(self, sandbox_id: str) -> Sandbox | None:
        """The record that stays of a sandbox."""
        kept = self._kept.get(sandbox_id)
        return None if kept is None else kept[1]

    def records(self) -> dict[str, Sandbox]:
        """All of them by their keys."""
        return dict(self._kept.values())

    def until(self, sandbox_id: str) -> float | None:
        """When the record is to be dropped (Unix seconds); None for one that stays until somebody drops it."""
        record = self.get(sandbox_id)
        declared = None if record is None else record.declared
        if record is None or declared is None or declared.retain_for is None or declared.held:
            return None
        return (record.ended_at or 0.0) + declared.retain_for

    def adopt(self) -> None:
        """Go on with the records of an earlier run."""
        for entry in self._journal.retained():
            if entry.sandbox is not None:
                self._take_in(entry.key, entry.sandbox)

    def keep(self, key: str, sandbox: Sandbox, reason: str, now: float) -> None:
        """A sandbox has ended; its record stays. Where that cannot be written down it is told of all the same, and the
        next start writes it: it finds the VM gone."""
        record = msgspec.structs.replace(
            sandbox,
            state="ended",
            ended_at=now,
            end_reason=reason,
            token=None,
            traffic_token=None,
            confirm_by=None,
            paused_memory=None,
        )
        try:
            self._journal.retain(key, record, now)
        except GreenroomError as error:
            _log.error("the end of %s could not be written down: %s", sandbox.sandbox_id, error.message)
        self._take_in(key, record)
        while len(self._kept) > MOST:
            oldest = next(iter(self._kept))
            _log.warning("more than %d ended sandboxes are told of: %s no longer is", MOST, oldest)
            try:
                self.drop(oldest, now)
            except GreenroomError as error:
                _log.error("its record could not be dropped: %s", error.message)
                break

    def _take_in(self, key: str, record: Sandbox) -> None:
        self._kept[record.sandbox_id] = (key, record)
        self._changes.put(record)
        self._names.take(record.sandbox_id, record.owner, record.name)

    def declare(self, sandbox_id: str, declared: Declared, now: float) -> Sandbox:
        """Replace what is declared of one that stays. Raises KeyError, JournalUnavailable."""
        key, record = self._kept[sandbox_id]
        changed = msgspec.structs.replace(record, declared=declared)
        self._journal.retain(key, changed, now)
        self._take_in(key, changed)
        return changed

    def drop(self, sandbox_id: str, now: float) -> bool:
        """Let a record go, and its name. False when there is none. Raises JournalUnavailable."""
        if sandbox_id not in self._kept:
            return False
        key, record = self._kept[sandbox_id]
        self._journal.end(key, record.end_reason, now)
        del self._kept[sandbox_id]
        self._names.free(sandbox_id, record.owner, record.name)
        self._changes.drop(sandbox_id)
        return True

    def move(self, step: float) -> None:
        """The wall clock was set: the records' times go with it, in memory."""
        for key, record in list(self._kept.values()):
            after = msgspec.structs.replace(
                record,
                started_at=record.started_at + step,
                ends_at=record.ends_at + step,
                ended_at=None if record.ended_at is None else record.ended_at + step,
                declared=moved(record.declared, step),
            )
            self._take_in(key, after)
