"""Which form a client wants an answer in: objects, a Table for people, or metadata alone.

Clients say so in `Accept`, by parameters of the media type (`as`, `g`, `v`), in the order of their wishes; see
"Alternate representations of resources" in "Kubernetes API Concepts". Pure.
"""

from __future__ import annotations

from typing import Final, Literal

from greenroom.api.kube.status import bad_request, not_acceptable, unsupported_media_type

JSON: Final = "application/json"
Form = Literal["object", "table", "partial"]
_FORMS: Final[dict[tuple[str, str, str], Form]] = {
    ("", "", ""): "object",
    ("Table", "meta.k8s.io", "v1"): "table",
    ("PartialObjectMetadata", "meta.k8s.io", "v1"): "partial",
    ("PartialObjectMetadataList", "meta.k8s.io", "v1"): "partial",
}
HEADER_LIMIT = 4 << 10
"""Characters of an Accept header that are looked at; a longer one is refused."""
Include = Literal["None", "Metadata", "Object"]

JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
PATCHES: Final = (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY_PATCH)


def media_ranges(accept: str) -> list[tuple[str, dict[str, str]]]:
    """The media types of an Accept header with their parameters, best first. Raises 400 for one that is too long."""
    if len(accept) > HEADER_LIMIT:
        raise bad_request(f"Accept: may have up to {HEADER_LIMIT} characters")
    found: list[tuple[float, str, dict[str, str]]] = []
    for part in accept.split(","):
        name, *rest = (each.strip() for each in part.split(";"))
        if not name:
            continue
        parameters = dict(each.split("=", 1) for each in rest if "=" in each)
        try:
            weight = float(parameters.pop("q", "1"))
        except ValueError:
            weight = 0.0
        if weight > 0:
            found.append((weight, name.lower(), parameters))
    # Sorting keeps the client's order among equals.
    found.sort(key=lambda each: -each[0])
    return [(name, parameters) for _, name, parameters in found]


def form_of(accept: str, *, alone: bool = False) -> Form:
    """The form that an answer takes. `alone` is for answers that have no table. Raises 406 when there is none."""
    for name, parameters in media_ranges(accept or JSON):
        if name not in (JSON, "application/*", "*/*"):
            continue
        asked = (parameters.get("as", ""), parameters.get("g", ""), parameters.get("v", ""))
        form = _FORMS.get(asked)
        if form is not None and not (alone and form != "object"):
            return form
    raise not_acceptable([JSON])


def accepts(accept: str, media_type: str = JSON) -> bool:
    """Whether a client reads a media type."""
    kind = media_type.partition("/")[0]
    return any(name in (media_type, f"{kind}/*", "*/*") for name, _ in media_ranges(accept or "*/*"))


def include_of(asked: str | None) -> Include:
    """The `includeObject` parameter: what a table's rows carry of their objects. Raises 400."""
    match asked or "Metadata":
        case "None":
            return "None"
        case "Metadata":
            return "Metadata"
        case "Object":
            return "Object"
    raise bad_request(f"includeObject: unsupported value {str(asked)[:40]!r}: None, Metadata or Object")


def body_type(content_type: str, accepted: tuple[str, ...] = (JSON,)) -> str:
    """The media type of a body. Raises 415 when it is none of `accepted`; without a header it is the first."""
    name = content_type.partition(";")[0].strip().lower()
    if not name:
        return accepted[0]
    if name not in accepted:
        raise unsupported_media_type(accepted)
    return name
