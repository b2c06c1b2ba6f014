"""Tables: what `kubectl get` shows, made by the server from a kind's printer columns.

Pure. Columns find their values by a JSONPath of the simple kind that CustomResourceDefinitions allow: fields, an
index, or a filter for equality. Sources: "Receiving resources as Tables" in "Kubernetes API Concepts"; ages read as
apimachinery's `duration.HumanDuration`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

from greenroom.api.kube.kinds import Column, Kind
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
def _steps(path: str) -> tuple[Step, ...]:
    steps: list[Step] = []
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            raise ValueError(f"{path!r} is no path that columns can have")
        steps.append(_step(**step.groupdict()))
        at = step.end()
    return tuple(steps)


def _step(field: str | None, index: str | None, key: str | None, value: str | None) -> Step:
    if field is not None:
        return lambda node: node.get(field) if isinstance(node, dict) else None
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
    found: Any = obj
    for step in _steps(path):
        if found is None:
            return None
        found = step(found)
    return found


def cell(obj: Object, column: Column, now: datetime) -> Any:
    """What a column shows of an object."""
    found = lookup(obj, column.path)
    if column.type == "date":
        return age(found, now)
    if found is None:
        return None if column.type in ("integer", "number", "boolean") else ""
    return found if column.type in ("integer", "number", "boolean") else str(found)


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


def row(obj: Object, kind: Kind, include: Include, now: datetime) -> Object:
    """One object's row."""
    made: Object = {
        "cells": [metadata_of(obj).get("name", ""), *(cell(obj, column, now) for column in kind.columns)]
    }
    if include == "Metadata":
        made["object"] = partial(obj)
    elif include == "Object":
        made["object"] = obj
    return made


def table(
    objects: Iterable[Object],
    kind: Kind,
    now: datetime,
    *,
    include: Include = "Metadata",
    metadata: Object | None = None,
    headed: bool = True,
) -> Object:
    """The table of some objects. `headed` is for all but the further events of a watch."""
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata or {},
        "columnDefinitions": definitions(kind) if headed else [],
        "rows": [row(obj, kind, include, now) for obj in objects],
    }
