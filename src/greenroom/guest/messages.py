"""Reading JSON messages field by field, with a clear refusal for a field of the wrong type.

The rules are those of the Protobuf JSON mapping (https://protobuf.dev/programming-guides/json/): a
missing or null field has its zero value, unknown fields are ignored, bytes are base64 in either alphabet,
integers may be decimal strings.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping
from typing import Any

from .errors import AgentError

Message = Mapping[str, Any]


def decode(raw: bytes) -> Message:
    """A JSON object; an empty body counts as ``{}``. Raises ``invalid_argument``."""
    if not raw:
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AgentError("invalid_argument", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise AgentError("invalid_argument", "the body must be a JSON object")
    return value


def encode(value: object) -> bytes:
    """Compact JSON, ASCII only."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def text(message: Message, name: str, default: str = "") -> str:
    """A string field."""
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise _wrong(name, "a string")
    return value


def flag(message: Message, name: str, default: bool) -> bool:
    """A boolean field."""
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return value


def integer(message: Message, name: str, default: int = 0) -> int:
    """An integer field, given as a number or as a decimal string."""
    value = message.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise _wrong(name, "an integer") from None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "an integer")
    return value


def child(message: Message, name: str) -> Message | None:
    """A nested message, or None where it is absent."""
    value = message.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong(name, "an object")
    return value


def texts(message: Message, name: str) -> list[str]:
    """A list of strings."""
    value = message.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong(name, "a list of strings")
    return value


def text_map(message: Message, name: str) -> dict[str, str]:
    """A map of strings to strings."""
    value = message.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise _wrong(name, "an object whose values are strings")
    return value


def octets(message: Message, name: str) -> bytes | None:
    """A bytes field, or None where it is absent."""
    value = message.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong(name, "base64")
    return base64(value, name)


def base64(value: str, name: str) -> bytes:
    """Decode standard or URL-safe base64, padded or not."""
    body = value.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return binascii.a2b_base64(body + "=" * (-len(body) % 4), strict_mode=True)
    except (binascii.Error, ValueError):
        raise _wrong(name, "base64") from None


def _wrong(name: str, expected: str) -> AgentError:
    return AgentError("invalid_argument", f"field {name!r} must be {expected}")
