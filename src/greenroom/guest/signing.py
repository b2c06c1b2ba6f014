"""Who may use ``/files``: the access token in a header, or a signature made with it in the URL.

A signature lets somebody without the token move one file until a moment in time. It is ``v1_`` and the
unpadded base64 of the SHA-256 of ``path:operation:user:token``, with ``:expiration`` (Unix seconds) when
the URL has an end; path and user are the query values as they stand in the URL, decoded.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping

from .errors import AgentError

TOKEN_HEADER = "x-access-token"  # noqa: S105 - the name of a header


def same(given: str, secret: str) -> bool:
    """Compare in constant time; any text is allowed."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode("utf-8", "replace"))


def signature(path: str, operation: str, user: str, token: str, expiration: str | None) -> str:
    """The signature for one file; ``operation`` is ``read`` or ``write``."""
    parts = [path, operation, user, token]
    if expiration is not None:
        parts.append(expiration)
    digest = hashlib.sha256(":".join(parts).encode("utf-8", "surrogateescape")).digest()
    return "v1_" + binascii.b2a_base64(digest, newline=False).decode("ascii").rstrip("=")


def authorize_file(
    headers: Mapping[str, str], arguments: Mapping[str, str], operation: str, token: str | None
) -> None:
    """Let a ``/files`` request pass, or raise ``unauthenticated``.

    The header decides when it is there; else the signature must be right, and only then does its expiry
    count, so that nobody learns anything from a wrong one.
    """
    if token is None:
        return
    given = headers.get(TOKEN_HEADER)
    if given is not None:
        if not same(given, token):
            raise AgentError("unauthenticated", "the access token is not valid")
        return
    signed = arguments.get("signature")
    if signed is None:
        raise AgentError("unauthenticated", "missing signature query parameter or access token")
    expiration = arguments.get("signature_expiration")
    path, user = arguments.get("path", ""), arguments.get("username", "")
    expected = signature(path, operation, user, token, expiration)
    if not same(signed, expected):
        raise AgentError("unauthenticated", "invalid signature")
    if expiration is not None and _is_over(expiration):
        raise AgentError("unauthenticated", "signature is already expired")


def _is_over(expiration: str) -> bool:
    try:
        return int(expiration) < time.time()
    except ValueError:
        raise AgentError("unauthenticated", "the signature expiration is not a number") from None
