"""Server-side apply, and who owns which field after any other change.

Every manager has a set of fields per operation and subresource. An apply sets exactly the fields that it names: those
it named before and does not name any more go, unless somebody else owns them too; those that somebody else owns and
that it would change are conflicts, unless it is forced. Any other write takes what it changes from everybody.
Source: "Server-Side Apply" in Kubernetes' documentation. Pure: an object and its managed fields in, a new one out.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.objects import Object, copied, metadata_of, rfc3339
from greenroom.api.kube.patching import fieldsets
from greenroom.api.kube.patching.fieldsets import (
    NOTHING,
    FieldSet,
    Malformed,
    Path,
    compared,
    field_element,
    flattened,
    inner_schema,
    is_atomic,
    item_element,
    within,
    without,
)
from greenroom.api.kube.schemas.building import LIST_TYPE, Schema
from greenroom.api.kube.status import Cause, StatusError, apply_conflict, bad_request

Operation = Literal["Apply", "Update"]
UPDATERS_LIMIT = 10
"""Managers that are remembered for updates; the oldest become one, called ancient-changes, as in Kubernetes."""
ENTRIES_LIMIT = 100
"""Entries of managedFields that are taken from an object."""
MANAGER_LIMIT = 128
"""Characters of a manager's name."""
ANCIENT: Final = "ancient-changes"

_UNOWNED: Final = frozenset(
    [
        ("f:apiVersion",),
        ("f:kind",),
        ("f:metadata",),
        *(
            ("f:metadata", field_element(name))
            for name in (
                "name",
                "namespace",
                "uid",
                "creationTimestamp",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
                "generation",
                "managedFields",
                "resourceVersion",
                "selfLink",
            )
        ),
    ]
)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What one manager set by one operation."""

    manager: str
    operation: Operation
    api_version: str
    fields: FieldSet
    subresource: str = ""
    time: str = ""

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """Two entries of one object differ in this."""
        return (self.manager, self.operation, self.api_version, self.subresource)

    def encoded(self) -> Object:
        """The entry as an object has it."""
        said: Object = {
            "manager": self.manager,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": fieldsets.encoded(self.fields),
        }
        if self.subresource:
            said["subresource"] = self.subresource
        return said


class Author(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes, through what, and when."""

    manager: str
    now: datetime
    subresource: str = ""


def manager_of(asked: str | None, agent: str = "") -> str:
    """The manager that a request is by: `fieldManager`, or what comes before the slash in the user agent.

    Raises 400 for a name that is too long or not printable.
    """
    name = asked or agent.partition("/")[0][:MANAGER_LIMIT].strip() or "unknown"
    if len(name) > MANAGER_LIMIT or not name.isprintable():
        raise bad_request(f"fieldManager: may have up to {MANAGER_LIMIT} printable characters")
    return name


def entries_of(obj: Object | None) -> list[Entry]:
    """The managed fields of an object. Raises Malformed."""
    told = metadata_of(obj or {}).get("managedFields") or []
    if len(told) > ENTRIES_LIMIT:
        raise Malformed("there are too many entries of managed fields")
    found: dict[tuple[str, str, str, str], Entry] = {}
    for each in told:
        operation = each.get("operation")
        if operation not in ("Apply", "Update") or each.get("fieldsType", "FieldsV1") != "FieldsV1":
            raise Malformed("an entry of managed fields has another operation or format")
        entry = Entry(
            manager=str(each.get("manager") or ""),
            operation=operation,
            api_version=str(each.get("apiVersion") or ""),
            subresource=str(each.get("subresource") or ""),
            time=str(each.get("time") or ""),
            fields=fieldsets.decoded(each.get("fieldsV1") or {}),
        )
        found[entry.identity] = entry
    return list(found.values())


def updated(old: Object | None, new: Object, kind: Kind, author: Author) -> None:
    """Set who owns what in `new`, in place, after a write that is no apply.

    A client that leaves managedFields alone, or sends what is none, changes nothing about the others; one that sends
    an empty list makes the server forget them.
    """
    metadata = new["metadata"]
    told = metadata.get("managedFields")
    forget = told is not None and (told in ([], [{}]))
    try:
        entries = [] if forget else entries_of(new if told else old)
    except Malformed:
        entries = _known_entries(old)
    before, after = _owned(old, kind), _owned(new, kind)
    changed, gone = compared(before, after)
    mine = Entry(
        manager=author.manager,
        operation="Update",
        api_version=kind.api_version,
        subresource=author.subresource,
        fields=changed,
    )
    kept = [entry for entry in entries if entry.identity != mine.identity]
    kept = _less(kept, changed | gone)
    previous = next((entry for entry in entries if entry.identity == mine.identity), None)
    fields = (changed | (previous.fields if previous else NOTHING)) - gone
    if forget and told == [] and not changed:
        metadata.pop("managedFields", None)
        return
    _write(metadata, kept, mine, fields, previous, author)


def applied(live: Object | None, config: Object, kind: Kind, author: Author, *, force: bool) -> Object:
    """The object that an apply of `config` makes of `live` (None when it does not exist yet).

    `config` is pruned and has no nulls. Raises 409 with a cause for every field that another manager owns, 400 for
    lists whose items lack their keys.
    """
    metadata = metadata_of(config)
    if metadata.get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    entries = _known_entries(live)
    mine = Entry(
        manager=author.manager,
        operation="Apply",
        api_version=kind.api_version,
        subresource=author.subresource,
        fields=frozenset(),
    )
    previous = next((entry for entry in entries if entry.identity == mine.identity), None)
    others = [entry for entry in entries if entry.identity != mine.identity]
    try:
        asked = frozenset(_owned(config, kind))
        before = _owned(live, kind)
        merged: Object = _merged(live or {}, config, kind.schema)
        after = _owned(merged, kind)
        changed, gone = compared(before, after)
    except Malformed as error:
        raise bad_request(str(error)) from error
    # An empty map in which something is now has not gone.
    filled = within(after)
    gone = frozenset(path for path in gone if before[path] != {} or path not in filled)
    # Unless it is forced, an apply may agree with the others but not change what they set.
    clashes = [(entry, entry.fields & (changed | gone)) for entry in others]
    if not force and any(fields for _, fields in clashes):
        raise _conflict(clashes)
    others = _less(others, changed | gone)
    if previous is not None:
        dropped = previous.fields - asked - within(asked.union(*(entry.fields for entry in others)))
        merged = without(merged, kind.schema, dropped, asked)
        others = _less(others, compared(before, _owned(merged, kind))[1])
    merged.setdefault("metadata", {})
    _write(merged["metadata"], others, mine, asked, previous, author)
    return merged


def _known_entries(obj: Object | None) -> list[Entry]:
    try:
        return entries_of(obj)
    except Malformed:
        return []


def _owned(obj: Object | None, kind: Kind) -> dict[Path, Any]:
    return {
        path: value for path, value in flattened(obj or {}, kind.schema).items() if path[:2] not in _UNOWNED
    }


def _less(entries: Iterable[Entry], gone: FieldSet) -> list[Entry]:
    """The entries without what others have taken, and without those that have nothing left."""
    left = [(entry, entry.fields - gone) for entry in entries]
    return [
        entry if len(fields) == len(entry.fields) else msgspec.structs.replace(entry, fields=fields)
        for entry, fields in left
        if fields
    ]


def _write(
    metadata: Object,
    others: list[Entry],
    mine: Entry,
    fields: FieldSet,
    previous: Entry | None,
    author: Author,
) -> None:
    entries = list(others)
    if fields:
        same_as_before = previous is not None and previous.fields == fields
        time = previous.time if previous is not None and same_as_before else rfc3339(author.now)
        entries.append(msgspec.structs.replace(mine, fields=fields, time=time))
    entries = _capped(entries)
    entries.sort(key=lambda entry: (entry.operation, entry.time, entry.identity))
    if entries:
        metadata["managedFields"] = [entry.encoded() for entry in entries]
    else:
        metadata.pop("managedFields", None)


def _capped(entries: list[Entry]) -> list[Entry]:
    updaters = sorted(
        (entry for entry in entries if entry.operation == "Update"), key=lambda entry: entry.time
    )
    excess = len(updaters) - UPDATERS_LIMIT
    if excess <= 0:
        return entries
    old = updaters[: excess + 1]
    ancient = Entry(
        manager=ANCIENT,
        operation="Update",
        api_version=old[-1].api_version,
        time=old[-1].time,
        fields=NOTHING.union(*(entry.fields for entry in old)),
    )
    return [entry for entry in entries if entry not in old] + [ancient]


def _conflict(clashes: list[tuple[Entry, FieldSet]]) -> StatusError:
    causes = []
    for entry, fields in clashes:
        through = f' with subresource "{entry.subresource}"' if entry.subresource else ""
        using = f" using {entry.api_version}" if entry.operation == "Update" else ""
        at = f" at {entry.time}" if entry.operation == "Update" and entry.time else ""
        who = f'conflict with "{entry.manager}"{through}{using}{at}'
        causes += [Cause("FieldManagerConflict", who, fieldsets.shown(path)) for path in sorted(fields)]
    return apply_conflict(causes)


def _merged(live: Any, config: Any, schema: Schema) -> Any:
    """`live` with everything that `config` names. Raises Malformed."""
    if isinstance(live, dict) and isinstance(config, dict) and not is_atomic(config, schema):
        both = {name: copied(each) for name, each in live.items() if name not in config}
        for name, each in config.items():
            inner = inner_schema(name, schema)
            both[name] = _merged(live[name], each, inner) if name in live else copied(each)
        # In the order of the live object, then that of what is new.
        return {name: both[name] for name in [*live, *(name for name in both if name not in live)]}
    if isinstance(live, list) and isinstance(config, list) and not is_atomic(config, schema):
        ours = {item_element(each, schema): each for each in live}
        theirs = {item_element(each, schema): each for each in config}
        items = schema.get("items", {})
        keyed = schema[LIST_TYPE] == "map"
        whole = [
            _merged(each, theirs[name], items) if keyed and name in theirs else copied(each)
            for name, each in ours.items()
        ]
        return whole + [copied(each) for name, each in theirs.items() if name not in ours]
    return copied(config)
