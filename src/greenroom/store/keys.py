"""API keys: made, listed, revoked and recognised. A secret is shown once and never kept.

A secret is `e2b_` and 40 lowercase hexadecimal digits, the form that E2B's SDKs check before they send it.
Its 160 random bits cannot be guessed, so a plain SHA-256 suffices: slow, salted hashes protect secrets that
people choose.

Looking a key up by its digest in an index takes longer the more leading digits match, but that tells nothing
of use: whoever offers a secret cannot choose its digest, so cannot steer towards one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Sequence

from greenroom.errors import BadRequest
from greenroom.store.records import ApiKey, Rule, Store

_SECRET = re.compile(r"e2b_[0-9a-f]{40}")
_OWNER = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""A DNS label: an owner is a namespace of the Kubernetes dialect. Keys made before that may have `_` in theirs."""
_HINT_DIGITS = 4
_VERB = re.compile(r"\*|[a-z]{1,32}")
_RESOURCE = re.compile(r"\*(?:/[a-z]{1,32})?|[a-z]{1,63}(?:\.[a-z0-9.-]{1,190})?(?:/(?:\*|[a-z]{1,32}))?")
_ALLOWED = re.compile(r"\s*(\S+)\s+(\S+)(?:\s+in\s+(\S+))?\s*")
MOST_RULES = 64
"""Rules of one key."""


def digest_of(secret: str) -> str:
    """Hex SHA-256 of a secret, the only form in which it is kept."""
    return hashlib.sha256(secret.encode()).hexdigest()


def is_secret(text: str) -> bool:
    """True if `text` has the form of an API key's secret; says nothing about whether there is such a key."""
    return _SECRET.fullmatch(text) is not None


def rule_of(text: str, owner: str) -> Rule:
    """The rule that a text names: `VERBS RESOURCES [in NAMESPACES]`, each a list with commas, or `*`.

    Without namespaces it is for the owner's. Raises BadRequest saying what is wrong.
    """
    found = _ALLOWED.fullmatch(text)
    if found is None:
        raise BadRequest(
            f"{text[:100]!r} is no rule; write VERBS RESOURCES [in NAMESPACES], as in "
            "'get,list,watch sandboxes,sandboxwarmpools in team-a,team-b' or '* *'"
        )
    verbs, resources, namespaces = ((each or owner).split(",") for each in found.groups())
    for each in verbs:
        if _VERB.fullmatch(each) is None:
            raise BadRequest(
                f"{each[:40]!r} is no verb; verbs are get, list, watch, create, update, patch, delete, *"
            )
    for each in resources:
        if _RESOURCE.fullmatch(each) is None:
            raise BadRequest(
                f"{each[:80]!r} is no resource; resources are sandboxes, sandboxes/pause, sandboxclaims, *"
            )
    for each in namespaces:
        if each not in ("*", owner):
            check_owner(each, "a namespace")
    return Rule(namespaces=namespaces, resources=resources, verbs=verbs)


def text_of(rule: Rule) -> str:
    """The text that names a rule."""
    return f"{','.join(rule.verbs)} {','.join(rule.resources)} in {','.join(rule.namespaces)}"


def check_owner(owner: str, what: str = "the owner of an API key") -> None:
    """Raise BadRequest for what can be no namespace."""
    if _OWNER.fullmatch(owner) is None:
        raise BadRequest(
            f"{what} is a namespace: 1 to 63 of the characters a-z, 0-9 and -, with no - at its ends; "
            f"{owner[:80]!r} is none"
        )


async def create_api_key(
    store: Store, name: str, owner: str, rules: Sequence[Rule] = ()
) -> tuple[ApiKey, str]:
    """Make a key for `owner`; returns its record and its secret, which nothing can show again.

    `name` is for people (1 to 100 printable characters); `owner` is a DNS label, the namespace of what the key makes.
    Without rules it may do everything there, and nothing elsewhere. Raises BadRequest when one of them is wrong.
    """
    if not 1 <= len(name) <= 100 or not name.isprintable():
        raise BadRequest("the name of an API key has 1 to 100 printable characters")
    check_owner(owner)
    if len(rules) > MOST_RULES:
        raise BadRequest(f"an API key has at most {MOST_RULES} rules")
    secret = "e2b_" + secrets.token_hex(20)
    key = ApiKey(
        key_id=secrets.token_hex(6),
        name=name,
        owner=owner,
        created_at=time.time(),
        hint=secret[-_HINT_DIGITS:],
        rules=list(rules),
    )
    await store.add_api_key(key, digest_of(secret))
    return key, secret


async def list_api_keys(store: Store, owner: str | None = None) -> list[ApiKey]:
    """All keys, or one owner's, revoked ones too, oldest first."""
    return [key for key in await store.api_keys() if owner is None or key.owner == owner]


async def revoke_api_key(store: Store, key_id: str) -> bool:
    """Revoke a key from now on; False when there is none of this id or it already was."""
    return await store.revoke_api_key(key_id, time.time())


async def recognise(store: Store, secret: str) -> ApiKey | None:
    """The key that `secret` belongs to, or None when there is none or it was revoked."""
    if not is_secret(secret):
        return None
    key = await store.find_api_key(digest_of(secret))
    return key if key is not None and key.revoked_at is None else None
