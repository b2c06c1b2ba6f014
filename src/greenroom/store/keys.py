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

from greenroom.errors import BadRequest
from greenroom.store.records import ApiKey, Store

_SECRET = re.compile(r"e2b_[0-9a-f]{40}")
_OWNER = re.compile(r"[a-z0-9_]{1,64}")
_HINT_DIGITS = 4


def digest_of(secret: str) -> str:
    """Hex SHA-256 of a secret, the only form in which it is kept."""
    return hashlib.sha256(secret.encode()).hexdigest()


def is_secret(text: str) -> bool:
    """True if `text` has the form of an API key's secret; says nothing about whether there is such a key."""
    return _SECRET.fullmatch(text) is not None


async def create_api_key(store: Store, name: str, owner: str) -> tuple[ApiKey, str]:
    """Make a key for `owner`; returns its record and its secret, which nothing can show again.

    `name` is for people (1 to 100 printable characters); `owner` is `[a-z0-9_]{1,64}`, as it becomes part of
    claim keys. Raises BadRequest when one of them is not.
    """
    if not 1 <= len(name) <= 100 or not name.isprintable():
        raise BadRequest("the name of an API key has 1 to 100 printable characters")
    if _OWNER.fullmatch(owner) is None:
        raise BadRequest("the owner of an API key has 1 to 64 of the characters a-z, 0-9 and _")
    secret = "e2b_" + secrets.token_hex(20)
    key = ApiKey(
        key_id=secrets.token_hex(6),
        name=name,
        owner=owner,
        created_at=time.time(),
        hint=secret[-_HINT_DIGITS:],
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
