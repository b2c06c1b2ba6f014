"""Tables: what `kubectl get` shows, made by the server from a kind's printer columns.

Pure. Columns find their values by a JSONPath of the simple kind that CustomResourceDefinitions allow: fields, an
index, or a filter for equality. Sources: "Receiving resources as Tables" in "Kubernetes API Concepts"; ages read as
apimachinery's `duration.HumanDuration`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.negotiation import Include
from greenroom.api.kube.objects import Object, instant_of, metadata_of

UNKNOWN = "<unknown>"
_STEP = re.compile(
    r"\.(?P<field>[A-Za-z_][\w-]*)|\[(?P<index>\d+)\]|\[\?\(@\.(?P<key>[\w.-]+)==['\"](?P<value>[^'\"]*)['\"]\)\]"
)
Step = Callable[[Any], Any]


def human_duration(seconds: float) -> str:
    """A duration with as many digits as matter: 90s, 5m, 3h20m, 12d."""
    whole = int(seconds)
    if whole < -1:
        return "<invalid>"
    if whole < 0:
        return "0s"
    if whole < 120:
        return f"{whole}s"
    minutes = whole // 60
    if minutes < 10:
        return f"{minutes}m{whole % 60}s" if whole % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    hours = minutes // 60
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if hours < 192:
        return f"{hours // 24}d{hours % 24}h" if hours % 24 else f"{hours // 24}d"
    days = hours // 24
    if days < 730:
        return f"{days}d"
    if days < 2920:
        return f"{days // 365}y{days % 365}d" if days % 365 else f"{days // 365}y"
    return f"{days // 365}y"


def age(stamp: object, now: datetime) -> str:
    """How long ago an RFC 3339 instant was."""
    instant = instant_of(stamp)
    return UNKNOWN if instant is None else human_duration((now - instant).total_seconds())


@lru_cache(maxsize=256)
def _finder(path: str) -> Step:
    """What finds the value at a JSONPath, or None."""
    steps: list[Step] = []
    fields: list[str] = []
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            raise ValueError(f"{path!r} is no path that columns can have")
        found = step.groupdict()
        if found["field"] is not None:
            fields.append(found["field"])
        else:
            steps += [_fields(tuple(fields)), _step(found["index"], found["key"], found["value"])]
            fields = []
        at = step.end()
    steps.append(_fields(tuple(fields)))
    if len(steps) == 1:
        return steps[0]

    def find(node: Any) -> Any:
        for each in steps:
            node = each(node)
            if node is None:
                return None
        return node

    return find


def _fields(names: tuple[str, ...]) -> Step:
    # Most of the time of a long table is spent here.
    def find(node: Any) -> Any:
        for name in names:
            if not isinstance(node, dict):
                return None
            node = node.get(name)
        return node

    return find


def _step(index: str | None, key: str | None, value: str | None) -> Step:
    if index is not None:
        place = int(index)
        return lambda node: node[place] if isinstance(node, list) and place < len(node) else None

    def first(node: Any) -> Any:
        if not isinstance(node, list):
            return None
        return next((each for each in node if isinstance(each, dict) and each.get(key) == value), None)

    return first


def lookup(obj: Object, path: str) -> Any:
    """The value at a JSONPath, or None."""
    return _finder(path)(obj)


@lru_cache(maxsize=1024)
def _instant(stamp: str) -> float | None:
    instant = instant_of(stamp)
    return None if instant is None else instant.timestamp()


def cells(kind: Kind, now: datetime) -> Callable[[Object], list[Any]]:
    """What makes the cells of an object: the name, then a value for each column."""
    present = now.timestamp()
    columns = [(_finder(column.path), column.type, column.cell) for column in kind.columns]

    def of(obj: Object) -> list[Any]:
        made: list[Any] = [metadata_of(obj).get("name", "")]
        for find, kind_of, make in columns:
            value = find(obj)
            if make is not None:
                value = make(value)
            if kind_of == "date":
                instant = _instant(value) if isinstance(value, str) else None
                value = UNKNOWN if instant is None else human_duration(present - instant)
            elif kind_of == "string":
                value = "" if value is None else str(value)
            made.append(value)
        return made

    return of


def definitions(kind: Kind) -> list[Object]:
    """The columns' descriptions; the name comes first."""
    name = {
        "name": "Name",
        "type": "string",
        "format": "name",
        "description": "The name, unique for its kind within a namespace.",
        "priority": 0,
    }
    return [
        name,
        *(
            {
                "name": column.name,
                "type": column.type,
                "format": "",
                "description": column.description,
                "priority": column.priority,
            }
            for column in kind.columns
        ),
    ]


def partial(obj: Object) -> Object:
    """The object's metadata alone."""
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata_of(obj),
    }


def table(
    objects: Sequence[Object],
    kind: Kind,
    now: datetime,
    *,
    include: Include = "Metadata",
    metadata: Object | None = None,
    headed: bool = True,
) -> Object:
    """The table of some objects. `headed` is for all but the further events of a watch."""
    make = cells(kind, now)
    rows: list[Object] = [{"cells": make(obj)} for obj in objects]
    if include != "None":
        for row, obj in zip(rows, objects, strict=True):
            row["object"] = obj if include == "Object" else partial(obj)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata or {},
        "columnDefinitions": definitions(kind) if headed else [],
        "rows": rows,
    }
