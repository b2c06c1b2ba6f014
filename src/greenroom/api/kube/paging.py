"""Lists in pages: `limit` and `continue`, every page from the version that the first one was made at.

A token says the version and the last key of its page. As long as the watch cache knows what changed since that
version, the list can be had as it was then, on any replica that counts the same versions; after that the client gets
410 and a token that goes on from the same key in the current version, which it may use when it does not mind the
difference. Source: "Retrieving large results sets in chunks" in "Kubernetes API Concepts". Pure.
"""

from __future__ import annotations

import base64
import binascii
import json
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from greenroom.api.kube.objects import Key, Object
from greenroom.api.kube.rows import Item, key_of_item
from greenroom.api.kube.status import StatusError, bad_request, expired

TOKEN_LIMIT = 2048
"""Characters of a token."""
LIMIT_LIMIT = 10**9


class Token(msgspec.Struct, frozen=True):
    """Where a list goes on: behind `after`, at `version`, or in the current state when that is -1."""

    version: int
    after: Key


def limit_of(asked: str | None) -> int:
    """The `limit` parameter; 0 is no limit. Raises 400."""
    if not asked:
        return 0
    if not asked.isascii() or not asked.isdigit() or len(asked) > 10 or int(asked) > LIMIT_LIMIT:
        raise bad_request(f"limit: Invalid value: {asked[:20]!r}: a number of objects is needed")
    return int(asked)


def encoded(token: Token) -> str:
    """The opaque text of a token, safe in URLs."""
    told = {"v": "greenroom/v1", "rv": token.version, "ns": token.after[0], "name": token.after[1]}
    return base64.urlsafe_b64encode(json.dumps(told, separators=(",", ":")).encode()).decode().rstrip("=")


def decoded(text: str) -> Token:
    """The token of a text. Raises 400 for what `encoded` did not make."""
    try:
        if len(text) > TOKEN_LIMIT:
            raise ValueError
        told: Any = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        token = Token(told["rv"], (told["ns"], told["name"]))
        whole = isinstance(token.version, int) and all(isinstance(part, str) for part in token.after)
        if not whole or told["v"] != "greenroom/v1" or encoded(token) != text:
            raise ValueError
    except (ValueError, KeyError, TypeError, binascii.Error, RecursionError) as error:
        raise bad_request("continue key is not valid: it is no token of this server") from error
    return token


def too_old(token: Token) -> StatusError:
    """410 for a token whose version is not known any more, with one that goes on in the current version."""
    message = (
        "The provided continue parameter is too old to display a consistent list result. You can start a new list "
        "without the continue parameter, or use the continue token in this response to retrieve the remainder of the "
        "results. Continuing with the provided token results in an inconsistent list - objects that were created, "
        "modified, or deleted between the time the first chunk was returned and now may show up in the list."
    )
    return expired(message, encoded(Token(-1, token.after)))


class Page(msgspec.Struct, frozen=True):
    """Some of a list's objects, and the metadata of the list that they make."""

    objects: Sequence[Item]
    metadata: Object
    missing: Sequence[str] = ()
    """Names of nodes of which not all, or not the latest, is in the list."""


def cut(
    objects: Sequence[Item], version: int, limit: int, after: Key | None = None, *, counted: bool = True
) -> Page:
    """The page of `objects` (sorted by key) behind `after`. `counted` tells how many remain."""
    first = 0 if after is None else bisect_right(objects, after, key=key_of_item)
    end = len(objects) if limit == 0 else min(first + limit, len(objects))
    metadata: Object = {"resourceVersion": str(version)}
    if end < len(objects):
        metadata["continue"] = encoded(Token(version, key_of_item(objects[end - 1])))
        if counted:
            metadata["remainingItemCount"] = len(objects) - end
    return Page(objects[first:end], metadata)
