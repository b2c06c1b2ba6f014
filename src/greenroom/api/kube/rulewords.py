"""The words that rules of API keys are made of: a rule with a word that nothing answers to would never hold. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from greenroom.api.kube.discovery import subresources
from greenroom.api.kube.kinds import CORE, KINDS, READS, WRITES
from greenroom.errors import BadRequest
from greenroom.store.records import Rule

VERBS = (*READS, *WRITES)


def check_words(rule: Rule) -> None:
    """Raise BadRequest for verbs and resources that there are not, listing those that there are."""
    for verb in rule.verbs:
        if verb not in (*VERBS, "*"):
            raise BadRequest(f"there is no verb {verb!r}\nVerbs are {', '.join(VERBS)}, and * for all")
    for resource in rule.resources:
        if not _known(resource):
            raise BadRequest(
                f"there is no resource {resource[:80]!r}\nResources are {', '.join(_resources())}, and * for all; "
                "sandboxes/* are all subresources of sandboxes"
            )


def _known(resource: str) -> bool:
    named, slash, part = resource.partition("/")
    kinds = [kind for kind in (*KINDS, *CORE) if named in ("*", kind.plural, f"{kind.plural}.{kind.group}")]
    if not slash or not kinds:
        return bool(kinds)
    return part == "*" or any(part == name for kind in kinds for name, _, _ in subresources(kind))


def _resources() -> Iterator[str]:
    for kind in (*KINDS, *CORE):
        yield kind.plural
        yield from (f"{kind.plural}/{name}" for name, _, _ in subresources(kind) if name != "status")
