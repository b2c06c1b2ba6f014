"""Bodies into JSON values: bounded in size, depth and number of values before they are built, repeated keys told.

Kubernetes tells repeated keys by their paths under `fieldValidation`; RFC 8259 leaves their meaning open. Python's
parser is used because it shows the pairs of an object, which msgspec does not.
"""

from __future__ import annotations

import json
import re
from typing import Any

from greenroom.api.kube.status import bad_request, too_large

BODY_LIMIT = 1 << 20
"""Bytes of a body."""
DEPTH_LIMIT = 64
"""Objects and lists within each other. The deepest schema of ours has 12."""
VALUE_LIMIT = 20_000
"""Objects, lists and commas: about as many values, each of which is looked at some twenty times."""
DIGITS_LIMIT = 400
"""Digits of a whole number: more than any double has."""
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{},]', re.DOTALL)
"""Texts, closed or not, and what makes the shape. A text is never read twice: one that is not closed ends the body."""
_LONE = re.compile(rb"\\u[dD][89a-fA-F]")
"""How a surrogate is written, which may lack its other half."""


class _Pairs(dict[str, Any]):
    """An object of the body that repeated some keys."""

    repeated: tuple[str, ...] = ()


def decoded(body: bytes, limit: int = BODY_LIMIT) -> tuple[Any, list[str]]:
    """The JSON value of a body, and the paths of keys that an object repeats (the last one counts).

    Raises `StatusError`: 413 over `limit` bytes, 400 for what is no JSON, too deep, or too much.
    """
    if len(body) > limit:
        raise too_large(limit)
    _check_shape(body)
    try:
        # Decoded here: left to itself the parser would take UTF-16 and UTF-32 as well.
        value = json.loads(
            body.decode(), object_pairs_hook=_object, parse_constant=_no_constant, parse_int=_integer
        )
        if _LONE.search(body):
            _check_texts(value)
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f"the object provided is unrecognized: not valid JSON ({str(error)[:100]})"
        ) from error
    repeated: list[str] = []
    return _plain(value, "", repeated), repeated


def decoded_object(body: bytes, limit: int = BODY_LIMIT) -> tuple[dict[str, Any], list[str]]:
    """The same for a body that has to be an object."""
    value, repeated = decoded(body, limit)
    if not isinstance(value, dict):
        raise bad_request("the object provided is unrecognized: a JSON object is needed")
    return value, repeated


def _check_shape(body: bytes) -> None:
    depth = count = 0
    for token in _TOKENS.finditer(body):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
            count += 1
            if depth > DEPTH_LIMIT:
                raise bad_request(f"the object provided has more than {DEPTH_LIMIT} levels")
        elif mark in (b"}", b"]"):
            depth -= 1
        elif mark == b",":
            count += 1
        if count > VALUE_LIMIT:
            raise bad_request(f"the object provided has more than {VALUE_LIMIT} values")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    marked = _Pairs(found)
    seen: set[str] = set()
    marked.repeated = tuple(
        dict.fromkeys(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    )
    return marked


def _integer(text: str) -> int:
    if len(text) > DIGITS_LIMIT:
        raise ValueError(f"a number has more than {DIGITS_LIMIT} digits")
    return int(text)


def _check_texts(value: Any) -> None:
    # Half a surrogate pair is no character: nobody could encode it again, neither for the node nor for the answer.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text has one half of a surrogate pair") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _plain(value: Any, path: str, repeated: list[str]) -> Any:
    if isinstance(value, list):
        for number, each in enumerate(value):
            value[number] = _plain(each, f"{path}[{number}]", repeated)
        return value
    if not isinstance(value, dict):
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            raise bad_request("the object provided has a number that is too large")
        return value
    if isinstance(value, _Pairs):
        repeated += [f"{path}.{name}".lstrip(".") for name in value.repeated]
        value = dict(value)
    for name, each in value.items():
        if isinstance(each, dict | list | float):
            value[name] = _plain(each, f"{path}.{name}", repeated)
    return value
