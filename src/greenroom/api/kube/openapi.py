"""The API's description in OpenAPI v3, one document per group and version, as `kubectl explain` and clients read it.

Made once from the kinds: what is validated is what is described. `/openapi/v3` names each document with a hash of it,
so that clients keep what they have. Source: "The Kubernetes API" (OpenAPI V3) in Kubernetes' documentation. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

import greenroom
from greenroom.api.kube.discovery import subresources
from greenroom.api.kube.kinds import Kind, groups
from greenroom.api.kube.negotiation import APPLY_PATCH, JSON, PATCHES
from greenroom.api.kube.schemas.building import Schema, anything, text
from greenroom.api.kube.schemas.metadata import LIST_META
from greenroom.api.kube.schemas.pools import SCALE

GVK: Final = "x-kubernetes-group-version-kind"
_META: Final = "io.k8s.apimachinery.pkg.apis.meta.v1"
_METHODS: Final = {
    "get": "get",
    "list": "get",
    "create": "post",
    "update": "put",
    "patch": "patch",
    "delete": "delete",
    "deletecollection": "delete",
}
_QUERY: Final[dict[str, tuple[str, str]]] = {
    "dryRun": ("string", "All: check the change as if it were made, and make none."),
    "fieldManager": ("string", "The name under which the fields are owned."),
    "fieldValidation": ("string", "What happens to unknown and repeated fields: Ignore, Warn or Strict."),
    "force": ("boolean", "Take fields from their owners. For apply patches alone."),
    "labelSelector": ("string", "Only objects with these labels."),
    "fieldSelector": ("string", "Only objects with these fields."),
    "limit": ("integer", "How many objects a page has at most."),
    "continue": ("string", "Where the list goes on."),
    "resourceVersion": ("string", "The version that is asked for."),
    "resourceVersionMatch": ("string", "How that version is meant: NotOlderThan or Exact."),
    "sendInitialEvents": ("boolean", "Begin a watch with the objects that there are."),
    "allowWatchBookmarks": ("boolean", "Send versions to go on from."),
    "timeoutSeconds": ("integer", "Seconds until the answer ends."),
    "watch": ("boolean", "Follow the changes."),
    "gracePeriodSeconds": ("integer", "Seconds that the object may take to go."),
    "propagationPolicy": ("string", "What happens to what the object owns: Orphan, Background, Foreground."),
}
_SELECTING: Final = (
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "labelSelector",
    "limit",
    "resourceVersion",
    "resourceVersionMatch",
    "sendInitialEvents",
    "timeoutSeconds",
    "watch",
)
_WRITING: Final = ("dryRun", "fieldManager", "fieldValidation")
_PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "list": _SELECTING,
    "create": _WRITING,
    "update": _WRITING,
    "patch": (*_WRITING, "force"),
    "delete": ("dryRun", "gracePeriodSeconds", "propagationPolicy"),
    "deletecollection": ("dryRun", "gracePeriodSeconds", "propagationPolicy", *_SELECTING),
}
_ACTIONS: Final = {"create": "post", "update": "put"}


class Document(msgspec.Struct, frozen=True):
    """A document of one group and version, encoded, and the path under which it is served."""

    path: str
    body: bytes
    hash: str


def documents(kinds: Sequence[Kind]) -> dict[str, Document]:
    """The documents by what `/openapi/v3` calls them: `apis/<group>/<version>`, `api/v1`."""
    found: dict[str, Document] = {}
    for versions in groups(tuple(kinds)).values():
        for known in versions.values():
            name = known[0].prefix.lstrip("/")
            body = msgspec.json.encode(document(known))
            # A name for a version, not a protection.
            found[name] = Document(f"/openapi/v3/{name}", body, hashlib.sha256(body).hexdigest().upper())
    return found


def index(known: dict[str, Document]) -> dict[str, Any]:
    """`/openapi/v3`."""
    return {
        "paths": {
            name: {"serverRelativeURL": f"{each.path}?hash={each.hash}"} for name, each in known.items()
        }
    }


def component(group: str, version: str, name: str) -> str:
    """The name of a schema: the group's parts in reverse, as Kubernetes names those of custom resources."""
    spelled = ".".join(reversed(group.split("."))) if group else "io.k8s.api.core"
    return f"{spelled}.{version}.{name}"


def document(kinds: Sequence[Kind]) -> dict[str, Any]:
    """The document of the kinds of one group and version."""
    schemas: dict[str, Any] = {
        f"{_META}.Status": anything("What became of a request."),
        f"{_META}.DeleteOptions": _delete_options(),
        f"{_META}.ListMeta": LIST_META,
    }
    paths: dict[str, Any] = {}
    for kind in kinds:
        schemas |= _components(kind)
        paths |= dict(_paths(kind))
    return {
        "openapi": "3.0.0",
        "info": {"title": "Greenroom", "version": f"v{greenroom.__version__}"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _delete_options() -> Schema:
    return {
        "type": "object",
        "description": "How to delete.",
        "properties": {
            "apiVersion": text("The version of this body."),
            "kind": text("The kind of this body."),
            "dryRun": {"type": "array", "description": "All: change nothing.", "items": {"type": "string"}},
            "gracePeriodSeconds": {
                "type": "integer",
                "description": "Seconds that the object may take to go.",
            },
            "preconditions": anything("UID and resourceVersion that the object has to have."),
            "propagationPolicy": text("What happens to what the object owns."),
        },
    }


def _components(kind: Kind) -> dict[str, Any]:
    own = component(kind.group, kind.version, kind.name)
    found: dict[str, Any] = {
        own: {**kind.schema, GVK: [gvk(kind.group, kind.version, kind.name)]},
        component(kind.group, kind.version, kind.list_name): {
            "type": "object",
            "description": f"A list of {kind.plural}.",
            "required": ["items"],
            "properties": {
                "apiVersion": text("Group and version of this list."),
                "kind": text("The kind of this list."),
                "metadata": _reference(f"{_META}.ListMeta"),
                "items": {"type": "array", "description": "The objects.", "items": _reference(own)},
            },
            GVK: [gvk(kind.group, kind.version, kind.list_name)],
        },
    }
    if kind.scale is not None:
        found["io.k8s.api.autoscaling.v1.Scale"] = {**SCALE, GVK: [gvk("autoscaling", "v1", "Scale")]}
    for action in kind.actions:
        bodies = [(action.takes, action.schema), (action.gives, action.gives_schema)]
        for name, schema in bodies:
            if schema is not None:
                found[component(kind.group, kind.version, name)] = {
                    **schema,
                    GVK: [gvk(kind.group, kind.version, name)],
                }
    return found


def _paths(kind: Kind) -> Iterator[tuple[str, dict[str, Any]]]:
    own = (kind.group, kind.version, kind.name)
    scope = "/namespaces/{namespace}" if kind.namespaced else ""
    collection = f"{kind.prefix}{scope}/{kind.plural}"
    if kind.namespaced:
        yield (
            f"{kind.prefix}/{kind.plural}",
            _operations(kind, own, ("list",), f"{kind.prefix}/{kind.plural}"),
        )
    yield collection, _operations(kind, own, ("list", "create", "deletecollection"), collection)
    yield (
        f"{collection}/{{name}}",
        _operations(kind, own, ("get", "update", "patch", "delete"), f"{collection}/{{name}}"),
    )
    for name, body, verbs in subresources(kind):
        path = f"{collection}/{{name}}/{name}"
        yield path, _operations(kind, body, verbs, path, always=True)


def _operations(
    kind: Kind, body: tuple[str, str, str], verbs: Sequence[str], path: str, *, always: bool = False
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for verb in verbs:
        if always or verb in kind.verbs:
            found[_METHODS[verb]] = _operation(body, verb, path)
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    found["parameters"] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": f"The {'namespace' if name == 'namespace' else 'name of the object'}.",
            "schema": {"type": "string"},
        }
        for name in names
    ]
    return found


def _operation(body: tuple[str, str, str], verb: str, path: str) -> dict[str, Any]:
    group, version, name = body
    schema = _reference(
        "io.k8s.api.autoscaling.v1.Scale" if name == "Scale" else component(group, version, name)
    )
    answer = schema
    if verb == "list":
        answer = _reference(component(group, version, f"{name}List"))
    elif verb in ("delete", "deletecollection"):
        answer = _reference(f"{_META}.Status")
    slug = "".join(part.strip("{}").title() for part in path.replace(".", "/").replace("-", "/").split("/"))
    said: dict[str, Any] = {
        "operationId": f"{verb}{slug}",
        "tags": [f"{group}_{version}"],
        "x-kubernetes-action": _ACTIONS.get(verb, verb),
        GVK: gvk(group, version, name),
        "parameters": [
            {"name": each, "in": "query", "description": _QUERY[each][1], "schema": {"type": _QUERY[each][0]}}
            for each in _PARAMETERS.get(verb, ())
        ],
        "responses": {
            "201" if verb == "create" else "200": {
                "description": "It is done.",
                "content": {JSON: {"schema": answer}},
            }
        },
    }
    if verb in ("create", "update"):
        said["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    elif verb == "patch":
        free = {"schema": {"type": "object", "description": "A patch."}}
        listed = {"schema": {"type": "array", "description": "Operations.", "items": {"type": "object"}}}
        content = {each: listed if each.startswith("application/json-patch") else free for each in PATCHES}
        said["requestBody"] = {"required": True, "content": {**content, APPLY_PATCH: free}}
    elif verb in ("delete", "deletecollection"):
        said["requestBody"] = {"content": {JSON: {"schema": _reference(f"{_META}.DeleteOptions")}}}
    return said


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def gvk(group: str, version: str, kind: str) -> dict[str, str]:
    """The value of `GVK` for a kind."""
    return {"group": group, "version": version, "kind": kind}
