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
from greenroom.api.kube.objects import Object
from greenroom.api.kube.options import Answering
from greenroom.api.kube.paging import Page
from greenroom.api.kube.rows import Item, Row, object_of

BATCH: Final = 512
"""Objects that are encoded, and sent, at a time."""
_PARTIAL: Final = b'{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":'

Pieces = list[bytes]
Add = Callable[[Pieces, Item], None]


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
        return _list(head, b"items", page.objects, _partial)
    head = {"kind": kind.list_name, "apiVersion": kind.api_version, "metadata": page.metadata}
    return _list(head, b"items", page.objects, _whole)


def _list(head: Object, name: bytes, items: Sequence[Item], add: Add) -> Iterator[bytes]:
    pieces: Pieces = [msgspec.json.encode(head)[:-1], b',"', name, b'":[']
    for first in range(0, len(items), BATCH):
        for place, item in enumerate(items[first : first + BATCH], first):
            if place:
                pieces.append(b",")
            add(pieces, item)
        yield b"".join(pieces)
        pieces = []
    pieces.append(b"]}")
    yield b"".join(pieces)


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

    def add(pieces: Pieces, item: Item) -> None:
        head = item.cells() if isinstance(item, Row) else None
        if head is None:
            shown: Any = object_of(item)
            pieces += (b'{"cells":', msgspec.json.encode(cells_of(shown)))
        else:
            assert isinstance(item, Row)  # noqa: S101
            born = int(item.born())
            age = ages.get(born)
            if age is None:
                # A timestamp has whole seconds, so there are few.
                age = ages[born] = b',"%s"]' % tables.human_duration(present - born).encode()
            pieces += (b'{"cells":', head, age)
        if include == "None":
            pieces.append(b"}")
        else:
            pieces.append(b',"object":')
            (_partial if include == "Metadata" else _whole)(pieces, item)
            pieces.append(b"}")

    return add
