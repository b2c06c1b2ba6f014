"""Strategic merge patch: a merge patch that knows from the schema how to merge lists.

A list whose schema has `x-kubernetes-patch-strategy: merge` is merged by its `x-kubernetes-patch-merge-key`, or as a
set when its items are scalars; any other list is replaced. (A merge key is one field, so ports are merged by their
number alone, here as in Kubernetes; server-side apply knows their protocol.)
Directives: `$patch` (merge, replace, delete),
`$deleteFromPrimitiveList/<list>`, `$setElementOrder/<list>`, `$retainKeys`. Sources: "Update API Objects in Place
Using kubectl patch" and sig-api-machinery's "Strategic Merge Patch".
"""

from __future__ import annotations

import json
from typing import Any

from greenroom.api.kube.objects import copied
from greenroom.api.kube.schemas.building import MERGE_KEY, STRATEGY, Schema
from greenroom.api.kube.status import StatusError, bad_request

_DIRECTIVE = "$patch"
_RETAIN = "$retainKeys"
_DELETE = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"
_NOTHING: Schema = {}


def apply_strategic_patch(target: Any, patch: Any, schema: Schema) -> Any:
    """The patched copy of `target`. Raises 400 for directives that are none."""
    if not isinstance(patch, dict):
        raise bad_request("a strategic merge patch is an object")
    return _merged(target if isinstance(target, dict) else {}, patch, schema)


def _merged(target: dict[str, Any], patch: dict[str, Any], schema: Schema) -> dict[str, Any]:
    match patch.get(_DIRECTIVE, "merge"):
        case "replace":
            return {name: _plain(value) for name, value in _without_directives(patch).items()}
        case "delete":
            return {}
        case "merge":
            pass
        case other:
            raise _unknown(_DIRECTIVE, other)
    result: dict[str, Any] = copied(target)
    if (retain := patch.get(_RETAIN)) is not None:
        if not isinstance(retain, list):
            raise _unknown(_RETAIN, retain)
        result = {name: value for name, value in result.items() if name in retain}
    fields: dict[str, Schema] = schema.get("properties", _NOTHING)
    for name in _list_names(patch):
        _merge_list(result, name, patch, fields.get(name, _NOTHING))
    for name, value in patch.items():
        if name.startswith("$") or isinstance(value, list):
            continue
        inner: Schema = fields.get(name) or schema.get("additionalProperties") or _NOTHING
        before = result.get(name)
        if value is None:
            result.pop(name, None)
        elif not isinstance(value, dict):
            result[name] = value
        elif value.get(_DIRECTIVE) == "delete":
            result.pop(name, None)
        else:
            result[name] = _merged(before if isinstance(before, dict) else {}, value, inner)
    return result


def _list_names(patch: dict[str, Any]) -> list[str]:
    """The lists that a patch is about: given, taken from, or ordered."""
    names = dict.fromkeys(
        name for name, value in patch.items() if isinstance(value, list) and name[:1] != "$"
    )
    for name, value in patch.items():
        for prefix in (_DELETE, _ORDER):
            if name.startswith(prefix):
                if not isinstance(value, list):
                    raise _unknown(name, value)
                names[name.removeprefix(prefix)] = None
    return list(names)


def _merge_list(result: dict[str, Any], name: str, patch: dict[str, Any], schema: Schema) -> None:
    before = result.get(name)
    given = patch.get(name)
    if given is None and name in patch:
        result.pop(name, None)
        return
    if schema.get(STRATEGY) != "merge":
        if given is not None:
            result[name] = _plain(given)
        return
    target = before if isinstance(before, list) else []
    order = patch.get(_ORDER + name)
    if key := schema.get(MERGE_KEY):
        merged = _merge_keyed(target, given or [], key, schema.get("items", _NOTHING))
        known = (
            merged if order is None else _ordered(merged, target, order, lambda item: _identity(item, key))
        )
    else:
        gone = {_text(each) for each in patch.get(_DELETE + name, ())}
        kept = [each for each in target if _text(each) not in gone]
        seen = {_text(each) for each in kept}
        for each in given or []:
            if _text(each) not in seen:
                seen.add(_text(each))
                kept.append(each)
        known = kept if order is None else _ordered(kept, target, order, _text)
    if known or given is not None or before is not None:
        result[name] = known


def _merge_keyed(target: list[Any], given: list[Any], key: str, schema: Schema) -> list[Any]:
    for item in given:
        if not isinstance(item, dict):
            raise bad_request(f"an item of a list that is merged by {key} has to be an object")
    if any(item.get(_DIRECTIVE) == "replace" and key not in item for item in given):
        return [_plain(item) for item in given if item.get(_DIRECTIVE) != "replace"]
    merged = copied(target)
    places = {_identity(item, key): place for place, item in enumerate(merged)}
    gone: set[str] = set()
    for item in given:
        if key not in item:
            raise bad_request(f"map: {_text(item)[:80]} does not contain declared merge key: {key}")
        identity = _identity(item, key)
        directive = item.get(_DIRECTIVE)
        if directive == "delete":
            gone.add(identity)
            continue
        gone.discard(identity)
        if identity in places:
            merged[places[identity]] = _merged(merged[places[identity]], item, schema)
        else:
            places[identity] = len(merged)
            merged.append(_merged({}, item, schema))
    return [item for item in merged if _identity(item, key) not in gone]


def _ordered(merged: list[Any], target: list[Any], order: list[Any], identity: Any) -> list[Any]:
    """`merged` in the order that the patch wants; items it does not name stay before those they stood before."""
    wanted = {identity(each): place for place, each in enumerate(order)}
    was = {identity(each): place for place, each in enumerate(target)}
    named = sorted(
        (each for each in merged if identity(each) in wanted), key=lambda each: wanted[identity(each)]
    )
    others = [each for each in merged if identity(each) not in wanted]
    result: list[Any] = []
    for each in named:
        place = was.get(identity(each), len(target))
        while others and was.get(identity(others[0]), len(target)) < place:
            result.append(others.pop(0))
        result.append(each)
    return result + others


def _identity(item: Any, key: str) -> str:
    return _text(item.get(key)) if isinstance(item, dict) else _text(item)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _without_directives(patch: dict[str, Any]) -> dict[str, Any]:
    directives = (_DIRECTIVE, _RETAIN, _DELETE, _ORDER)
    return {
        name: each for name, each in patch.items() if each is not None and not name.startswith(directives)
    }


def _plain(value: Any) -> Any:
    """A copy of a patch's value as it becomes part of an object: without directives and nulls."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in _without_directives(value).items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def _unknown(directive: str, value: Any) -> StatusError:
    return bad_request(f"the strategic merge patch has an unknown {directive}: {_text(value)[:80]}")
