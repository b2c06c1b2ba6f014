"""Options of requests: from the query, and of a delete from the body too. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from greenroom.api.kube import negotiation
from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.negotiation import Form, Include
from greenroom.api.kube.objects import Object
from greenroom.api.kube.patching.applying import manager_of
from greenroom.api.kube.selectors import Selection, parse_fields, parse_labels
from greenroom.api.kube.status import Cause, Subject, bad_request, invalid
from greenroom.api.kube.validation import FieldValidation, field_validation, unsupported
from greenroom.api.kube.watching import truth_of

POLICIES: Final = ("Orphan", "Background", "Foreground")
WATCH_LIMIT = 3600.0
"""Seconds that a watch lasts at most."""
_VALUE_LIMIT = 64


class Writing(msgspec.Struct, frozen=True, kw_only=True):
    """How to write."""

    manager: str = "unknown"
    level: FieldValidation = "Warn"
    dry_run: bool = False
    force: bool = False


class Deleting(msgspec.Struct, frozen=True, kw_only=True):
    """How to delete, and what the object has to be for that."""

    dry_run: bool = False
    uid: str = ""
    version: str = ""
    orphan: bool = False
    """What belongs to the object stays."""


class Answering(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer."""

    form: Form = "object"
    include: Include = "Metadata"


def writing(query: Mapping[str, str], agent: str = "", *, apply: bool = False) -> Writing:
    """The options of a create, an update or a patch. An apply has to name its manager. Raises 400, 422."""
    if apply and not query.get("fieldManager"):
        raise _refused(
            Cause("FieldValueRequired", "Required value: is required for apply patch", "fieldManager")
        )
    force = truth_of("force", query.get("force"))
    if force is not None and not apply:
        raise _refused(
            Cause("FieldValueForbidden", "Forbidden: may not be specified for non-apply patch", "force")
        )
    return Writing(
        manager=manager_of(query.get("fieldManager"), agent),
        level=field_validation(query.get("fieldValidation")),
        dry_run=dry_run(query.get("dryRun")),
        force=bool(force),
    )


def dry_run(asked: str | None) -> bool:
    """The `dryRun` parameter. Raises 422."""
    if not asked:
        return False
    if asked != "All":
        raise _refused(unsupported("dryRun", asked[:_VALUE_LIMIT], ["All"]))
    return True


def _refused(cause: Cause) -> Exception:
    return invalid(Subject("meta.k8s.io", "Options", ""), [cause])


def deleting(query: Mapping[str, str], body: Object) -> Deleting:
    """The options of a delete; what the body says counts more. Raises 400, 422."""
    policy = _of(body, "propagationPolicy", str) or query.get("propagationPolicy")
    if policy and policy not in POLICIES:
        raise _refused(unsupported("propagationPolicy", policy[:_VALUE_LIMIT], POLICIES))
    _grace(_of(body, "gracePeriodSeconds", int), query.get("gracePeriodSeconds"))
    asked = _of(body, "dryRun", list) or ([query["dryRun"]] if query.get("dryRun") else [])
    if any(not isinstance(each, str) for each in asked):
        raise bad_request("dryRun: a list of texts is needed")
    conditions = _of(body, "preconditions", dict) or {}
    dry = [dry_run(each) for each in asked]
    return Deleting(
        dry_run=any(dry),
        uid=_of(conditions, "uid", str) or "",
        version=_of(conditions, "resourceVersion", str) or "",
        orphan=policy == "Orphan",
    )


def _grace(given: int | None, asked: str | None) -> None:
    if given is None and asked and not (asked.isascii() and asked.isdigit() and len(asked) < 10):
        raise bad_request(f"gracePeriodSeconds: Invalid value: {asked[:20]!r}: seconds are needed")


def _of(body: Object, name: str, kind: type) -> Any:
    value = body.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise bad_request(f"{name}: Invalid value: it is of another type")
    return value


def selection(query: Mapping[str, str], namespace: str, kind: Kind) -> Selection:
    """What a request is narrowed to. Raises 400."""
    return Selection(
        namespace,
        parse_labels(query.get("labelSelector", "")),
        parse_fields(query.get("fieldSelector", ""), kind.selectable),
    )


def answering(query: Mapping[str, str], accept: str) -> Answering:
    """The form that a client wants. Raises 400, 406."""
    return Answering(
        form=negotiation.form_of(accept), include=negotiation.include_of(query.get("includeObject"))
    )


def watch_seconds(asked: str | None, default: Callable[[], float]) -> float:
    """How long a watch lasts. Raises 400."""
    if not asked:
        return min(default(), WATCH_LIMIT)
    if not asked.isascii() or not asked.isdigit() or len(asked) > 9:
        raise bad_request(f"timeoutSeconds: Invalid value: {asked[:20]!r}: seconds are needed")
    return min(float(asked), WATCH_LIMIT) or WATCH_LIMIT
