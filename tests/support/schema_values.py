"""Values that structural schemas allow: drawn by hypothesis, or one with every field there is."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from greenroom.api.kube.schemas.building import INT_OR_STRING, LIST_KEYS, LIST_TYPE, PRESERVE

_NAMES = st.sampled_from(["a", "b", "c", "d"])


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema. Names are few, so that two values have something to do with each other."""
    if schema.get(INT_OR_STRING):
        return st.sampled_from([1, "2"])
    kind = schema["type"]
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(
            schema.get("minimum", 0), min(schema.get("maximum", 5), schema.get("minimum", 0) + 4)
        )
    if kind == "string":
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if schema.get("format") == "date-time":
            return st.sampled_from(["2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z"])
        return _NAMES
    if kind == "array":
        return _lists(schema)
    if "properties" in schema:
        fields = {name: values(each) for name, each in schema["properties"].items()}
        needed = {name: fields.pop(name) for name in schema.get("required", [])}
        return st.fixed_dictionaries(needed, optional=fields)
    if "additionalProperties" in schema:
        return st.dictionaries(_NAMES, values(schema["additionalProperties"]), max_size=3)
    assert schema.get(PRESERVE)
    return st.dictionaries(_NAMES, st.integers(0, 3), max_size=2)


def _lists(schema: dict[str, Any]) -> st.SearchStrategy[list[Any]]:
    items = values(schema["items"])
    fewest = schema.get("minItems", 0)
    if schema[LIST_TYPE] == "set":
        return st.lists(items, max_size=3, min_size=fewest, unique=True)
    if schema[LIST_TYPE] == "map":
        fields = schema["items"]["properties"]

        def identity(item: dict[str, Any]) -> str:
            return json.dumps([item.get(key, fields[key].get("default")) for key in schema[LIST_KEYS]])

        return st.lists(items, max_size=3, min_size=fewest, unique_by=identity)
    return st.lists(items, max_size=2, min_size=fewest)


def full(schema: dict[str, Any]) -> Any:
    """A value with every field that the schema knows."""
    if schema.get(INT_OR_STRING):
        return "1"
    kind = schema["type"]
    if kind == "object":
        if "properties" in schema:
            return {name: full(each) for name, each in schema["properties"].items()}
        inner = schema.get("additionalProperties")
        return {"key": full(inner)} if inner else {"key": {"deep": [1]}}
    if kind == "array":
        return [full(schema["items"])]
    if kind == "boolean":
        return True
    if kind == "integer":
        return schema.get("minimum", 1)
    if "enum" in schema:
        return schema["enum"][0]
    return "2026-01-01T00:00:00Z" if schema.get("format") == "date-time" else "text"
