"""What a structural schema says about an object: fields it does not know, values it lacks, values it refuses.

Pure: `pruned` leaves unknown fields out and names them, `defaulted` fills in what is missing, `violations` tells
everything that is wrong, in the texts of apimachinery's `validation/field` and of the OpenAPI validation that
Kubernetes uses. Sources: "Extend the Kubernetes API with CustomResourceDefinitions" (structural schemas, pruning,
defaulting), "Kubernetes API Concepts" (field validation).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

from greenroom.api.kube.objects import Object, copied, instant_of, same
from greenroom.api.kube.schemas.building import (
    IMMUTABLE,
    INT_OR_STRING,
    LIST_KEYS,
    LIST_TYPE,
    PRESERVE,
    Schema,
)
from greenroom.api.kube.status import Cause, StatusError, bad_request

FieldValidation = Literal["Ignore", "Warn", "Strict"]
LEVELS: tuple[FieldValidation, ...] = ("Ignore", "Warn", "Strict")
NAMED = 64
"""Unknown or repeated fields that an answer names at most."""
_SHOWN = 80
"""Characters of a refused value that an error shows."""
_WIDTHS = {"int32": 31, "int64": 63}


def required(path: str, detail: str = "") -> Cause:
    """A value is missing."""
    return Cause("FieldValueRequired", f"Required value{': ' if detail else ''}{detail}", path)


def wrong(path: str, value: Any, detail: str) -> Cause:
    """A value cannot be."""
    return Cause("FieldValueInvalid", f"Invalid value: {shown(value)}: {detail}", path)


def wrong_type(path: str, value: Any, kind: str) -> Cause:
    """A value is of another type."""
    detail = f"{path} in body must be of type {kind}: {json.dumps(_type_of(value))}"
    return Cause("FieldValueTypeInvalid", f"Invalid value: {json.dumps(_type_of(value))}: {detail}", path)


def unsupported(path: str, value: Any, allowed: Sequence[Any]) -> Cause:
    """A value is none of those there are."""
    names = ", ".join(shown(each) for each in allowed)
    return Cause(
        "FieldValueNotSupported", f"Unsupported value: {shown(value)}: supported values: {names}", path
    )


def duplicate(path: str, value: Any) -> Cause:
    """A value is there twice."""
    return Cause("FieldValueDuplicate", f"Duplicate value: {shown(value)}", path)


def too_long(path: str, limit: int, what: str = "bytes") -> Cause:
    """A value is over its bound."""
    return Cause("FieldValueTooLong", f"Too long: may not be more than {limit} {what}", path)


def not_allowed(path: str, detail: str) -> Cause:
    """A value may not be there."""
    return Cause("FieldValueForbidden", f"Forbidden: {detail}", path)


def shown(value: Any) -> str:
    """A value in an error text, cut when it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def field_validation(asked: str | None) -> FieldValidation:
    """The `fieldValidation` parameter; Warn is the default. Raises 400."""
    for level in LEVELS:
        if asked == level:
            return level
    if asked:
        raise bad_request(
            f"fieldValidation: Unsupported value: {shown(asked[:_SHOWN])}: supported values: "
            + ", ".join(f'"{level}"' for level in LEVELS)
        )
    return "Warn"


def strictness(level: FieldValidation, unknown: Sequence[str], repeated: Sequence[str]) -> list[str]:
    """The warnings that fields of a body deserve. Raises 400 under Strict."""
    told = [f'unknown field "{name}"' for name in unknown] + [
        f'duplicate field "{name}"' for name in repeated
    ]
    told = told[:NAMED]
    if told and level == "Strict":
        raise _strict_error(told)
    return told if level == "Warn" else []


def _strict_error(told: Sequence[str]) -> StatusError:
    return bad_request(f"strict decoding error: {', '.join(told)}")


def warning_header(text: str) -> str:
    """One `Warning` header's value (RFC 7234, 5.5; code 299), as clients of Kubernetes show it."""
    clean = "".join(each if each.isprintable() and each.isascii() else "?" for each in text)[:1000]
    return '299 - "' + clean.replace("\\", "\\\\").replace('"', '\\"') + '"'


def pruned(value: Any, schema: Schema) -> tuple[Any, list[str]]:
    """A copy of `value` without the fields that the schema does not know, and their paths."""
    unknown: list[str] = []
    return _prune(value, schema, "", unknown), unknown


def _prune(value: Any, schema: Schema, path: str, unknown: list[str]) -> Any:
    if isinstance(value, list):
        items = schema.get("items")
        if items is None:
            return copied(value)
        return [_prune(each, items, f"{path}[{number}]", unknown) for number, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    fields: dict[str, Schema] = schema.get("properties", {})
    free: Schema | None = schema.get("additionalProperties")
    kept: Object = {}
    for name, each in value.items():
        inner = fields.get(name, free)
        if inner is not None:
            kept[name] = _prune(each, inner, f"{path}.{name}" if path else name, unknown)
        elif schema.get(PRESERVE) or schema.get("type") != "object":
            kept[name] = copied(each)
        else:
            unknown.append(f"{path}.{name}" if path else name)
    return kept


def defaulted(value: Any, schema: Schema) -> Any:
    """`value`, changed in place: what is missing gets its default, and a null that may not be one goes."""
    if isinstance(value, list):
        if (items := schema.get("items")) is not None:
            for each in value:
                defaulted(each, items)
        return value
    if not isinstance(value, dict):
        return value
    fields: dict[str, Schema] = schema.get("properties", {})
    for name, inner in fields.items():
        if name in value and value[name] is None and not inner.get("nullable") and "default" in inner:
            del value[name]
        if name not in value and "default" in inner:
            value[name] = copied(inner["default"])
        if name in value:
            defaulted(value[name], inner)
    if (free := schema.get("additionalProperties")) is not None:
        for name, each in value.items():
            if name not in fields:
                defaulted(each, free)
    return value


def without_nulls(value: Any, schema: Schema) -> Any:
    """`value`, changed in place: nulls go where the schema does not allow them, as if the field were not there."""
    if isinstance(value, list):
        if (items := schema.get("items")) is not None:
            for each in value:
                without_nulls(each, items)
        return value
    if isinstance(value, dict):
        fields: dict[str, Schema] = schema.get("properties", {})
        for name in [name for name, each in value.items() if each is None]:
            if name in fields and not fields[name].get("nullable"):
                del value[name]
        for name, each in value.items():
            if (inner := fields.get(name, schema.get("additionalProperties"))) is not None:
                without_nulls(each, inner)
    return value


def violations(value: Any, schema: Schema, path: str = "") -> list[Cause]:
    """Everything that is wrong with a value, in the order of its fields."""
    return list(_violations(value, schema, path))


def _violations(value: Any, schema: Schema, path: str) -> Iterator[Cause]:
    if value is None:
        if not schema.get("nullable"):
            yield wrong_type(path, value, _kind(schema))
        return
    if schema.get(INT_OR_STRING):
        if not (_is_integer(value) or isinstance(value, str)):
            yield wrong_type(path, value, "integer or string")
        elif "pattern" in schema and not _pattern(schema["pattern"]).search(str(value)):
            yield wrong(path, value, f"{path} in body should match '{schema['pattern']}'")
        return
    check = _CHECKS.get(schema.get("type", ""))
    if check is not None:
        yield from check(value, schema, path)


def _object(value: Any, schema: Schema, path: str) -> Iterator[Cause]:
    if not isinstance(value, dict):
        yield wrong_type(path, value, "object")
        return
    fields: dict[str, Schema] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield required(f"{path}.{name}" if path else name)
    for name, each in value.items():
        inner = fields.get(name, schema.get("additionalProperties"))
        if inner is not None:
            yield from _violations(each, inner, f"{path}.{name}" if path else name)


def _array(value: Any, schema: Schema, path: str) -> Iterator[Cause]:
    if not isinstance(value, list):
        yield wrong_type(path, value, "array")
        return
    if len(value) < schema.get("minItems", 0):
        yield wrong(path, len(value), f"{path} in body should have at least {schema['minItems']} items")
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        yield Cause(
            "FieldValueTooMany",
            f"Too many: {len(value)}: must have at most {schema['maxItems']} items",
            path,
        )
    if (items := schema.get("items")) is not None:
        for number, each in enumerate(value):
            yield from _violations(each, items, f"{path}[{number}]")
    yield from _repeats(value, schema, path)


def _repeats(value: list[Any], schema: Schema, path: str) -> Iterator[Cause]:
    seen: set[str] = set()
    kind = schema.get(LIST_TYPE)
    for number, each in enumerate(value):
        if kind == "set":
            identity: Any = each
        elif kind == "map" and isinstance(each, dict):
            fields = schema["items"].get("properties", {})
            identity = {key: each.get(key, fields[key].get("default")) for key in schema[LIST_KEYS]}
        else:
            continue
        text = json.dumps(identity, sort_keys=True)
        if text in seen:
            yield duplicate(f"{path}[{number}]", identity)
        seen.add(text)


def _string(value: Any, schema: Schema, path: str) -> Iterator[Cause]:
    if not isinstance(value, str):
        yield wrong_type(path, value, "string")
        return
    if "enum" in schema and value not in schema["enum"]:
        yield unsupported(path, value, schema["enum"])
    if len(value) < schema.get("minLength", 0):
        yield wrong(path, value, f"{path} in body should be at least {schema['minLength']} chars long")
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        yield too_long(path, schema["maxLength"], "characters")
    elif "pattern" in schema and not _pattern(schema["pattern"]).search(value):
        yield wrong(path, value, f"{path} in body should match '{schema['pattern']}'")
    if schema.get("format") == "date-time" and instant_of(value) is None:
        yield wrong(path, value, f"{path} in body must be of type date-time: {shown(value)}")


def _integer(value: Any, schema: Schema, path: str) -> Iterator[Cause]:
    if not _is_integer(value):
        yield wrong_type(path, value, "integer")
        return
    bits = _WIDTHS.get(schema.get("format", "int64"), 63)
    if not -(1 << bits) <= value < 1 << bits:
        yield wrong(path, value, f"{path} in body should be of {schema.get('format', 'int64')}")
    elif "minimum" in schema and value < schema["minimum"]:
        yield wrong(path, value, f"{path} in body should be greater than or equal to {schema['minimum']}")
    elif "maximum" in schema and value > schema["maximum"]:
        yield wrong(path, value, f"{path} in body should be less than or equal to {schema['maximum']}")


def _boolean(value: Any, _schema: Schema, path: str) -> Iterator[Cause]:
    if not isinstance(value, bool):
        yield wrong_type(path, value, "boolean")


_CHECKS = {"object": _object, "array": _array, "string": _string, "integer": _integer, "boolean": _boolean}


def changes_refused(new: Any, old: Any, schema: Schema, path: str = "") -> list[Cause]:
    """Fields that differ from the existing object's although the schema says that they never change."""
    found: list[Cause] = []
    if schema.get(IMMUTABLE) and not same(new, old):
        return [wrong(path, new, f"{path.rpartition('.')[2]} is immutable")]
    if isinstance(new, dict) or isinstance(old, dict):
        ours = new if isinstance(new, dict) else {}
        theirs = old if isinstance(old, dict) else {}
        for name, inner in schema.get("properties", {}).items():
            found += changes_refused(
                ours.get(name), theirs.get(name), inner, f"{path}.{name}" if path else name
            )
    return found


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(schema: Schema) -> str:
    return str(schema.get("type", "integer or string"))


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return names[type(value)]


@lru_cache(maxsize=256)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text.removesuffix("$") + r"\Z" if text.endswith("$") else text, re.ASCII)
