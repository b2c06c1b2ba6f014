"""What a pod template asks for, in Greenroom's terms: the template it names, and the size that satisfies it. Pure.

The Kubernetes dialect describes a sandbox as a pod, of which the first container counts: its image is the name of a
Greenroom template, its resources choose a size out of `SIZES`. The api sizes what it creates with this and the master
the pools that it fills, so that a claim finds the members that were made for it.

A quantity is what Kubernetes means by one (`500m`, `1Gi`, `1e3`):
https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from greenroom.errors import BadRequest
from greenroom.wire.messages import Size

SIZES: tuple[Size, ...] = (
    Size("small", cpus=1, memory_mib=512, disk_mib=4096),
    Size("medium", cpus=2, memory_mib=1024, disk_mib=4096),
    Size("large", cpus=4, memory_mib=4096, disk_mib=4096),
    Size("xlarge", cpus=4, memory_mib=8192, disk_mib=4096),
    Size("2xlarge", cpus=8, memory_mib=16384, disk_mib=4096),
)
"""All sizes that can be asked for by resources, the smallest first; none has less of anything than one before it."""

MIB = 1 << 20
LONGEST = 64
"""Characters of a quantity."""
_LARGEST = Fraction(2**63 - 1)
"""Kubernetes keeps no larger one either."""
_QUANTITY = re.compile(
    r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,2}))?"
)
_SUFFIXES = {
    "": Fraction(1),
    **{suffix: Fraction(1, 1000**power) for power, suffix in enumerate("mun", 1)},
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", 1)},
}


def quantity(text: object) -> Fraction:
    """The number that a quantity means: CPUs (`500m` is one half) or bytes. A number that is none of text counts too.

    Raises BadRequest when it is none, or is beyond what Kubernetes keeps.
    """
    written = repr(text) if isinstance(text, int | float) and not isinstance(text, bool) else text
    if not isinstance(written, str) or len(written) > LONGEST or not (found := _QUANTITY.fullmatch(written)):
        raise BadRequest(f"{str(text)[:LONGEST]!r} is no quantity; write one as 2, 500m or 512Mi")
    sign, digits, suffix, exponent = found.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""]
    amount = Fraction(digits.rstrip(".")) * scale
    if amount > _LARGEST:
        raise BadRequest(f"{written!r} is too much; a quantity is at most 2^63-1")
    return -amount if sign == "-" else amount


def image_of(pod_template: Mapping[str, Any]) -> str:
    """The image of the first container of a `podTemplate`: name or id of a template, with or without `:default`.

    Raises BadRequest when there is none.
    """
    image = _first_container(pod_template).get("image")
    if not isinstance(image, str) or not image:
        raise BadRequest(
            "podTemplate.spec.containers[0].image: the name of a template is needed, such as 'base'"
        )
    return image


def resources_of(pod_template: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `resources` of the first container, for `size_for`; empty where it has none. Raises BadRequest."""
    resources = _first_container(pod_template).get("resources")
    if resources is None:
        return {}
    if not isinstance(resources, Mapping):
        raise BadRequest(
            "podTemplate.spec.containers[0].resources: an object with requests or limits is needed"
        )
    return resources


def _first_container(pod_template: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = pod_template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    first = containers[0] if isinstance(containers, list) and containers else None
    if not isinstance(first, Mapping):
        raise BadRequest("podTemplate.spec.containers: one container is needed, its image names a template")
    return first


def size_for(resources: Mapping[str, Any], own: Size) -> Size:
    """The smallest of `SIZES` that gives a container what its `resources` request, or limit where nothing is requested.

    `own`, the template's own size, is what one gets that says nothing. Raises BadRequest where no size is enough, or
    where something is asked for that no size has.
    """
    asked = _asked(resources)
    if not asked:
        return own
    for size in SIZES:
        has = _has(size)
        if all(amount <= has.get(name, 0) for name, amount in asked.items()):
            return size
    wanted = ", ".join(f"{name} {_shown(name, amount)}" for name, amount in asked.items())
    known = _has(SIZES[-1])
    if strange := [name for name, amount in asked.items() if amount and name not in known]:
        raise BadRequest(
            f"resources: no size has {', '.join(strange)}; sizes have {', '.join(known)}. They are: {table()}"
        )
    raise BadRequest(f"resources: no size has {wanted}; ask for at most what one of these has: {table()}")


def table() -> str:
    """All sizes in words, as refusals name them."""
    return "; ".join(
        f"{size.name}: {size.cpus} CPU, {size.memory_mib}Mi memory, {size.disk_mib}Mi disk" for size in SIZES
    )


def _has(size: Size) -> dict[str, int]:
    return {"cpu": size.cpus, "memory": size.memory_mib * MIB, "ephemeral-storage": size.disk_mib * MIB}


def _asked(resources: Mapping[str, Any]) -> dict[str, Fraction]:
    """What is asked for by resource. What only has a limit requests as much: Kubernetes has it so."""
    requests, limits = _amounts(resources, "requests"), _amounts(resources, "limits")
    for name, limit in limits.items():
        if requests.get(name, limit) > limit:
            raise BadRequest(
                f"resources.requests.{name}: {_shown(name, requests[name])} is more than its limit, "
                f"{_shown(name, limit)}"
            )
    return {**limits, **requests}


def _amounts(resources: Mapping[str, Any], field: str) -> dict[str, Fraction]:
    given = resources.get(field)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise BadRequest(f"resources.{field}: an object is needed, such as {{'cpu': '1', 'memory': '512Mi'}}")
    amounts = {}
    for name, text in given.items():
        try:
            amount = quantity(text)
        except BadRequest as error:
            raise BadRequest(f"resources.{field}.{str(name)[:LONGEST]}: {error.message}") from error
        if amount < 0:
            raise BadRequest(f"resources.{field}.{str(name)[:LONGEST]}: it cannot be less than 0")
        amounts[str(name)[:LONGEST]] = amount
    return amounts


def _shown(name: str, amount: Fraction) -> str:
    """An amount as people write it, rounded up."""
    if name in ("memory", "ephemeral-storage"):
        return f"{-(-amount // MIB)}Mi"
    return str(amount) if amount.denominator == 1 else f"{-(-amount * 1000 // 1)}m"
