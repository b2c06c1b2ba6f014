"""What SandboxWarmPools and SandboxTemplates say, read the same way by whoever acts on them. Pure, over documents.

The master fills pools by this, and the api shows them, sizes claims on them and refuses by it: what one of them takes a
document for, the other does too, and says of it what is wrong in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from greenroom.errors import BadRequest
from greenroom.wire.messages import PoolName, Size, Template
from greenroom.wire.podsizes import image_of, resources_of, size_for

DEFAULT_TAG = "default"
"""The one tag a template has until templates can be built."""
MOST_REPLICAS = 1_000_000
"""Of one pool; more is taken for a mistake."""


class Templates:
    """Greenroom's own templates, found by what images call them."""

    def __init__(self, templates: Iterable[Template] = ()) -> None:
        self._by_name = {template.name: template for template in templates}
        self._by_id = {template.template_id: template for template in self._by_name.values()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Templates) and self._by_name == other._by_name

    def all(self) -> list[Template]:
        """All of them."""
        return list(self._by_name.values())

    def find(self, ref: str) -> Template | None:
        """The template with this name or id, either with or without the tag `default`."""
        name, _, tag = ref.partition(":")
        if tag not in ("", DEFAULT_TAG):
            return None
        return self._by_name.get(name) or self._by_id.get(name)


# Pools


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    generation: int | None = None
    deletion_timestamp: str | None = None


class _Ref(msgspec.Struct, frozen=True):
    name: str


class _Strategy(msgspec.Struct, frozen=True):
    type: Literal["OnReplenish", "Recreate"] = "OnReplenish"


class Autoscaling(msgspec.Struct, frozen=True, rename="camel"):
    """Bounds between which a pool's size follows the claims; see `bounds`."""

    min_replicas: int | None = None
    max_replicas: int | None = None


class _PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    sandbox_template_ref: _Ref
    replicas: int = 1
    update_strategy: _Strategy | None = None
    autoscaling: Autoscaling | None = None


class PoolDocument(msgspec.Struct, frozen=True):
    """A SandboxWarmPool as it is kept."""

    spec: _PoolSpec
    metadata: _Metadata = _Metadata()


class PoolWish(NamedTuple):
    """What a SandboxWarmPool asks for."""

    template: str
    """Name of its SandboxTemplate."""
    generation: int
    replicas: int
    recreate: bool
    """How members of an older template go: at once, but for a floor, or as they are claimed."""
    autoscaling: Autoscaling | None

    @property
    def bounds(self) -> Bounds:
        """See `bounds`."""
        return bounds(self.replicas, self.autoscaling)


class Bounds(NamedTuple):
    """How many ready members a pool has at least and at most; the same where nothing lets it follow the claims."""

    least: int
    most: int


def bounds(replicas: int, autoscaling: Autoscaling | None) -> Bounds:
    """How many members are wanted. With autoscaling its maximum holds whatever else is said, and `replicas` are the
    minimum where it names none."""
    replicas = max(0, min(replicas, MOST_REPLICAS))
    if autoscaling is None:
        return Bounds(replicas, replicas)
    least, most = autoscaling.min_replicas, autoscaling.max_replicas
    wanted = replicas if least is None else max(0, min(least, MOST_REPLICAS))
    most = max(wanted, replicas) if most is None else max(0, min(most, MOST_REPLICAS))
    return Bounds(min(wanted, most), most)


def wish_of(document: PoolDocument) -> PoolWish:
    """What a pool asks for; one that is being deleted asks for no members."""
    spec, metadata = document.spec, document.metadata
    going = metadata.deletion_timestamp is not None
    return PoolWish(
        template=spec.sandbox_template_ref.name,
        generation=metadata.generation or 0,
        replicas=0 if going else max(0, min(spec.replicas, MOST_REPLICAS)),
        recreate=spec.update_strategy is not None and spec.update_strategy.type == "Recreate",
        autoscaling=None if going else spec.autoscaling,
    )


# Templates


class _TemplateSpec(msgspec.Struct, frozen=True, rename="camel"):
    pod_template: dict[str, Any] = {}


class TemplateDocument(msgspec.Struct, frozen=True):
    """A SandboxTemplate as it is kept."""

    spec: _TemplateSpec


class Members(NamedTuple):
    """What members of a pool are alike in, or why there can be none: `reason` in one word, `problem` for people."""

    key: PoolName | None = None
    size: Size | None = None
    reason: str = ""
    problem: str = ""


def members_of(
    pod_template: Mapping[str, Any] | None, name: str, namespace: str, templates: Templates
) -> Members:
    """What members are made of by the `podTemplate` of the SandboxTemplate called `name`; None: it is not there."""
    if pod_template is None:
        return Members(
            reason="TemplateNotFound",
            problem=f"there is no SandboxTemplate {name!r} in namespace {namespace!r}; create it, "
            "or let sandboxTemplateRef name another",
        )
    reason = "InvalidTemplate"
    try:
        image = image_of(pod_template)
        resources = resources_of(pod_template)
        own = templates.find(image)
        if own is None:
            reason = "ImageNotFound"
            raise BadRequest(f"there is no template {image!r}; name one that `greenroom status` lists")
        reason = "NoSize"
        size = size_for(resources, own.size)
    except BadRequest as error:
        return Members(reason=reason, problem=f"SandboxTemplate {name!r}: {error.message}")
    return Members(PoolName(own.name, size.name), size)
