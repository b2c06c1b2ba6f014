"""Who may do what: one authorizer for both dialects. Pure.

A caller is an API key or somebody for whom a front proxy vouches; what it may is a list of rules (`store.records`). An
*action* is a verb on a resource in a namespace, in Kubernetes' words; operations of the E2B dialect are named in them
too. A rule for all namespaces is needed where an action is in none, or in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from greenroom.store.records import EVERYTHING, ApiKey, Rule

SET_ABOVE: Final = frozenset({"resourcequotas"})
"""Resources that bound a namespace."""
READS: Final = ("get", "list", "watch")


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a caller is about to do. `resource` is empty for what is no resource, which `path` names then."""

    verb: str
    group: str = ""
    resource: str = ""
    part: str = ""
    """The subresource."""
    namespace: str = ""
    """Empty for all of them, and for what is in none."""
    name: str = ""
    path: str = ""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and what it may."""

    user: str
    owner: str
    """The namespace of what it makes without saying where."""
    rules: Sequence[Rule]
    uid: str = ""
    groups: Sequence[str] = ()
    extra: dict[str, list[str]] = {}

    def may(self, action: Action) -> bool:
        """Whether it may do that. What is no resource (versions, schemas) anybody may read who is known here."""
        if not action.resource:
            return action.verb in ("get", "head")
        if (action.group, action.resource, action.part) == ("", "namespaces", "") and action.verb in READS:
            # Those in which it may do something; a list has these alone.
            seen = self.namespaces()
            return seen is None or (action.namespace in seen if action.namespace else bool(seen))
        return any(_allows(rule, action) for rule in self.rules)

    def namespaces(self) -> frozenset[str] | None:
        """The namespaces in which it may do anything at all; None when that is all of them."""
        named = {namespace for rule in self.rules for namespace in rule.namespaces}
        return None if "*" in named else frozenset(named)


def rules_of(key: ApiKey) -> list[Rule]:
    """What a key may: its rules, or everything in its owner's namespace."""
    return key.rules or [Rule(namespaces=[key.owner], resources=["*"], verbs=["*"])]


def of_key(key: ApiKey) -> Caller:
    """A key as a caller."""
    groups = ("system:authenticated", *(("greenroom:admins",) if EVERYTHING in key.rules else ()))
    return Caller(user=f"key:{key.name}", uid=key.key_id, owner=key.owner, rules=rules_of(key), groups=groups)


def refusal(caller: Caller, action: Action) -> str:
    """Why a caller may not do something, in Kubernetes' words."""
    if not action.resource:
        return f'User "{caller.user}" cannot {action.verb} path "{action.path}"'
    what = f"{action.resource}/{action.part}" if action.part else action.resource
    where = f'in the namespace "{action.namespace}"' if action.namespace else "at the cluster scope"
    return (
        f'User "{caller.user}" cannot {action.verb} resource "{what}" in API group "{action.group}" {where}'
    )


def _allows(rule: Rule, action: Action) -> bool:
    return (
        ("*" in rule.verbs or action.verb in rule.verbs)
        and ("*" in rule.namespaces or (action.namespace != "" and action.namespace in rule.namespaces))
        and any(
            _covers(each, action) for each in rule.resources if each != "*" or not _set_above(rule, action)
        )
    )


def _set_above(rule: Rule, action: Action) -> bool:
    """Whether an action is beyond "everything" in some namespaces: who is bounded by a quota does not set it. A rule
    that names the resource, or one for all namespaces, allows it."""
    return action.resource in SET_ABOVE and action.verb not in READS and "*" not in rule.namespaces


def _covers(resource: str, action: Action) -> bool:
    if resource == "*":
        return True
    named, _, part = resource.partition("/")
    if part != action.part and not (part == "*" and action.part):
        return False
    return named in ("*", action.resource, f"{action.resource}.{action.group}")
