"""What is wrong with a pod template, or of no effect: a sandbox is a microVM with one template and one size. Pure.

Every path in a cause is that of the object's field, `path` is where the pod template is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from greenroom.api.kube.objects import Object
from greenroom.api.kube.status import Cause
from greenroom.api.kube.validation import wrong
from greenroom.errors import BadRequest
from greenroom.wire import podsizes
from greenroom.wire.messages import Template

Known = Callable[[str], Template | None]
"""The Greenroom template that an image names, or None."""

_UNUSED_IN_POD: Final = (
    "initContainers",
    "nodeSelector",
    "affinity",
    "tolerations",
    "runtimeClassName",
    "restartPolicy",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "volumes",
    "securityContext",
    "hostNetwork",
    "dnsPolicy",
    "dnsConfig",
    "imagePullSecrets",
)
_UNUSED_IN_CONTAINER: Final = (
    "imagePullPolicy",
    "command",
    "args",
    "workingDir",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "lifecycle",
    "securityContext",
    "volumeMounts",
    "envFrom",
)


def forbidden(path: str, detail: str) -> Cause:
    """A value that cannot be had here."""
    return Cause("FieldValueForbidden", f"Forbidden: {detail}", path)


def problems(pod: Any, known: Known, names: Sequence[str], path: str = "spec.podTemplate") -> list[Cause]:
    """What keeps a sandbox from being made of a pod template. `names` are those of the templates that there are."""
    return list(_problems(pod, known, names, path))


def _problems(pod: Any, known: Known, names: Sequence[str], path: str) -> Iterator[Cause]:
    first = f"{path}.spec.containers[0]"
    try:
        image = podsizes.image_of(pod)
        resources = podsizes.resources_of(pod)
    except BadRequest as error:
        yield wrong(first, "", error.message)
        return
    template = known(image)
    if template is None:
        listed = ", ".join(sorted(names)[:20]) or "none yet"
        yield wrong(f"{first}.image", image, f"no Greenroom template has this name; there are: {listed}")
    try:
        podsizes.size_for(resources, template.size if template is not None else podsizes.SIZES[0])
    except BadRequest as error:
        yield wrong(f"{first}.resources", resources, error.message)
    for place, container in _containers(pod):
        for number, variable in enumerate(_list(container.get("env"))):
            if isinstance(variable, dict) and variable.get("valueFrom"):
                yield forbidden(
                    f"{path}.spec.containers[{place}].env[{number}].valueFrom",
                    "there are no secrets and config maps to look values up in; give the value",
                )


def unused(pod: Any, path: str = "spec.podTemplate") -> list[str]:
    """What of a pod template has no effect, a text for each field that is there."""
    if not isinstance(pod, dict):
        return []
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        return []
    found = [f"{path}.spec.{name}" for name in _UNUSED_IN_POD if spec.get(name)]
    for place, container in _containers(pod):
        where = f"{path}.spec.containers[{place}]"
        if place:
            found.append(where)
            continue
        found += [f"{where}.{name}" for name in _UNUSED_IN_CONTAINER if container.get(name)]
    return [f"{each}: has no effect: a sandbox is a microVM made from its template" for each in found]


def _containers(pod: Any) -> list[tuple[int, Object]]:
    spec = pod.get("spec") if isinstance(pod, dict) else None
    found = _list(spec.get("containers") if isinstance(spec, dict) else None)
    return [(place, each) for place, each in enumerate(found) if isinstance(each, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
