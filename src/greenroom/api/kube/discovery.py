"""Discovery: which groups, versions and resources there are, in the older form and the aggregated one.

Pure: made once from the kinds. Sources: "Kubernetes API Concepts" and "The Kubernetes API" (discovery,
`apidiscovery.k8s.io/v2`) in Kubernetes' documentation.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any, Final

import greenroom
from greenroom.api.kube.kinds import Action, Kind, groups
from greenroom.api.kube.negotiation import media_ranges
from greenroom.api.kube.objects import Object

COMPATIBLE: Final = ("1", "32")
"""The version of Kubernetes whose conventions are followed."""
AGGREGATED: Final = ("v2", "v2beta1")
_SCALE: Final = ("autoscaling", "v1", "Scale")
_OBJECT_SUBRESOURCE: Final = ("get", "patch", "update")


def version() -> Object:
    """`/version`."""
    major, minor = COMPATIBLE
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"v{major}.{minor}.0+greenroom-{greenroom.__version__}",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "none",
        "compiler": platform.python_implementation(),
        "platform": f"linux/{platform.machine()}",
    }


def core_versions(kinds: Sequence[Kind]) -> Object:
    """`/api`."""
    return {
        "kind": "APIVersions",
        "versions": list(groups(tuple(kinds)).get("", {})),
        "serverAddressByClientCIDRs": [],
    }


def _group(name: str, versions: Sequence[str]) -> Object:
    told = [{"groupVersion": f"{name}/{each}", "version": each} for each in versions]
    return {"name": name, "versions": told, "preferredVersion": told[0]}


def group_list(kinds: Sequence[Kind]) -> Object:
    """`/apis`."""
    named = {name: versions for name, versions in groups(tuple(kinds)).items() if name}
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group(name, list(versions)) for name, versions in named.items()],
    }


def group(name: str, kinds: Sequence[Kind]) -> Object | None:
    """`/apis/<group>`, or None when there is no such group."""
    versions = groups(tuple(kinds)).get(name) if name else None
    return (
        None if versions is None else {"kind": "APIGroup", "apiVersion": "v1", **_group(name, list(versions))}
    )


def resource_list(group_name: str, version_name: str, kinds: Sequence[Kind]) -> Object | None:
    """`/apis/<group>/<version>` and `/api/<version>`, or None when there is no such version."""
    known = groups(tuple(kinds)).get(group_name, {}).get(version_name)
    if known is None:
        return None
    resources: list[Object] = []
    for kind in known:
        whole: Object = {
            "name": kind.plural,
            "singularName": kind.singular,
            "namespaced": kind.namespaced,
            "kind": kind.name,
            "verbs": sorted(kind.verbs),
        }
        if kind.short_names:
            whole["shortNames"] = list(kind.short_names)
        if kind.categories:
            whole["categories"] = list(kind.categories)
        resources.append(whole)
        for name, (sub_group, sub_version, sub_kind), verbs in subresources(kind):
            part: Object = {
                "name": f"{kind.plural}/{name}",
                "singularName": "",
                "namespaced": kind.namespaced,
                "kind": sub_kind,
                "verbs": list(verbs),
            }
            if (sub_group, sub_version) != (kind.group, kind.version):
                part |= {"group": sub_group, "version": sub_version}
            resources.append(part)
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group_name}/{version_name}" if group_name else version_name,
        "resources": resources,
    }


def subresources(kind: Kind) -> Iterator[tuple[str, tuple[str, str, str], tuple[str, ...]]]:
    """Each subresource of a kind: its name, the group, version and kind of its body, and its verbs."""
    if kind.has_status:
        yield "status", (kind.group, kind.version, kind.name), _OBJECT_SUBRESOURCE
    if kind.scale is not None:
        yield "scale", _SCALE, _OBJECT_SUBRESOURCE
    for action in kind.actions:
        yield action.name, _body_of(kind, action), ("create",)


def _body_of(kind: Kind, action: Action) -> tuple[str, str, str]:
    return (kind.group, kind.version, action.takes)


def aggregated(kinds: Sequence[Kind], form: str, *, core: bool) -> Object:
    """All of `/apis` (or, with `core`, of `/api`) in one answer; `form` is v2 or v2beta1."""
    items = []
    for name, versions in groups(tuple(kinds)).items():
        if bool(name) == core:
            continue
        items.append(
            {
                "metadata": {"name": name, "creationTimestamp": None},
                "versions": [
                    {
                        "version": each,
                        "resources": [_described(kind) for kind in known],
                        "freshness": "Current",
                    }
                    for each, known in versions.items()
                ],
            }
        )
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"apidiscovery.k8s.io/{form}",
        "metadata": {},
        "items": items,
    }


def _described(kind: Kind) -> Object:
    whole: Object = {
        "resource": kind.plural,
        "responseKind": _kind(kind.group, kind.version, kind.name),
        "scope": "Namespaced" if kind.namespaced else "Cluster",
        "singularResource": kind.singular,
        "verbs": sorted(kind.verbs),
    }
    if kind.short_names:
        whole["shortNames"] = list(kind.short_names)
    if kind.categories:
        whole["categories"] = list(kind.categories)
    parts = [
        {"subresource": name, "responseKind": _kind(*answer), "verbs": list(verbs)}
        for name, answer, verbs in subresources(kind)
    ]
    if parts:
        whole["subresources"] = parts
    return whole


def _kind(group_name: str, version_name: str, name: str) -> dict[str, Any]:
    return {"group": group_name, "version": version_name, "kind": name}


def wants_aggregated(accept: str) -> str:
    """The form of aggregated discovery that a client prefers to the older one, or ""."""
    for _, parameters in media_ranges(accept or "*/*"):
        if parameters.get("as") == "APIGroupDiscoveryList" and parameters.get("g") == "apidiscovery.k8s.io":
            if parameters.get("v") in AGGREGATED:
                return parameters["v"]
        elif "as" not in parameters:
            return ""
    return ""


def aggregated_type(form: str) -> str:
    """The media type of aggregated discovery: clients tell by it what they got."""
    return f"application/json;g=apidiscovery.k8s.io;v={form};as=APIGroupDiscoveryList"
