"""Whose signature is this? Which of a node's sandboxes a signed URL of `/files` belongs to. Pure.

E2B's clients sign such URLs with the sandbox's token, and where all sandboxes share one URL they put no id into it.
The token itself cannot be told from the signature, so every live token is tried. The work is one SHA-256 block or
two for each sandbox, whatever the length of the path, and all are tried whichever matches, in constant time each:
how long it takes tells how many sandboxes there are and nothing else. The answer only says where the request goes;
the agent there checks signature and expiry for itself.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from collections.abc import Iterable
from urllib.parse import parse_qsl

from greenroom.wire.messages import SignedUrl

_MAX_FIELDS = 100
_MAX_TEXT = 4096
"""Characters of a path, user or expiration; no longer path exists in a guest."""


def owner_of(url: SignedUrl, tokens: Iterable[tuple[str, str]]) -> str | None:
    """The sandbox whose token made the signature of `url`, or None; `tokens` are pairs of sandbox id and token."""
    arguments = _arguments(url.query)
    offered = arguments.get("signature", "").encode("utf-8", "surrogateescape")
    if not offered or any(len(value) > _MAX_TEXT for value in arguments.values()):
        return None
    expiration = arguments.get("signature_expiration")
    ending = b"" if expiration is None else b":" + expiration.encode("utf-8", "surrogateescape")
    begun = []
    for operation in url.operations:
        parts = (arguments.get("path", ""), operation, arguments.get("username", ""), "")
        begun.append(hashlib.sha256(":".join(parts).encode("utf-8", "surrogateescape")))
    found = None
    for sandbox_id, token in tokens:
        for beginning in begun:
            digest = beginning.copy()
            digest.update(token.encode() + ending)
            made = b"v1_" + binascii.b2a_base64(digest.digest(), newline=False).rstrip(b"=")
            if hmac.compare_digest(made, offered):
                found = sandbox_id
    return found


def is_over(url: SignedUrl, now: float) -> bool:
    """Whether the signature of `url` had ended at `now` (Unix seconds), or its end is no time at all."""
    expiration = _arguments(url.query).get("signature_expiration")
    if expiration is None:
        return False
    try:
        return int(expiration) < now
    except ValueError:
        return True


def _arguments(query: str) -> dict[str, str]:
    """The query as the agent reads it: of a repeated name the first value counts. Empty if it cannot be read."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="surrogateescape")
    except ValueError:
        return {}
    return dict(reversed(pairs))
