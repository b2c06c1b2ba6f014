"""Objects that are made when somebody looks: what a storage lists that synthesizes its objects.

A list of 50,000 is joined from texts that each row has made once, not from 50,000 dicts; a selector asks a row for its
labels alone. Whoever wants the object itself calls `object_of`. Rows never change: another state is another row.
Everything that handles objects of a storage takes plain objects and rows alike (`Item`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from greenroom.api.kube.objects import Key, Object, key_of, metadata_of


class Row:
    """One object that a storage could make."""

    __slots__ = ("key",)

    key: Key

    def object(self) -> Object:
        """The object, made anew."""
        raise NotImplementedError

    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        labels: Mapping[str, str] = metadata_of(self.object()).get("labels") or {}
        return labels

    def field(self, name: str) -> str | None:
        """The text that field selectors compare of this field, or None where the object has to be asked."""
        return None

    def weight(self) -> int:
        """About how many bytes its JSON has."""
        return LIGHT

    def json(self) -> tuple[bytes, ...]:
        """The object's JSON, in pieces."""
        return (msgspec.json.encode(self.object()),)

    def metadata(self) -> bytes:
        """JSON of its metadata."""
        return msgspec.json.encode(metadata_of(self.object()))

    def told(self) -> tuple[bytes, int, bytes] | None:
        """What its row of a table needs: JSON of its cells without the closing bracket and the last cell, which is its
        age; when it was made, in whole Unix seconds; JSON of its metadata. None where it has all to be found in the
        object."""
        return None


LIGHT: Final = 1 << 10
"""Bytes of an object, where nothing better is known."""
Item = Object | Row
Items = Sequence[Object] | Sequence[Row]
Make = Callable[[], Object]


def object_of(item: Item) -> Object:
    """The object of an item."""
    return item.object() if isinstance(item, Row) else item


def key_of_item(item: Item) -> Key:
    """Where it is found."""
    return item.key if isinstance(item, Row) else key_of(item)
