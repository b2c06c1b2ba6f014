"""The API's description (OpenAPI 3.1), made from what answers it: nothing of it is typed a second time.

Paths and methods come from the table that is served (`routes`), sentences from the handlers' docstrings, bodies from
the structs that are decoded and encoded (`schemas`), the rest from `operations`. Pure: a table in, a document out.
`described` adds the path that serves it, and `python -m greenroom.api.describe` prints it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import greenroom
from greenroom.api.e2b.errors import ErrorBody
from greenroom.api.e2b.operations import OPERATIONS, Operation
from greenroom.api.e2b.permissions import OPERATIONS as OPERATIONS_WITH_RULES
from greenroom.api.e2b.resources import OPEN_PATHS, Handler, Unsupported

PATH = "/openapi.json"
UNSUPPORTED = "x-greenroom-unsupported"
"""Marks an operation that E2B's clients know and Greenroom answers with 501; its value says what is missing."""

Paths = Mapping[str, Mapping[str, Handler]]

_REF = "#/components/schemas/{name}"
_SERVER_SIDE = frozenset({500, 503})
_MEANINGS = {
    200: "As it is.",
    201: "It is done.",
    204: "It is done; nothing more to say.",
    400: "The request does not follow the contract; the message names the field.",
    401: "No API key, or one that is not known.",
    403: "The key's rules or a quota do not allow it, or it is not the caller's to change.",
    404: "There is no such thing, or it is somebody else's.",
    409: "It cannot be had in this state, or the idempotency key was used with another body.",
    410: "What the idempotency key made has ended; the key makes no second one.",
    413: "The body is over its bound.",
    500: "A fault of the platform. With `Should-Retry: false` it is not known whether it was done.",
    501: "Not supported by this server.",
    503: "Not now: the same request may succeed after `Retry-After` seconds.",
}
_ERROR_HEADERS: dict[int, tuple[str, Any, bool]] = {
    401: ("WWW-Authenticate", str, True),
    500: ("Should-Retry", str, False),
    503: ("Retry-After", int, True),
}
"""Header of an error, its type, and whether it is always there."""
_SANDBOX_ID = r"^i[a-z0-9]{19}(-[a-z0-9]+)?$"
"""Clients of the first generation append `-<clientID>`."""
_INTRO = """The control API of Greenroom, in E2B's dialect: what the published SDKs call. Every path and method that \
the server knows is here; those with `x-greenroom-unsupported` are answered with 501. Errors are always JSON. \
A method that a path does not have is answered with 405 and `Allow`; HEAD and OPTIONS work everywhere."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of the table, with its description where there is one."""

    method: str
    path: str
    """As OpenAPI writes it: without Starlette's convertors."""
    what: str
    """A sentence; of an unsupported one the name of what is missing."""
    supported: bool
    needs_key: bool
    operation: Operation | None


def known(paths: Paths) -> list[Known]:
    """Every operation of `paths`, the health checks and the description itself, by path and method."""
    found = []
    own: Paths = {**OPEN_PATHS, PATH: {"GET": _serve}}
    for path, methods in {**own, **paths}.items():
        plain = re.sub(r"\{(\w+):\w+\}", r"{\1}", path)
        for method, handler in methods.items():
            refused = isinstance(handler, Unsupported)
            found.append(
                Known(
                    method=method,
                    path=plain,
                    what=handler.what if isinstance(handler, Unsupported) else sentence(handler),
                    supported=not refused,
                    needs_key=path in paths,
                    operation=None if refused else OPERATIONS.get((method, plain)) or _OWN.get(plain),
                )
            )
    return sorted(found, key=lambda each: (each.path, each.method))


def sentence(handler: Handler) -> str:
    """What a handler's docstring says behind its path."""
    text = " ".join((inspect.getdoc(handler) or "").split())
    return text.partition("`: ")[2] or text


def document(paths: Paths) -> dict[str, Any]:
    """The OpenAPI document of `paths`."""
    operations = known(paths)
    schema = _Schemas(operations)
    described: dict[str, dict[str, Any]] = {}
    for each in operations:
        described.setdefault(each.path, {})[each.method.lower()] = _operation(each, schema)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Greenroom",
            "version": greenroom.__version__,
            "description": _INTRO,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"ApiKey": []}, {"Bearer": []}],
        "paths": described,
        "components": {
            "securitySchemes": {
                "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "Bearer": {"type": "http", "scheme": "bearer", "description": "The same API key."},
            },
            "schemas": schema.components,
        },
    }


def described(paths: dict[str, dict[str, Handler]]) -> dict[str, dict[str, Handler]]:
    """`paths` and the one that serves their description."""
    body = msgspec.json.encode(document(paths))
    return {PATH: {"GET": functools.partial(_serve, body=body)}, **paths}


async def _serve(_request: Request, *, body: bytes = b"") -> Response:
    """`GET /openapi.json`: this description."""
    return Response(body, media_type="application/json")


_OWN = {
    "/health": Operation(answers={200: "text/plain"}),
    "/healthz": Operation(answers={200: dict[str, bool]}),
    PATH: Operation(answers={200: dict[str, Any]}),
}


class _Schemas:
    """JSON Schemas of all types of some operations, each named struct once."""

    def __init__(self, operations: list[Known]) -> None:
        kinds: list[Any] = [ErrorBody, str, int]
        for each in operations:
            if (operation := each.operation) is not None:
                answers = [kind for kind in operation.answers.values() if kind not in (None, "text/plain")]
                queries = [kind for kind, _ in operation.query.values()]
                kinds += [*answers, *queries, *([] if operation.body is None else [operation.body])]
        self._known: list[tuple[Any, dict[str, Any]]] = []
        schemas, self.components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._known = list(zip(kinds, schemas, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type; a copy, because documents are changed by those who read them."""
        return dict(next(schema for known, schema in self._known if known == kind))


def _operation(each: Known, schema: _Schemas) -> dict[str, Any]:
    slug = re.sub(r"\W+", "_", each.path).strip("_")
    said: dict[str, Any] = {
        "operationId": f"{each.method.lower()}_{slug}",
        "summary": each.what if each.supported else f"{each.what} (not supported)",
        "tags": [next(part for part in each.path.split("/") if part not in ("", "v2", "v3"))],
    }
    if not each.needs_key:
        said["security"] = []
    if not each.supported:
        said[UNSUPPORTED] = each.what
    operation = each.operation or Operation(answers={})
    if parameters := _parameters(each, operation, schema):
        said["parameters"] = parameters
    if operation.body is not None:
        said["requestBody"] = {
            "required": operation.body_required,
            "content": {"application/json": {"schema": schema.of(operation.body)}},
        }
    answers = {
        str(status): _answer(status, kind, operation, schema) for status, kind in operation.answers.items()
    }
    failures = {
        str(status): _failure(status, schema) for status in sorted(statuses(each) - operation.answers.keys())
    }
    said["responses"] = {**answers, **failures}
    if each.supported and not operation.answers:
        said["responses"]["default"] = {"description": "Not described yet."}
    return said


def statuses(each: Known) -> frozenset[int]:
    """Every status that an operation may answer with, as long as its method is one of its path's."""
    if not each.needs_key:
        return frozenset({200})
    if not each.supported:
        return frozenset({401, 500, 501, 503})
    operation = each.operation or Operation(answers={})
    found = {401, *_SERVER_SIDE, *operation.answers, *operation.errors}
    if (each.method, each.path) in OPERATIONS_WITH_RULES:
        found.add(403)
    if "{" in each.path:
        found.add(404)
    if operation.query or operation.idempotent or operation.body is not None:
        found.add(400)
    if operation.body is not None:
        found.add(413)
    return frozenset(found)


def _parameters(each: Known, operation: Operation, schema: _Schemas) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in re.findall(r"\{(\w+)\}", each.path):
        sandbox = name == "id" and "sandboxes/" in each.path
        kind = {"type": "string", **({"pattern": _SANDBOX_ID} if sandbox else {"minLength": 1})}
        found.append({"name": name, "in": "path", "required": True, "schema": kind})
    for name, (kind, meaning) in operation.query.items():
        found.append(
            {
                "name": name,
                "in": "query",
                "required": name in operation.required,
                "description": meaning,
                "schema": schema.of(kind),
            }
        )
    if operation.idempotent:
        found.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "The same key with the same body is the same request, however often it is sent.",
                "schema": {"type": "string", "pattern": "^[a-z0-9-]{1,255}$"},
            }
        )
    return found


def _answer(status: int, kind: Any, operation: Operation, schema: _Schemas) -> dict[str, Any]:
    said: dict[str, Any] = {"description": _MEANINGS[status]}
    if operation.headers:
        said["headers"] = {
            name: {"description": meaning, "schema": {"type": "string"}}
            for name, meaning in operation.headers.items()
        }
    if kind == "text/plain":
        said["content"] = {"text/plain": {"schema": schema.of(str)}}
    elif kind is not None:
        said["content"] = {"application/json": {"schema": schema.of(kind)}}
    return said


def _failure(status: int, schema: _Schemas) -> dict[str, Any]:
    said: dict[str, Any] = {"description": _MEANINGS[status]}
    if status in _ERROR_HEADERS:
        name, kind, always = _ERROR_HEADERS[status]
        said["headers"] = {name: {"required": always, "schema": schema.of(kind)}}
    said["content"] = {"application/json": {"schema": schema.of(ErrorBody)}}
    return said
