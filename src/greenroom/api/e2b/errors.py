"""Errors as E2B's clients read them: always JSON with `code` and `message`.

Statuses matter as much as bodies. E2B's SDKs send a request again, with the same body, when they see 429,
502, 503 or 504 (or whatever `Should-Retry` says), after `Retry-After` whole seconds; so those four are only
for conditions that pass, and never for an outcome that is unknown without a key to ask by.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec
from starlette.responses import Response

from greenroom.errors import GreenroomError, MethodNotAllowed, PermanentError, TemporaryError


class NotSupported(PermanentError):
    """E2B has this, Greenroom does not yet."""

    kind: ClassVar[str] = "not_supported"
    status: ClassVar[int] = 501


class CreateUnknown(PermanentError):
    """A create without an idempotency key whose answer was lost. Sending it again would make a second one."""

    kind: ClassVar[str] = "create_unknown"
    status: ClassVar[int] = 500


class MethodMismatch(MethodNotAllowed):
    """The path exists but not with this method; `allowed` are those it takes."""

    def __init__(self, allowed: str) -> None:
        super().__init__(f"this path takes {allowed}")
        self.allowed = allowed


class ErrorBody(msgspec.Struct, frozen=True):
    """E2B's `Error`."""

    code: int
    message: str


def render(error: GreenroomError) -> Response:
    """The response for `error`."""
    headers: dict[str, str] = {}
    if isinstance(error, TemporaryError) and error.status == 503:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, CreateUnknown):
        headers["Should-Retry"] = "false"
    elif isinstance(error, MethodMismatch):
        headers["Allow"] = error.allowed
    elif error.status == 401:
        headers["WWW-Authenticate"] = 'ApiKey realm="greenroom", header="X-API-Key"'
    body = msgspec.json.encode(ErrorBody(error.status, error.message))
    return Response(body, error.status, headers, media_type="application/json")
