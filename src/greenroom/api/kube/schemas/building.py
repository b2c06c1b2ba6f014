"""Short hands for writing schemas. Each returns a new node; the first argument is always the description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]
"""A node of a structural schema."""

LIST_TYPE = "x-kubernetes-list-type"
LIST_KEYS = "x-kubernetes-list-map-keys"
MAP_TYPE = "x-kubernetes-map-type"
MERGE_KEY = "x-kubernetes-patch-merge-key"
STRATEGY = "x-kubernetes-patch-strategy"
PRESERVE = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"
IMMUTABLE = "x-greenroom-immutable"
"""On a field that may not change once the object exists; in a CustomResourceDefinition it would be a CEL rule."""


def text(description: str, *, enum: Sequence[str] = (), **more: Any) -> Schema:
    """A string."""
    said: Schema = {"type": "string", "description": description, **more}
    if enum:
        said["enum"] = list(enum)
    return said


def instant(description: str, **more: Any) -> Schema:
    """An RFC 3339 instant."""
    return {"type": "string", "format": "date-time", "description": description, **more}


def integer(description: str, *, bits: int = 32, **more: Any) -> Schema:
    """A whole number of so many bits."""
    return {"type": "integer", "format": f"int{bits}", "description": description, **more}


def boolean(description: str, **more: Any) -> Schema:
    """True or false."""
    return {"type": "boolean", "description": description, **more}


def quantity(description: str) -> Schema:
    """An amount such as `500m` or `2Gi`: a number, or a text with a unit."""
    return {
        INT_OR_STRING: True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "description": description,
        "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$",
    }


def int_or_string(description: str) -> Schema:
    """A number or a name, as ports have."""
    return {
        INT_OR_STRING: True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "description": description,
    }


def record(
    description: str,
    properties: dict[str, Schema],
    *,
    required: Sequence[str] = (),
    open_ended: bool = False,
    whole: bool = False,
) -> Schema:
    """An object with fields. `open_ended` keeps fields that are not known, `whole` is replaced as a whole."""
    said: Schema = {"type": "object", "description": description, "properties": properties}
    if required:
        said["required"] = list(required)
    if open_ended:
        said[PRESERVE] = True
    if whole:
        said[MAP_TYPE] = "atomic"
    return said


def mapping(description: str, values: Schema | None = None, **more: Any) -> Schema:
    """An object with free keys; its values are texts unless told."""
    return {
        "type": "object",
        "description": description,
        "additionalProperties": {"type": "string"} if values is None else values,
        **more,
    }


def atomic(description: str, items: Schema, **more: Any) -> Schema:
    """A list that is replaced as a whole."""
    return {"type": "array", "description": description, "items": items, LIST_TYPE: "atomic", **more}


def unique(description: str, items: Schema, **more: Any) -> Schema:
    """A list of scalars in which each is there once; patches merge it."""
    return {
        "type": "array",
        "description": description,
        "items": items,
        LIST_TYPE: "set",
        STRATEGY: "merge",
        **more,
    }


def keyed(description: str, items: Schema, *keys: str, **more: Any) -> Schema:
    """A list whose items are known by the values of `keys`; patches merge it by the first of them."""
    return {
        "type": "array",
        "description": description,
        "items": items,
        LIST_TYPE: "map",
        LIST_KEYS: list(keys),
        MERGE_KEY: keys[0],
        STRATEGY: "merge",
        **more,
    }


def anything(description: str) -> Schema:
    """An object that is kept as it comes."""
    return {"type": "object", "description": description, PRESERVE: True}
