"""What an object asks for, as a claim: the rules of specs, and the texts in which they are refused. Pure.

Everything here is about the pod template and what stands around it, which `Sandbox` and `SandboxTemplate` share: its
first container names the template (image), the size (resources) and the environment. What has no meaning for a microVM
that starts from a snapshot is accepted, since manifests written for pods have it, and answered with a warning; what
would be unsafe to ignore is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from greenroom.api.kube.kinds import field
from greenroom.api.kube.live.instants import seconds_of
from greenroom.api.kube.objects import Object, same
from greenroom.api.kube.status import Cause
from greenroom.api.kube.validation import duplicate, not_allowed, required, shown, wrong
from greenroom.errors import BadRequest
from greenroom.wire.ids import is_sandbox_id
from greenroom.wire.messages import Size, SnapshotInfo, Template
from greenroom.wire.podsizes import image_of, resources_of, size_for

CONTAINER: Final = "spec.podTemplate.spec.containers[0]"
VARIABLES: Final = 256
"""Environment variables of one sandbox."""
LAST_INSTANT: Final = 253_402_300_799.0
"""The last second of the year 9999 (Unix seconds): what comes after has no date that can be written."""
NAMED: Final = 20
"""Templates that a refusal names."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,254}")
_COUNTS: Final = frozenset({"name", "image", "env", "envFrom", "resources"})
"""Fields of a container that mean something here; of a pod these are the containers."""
PATHS: Final = 24
"""Fields without effect that a warning names."""


class Made(msgspec.Struct, frozen=True):
    """What a pod template comes to: a template of the platform, a size, an environment."""

    template: str
    size: Size
    env: dict[str, str]
    snapshot: str = ""
    """Id of the snapshot to start from, which `template` names too then."""


def pod_violations(spec: Mapping[str, Any]) -> Iterator[Cause]:
    """What is wrong with the pod template and volumes of a spec whose types the schema has accepted."""
    if spec.get("volumeClaimTemplates"):
        detail = "sandboxes have the disk of their size alone; leave the volumes out"
        yield not_allowed("spec.volumeClaimTemplates", detail)
    first = _container(spec)
    if not first.get("image"):
        yield required(f"{CONTAINER}.image", "the name of a Greenroom template, such as base")
    yield from env_violations(first.get("env") or (), f"{CONTAINER}.env")
    if first.get("envFrom"):
        detail = (
            "there are no Secrets and ConfigMaps to take variables from; name them with their values in env"
        )
        yield not_allowed(f"{CONTAINER}.envFrom", detail)


def env_violations(entries: Sequence[Mapping[str, Any]], path: str) -> Iterator[Cause]:
    """What is wrong with a list of environment variables."""
    if len(entries) > VARIABLES:
        yield Cause(
            "FieldValueTooMany", f"Too many: {len(entries)}: must have at most {VARIABLES} items", path
        )
        return
    seen: set[str] = set()
    for number, entry in enumerate(entries):
        name, value = str(entry.get("name", "")), entry.get("value") or ""
        if not _VARIABLE.fullmatch(name):
            detail = "a variable's name consists of letters, digits, '_', '-' and '.', and does not begin with a digit"
            yield wrong(f"{path}[{number}].name", name, detail)
        if name in seen:
            yield duplicate(f"{path}[{number}].name", name)
        seen.add(name)
        if "valueFrom" in entry:
            detail = "there are no Secrets, ConfigMaps or pod fields to take a value from; give the value"
            yield not_allowed(f"{path}[{number}].valueFrom", detail)
        if "\0" in str(value):
            yield wrong(f"{path}[{number}].value", value, "it has a NUL character")


def pod_warnings(spec: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[str]:
    """What of a spec has no effect, in sentences for people; nothing where it was so `before`."""
    if before is not None and all(
        same(spec.get(each), before.get(each)) for each in ("podTemplate", "service")
    ):
        return []
    pod = field(spec, ("podTemplate", "spec")) or {}
    told: list[str] = []
    containers = pod.get("containers") or []
    if len(containers) > 1:
        names = ", ".join(str(each.get("name", ""))[:63] for each in containers[1:9])
        told.append(
            f"spec.podTemplate.spec.containers: a sandbox is one machine; only the first counts, not {names}"
        )
    first = _container(spec)
    idle = [each for each in pod if each != "containers" and _given(pod[each])]
    idle += [f"containers[0].{each}" for each in first if each not in _COUNTS and _given(first[each])]
    if idle:
        named = ", ".join(each[:63] for each in idle[:PATHS]) + (", …" if len(idle) > PATHS else "")
        told.append(f"spec.podTemplate.spec: has no effect here: {named}")
    if spec.get("service"):
        told.append("spec.service: has no effect here; sandboxes are reached through the proxy")
    return told


def _given(value: object) -> bool:
    return value is not None and value != "" and value != {} and value != []


def _container(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = field(spec, ("podTemplate", "spec", "containers")) or [{}]
    found = containers[0]
    return found if isinstance(found, Mapping) else {}


def image(spec: Mapping[str, Any]) -> str:
    """The image that a spec names, or "" where it names none."""
    try:
        return image_of(spec.get("podTemplate") or {})
    except BadRequest:
        return ""


def environment(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Environment variables by name."""
    return {str(entry["name"]): str(entry.get("value") or "") for entry in entries}


def made_of(spec: Mapping[str, Any], source: Template | SnapshotInfo) -> Made | Cause:
    """What a spec comes to with what its image names, or why no size is enough. A snapshot's size is what it is."""
    path = f"{CONTAINER}.resources"
    try:
        size = size_for(resources_of(spec.get("podTemplate") or {}), source.size)
    except BadRequest as error:
        return wrong_text(path, error.message.removeprefix("resources: "))
    env = environment(_container(spec).get("env") or ())
    if isinstance(source, Template):
        return Made(source.name, size, env)
    has = source.size
    if size.cpus > has.cpus or size.memory_mib > has.memory_mib:
        return wrong_text(
            path, f"the snapshot has {has.cpus} CPU and {has.memory_mib}Mi memory, and cannot be made larger"
        )
    return Made(source.snapshot_id, has, env, source.snapshot_id)


def unknown_image(name: str, templates: Sequence[Template], *, or_snapshot: bool = False) -> Cause:
    """The image is no template, nor, where it may be one, a snapshot; tells which templates there are."""
    names = sorted(template.name for template in templates)
    there = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
    known = f"templates are: {there}" if names else "there is no template yet"
    if or_snapshot:
        known += "; and this namespace has no snapshot of that id or name"
    return Cause("FieldValueNotFound", f"Not found: {shown(name)}: {known}", f"{CONTAINER}.image")


def wrong_text(path: str, message: str) -> Cause:
    """A cause whose text says what value is wrong itself."""
    return Cause("FieldValueInvalid", f"Invalid value: {message}", path)


def ending_violations(told: object, before: object, path: str, now: float) -> Iterator[Cause]:
    """What is wrong with the instant at which something shall end; one that was accepted stays acceptable."""
    if told is None or same(told, before):
        return
    at = seconds_of(told)
    if at is not None and at > LAST_INSTANT:
        yield wrong(path, told, "it has to lie before the year 10000 (UTC)")
    elif at is not None and at <= now:
        yield wrong(path, told, "it has passed already; name an instant in the future, or delete the object")


def name_violations(obj: Object) -> Iterator[Cause]:
    """Names that look like ids of sandboxes belong to what has no other name."""
    name = (obj.get("metadata") or {}).get("name") or ""
    if is_sandbox_id(name):
        detail = "it has the form of a sandbox's id, which is the name of sandboxes that were given none; take another"
        yield wrong("metadata.name", name, detail)


def combined(
    template: Mapping[str, str], added: Mapping[str, str], policy: str, path: str
) -> dict[str, str] | Cause:
    """The environment of a claim: the template's, and what the claim may bring by the template's policy."""
    if not added:
        return dict(template)
    if policy == "Disallowed":
        detail = "the template's envVarsInjectionPolicy is Disallowed; it may be Allowed or Overrides"
        return not_allowed(path, detail)
    replaced = sorted(name for name in added if name in template and added[name] != template[name])
    if policy == "Allowed" and replaced:
        detail = (
            f"the template has {', '.join(replaced[:NAMED])} already; its envVarsInjectionPolicy would have to be "
            "Overrides"
        )
        return not_allowed(path, detail)
    return {**template, **added}
