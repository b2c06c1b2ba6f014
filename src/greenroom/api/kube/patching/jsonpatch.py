"""JSON patch (RFC 6902) with JSON pointers (RFC 6901)."""

from __future__ import annotations

import re
from typing import Any

from greenroom.api.kube.objects import copied, same
from greenroom.api.kube.status import StatusError, bad_request

OPERATIONS_LIMIT = 1_000
COPIED_LIMIT = 100_000
"""Values that all `copy` operations of a patch may make; each may double the document, so few would fill memory."""
TEXT = 16
"""Characters of a text that count as one value more."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_KINDS = ("add", "remove", "replace", "move", "copy", "test")


class _Failed(Exception):
    """An operation that cannot be done; the text says why."""


def apply_json_patch(document: Any, patch: Any) -> Any:
    """The patched copy of `document`.

    Raises 400 for what is no patch, 422 (Invalid) for one that this document does not take.
    """
    if not isinstance(patch, list):
        raise bad_request("a JSON patch is a list of operations")
    if len(patch) > OPERATIONS_LIMIT:
        raise StatusError(
            413,
            "RequestEntityTooLarge",
            f"The allowed maximum operations in a JSON patch is {OPERATIONS_LIMIT}, got {len(patch)}",
        )
    checked = [_checked(operation) for operation in patch]
    result, allowance = copied(document), COPIED_LIMIT
    for number, operation in enumerate(checked):
        try:
            result, allowance = _apply(result, operation, allowance)
        except _Failed as error:
            said = f"the server rejected our request due to an error in our request: operation {number} of the patch"
            raise StatusError(422, "Invalid", f"{said}: {error}") from error
    return result


def _checked(operation: Any) -> dict[str, Any]:
    if not isinstance(operation, dict) or operation.get("op") not in _KINDS:
        raise bad_request(f"an operation of a JSON patch has an op of {', '.join(_KINDS)}")
    kind = operation["op"]
    needed = ["path", *(["from"] if kind in ("move", "copy") else [])]
    for name in needed:
        pointer = operation.get(name)
        if not isinstance(pointer, str) or (pointer and not pointer.startswith("/")):
            raise bad_request(f"{kind} needs a JSON pointer in {name}")
    if kind in ("add", "replace", "test") and "value" not in operation:
        raise bad_request(f"{kind} needs a value")
    return operation


def _apply(document: Any, operation: dict[str, Any], allowance: int) -> tuple[Any, int]:
    path = _parsed(operation["path"])
    match operation["op"]:
        case "add":
            return _add(document, path, copied(operation["value"])), allowance
        case "remove":
            return _remove(document, path)[0], allowance
        case "replace":
            if not path:
                return copied(operation["value"]), allowance
            _found(document, path)
            parent = _found(document, path[:-1])
            parent[_place(parent, path[-1])] = copied(operation["value"])
            return document, allowance
        case "move":
            source = _parsed(operation["from"])
            if path[: len(source)] == source and path != source:
                raise _Failed("a value cannot be moved into itself")
            document, value = _remove(document, source) if path != source else (document, None)
            return (_add(document, path, value) if path != source else document), allowance
        case "copy":
            value = _found(document, _parsed(operation["from"]))
            allowance -= _count(value)
            if allowance < 0:
                raise _Failed("it copies too much")
            return _add(document, path, copied(value)), allowance
    if not same(_found(document, path), operation["value"]):
        raise _Failed(f"testing path {operation['path']} failed: the value is another one")
    return document, allowance


def _parsed(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _found(document: Any, path: list[str]) -> Any:
    for part in path:
        place = _place(document, part)
        try:
            document = document[place]
        except (KeyError, IndexError):
            raise _Failed(f"there is nothing at {part[:80]!r}") from None
    return document


def _place(parent: Any, part: str) -> Any:
    """`part` as a key or an index of `parent`."""
    if isinstance(parent, dict):
        return part
    if not isinstance(parent, list):
        raise _Failed(f"there is nothing below which {part[:80]!r} could be")
    if not _INDEX.fullmatch(part):
        raise _Failed(f"{part[:80]!r} is no index of a list")
    return int(part)


def _add(document: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent = _found(document, path[:-1])
    if isinstance(parent, list):
        at = len(parent) if path[-1] == "-" else _place(parent, path[-1])
        if at > len(parent):
            raise _Failed(f"{at} is behind the end of the list")
        parent.insert(at, value)
    else:
        parent[_place(parent, path[-1])] = value
    return document


def _remove(document: Any, path: list[str]) -> tuple[Any, Any]:
    if not path:
        return None, document
    value = _found(document, path)
    parent = _found(document, path[:-1])
    del parent[_place(parent, path[-1])]
    return document, value


def _count(value: Any) -> int:
    if isinstance(value, str):
        return 1 + len(value) // TEXT
    if isinstance(value, dict):
        return 1 + sum(_count(name) + _count(each) for name, each in value.items())
    if isinstance(value, list):
        return 1 + sum(_count(each) for each in value)
    return 1
