"""Sets of fields, as `metadata.managedFields` keeps them: which parts of an object somebody set.

A path is a tuple of elements in the spelling of FieldsV1: `f:name` for a field, `k:{"name":"a"}` for an item of a list
that goes by keys, `v:"a"` for an item of a set. `flattened` takes an object apart into the paths that can be owned;
differences of objects and conflicts of owners are then operations on sets. Source: "Server-Side Apply" in Kubernetes'
documentation, and the rules of sigs.k8s.io/structured-merge-diff for what has a path of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from greenroom.api.kube.objects import same
from greenroom.api.kube.schemas.building import LIST_KEYS, LIST_TYPE, MAP_TYPE, Schema

Path = tuple[str, ...]
FieldSet = frozenset[Path]

MEMBER: Final = object()
"""Stands for the value of a path that only says that an item, or a key of a free map, is there."""
DEPTH_LIMIT = 64
FIELDS_LIMIT = 20_000
"""Paths in one set."""
_NOTHING: Schema = {}
NOTHING: FieldSet = frozenset()


class Malformed(ValueError):
    """A FieldsV1 tree that is none, or an object whose list items have no keys."""


def field_element(name: str) -> str:
    """The path element of a field."""
    return f"f:{name}"


def item_element(item: Any, schema: Schema) -> str:
    """The path element of a list item, by the schema of the list. Raises Malformed for one without its keys."""
    if schema.get(LIST_TYPE) == "set":
        return f"v:{_compact(item)}"
    fields: dict[str, Schema] = schema.get("items", _NOTHING).get("properties", {})
    if not isinstance(item, dict):
        raise Malformed("an item of a list with keys has to be an object")
    keys: dict[str, Any] = {}
    for name in schema[LIST_KEYS]:
        value = item.get(name, fields.get(name, _NOTHING).get("default"))
        if value is None:
            raise Malformed(f"an item of a list has no {name}, which is its key")
        keys[name] = value
    return f"k:{_compact(keys)}"


def is_atomic(value: Any, schema: Schema) -> bool:
    """Whether a value is owned as a whole: scalars, and what the schema does not let merge."""
    if isinstance(value, dict):
        return schema.get(MAP_TYPE) == "atomic"
    return not (isinstance(value, list) and schema.get(LIST_TYPE) in ("set", "map"))


def inner_schema(name: str, schema: Schema) -> Schema:
    """The schema of a field, an empty one for what is not described."""
    fields: dict[str, Schema] = schema.get("properties", {})
    found = fields.get(name)
    if found is None:
        found = schema.get("additionalProperties")
    return _NOTHING if found is None else found


def flattened(value: Any, schema: Schema) -> dict[Path, Any]:
    """Every path of an object that can be owned, with the value there. Raises Malformed."""
    found: dict[Path, Any] = {}
    _flatten(value, schema, (), found)
    return found


def _flatten(value: Any, schema: Schema, path: Path, found: dict[Path, Any]) -> None:
    if is_atomic(value, schema):
        found[path] = value
    elif isinstance(value, dict):
        fields = schema.get("properties", _NOTHING)
        for name, each in value.items():
            inner = inner_schema(name, schema)
            at = (*path, field_element(name))
            if each == {} and isinstance(each, dict):
                found[at] = each
                continue
            if name not in fields:
                found[at] = MEMBER
            _flatten(each, inner, at, found)
    else:
        items = schema.get("items", _NOTHING)
        for each in value:
            at = (*path, item_element(each, schema))
            if at in found:
                raise Malformed(f"a list has two items {at[-1][:80]}")
            found[at] = MEMBER
            _flatten(each, items, at, found)


def compared(old: Mapping[Path, Any], new: Mapping[Path, Any]) -> tuple[FieldSet, FieldSet]:
    """What differs between two flattened objects: paths that are new or have another value, and those that went."""
    changed = frozenset(
        path for path, value in new.items() if path not in old or not _equal(old[path], value)
    )
    return changed, frozenset(old.keys() - new.keys())


def _equal(one: Any, other: Any) -> bool:
    return one is other or (one is not MEMBER and other is not MEMBER and same(one, other))


def within(paths: Iterable[Path]) -> FieldSet:
    """The paths and everything they are within."""
    return frozenset(path[:length] for path in paths for length in range(1, len(path) + 1))


def without(value: Any, schema: Schema, gone: FieldSet, kept: FieldSet, path: Path = ()) -> Any:
    """A copy of `value` without the paths in `gone`, and without what is empty because of that.

    `kept` are paths that stay although what was in them has gone.
    """
    if isinstance(value, dict) and not is_atomic(value, schema):
        left: Any = {}
        for name, each in value.items():
            at = (*path, field_element(name))
            if at not in gone:
                rest = without(each, inner_schema(name, schema), gone, kept, at)
                if rest or rest == each or at in kept or not isinstance(rest, dict | list):
                    left[name] = rest
        return left
    if isinstance(value, list) and not is_atomic(value, schema):
        items = schema.get("items", _NOTHING)
        elements = [((*path, item_element(each, schema)), each) for each in value]
        return [without(each, items, gone, kept, at) for at, each in elements if at not in gone]
    return value


def encoded(fields: FieldSet) -> dict[str, Any]:
    """The FieldsV1 tree of a set."""
    tree: dict[str, Any] = {}
    for path in sorted(fields):
        node = tree
        for element in path:
            node = node.setdefault(element, {})
        # A path that is a member and has others below it says so with a dot.
        node["."] = {}
    _undot(tree)
    return tree


def _undot(node: dict[str, Any]) -> None:
    for each in node.values():
        if each.keys() == {"."}:
            del each["."]
        else:
            _undot(each)


def decoded(tree: Any) -> FieldSet:
    """The set of a FieldsV1 tree. Raises Malformed."""
    found: set[Path] = set()
    _collect(tree, (), found)
    return frozenset(found)


def _collect(node: Any, path: Path, found: set[Path]) -> None:
    if not isinstance(node, dict):
        raise Malformed("a node of FieldsV1 has to be an object")
    if len(path) > DEPTH_LIMIT or len(found) > FIELDS_LIMIT:
        raise Malformed("there are too many managed fields")
    if path and (not node or "." in node):
        found.add(path)
    for element, each in node.items():
        if element != ".":
            _collect(each, (*path, _checked(element)), found)


def _checked(element: str) -> str:
    kind, colon, rest = element.partition(":")
    if not colon or kind not in ("f", "k", "v", "i"):
        raise Malformed(f"{element[:80]!r} is no path element")
    if kind == "f":
        return element
    try:
        value = json.loads(rest)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{element[:80]!r} is no path element") from error
    if kind == "k" and not isinstance(value, dict):
        raise Malformed(f"{element[:80]!r} has no keys")
    return f"{kind}:{_compact(value)}"


def shown(path: Path) -> str:
    """A path as errors spell it: `.spec.env[name="a"].value`."""
    text = ""
    for element in path:
        kind, _, rest = element.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "k":
            keys = json.loads(rest)
            text += "[" + ",".join(f"{name}={_compact(value)}" for name, value in sorted(keys.items())) + "]"
        elif kind == "v":
            text += f"[={rest}]"
        else:
            text += f"[{rest}]"
    return text


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
