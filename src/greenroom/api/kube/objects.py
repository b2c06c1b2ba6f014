"""Objects as this API handles them: decoded JSON, and the few things every module asks of one.

An object is a plain `dict` in the form in which it travels. Whoever was handed one by a storage or by the watch
cache must not change it, because others hold the same one: `copied` first.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object, or any JSON object."""
Key = tuple[str, str]
"""Namespace ("" for what has none) and name."""

_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d:\d\d)(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def metadata_of(obj: Object) -> Object:
    """The object's metadata, or an empty one that is not part of it."""
    found = obj.get("metadata")
    return found if isinstance(found, dict) else {}


def key_of(obj: Object) -> Key:
    """Where the object is found."""
    metadata = metadata_of(obj)
    return (metadata.get("namespace") or "", metadata.get("name") or "")


def version_of(obj: Object) -> int:
    """The object's resourceVersion as a number, 0 when it has none."""
    text = metadata_of(obj).get("resourceVersion") or "0"
    return int(text) if text.isascii() and text.isdigit() else 0


def copied(value: Any) -> Any:
    """A copy of decoded JSON that shares nothing that can change."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. Unlike Python's, JSON's `true` is not its `1`; 1 and 1.0 are one number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(value, other[name]) for name, value in one.items())
        )
    if isinstance(one, list):
        return (
            isinstance(other, list)
            and len(one) == len(other)
            and all(same(*pair) for pair in zip(one, other, strict=True))
        )
    return bool(one == other)


def instant_of(text: object) -> datetime | None:
    """The instant that an RFC 3339 text names, or None when it is none."""
    if not isinstance(text, str) or (found := _INSTANT.fullmatch(text)) is None:
        return None
    day, clock, fraction, zone = found.groups()
    offset = "+00:00" if zone in "Zz" else zone
    try:
        return datetime.fromisoformat(f"{day}T{clock}{(fraction or '')[:7]}{offset}")
    except ValueError:
        return None


def rfc3339(instant: datetime) -> str:
    """An instant as Kubernetes' `metav1.Time` writes it: UTC, whole seconds."""
    return instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
