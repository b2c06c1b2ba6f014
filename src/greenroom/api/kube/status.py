"""Errors as Kubernetes' clients read them: a `Status` object with a reason, a code and causes.

Clients decide by `reason`, and by the code where they do not know the reason; people read `message`. The texts follow
apimachinery's `api/errors`, because scripts match them. Errors from below (`greenroom.errors`) get their reason from
`status_of`; Greenroom's own reason is `PoolExhausted`, which every client takes for what its code, 503, says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response

from greenroom.api.kube.objects import Object
from greenroom.errors import (
    BadRequest,
    Forbidden,
    GreenroomError,
    MethodNotAllowed,
    NodeUnavailable,
    NotFound,
    OutcomeUnknown,
    PermanentError,
    PoolDry,
    QuotaExceeded,
    SandboxEnded,
    TemporaryError,
    TooLarge,
    Unauthorized,
)

CONFLICT_409: Final = 409
CAUSES = 64
"""Causes that one Status tells at most: a body can be wrong in as many places as it has bytes."""


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reason for a failure, and the field it is about (`spec.replicas`, `spec.env[0].name`)."""

    reason: str
    message: str
    field: str = ""

    def line(self) -> str:
        """The cause in a sentence about several."""
        return f"{self.field}: {self.message}" if self.field else self.message


class Subject(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a failure is about: group, resource (plural) or kind, and name."""

    group: str = ""
    resource: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource


class StatusError(GreenroomError):
    """A request's failure in Kubernetes' terms. Whether to repeat it follows from `code` and `retry`, seconds."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        subject: Subject | None = None,
        causes: Sequence[Cause] = (),
        retry: float | None = None,
        continue_token: str = "",
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.subject = subject
        self.causes = tuple(causes[:CAUSES])
        self.retry = retry
        self.continue_token = continue_token
        self.allow = allow

    @property
    def retry_after(self) -> float | None:
        """See `GreenroomError`."""
        return self.retry

    def body(self) -> Object:
        """The `Status` object (`meta/v1`)."""
        metadata = {"continue": self.continue_token} if self.continue_token else {}
        said: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": metadata,
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        details: Object = {}
        if self.subject is not None:
            named = {
                "name": self.subject.name,
                "group": self.subject.group,
                "kind": self.subject.resource,
            }
            details = {key: value for key, value in named.items() if value}
        if self.causes:
            details["causes"] = [msgspec.to_builtins(cause) for cause in self.causes]
        if self.retry is not None:
            details["retryAfterSeconds"] = max(1, math.ceil(self.retry))
        if details:
            said["details"] = details
        said["code"] = self.code
        return said


def not_found(subject: Subject) -> StatusError:
    """404: there is no such object."""
    return StatusError(404, "NotFound", f'{subject} "{subject.name}" not found', subject=subject)


def no_such_path() -> StatusError:
    """404: the server has no such resource."""
    return StatusError(404, "NotFound", "the server could not find the requested resource")


def already_exists(subject: Subject) -> StatusError:
    """409 for a create: the name is taken."""
    return StatusError(
        CONFLICT_409, "AlreadyExists", f'{subject} "{subject.name}" already exists', subject=subject
    )


def name_not_free(subject: Subject) -> StatusError:
    """409 for a create with generateName: every name that was tried is taken; another request tries others."""
    why = "the server was not able to generate a unique name for the object"
    text = f'{subject} "{subject.name}" already exists, {why}'
    return StatusError(CONFLICT_409, "AlreadyExists", text, subject=subject, retry=1)


def conflict(subject: Subject, why: str = "") -> StatusError:
    """409: the object is not as the request supposes; by default it has been modified."""
    text = why or (
        "the object has been modified; please apply your changes to the latest version and try again"
    )
    message = f'Operation cannot be fulfilled on {subject} "{subject.name}": {text}'
    return StatusError(CONFLICT_409, "Conflict", message, subject=subject)


def apply_conflict(causes: Sequence[Cause]) -> StatusError:
    """409 for a server-side apply: other managers own fields that it would change."""
    noun = "conflict" if len(causes) == 1 else "conflicts"
    who = sorted({cause.message for cause in causes})
    lines: list[str] = []
    for each in who:
        fields = [cause.field for cause in causes if cause.message == each]
        lines.append(f"{each}: {fields[0]}" if len(causes) == 1 else f"{each}:\n- " + "\n- ".join(fields))
    lead = f"Apply failed with {len(causes)} {noun}: "
    return StatusError(CONFLICT_409, "Conflict", lead + "\n".join(lines), causes=causes)


def invalid(subject: Subject, causes: Sequence[Cause]) -> StatusError:
    """422: the object breaks rules; `subject.resource` is its kind here."""
    shown = [cause.line() for cause in causes[:CAUSES]]
    text = shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"
    message = f'{subject} "{subject.name}" is invalid: {text}'
    return StatusError(422, "Invalid", message, subject=subject, causes=causes)


def bad_request(message: str) -> StatusError:
    """400: the request is malformed."""
    return StatusError(400, "BadRequest", message)


def unauthorized() -> StatusError:
    """401: no credential that is known."""
    return StatusError(401, "Unauthorized", "Unauthorized")


def forbidden(subject: Subject, why: str) -> StatusError:
    """403: this caller may not."""
    named = f'{subject} "{subject.name}"' if subject.name else str(subject)
    return StatusError(403, "Forbidden", f"{named} is forbidden: {why}", subject=subject)


def method_not_allowed(subject: Subject, verb: str, allow: str = "") -> StatusError:
    """405: the resource has no such verb; `allow` are the methods that it has."""
    message = f'{verb} is not supported on resources of kind "{subject}"'
    if subject.group == "" and subject.resource == "namespaces":
        message += "; a namespace is there as soon as something is in it or a key belongs to it, and goes with the last"
    return StatusError(405, "MethodNotAllowed", message, subject=subject, allow=allow)


def not_acceptable(accepted: Sequence[str]) -> StatusError:
    """406: the server writes none of the media types that the client reads."""
    message = f"only the following media types are accepted: {', '.join(accepted)}"
    return StatusError(406, "NotAcceptable", message)


def unsupported_media_type(accepted: Sequence[str]) -> StatusError:
    """415: the server does not read the body's media type."""
    message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(accepted)}"
    if "application/json" in accepted:
        message += "; with kubectl, use kubectl apply -f, which sends JSON"
    return StatusError(415, "UnsupportedMediaType", message)


def expired(message: str, continue_token: str = "") -> StatusError:
    """410: the version asked for is not kept any more; list anew, or go on with `continue_token`, inconsistently."""
    return StatusError(410, "Expired", message, continue_token=continue_token)


def gone(message: str) -> StatusError:
    """410: it was there and will not be again."""
    return StatusError(410, "Gone", message)


def too_large(limit: int, what: str = "Request entity") -> StatusError:
    """413: the body, or what it would make, is over its bound, in bytes."""
    return StatusError(413, "RequestEntityTooLarge", f"{what} too large: limit is {limit} bytes")


def too_many_requests(message: str, retry: float) -> StatusError:
    """429: this caller asks too much; `retry` in seconds."""
    return StatusError(429, "TooManyRequests", message, retry=retry)


def unavailable(message: str, retry: float = 1.0) -> StatusError:
    """503: not now."""
    return StatusError(503, "ServiceUnavailable", message, retry=retry)


def timeout(message: str, retry: float = 1.0, causes: Sequence[Cause] = ()) -> StatusError:
    """504: not within its time; of a change it is not known whether it happened."""
    return StatusError(504, "Timeout", f"Timeout: {message}", retry=retry, causes=causes)


def version_too_large(asked: int, current: int) -> StatusError:
    """504: the client has seen a later version elsewhere, and this server did not get there in time."""
    message = f"Too large resource version: {asked}, current: {current}"
    cause = Cause("ResourceVersionTooLarge", "Too large resource version")
    return timeout(message, causes=(cause,))


def internal(message: str = "internal error; the server's log has the cause") -> StatusError:
    """500: a fault of ours."""
    return StatusError(500, "InternalError", f"Internal error occurred: {message}")


def status_of(error: GreenroomError) -> StatusError:
    """The Status for any of Greenroom's errors."""
    if isinstance(error, StatusError):
        return error
    code, reason = _meaning(error)
    retry = error.retry_after if isinstance(error, TemporaryError) else None
    return StatusError(code, reason, error.message, retry=retry)


_MEANINGS: tuple[tuple[type[GreenroomError], int, str], ...] = (
    (BadRequest, 400, "BadRequest"),
    (Unauthorized, 401, "Unauthorized"),
    (Forbidden, 403, "Forbidden"),
    (QuotaExceeded, 403, "Forbidden"),
    (NotFound, 404, "NotFound"),
    (MethodNotAllowed, 405, "MethodNotAllowed"),
    (SandboxEnded, 410, "Gone"),
    (TooLarge, 413, "RequestEntityTooLarge"),
    (PoolDry, 503, "PoolExhausted"),
    (NodeUnavailable, 503, "ServiceUnavailable"),
    # Whether it happened is not known, and that is what a Timeout says.
    (OutcomeUnknown, 504, "Timeout"),
)


def _meaning(error: GreenroomError) -> tuple[int, str]:
    for kind, code, reason in _MEANINGS:
        if isinstance(error, kind):
            return code, reason
    if isinstance(error, PermanentError) and error.status == CONFLICT_409:
        return CONFLICT_409, "Conflict"
    if isinstance(error, TemporaryError) and error.status == 503:
        return 503, "ServiceUnavailable"
    return 500, "InternalError"


def success(subject: Subject, uid: str = "") -> Object:
    """The Status that tells that an object is gone."""
    details: Object = {"name": subject.name, "group": subject.group, "kind": subject.resource, "uid": uid}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {key: value for key, value in details.items() if value},
    }


def render(error: GreenroomError) -> Response:
    """The HTTP response for `error`, with `Retry-After` (whole seconds), `Allow` or a challenge where they belong."""
    failure = status_of(error)
    headers: dict[str, str] = {}
    if failure.retry is not None:
        headers["Retry-After"] = str(max(1, math.ceil(failure.retry)))
    if failure.allow:
        headers["Allow"] = failure.allow
    if failure.code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body: Any = failure.body()
    return Response(msgspec.json.encode(body), failure.code, headers, media_type="application/json")
