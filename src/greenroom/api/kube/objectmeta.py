"""Rules about metadata: names, labels, annotations, finalizers, owners, and what an update may change.

Sources: "Object Names and IDs", "Labels and Selectors", "Annotations", "Finalizers", "Owners and Dependents" in
Kubernetes' documentation; the texts are those of apimachinery's `validation`. Pure.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from greenroom.api.kube.objects import Object, metadata_of, rfc3339, same
from greenroom.api.kube.status import Cause
from greenroom.api.kube.validation import duplicate, not_allowed, required, too_long, wrong

NAME_LIMIT = 253
LABEL_LIMIT = 63
ANNOTATIONS_LIMIT = 256 << 10
"""Bytes of all keys and values of an object's annotations together."""
LABELS_LIMIT = 64 << 10
"""Bytes of all labels. Kubernetes has no bound but the object's; here an object is kept in a node's journal."""
LISTED_LIMIT = 64
"""Finalizers, and owners, of one object."""
GENERATED = 5
"""Characters that the server appends to generateName."""
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""What generated names are made of: no vowels, no digits that look like letters (apimachinery's `rand`)."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_NAME_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_QUALIFIED_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
SERVER_SET = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
)
"""Fields that only the server sets."""


def name_problem(name: str) -> str:
    """Why a text is no name of an object, or ""."""
    if len(name) > NAME_LIMIT:
        return f"must be no more than {NAME_LIMIT} characters"
    return "" if _NAME.fullmatch(name) else _NAME_RULE


def namespace_problem(name: str) -> str:
    """Why a text is no name of a namespace, or ""."""
    if len(name) > LABEL_LIMIT:
        return f"must be no more than {LABEL_LIMIT} characters"
    return "" if _LABEL.fullmatch(name) else _LABEL_RULE


def qualified_problem(key: str) -> str:
    """Why a text is no key of a label, an annotation or a finalizer (`prefix/name`), or ""."""
    prefix, slash, name = key.rpartition("/")
    if slash:
        if not prefix:
            return "prefix part must be non-empty"
        if problem := name_problem(prefix):
            return f"prefix part {problem}"
    if not name:
        return "name part must be non-empty"
    if len(name) > LABEL_LIMIT:
        return f"name part must be no more than {LABEL_LIMIT} characters"
    return "" if _QUALIFIED.fullmatch(name) else _QUALIFIED_RULE


def value_problem(value: str) -> str:
    """Why a text is no value of a label, or ""."""
    if len(value) > LABEL_LIMIT:
        return f"must be no more than {LABEL_LIMIT} characters"
    return "" if not value or _QUALIFIED.fullmatch(value) else _VALUE_RULE


def generated_name(prefix: str) -> str:
    """A name that begins with `prefix`, cut so that it fits."""
    tail = "".join(secrets.choice(_ALPHABET) for _ in range(GENERATED))
    return prefix[: LABEL_LIMIT - GENERATED] + tail


def violations(metadata: Object, *, namespaced: bool) -> list[Cause]:
    """What is wrong with the metadata of an object whose types the schema has accepted already."""
    return list(_violations(metadata, namespaced))


def _violations(metadata: Object, namespaced: bool) -> Iterator[Cause]:
    name, prefix = metadata.get("name") or "", metadata.get("generateName") or ""
    if prefix and (problem := name_problem(prefix.rstrip("-.") or prefix)):
        yield wrong("metadata.generateName", prefix, problem)
    if not name:
        yield required("metadata.name", "name or generateName is required")
    elif problem := name_problem(name):
        yield wrong("metadata.name", name, problem)
    namespace = metadata.get("namespace") or ""
    if namespaced and not namespace:
        yield required("metadata.namespace")
    elif namespaced and (problem := namespace_problem(namespace)):
        yield wrong("metadata.namespace", namespace, problem)
    elif namespace and not namespaced:
        yield not_allowed("metadata.namespace", "not allowed on this type")
    yield from label_violations(metadata.get("labels") or {}, "metadata.labels")
    yield from annotation_violations(metadata.get("annotations") or {}, "metadata.annotations")
    yield from _finalizers(metadata.get("finalizers") or [])
    yield from _owners(metadata.get("ownerReferences") or [])


def label_violations(labels: dict[str, str], path: str) -> Iterator[Cause]:
    """What is wrong with labels."""
    for key, value in labels.items():
        if problem := qualified_problem(key):
            yield wrong(path, key, problem)
        if problem := value_problem(value):
            yield wrong(path, value, problem)
    if _size(labels) > LABELS_LIMIT:
        yield too_long(path, LABELS_LIMIT)


def annotation_violations(annotations: dict[str, str], path: str) -> Iterator[Cause]:
    """What is wrong with annotations: their keys count as lower case, their values are free."""
    for key in annotations:
        if problem := qualified_problem(key.lower()):
            yield wrong(path, key, problem)
    if _size(annotations) > ANNOTATIONS_LIMIT:
        yield too_long(path, ANNOTATIONS_LIMIT)


def _size(entries: dict[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in entries.items())


def _finalizers(finalizers: list[str]) -> Iterator[Cause]:
    if len(finalizers) > LISTED_LIMIT:
        yield too_long("metadata.finalizers", LISTED_LIMIT, "finalizers")
    for number, name in enumerate(finalizers):
        if problem := qualified_problem(name):
            yield wrong(f"metadata.finalizers[{number}]", name, problem)
        elif "/" not in name and name not in ("orphan", "foregroundDeletion"):
            yield wrong(
                f"metadata.finalizers[{number}]",
                name,
                "name is neither a standard finalizer name nor is it fully qualified",
            )


def _owners(owners: list[Object]) -> Iterator[Cause]:
    if len(owners) > LISTED_LIMIT:
        yield too_long("metadata.ownerReferences", LISTED_LIMIT, "owners")
    for number, owner in enumerate(owners):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                path = f"metadata.ownerReferences[{number}].{field}"
                yield wrong(path, owner.get(field, ""), "must not be empty")
    managing = [owner for owner in owners if owner.get("controller")]
    if len(managing) > 1:
        yield wrong(
            "metadata.ownerReferences",
            managing[1].get("name", ""),
            "Only one reference can have Controller set to true. "
            f'Found "true" in references for {managing[0].get("name")} and {managing[1].get("name")}',
        )
    seen: set[Any] = set()
    for number, owner in enumerate(owners):
        if owner.get("uid") in seen:
            yield duplicate(f"metadata.ownerReferences[{number}]", owner.get("uid"))
        seen.add(owner.get("uid"))


def prepare_create(obj: Object, *, uid: str, now: datetime) -> None:
    """Give a new object what the server gives, in place; what the client put there does not count."""
    metadata = obj["metadata"]
    for field in SERVER_SET:
        metadata.pop(field, None)
    metadata["uid"] = uid
    metadata["creationTimestamp"] = rfc3339(now)
    metadata["generation"] = 1


def prepare_update(new: Object, old: Object) -> None:
    """Give an update what the server has already given, where the client left it out or may not change it, in place."""
    metadata, before = new["metadata"], metadata_of(old)
    for field in (*SERVER_SET, "generateName"):
        if field == "uid" and metadata.get("uid"):
            continue
        if field in before:
            metadata[field] = before[field]
        else:
            metadata.pop(field, None)


def update_violations(new: Object, old: Object) -> list[Cause]:
    """What an update may not do with metadata: other names, another uid, more finalizers once the object is going."""
    metadata, before = metadata_of(new), metadata_of(old)
    found = [
        wrong(f"metadata.{field}", metadata.get(field, ""), "field is immutable")
        for field in ("name", "namespace", "uid")
        if not same(metadata.get(field), before.get(field))
    ]
    if before.get("deletionTimestamp"):
        added = set(metadata.get("finalizers") or []) - set(before.get("finalizers") or [])
        if added:
            found.append(
                not_allowed(
                    "metadata.finalizers",
                    "no new finalizers can be added if the object is being deleted, found new finalizers "
                    f"{sorted(added)}",
                )
            )
    return found
