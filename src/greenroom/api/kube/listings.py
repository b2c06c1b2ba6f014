"""The bodies of lists, in pieces that are made as they are sent.

A list of many objects is never in memory as a whole: rows (`rows`) give texts that they keep, and a few hundred of
them are joined at a time. The bytes are those that encoding the whole list would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from greenroom.api.kube import tables
from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.objects import Object, metadata_of
from greenroom.api.kube.options import Answering
from greenroom.api.kube.paging import Page
from greenroom.api.kube.rows import Item, Row, object_of

BATCH: Final = 512
"""Objects that are encoded, and sent, at a time, at most."""
PIECE: Final = 1 << 20
"""Bytes of a piece, about: more than `BATCH` objects of the usual size have, so only large ones make it shorter."""
FIRST: Final = 16
"""Objects of the first piece: then it is known how large they are."""
_PARTIAL: Final = b'{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":'

Pieces = list[bytes]
Add = Callable[[Pieces, Sequence[Item]], None]
"""Adds the texts of some items, each with a comma before it."""


def chunks(kind: Kind, page: Page, answer: Answering, now: datetime) -> Iterator[bytes]:
    """A list in the form that was asked for."""
    if answer.form == "table":
        head = {
            "kind": "Table",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": page.metadata,
            "columnDefinitions": tables.definitions(kind),
        }
        return _list(head, b"rows", page.objects, _rows(kind, answer, now))
    if answer.form == "partial":
        head = {
            "kind": "PartialObjectMetadataList",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": page.metadata,
        }
        return _list(head, b"items", page.objects, _each(_partial))
    head = {"kind": kind.list_name, "apiVersion": kind.api_version, "metadata": page.metadata}
    return _list(head, b"items", page.objects, _wholes)


def _list(head: Object, name: bytes, items: Sequence[Item], add: Add) -> Iterator[bytes]:
    beginning = b'%s,"%s":[' % (msgspec.json.encode(head)[:-1], name)
    if not items:
        yield beginning + b"]}"
        return
    first, many = 0, FIRST
    while first < len(items):
        pieces: Pieces = []
        add(pieces, items[first : first + many])
        if first == 0:
            pieces[0] = pieces[0].removeprefix(b",")
            pieces.insert(0, beginning)
        if first + many >= len(items):
            pieces.append(b"]}")
        piece = b"".join(pieces)
        yield piece
        first += many
        # Objects may be a thousand times larger than is usual, and a piece waits for whoever reads slowly.
        many = max(1, min(BATCH, 32 * many, many * PIECE // len(piece)))


def _each(one: Callable[[Pieces, Item], None]) -> Add:
    def add(pieces: Pieces, items: Sequence[Item]) -> None:
        for item in items:
            pieces.append(b",")
            one(pieces, item)

    return add


def _wholes(pieces: Pieces, items: Sequence[Item]) -> None:
    comma = b","
    for item in items:
        pieces.append(comma)
        if isinstance(item, Row):
            pieces += item.json()
        else:
            pieces.append(msgspec.json.encode(item))


def _whole(pieces: Pieces, item: Item) -> None:
    if isinstance(item, Row):
        pieces += item.json()
    else:
        pieces.append(msgspec.json.encode(item))


def _partial(pieces: Pieces, item: Item) -> None:
    if isinstance(item, Row):
        pieces += (_PARTIAL, item.metadata(), b"}")
    else:
        pieces.append(msgspec.json.encode(tables.partial(item)))


def _rows(kind: Kind, answer: Answering, now: datetime) -> Add:
    cells_of = tables.cells(kind, now)
    present = now.timestamp()
    ages: dict[int, bytes] = {}
    include = answer.include
    between = {"None": b"", "Metadata": b',"object":' + _PARTIAL, "Object": b',"object":'}[include]
    # What stands between the cells of a row that makes them itself, but for its age, and its object.
    parted = {"None": b"}", "Metadata": b"}}", "Object": b"}"}[include]

    def age_of(born: int) -> bytes:
        return b',"%s"]%s' % (tables.human_duration(present - born).encode(), between)

    def add(pieces: Pieces, items: Sequence[Item]) -> None:
        # This loop is what most of the time of a long table goes into.
        begin, whole, bare = b',{"cells":', include == "Object", include == "None"
        for item in items:
            told = item.told() if isinstance(item, Row) else None
            if told is None:
                shown: Any = object_of(item)
                cells, metadata = msgspec.json.encode(cells_of(shown)) + between, _metadata(shown)
                pieces += (begin, cells)
            else:
                head, born, metadata = told
                # A timestamp has whole seconds, so there are few.
                if (age := ages.get(born)) is None:
                    age = ages[born] = age_of(born)
                pieces += (begin, head, age)
            if whole:
                _whole(pieces, item)
                pieces.append(parted)
            elif bare:
                pieces.append(parted)
            else:
                pieces += (metadata, parted)

    return add


def _metadata(obj: Object) -> bytes:
    return msgspec.json.encode(metadata_of(obj))
