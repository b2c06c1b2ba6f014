"""Just enough of Kubernetes' Protocol Buffers form to read the reviews and quotas that kubectl sends in it. Pure.

kubectl's typed clients write built-in kinds in this form and take JSON for an answer. A body is `k8s` and a zero byte,
then a `runtime.Unknown` around the object. Field numbers are those of `generated.proto` in k8s.io/api. Everything is
bounded by the body, nothing is nested deeper than the fields that are named here.
Sources: "Kubernetes protobuf encoding" in "Kubernetes API Concepts"; protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from greenroom.api.kube.objects import Object
from greenroom.api.kube.status import bad_request

MEDIA_TYPE: Final = "application/vnd.kubernetes.protobuf"
MAGIC: Final = b"k8s\x00"

Fields = Mapping[int, tuple[str, Any]]
"""Fields of a message by number: name, and what it is: the fields of a message, None for a text, TEXTS for a list of
texts, or `Entries` for a map."""
TEXTS: Final = "texts"


class Entries:
    """A map from texts: to texts, or to quantities, which are messages with one text."""

    def __init__(self, *, quantities: bool = False) -> None:
        self.value: Fields = {1: ("key", None), 2: ("value", _QUANTITY if quantities else None)}

    def entry(self, data: bytes) -> tuple[str, str]:
        """One entry of it."""
        made = _message(data, self.value)
        value = made.get("value", "")
        return made.get("key", ""), value.get("string", "") if isinstance(value, dict) else value


_QUANTITY: Fields = {1: ("string", None)}

_TYPE_META: Fields = {1: ("apiVersion", None), 2: ("kind", None)}
_RESOURCE: Fields = {
    number: (name, None)
    for number, name in enumerate(
        ("namespace", "verb", "group", "version", "resource", "subresource", "name"), start=1
    )
}
_NON_RESOURCE: Fields = {1: ("path", None), 2: ("verb", None)}
_ACCESS: Fields = {1: ("resourceAttributes", _RESOURCE), 2: ("nonResourceAttributes", _NON_RESOURCE)}
_METADATA: Fields = {
    1: ("name", None),
    2: ("generateName", None),
    3: ("namespace", None),
    5: ("uid", None),
    6: ("resourceVersion", None),
    11: ("labels", Entries()),
    12: ("annotations", Entries()),
    14: ("finalizers", TEXTS),
}
"""What the server sets, and who owned which field, it knows itself."""
_QUOTA: Fields = {
    1: ("metadata", _METADATA),
    2: ("spec", {1: ("hard", Entries(quantities=True)), 2: ("scopes", TEXTS), 3: ("scopeSelector", {})}),
}
KINDS: Final[Mapping[str, Fields]] = {
    "ResourceQuota": _QUOTA,
    "SelfSubjectReview": {},
    "SelfSubjectAccessReview": {2: ("spec", _ACCESS)},
    "SelfSubjectRulesReview": {2: ("spec", {1: ("namespace", None)})},
}


def decoded(body: bytes, kind: str) -> Object:
    """A body in this form as the object that it is. Raises 400 for what is none of this kind."""
    if not body.startswith(MAGIC):
        raise bad_request("the body is not in Kubernetes' form of Protocol Buffers")
    named: Object = {}
    raw = b""
    for number, value in _fields(body[len(MAGIC) :]):
        if number == 1:
            named = _message(value, _TYPE_META)
        elif number == 2:
            raw = value
    if named.get("kind") not in ("", None, kind):
        raise bad_request(f"the kind in the data does not match the expected kind ({kind})")
    return {**named, **_message(raw, KINDS[kind])}


def _message(data: bytes, known: Fields) -> Object:
    made: Object = {}
    for number, value in _fields(data):
        if number not in known:
            continue
        name, inner = known[number]
        if isinstance(inner, Entries):
            key, entry = inner.entry(value)
            made.setdefault(name, {})[key] = entry
        elif inner == TEXTS:
            made.setdefault(name, []).append(_text(name, value))
        elif inner is not None:
            made[name] = _message(value, inner)
        elif value:
            made[name] = _text(name, value)
    return made


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise bad_request(f"{name}: it is no text") from None


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a message; others are passed over."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            _, at = _varint(data, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise _broken()
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            raise _broken()
    if at > len(data):
        raise _broken()


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if at >= len(data):
            raise _broken()
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise _broken()


def _broken() -> Exception:
    return bad_request("the body is not a message of Protocol Buffers")
