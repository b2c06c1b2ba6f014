"""The API's description in OpenAPI v2, for `/openapi/v2`: kinds, and that their patches can be tried out. Pure.

kubectl reads it, until 1.23 for everything, since then for what v3 does not tell, and in one form alone: the Protocol
Buffers of gnostic's `openapiv2/OpenAPIv2.proto`, whose field numbers are here. As kube-apiserver does for
CustomResourceDefinitions, what may have fields that are not known is described without those that are: a client that
checks by this would refuse the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

import greenroom
from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.negotiation import JSON, media_ranges
from greenroom.api.kube.openapi import GVK, Document, component, gvk
from greenroom.api.kube.schemas.building import INT_OR_STRING, PRESERVE, Schema
from greenroom.api.kube.status import not_acceptable

PROTOBUF: Final = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"
"""What clients ask for."""
ANSWERED: Final = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
"""What they are told, as by kube-apiserver: an `@` is no letter of a media type, and their parsers refuse it."""
_KEPT: Final = ("description", "format", "required")


class Documents(msgspec.Struct, frozen=True):
    """The document in both forms."""

    json: Document
    protobuf: Document

    def wanted(self, accept: str) -> tuple[Document, str]:
        """The form that a client wants most, and its media type. Raises 406."""
        for name, _ in media_ranges(accept or JSON):
            if name in (PROTOBUF, ANSWERED):
                return self.protobuf, ANSWERED
            if name in (JSON, "application/*", "*/*"):
                return self.json, JSON
        raise not_acceptable([JSON, PROTOBUF])


def documents(kinds: Sequence[Kind]) -> Documents:
    """The document of all kinds."""
    made = document(kinds)
    return Documents(_served(msgspec.json.encode(made)), _served(encoded(made)))


def _served(body: bytes) -> Document:
    # A name for a version, not a protection.
    return Document("/openapi/v2", body, hashlib.sha256(body).hexdigest().upper())


def document(kinds: Sequence[Kind]) -> dict[str, Any]:
    """The document as it is in JSON."""
    definitions: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for kind in kinds:
        known = gvk(kind.group, kind.version, kind.name)
        definitions[component(kind.group, kind.version, kind.name)] = {**_schema(kind.schema), GVK: [known]}
        if "patch" in kind.verbs:
            scope = "/namespaces/{namespace}" if kind.namespaced else ""
            path = f"{kind.prefix}{scope}/{kind.plural}/{{name}}"
            paths[path] = {"patch": _patch(kind, known, path)}
    return {
        "swagger": "2.0",
        "info": {"title": "Greenroom", "version": f"v{greenroom.__version__}"},
        "paths": paths,
        "definitions": definitions,
    }


def _patch(kind: Kind, known: Mapping[str, str], path: str) -> dict[str, Any]:
    places = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return {
        "operationId": f"patch{kind.version.title()}{kind.name}",
        "parameters": [
            *({"name": each, "in": "path", "type": "string", "required": True} for each in places),
            *({"name": each, "in": "query", "type": "string"} for each in ("dryRun", "fieldManager")),
            {"name": "body", "in": "body", "required": True, "schema": {"type": "object"}},
        ],
        "responses": {"200": {"description": "It is done."}},
        "x-kubernetes-action": "patch",
        GVK: known,
    }


def _schema(schema: Schema) -> Schema:
    made: Schema = {name: schema[name] for name in _KEPT if name in schema}
    if schema.get(INT_OR_STRING) or schema.get("nullable") or "type" not in schema:
        # Swagger has no word for either: it may be anything.
        return {"description": schema["description"]} if "description" in schema else {}
    made["type"] = schema["type"]
    if schema.get(PRESERVE):
        made.pop("required", None)
        return made
    if "properties" in schema:
        made["properties"] = {name: _schema(each) for name, each in schema["properties"].items()}
    if isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = _schema(schema["additionalProperties"])
    if "items" in schema:
        made["items"] = _schema(schema["items"])
    made |= {name: value for name, value in schema.items() if name.startswith("x-kubernetes-")}
    return made


def encoded(made: Mapping[str, Any]) -> bytes:
    """The document in gnostic's Protocol Buffers."""
    info = _text(1, made["info"]["title"]) + _text(2, made["info"]["version"])
    paths = b"".join(
        _named(2, path, _field(8, _operation(item["patch"]))) for path, item in made["paths"].items()
    )
    definitions = _schemas(made["definitions"])
    return _text(1, made["swagger"]) + _field(2, info) + _field(8, paths) + _field(9, definitions)


def _operation(said: Mapping[str, Any]) -> bytes:
    answers = b"".join(
        _named(1, code, _field(1, _text(1, answer["description"])))
        for code, answer in said["responses"].items()
    )
    parameters = b"".join(_field(8, _field(1, _parameter(each))) for each in said["parameters"])
    return _text(5, said["operationId"]) + parameters + _field(9, answers) + _extensions(13, said)


def _parameter(said: Mapping[str, Any]) -> bytes:
    needed = said.get("required", False)
    if said["in"] == "body":
        body = (
            _text(2, said["name"]) + _text(3, "body") + _true(4, needed) + _field(5, _message(said["schema"]))
        )
        return _field(1, body)
    query = said["in"] == "query"
    plain = (
        _true(1, needed)
        + _text(2, said["in"])
        + _text(4, said["name"])
        + _text(6 if query else 5, said["type"])
    )
    return _field(2, _field(3 if query else 4, plain))


def _schemas(named: Mapping[str, Schema]) -> bytes:
    return b"".join(_named(1, name, _message(each)) for name, each in named.items())


def _message(schema: Schema) -> bytes:
    return b"".join(_parts(schema))


def _parts(schema: Schema) -> Iterator[bytes]:
    for number, name in ((2, "format"), (4, "description")):
        if name in schema:
            yield _text(number, schema[name])
    for each in schema.get("required", ()):
        yield _text(19, each)
    if "additionalProperties" in schema:
        yield _field(21, _field(1, _message(schema["additionalProperties"])))
    if "type" in schema:
        yield _field(22, _text(1, schema["type"]))
    if "items" in schema:
        yield _field(23, _field(1, _message(schema["items"])))
    if "properties" in schema:
        yield _field(25, _schemas(schema["properties"]))
    yield _extensions(31, schema)


def _extensions(number: int, said: Mapping[str, Any]) -> bytes:
    """What begins with `x-`. Its value is a text of YAML, which JSON is."""
    return b"".join(
        _named(number, name, _field(2, msgspec.json.encode(value)))
        for name, value in said.items()
        if name.startswith("x-")
    )


def _named(number: int, name: str, value: bytes) -> bytes:
    return _field(number, _text(1, name) + _field(2, value))


def _text(number: int, value: str) -> bytes:
    return _field(number, value.encode())


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _true(number: int, value: bool) -> bytes:
    return _varint(number << 3) + b"\x01" if value else b""


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*made, value))
