"""Sandboxes' records as rows of a kind: kept by key, in order, with their changes.

A row makes its texts when they are first asked for and keeps them: metadata, spec and status of the object, and the
cells of its table's row. So a list of any length is a join, and costs what has changed since the last one. Specs are
much alike, and equal ones are kept once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

import msgspec

from greenroom.api.kube.kinds import CLAIM, SANDBOX, Kind
from greenroom.api.kube.live import documents
from greenroom.api.kube.live.conditions import PHASES, Facts, claim_status, ready, sandbox_status
from greenroom.api.kube.objects import Key, Object
from greenroom.api.kube.rows import LIGHT, Row
from greenroom.api.kube.storage import Listing
from greenroom.api.kube.versions import Clock
from greenroom.api.kube.watching import Cache, Change

SPECS: Final = 4096
"""Different specs that are kept once; beyond that they are begun anew."""
_encode: Final = msgspec.json.Encoder().encode
_specs: dict[bytes, bytes] = {}


def _shared(text: bytes) -> bytes:
    if len(_specs) >= SPECS:
        _specs.clear()
    return _specs.setdefault(text, text)


class LiveRow(Row):
    """The object of one kind that a sandbox's record has."""

    __slots__ = ("_born", "_cells", "_metadata", "_spec", "_status", "facts")

    kind: Kind
    open: bytes
    """What an object begins with, up to its metadata."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.key = (documents.namespace_of(facts.listed), documents.name_of(facts.listed))
        self._metadata: bytes | None = None
        self._spec = b""
        self._status = b""
        self._cells: bytes | None = None
        self._born = int(facts.listed.started_at)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'/'.join(self.key)} version={self.facts.version}>"

    @property
    def sandbox_id(self) -> str:
        """Whose it is."""
        return self.facts.listed.sandbox_id

    def parts(self) -> tuple[Object, Object, Object]:
        """Metadata, spec and status."""
        raise NotImplementedError

    def table(self) -> list[str]:
        """The cells before the age."""
        raise NotImplementedError

    def object(self) -> Object:
        """See `Row`."""
        metadata, spec, status = self.parts()
        return {
            "apiVersion": self.kind.api_version,
            "kind": self.kind.name,
            "metadata": metadata,
            "spec": spec,
            "status": status,
        }

    def _texts(self) -> bytes:
        metadata, spec, status = self.parts()
        self._spec = _shared(b',"spec":' + _encode(spec))
        self._status = b',"status":' + _encode(status) + b"}"
        self._metadata = _encode(metadata)
        return self._metadata

    def weight(self) -> int:
        """See `Row`."""
        declared = self.facts.listed.declared
        return LIGHT if declared is None else LIGHT + len(memoryview(declared.document))

    def json(self) -> tuple[bytes, ...]:
        """See `Row`."""
        return (self.open, self._metadata or self._texts(), self._spec, self._status)

    def metadata(self) -> bytes:
        """See `Row`."""
        return self._metadata or self._texts()

    def told(self) -> tuple[bytes, int, bytes]:
        """See `Row`."""
        if self._cells is None:
            self._cells = _encode(self.table())[:-1]
        return (self._cells, self._born, self._metadata or self._texts())


def _opening(kind: Kind) -> bytes:
    return b'{"apiVersion":"%s","kind":"%s","metadata":' % (kind.api_version.encode(), kind.name.encode())


class SandboxRow(LiveRow):
    """A Sandbox."""

    __slots__ = ()
    kind = SANDBOX
    open = _opening(SANDBOX)

    def parts(self) -> tuple[Object, Object, Object]:
        """See `LiveRow`."""
        document = documents.document_of(self.facts.listed)
        return (
            documents.sandbox_metadata(self.facts, document),
            documents.sandbox_spec(self.facts.listed, document),
            sandbox_status(self.facts, documents.ID_LABEL),
        )

    def labels(self) -> Mapping[str, str]:
        """See `Row`."""
        return documents.labels_of(self.facts, documents.document_of(self.facts.listed))

    def field(self, name: str) -> str | None:
        """See `Row`."""
        match name:
            case "status.phase":
                return PHASES[self.facts.listed.state]
            case "status.nodeName":
                return self.facts.node
            case "spec.operatingMode":
                return "Suspended" if self.facts.listed.state == "paused" else "Running"
        return None

    def table(self) -> list[str]:
        """See `LiveRow`."""
        return [self.key[1], *ready(self.facts), self.facts.node, self.sandbox_id]


class ClaimRow(LiveRow):
    """A SandboxClaim."""

    __slots__ = ()
    kind = CLAIM
    open = _opening(CLAIM)

    def parts(self) -> tuple[Object, Object, Object]:
        """See `LiveRow`."""
        document = documents.document_of(self.facts.listed)
        return (
            documents.claim_metadata(self.facts, document),
            documents.claim_spec(self.facts.listed, document),
            claim_status(self.facts, self.key[1]),
        )

    def table(self) -> list[str]:
        """See `LiveRow`."""
        status, reason = ready(self.facts)
        return [self.key[1], status, self.key[1], reason]


class Shelf:
    """The rows of one kind. `clock` gives their versions."""

    def __init__(self, kind: type[LiveRow], clock: Clock) -> None:
        self._make = kind
        self._clock = clock
        self.cache = Cache(clock.next(), clock=clock)
        self._rows: dict[Key, LiveRow] = {}
        self._keys: list[Key] | None = None
        """All keys in order, once a list was asked for; and their rows."""
        self._sorted: list[LiveRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: Key) -> LiveRow | None:
        """The row with a key."""
        return self._rows.get(key)

    def row(self, facts: Facts) -> LiveRow:
        """A row that is not kept."""
        return self._make(facts)

    def put(self, facts: Facts) -> LiveRow:
        """A record is there, or is another than it was; its version is given here."""
        key = (documents.namespace_of(facts.listed), documents.name_of(facts.listed))
        present = self._rows.get(key)
        if present is not None and present.sandbox_id != facts.listed.sandbox_id:
            # Another object has taken the name before it was told that the old one has gone.
            self.drop(key, present.sandbox_id)
        version = self._clock.next(documents.revision_of_listed(facts.listed))
        row = self._make(facts._replace(version=version))
        before = self._rows.get(row.key)
        self._rows[row.key] = row
        if self._keys is not None:
            place = bisect_left(self._keys, row.key)
            if before is None:
                self._keys.insert(place, row.key)
                self._sorted.insert(place, row)
            else:
                self._sorted[place] = row
        self.cache.record(Change(version, before, row))
        return row

    def drop(self, key: Key, sandbox_id: str) -> LiveRow | None:
        """A sandbox's record is no more; answers the row that it had."""
        row = self._rows.get(key)
        if row is None or row.sandbox_id != sandbox_id:
            return None
        del self._rows[key]
        if self._keys is not None:
            place = bisect_left(self._keys, key)
            del self._keys[place], self._sorted[place]
        self.cache.record(Change(self._clock.next(documents.revision_of_listed(row.facts.listed)), row, None))
        return row

    def listing(self, namespace: str, missing: list[str]) -> Listing:
        """The rows of a namespace, or with "" of all."""
        if self._keys is None:
            self._keys = sorted(self._rows)
            self._sorted = [self._rows[key] for key in self._keys]
        first, end = 0, len(self._keys)
        if namespace:
            first = bisect_left(self._keys, (namespace, ""))
            end = bisect_left(self._keys, (namespace + "\0", ""))
        return Listing(self.cache.version, self._sorted[first:end], missing)
