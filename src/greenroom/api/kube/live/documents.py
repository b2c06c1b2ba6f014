"""A sandbox's record as objects, and back: `Listed` to `Sandbox` and `SandboxClaim`. Pure.

A record has what is so (state, times, node), and `declared`, a document with what somebody wrote:

    {"sandbox": {"metadata": …, "spec": …}, "claim": {"metadata": …, "spec": …}}

An object is the document with the truth in its place: `operatingMode` and `shutdownTime` are those of the VM, name and
namespace those of the record, uid and creationTimestamp follow from it. So what is derived is not in the document, and
cannot contradict the VM. A sandbox that was made in E2B's dialect has no document; its objects tell what it is.

A claim is a part of its sandbox's document. The reference to it as the owner, and the labels that the platform sets
(`SET_LABELS`), are put there whenever an object is made, and taken off again by `sandbox_part`.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from greenroom.api.kube.kinds import CLAIM, SANDBOX, Kind
from greenroom.api.kube.live.conditions import Facts, claim_status, sandbox_status
from greenroom.api.kube.live.instants import instant_text, same_instant
from greenroom.api.kube.objectmeta import value_problem
from greenroom.api.kube.objects import Object, metadata_of
from greenroom.wire.messages import FOREVER, Declared, Listed, Size

PREFIX: Final = "sandbox.greenroom.dev/"
ID_LABEL: Final = f"{PREFIX}id"
NODE_LABEL: Final = f"{PREFIX}node"
TEMPLATE_LABEL: Final = f"{PREFIX}template"
LAUNCH_LABEL: Final = f"{PREFIX}launch"
OWN_LABELS: Final = (ID_LABEL, NODE_LABEL, TEMPLATE_LABEL, LAUNCH_LABEL)
CLAIM_LABEL: Final = "agents.x-k8s.io/claim-uid"
POOL_LABEL: Final = "agents.x-k8s.io/warm-pool"
SET_LABELS: Final = (*OWN_LABELS, CLAIM_LABEL, POOL_LABEL)
"""All labels that nobody else can set: they are not kept, and the true ones take their place."""
DEFAULT_NAMESPACE: Final = "default"
_SPACE: Final = uuid.UUID("6f1c1b1e-52a4-4d50-9f0a-7a0d6d1f6a10")
_KEPT: Final = (
    "generateName",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "managedFields",
)
"""Metadata that a document keeps, beside `generation`."""
Part = dict[str, Any]
"""`{"metadata": …, "spec": …}` of one object in a document."""


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was declared, decoded."""

    sandbox: Part = {}
    claim: Part | None = None


class _Which(msgspec.Struct, frozen=True):
    claim: msgspec.Raw = msgspec.Raw(b"null")


_document: msgspec.json.Decoder[Document] = msgspec.json.Decoder(Document)
_which: msgspec.json.Decoder[_Which] = msgspec.json.Decoder(_Which)
NOTHING: Final = Document()


def document_of(listed: Listed) -> Document:
    """What was declared of a sandbox; of one of which nothing was, or nothing that can be read, an empty document."""
    if listed.declared is None:
        return NOTHING
    try:
        return _document.decode(listed.declared.document)
    except (msgspec.DecodeError, RecursionError):
        return NOTHING


def claimed(listed: Listed) -> bool:
    """Whether there is a SandboxClaim with this sandbox."""
    if listed.declared is None:
        return False
    try:
        return bytes(_which.decode(listed.declared.document).claim) != b"null"
    except (msgspec.DecodeError, RecursionError):
        return False


def raw(document: Document) -> msgspec.Raw:
    """A document as it is kept."""
    return msgspec.Raw(msgspec.json.encode(document))


def revision_of_listed(listed: Listed) -> int:
    """The revision of what is declared; 0 where nothing is."""
    return 0 if listed.declared is None else listed.declared.revision


def namespace_of(listed: Listed) -> str:
    """The namespace of a sandbox's objects."""
    return listed.owner or DEFAULT_NAMESPACE


def name_of(listed: Listed) -> str:
    """The name of a sandbox's objects."""
    return listed.name or listed.sandbox_id


def uid_of(kind: Kind, sandbox_id: str) -> str:
    """The uid of the object of this kind that a sandbox has."""
    return str(uuid.uuid5(_SPACE, sandbox_id if kind is SANDBOX else f"{kind.name}/{sandbox_id}"))


@lru_cache(maxsize=4096)
def _label(text: str) -> bool:
    return bool(text) and not value_problem(text)


def own_labels(listed: Listed, node: str) -> dict[str, str]:
    """The platform's labels of a sandbox."""
    found = (
        (ID_LABEL, listed.sandbox_id),
        (NODE_LABEL, node),
        (TEMPLATE_LABEL, listed.template),
        (LAUNCH_LABEL, listed.launch),
    )
    return {key: value for key, value in found if _label(value)}


def labels_of(facts: Facts, document: Document) -> dict[str, str]:
    """The labels of a sandbox's Sandbox."""
    labels = own_labels(facts.listed, facts.node)
    given = (document.sandbox.get("metadata") or {}).get("labels")
    if given:
        labels = {**given, **labels}
    if document.claim is not None:
        labels[CLAIM_LABEL] = uid_of(CLAIM, facts.listed.sandbox_id)
        if pool := pool_of(document):
            labels[POOL_LABEL] = pool_label(pool)
    return labels


def pool_of(document: Document) -> str:
    """Name of the SandboxWarmPool that a sandbox was claimed by, or "" where it was not."""
    spec = (document.claim or {}).get("spec") or {}
    name = (spec.get("warmPoolRef") or {}).get("name")
    return name if isinstance(name, str) else ""


@lru_cache(maxsize=4096)
def pool_label(name: str) -> str:
    """What sandboxes that came from a pool have in `POOL_LABEL`: its name, or, as a label's value has only 63
    characters, what a longer one begins with and a hash of it."""
    if not value_problem(name):
        return name
    short = re.sub(r"[^A-Za-z0-9]+", "-", name)[:50].strip("-")
    return f"{short}-{hashlib.blake2b(name.encode(), digest_size=5).hexdigest()}".strip("-")


def _metadata(facts: Facts, kind: Kind, part: Part) -> Object:
    listed = facts.listed
    metadata: Object = {
        "name": name_of(listed),
        "namespace": namespace_of(listed),
        "uid": uid_of(kind, listed.sandbox_id),
        "resourceVersion": str(facts.version),
        "generation": 1,
        "creationTimestamp": instant_text(listed.started_at),
    }
    if given := part.get("metadata"):
        metadata["generation"] = given.get("generation") or 1
        for field in _KEPT:
            if value := given.get(field):
                metadata[field] = value
            elif value == 0:
                metadata[field] = 0
    declared = listed.declared
    if listed.ended_at is not None and declared is not None and not declared.retain:
        # It would be gone, if no finalizer held it.
        metadata = {**_end_of(listed.ended_at), **metadata}
    return metadata


def sandbox_metadata(facts: Facts, document: Document) -> Object:
    """Metadata of a Sandbox."""
    metadata = _metadata(facts, SANDBOX, document.sandbox)
    metadata["labels"] = labels_of(facts, document)
    if document.claim is not None:
        listed = facts.listed
        owner = {
            "apiVersion": CLAIM.api_version,
            "kind": CLAIM.name,
            "name": name_of(listed),
            "uid": uid_of(CLAIM, listed.sandbox_id),
            "controller": True,
            "blockOwnerDeletion": True,
        }
        metadata["ownerReferences"] = [owner, *metadata.get("ownerReferences", [])]
    return metadata


def sandbox_spec(listed: Listed, document: Document) -> Object:
    """Spec of a Sandbox: what was declared, in the mode and with the end that it has."""
    spec: Object = {}
    if (given := document.sandbox.get("spec")) is not None:
        spec.update(given)
    else:
        container = {"name": "sandbox", **has(listed.template, listed.size)}
        spec["podTemplate"] = {"spec": {"containers": [container]}}
    _ending(spec, listed)
    spec.setdefault("shutdownPolicy", "Retain" if listed.declared and listed.declared.retain else "Delete")
    spec["operatingMode"] = "Suspended" if listed.state == "paused" else "Running"
    return spec


def has(template: str, size: Size) -> Object:
    """The fields of a container that tell what a sandbox was made of: template and size."""
    asked = {"cpu": str(size.cpus), "memory": f"{size.memory_mib}Mi"}
    return {"image": template, "resources": {"requests": asked}}


def ends(listed: Listed) -> float | None:
    """When a sandbox ends, as far as that is known (Unix seconds): at what is declared, or at its time-out before."""
    times = []
    if listed.declared is not None and listed.declared.shutdown_at is not None:
        times.append(listed.declared.shutdown_at)
    # At its time-out one that pauses itself does not end, and a paused one has none.
    lasts = listed.ends_at - listed.started_at < FOREVER / 2
    if lasts and listed.state == "running" and not listed.lifespan.auto_pause:
        times.append(listed.ends_at)
    return min(times, default=None)


def _ending(spec: Object, listed: Listed) -> None:
    end = ends(listed)
    told = spec.pop("shutdownTime", None)
    if end is not None:
        spec["shutdownTime"] = told if same_instant(told, end) else instant_text(end)


def sandbox_object(facts: Facts, document: Document | None = None) -> Object:
    """The Sandbox of a record."""
    document = document_of(facts.listed) if document is None else document
    return {
        "apiVersion": SANDBOX.api_version,
        "kind": SANDBOX.name,
        "metadata": sandbox_metadata(facts, document),
        "spec": sandbox_spec(facts.listed, document),
        "status": sandbox_status(facts, ID_LABEL),
    }


def claim_metadata(facts: Facts, document: Document) -> Object:
    """Metadata of a SandboxClaim."""
    return _metadata(facts, CLAIM, document.claim or {})


def claim_spec(listed: Listed, document: Document) -> Object:
    """Spec of a SandboxClaim: what was declared, with the end that the sandbox has."""
    spec: Object = dict((document.claim or {}).get("spec") or {})
    lifecycle = dict(spec.get("lifecycle") or {})
    _ending(lifecycle, listed)
    if lifecycle or "lifecycle" in spec:
        spec["lifecycle"] = lifecycle
    return spec


def claim_object(facts: Facts, document: Document | None = None) -> Object:
    """The SandboxClaim of a record that has one."""
    document = document_of(facts.listed) if document is None else document
    return {
        "apiVersion": CLAIM.api_version,
        "kind": CLAIM.name,
        "metadata": claim_metadata(facts, document),
        "spec": claim_spec(facts.listed, document),
        "status": claim_status(facts, name_of(facts.listed)),
    }


# Back


def _part(obj: Object) -> Part:
    metadata = obj.get("metadata") or {}
    kept = {field: metadata[field] for field in _KEPT if metadata.get(field) not in (None, {}, [], "")}
    kept["generation"] = metadata.get("generation") or 1
    return {"metadata": kept, "spec": dict(obj.get("spec") or {})}


def sandbox_part(obj: Object) -> Part:
    """What a document keeps of a Sandbox."""
    part = _part(obj)
    metadata, spec = part["metadata"], part["spec"]
    labels = metadata.get("labels", {})
    own = {key for key in labels if key in SET_LABELS}
    if own:
        metadata["labels"] = {key: value for key, value in labels.items() if key not in own}
        if not metadata["labels"]:
            del metadata["labels"]
    uid = labels.get(CLAIM_LABEL)
    owners = [each for each in metadata.get("ownerReferences", []) if each.get("uid") != uid]
    if owners:
        metadata["ownerReferences"] = owners
    else:
        metadata.pop("ownerReferences", None)
    spec.pop("operatingMode", None)
    return part


def claim_part(obj: Object) -> Part:
    """What a document keeps of a SandboxClaim."""
    return _part(obj)


def declared_of(
    document: Document,
    *,
    revision: int,
    retain: bool,
    retain_for: float | None = None,
    shutdown_at: float | None = None,
) -> Declared:
    """The record of a document."""
    return Declared(
        document=raw(document),
        revision=revision,
        retain=retain,
        retain_for=retain_for,
        held=held(document.sandbox) or (document.claim is not None and held(document.claim)),
        shutdown_at=shutdown_at,
    )


def held(part: Part) -> bool:
    """Whether somebody's finalizer keeps an object."""
    return bool(metadata_of(part).get("finalizers"))


def going(document: Document, now: float) -> Document:
    """The document with the mark that its objects are going."""
    claim = document.claim
    return Document(_leaving(document.sandbox, now), None if claim is None else _leaving(claim, now))


def _leaving(part: Part, now: float) -> Part:
    metadata = dict(metadata_of(part))
    if not metadata.get("deletionTimestamp"):
        metadata |= _end_of(now)
    return {**part, "metadata": metadata}


def _end_of(now: float) -> Object:
    return {"deletionTimestamp": instant_text(now), "deletionGracePeriodSeconds": 0}


def lies(obj: Object, old: Object | None = None) -> list[str]:
    """The platform's labels that an object, or a change of `old`, brings itself. They are not kept: the platform's own
    take their place."""
    given: Mapping[str, str] = (obj.get("metadata") or {}).get("labels") or {}
    known: Mapping[str, str] = ((old or {}).get("metadata") or {}).get("labels") or {}
    return [key for key in SET_LABELS if key in given and given[key] != known.get(key)]
