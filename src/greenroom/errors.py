"""Every error that crosses a role's boundary, sorted by what the caller should do about it.

Two roots carry the meaning for retry, so that nobody has to guess from a status code:

* `PermanentError`: the same request will fail the same way; change it.
* `TemporaryError`: the same request may succeed after `retry_after` seconds.

Between roles an error travels as `{"error": {"kind", "message", "retry_after"}}` with its HTTP status
(`to_wire`, `from_wire`). Each dialect (`api.e2b`) maps the types to its own bodies. The message is shown to
the user: it says what happened and what to do, and never holds a secret or a host path.
"""

from __future__ import annotations

from typing import Any, ClassVar


class GreenroomError(Exception):
    """Base of all errors raised on purpose. `kind` names the type on the wire, `status` is its HTTP status."""

    kind: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the same request may succeed, or None when it will not."""
        return None

    def to_wire(self) -> dict[str, Any]:
        """The JSON body that `from_wire` of another process turns back into this error."""
        body: dict[str, Any] = {"kind": self.kind, "message": self.message}
        if self.retry_after is not None:
            body["retry_after"] = self.retry_after
        return {"error": body}


class PermanentError(GreenroomError):
    """Repeating the request changes nothing."""


class TemporaryError(GreenroomError):
    """The request may be repeated after `retry_after` seconds."""

    kind = "unavailable"
    status = 503

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self._retry_after = retry_after

    @property
    def retry_after(self) -> float:
        return self._retry_after


class InternalError(PermanentError):
    """A fault of ours. The cause is in the role's log, not in the message."""

    kind = "internal"
    status = 500


class BadRequest(PermanentError):
    """The request does not follow the contract; the message names the field."""

    kind = "bad_request"
    status = 400


class Unauthorized(PermanentError):
    """No credential, or one that is not known."""

    kind = "unauthorized"
    status = 401


class Forbidden(PermanentError):
    """A known credential that may not do this."""

    kind = "forbidden"
    status = 403


class NotFound(PermanentError):
    """The path or object does not exist."""

    kind = "not_found"
    status = 404


class UnknownSandbox(NotFound):
    """No live sandbox has this id (it may have ended)."""

    kind = "unknown_sandbox"


class UnknownTemplate(NotFound):
    """No template has this id or name."""

    kind = "unknown_template"


class UnknownSnapshot(NotFound):
    """No snapshot has this name (it may have been deleted)."""

    kind = "unknown_snapshot"


class MethodNotAllowed(PermanentError):
    """The path exists, the method does not."""

    kind = "method_not_allowed"
    status = 405


class NotRunning(PermanentError):
    """The sandbox is paused, and this needs it to run."""

    kind = "not_running"
    status = 409


class KeyConflict(PermanentError):
    """An idempotency key was used before with another body."""

    kind = "key_conflict"
    status = 409


class NameTaken(PermanentError):
    """Another sandbox of the same owner has this name."""

    kind = "name_taken"
    status = 409


class StaleObject(PermanentError):
    """What is to be changed is not as it was when it was read; read it again, and change that."""

    kind = "stale_object"
    status = 409


class QuotaExceeded(PermanentError):
    """The owner has as many sandboxes, CPUs or as much memory as it may have."""

    kind = "quota_exceeded"
    status = 403


class AlreadyPaused(PermanentError):
    """The sandbox is paused, so it cannot be paused again."""

    kind = "already_paused"
    status = 409


class SandboxEnded(PermanentError):
    """The sandbox that an idempotency key made has ended; the key makes no second one."""

    kind = "sandbox_ended"
    status = 410


class SnapshotDamaged(PermanentError):
    """A snapshot is not as it was written, or was made on what is not there any more; it cannot be restored."""

    kind = "snapshot_damaged"
    status = 409


class TooLarge(PermanentError):
    """The body is over its bound."""

    kind = "too_large"
    status = 413


class PoolDry(TemporaryError):
    """No warm sandbox came free within the queue's deadline, or the queue is full."""

    kind = "pool_dry"


class NodeUnavailable(TemporaryError):
    """The node that must answer cannot be reached, or none can take the work."""

    kind = "node_unavailable"


class JournalUnavailable(NodeUnavailable):
    """A node's journal cannot be written (a full disk) or read: it takes nothing on until it can."""

    kind = "journal"


class OutcomeUnknown(TemporaryError):
    """A mutation was sent and its answer was lost: it may or may not have happened. Ask by its key."""

    kind = "unknown"


class SetupError(PermanentError):
    """This machine lacks something; the message says what and how to get it. Raised before serving."""

    kind = "setup"


class RuntimeFailure(TemporaryError):
    """The VM engine could not do what was asked of it; the resources it used were given back."""

    kind = "runtime"
    status = 500


_BY_KIND: dict[str, type[GreenroomError]] = {}


def _register(root: type[GreenroomError]) -> None:
    for cls in root.__subclasses__():
        if "kind" in vars(cls):
            _BY_KIND[cls.kind] = cls
        _register(cls)


_register(GreenroomError)


def from_wire(status: int, body: object) -> GreenroomError:
    """Rebuild the error another role sent with HTTP `status`; anything unreadable becomes `InternalError`."""
    if isinstance(body, dict) and isinstance(detail := body.get("error"), dict):
        kind, message = str(detail.get("kind", "")), str(detail.get("message", ""))
        cls = _BY_KIND.get(kind)
        if cls is not None and issubclass(cls, TemporaryError):
            after = detail.get("retry_after")
            return cls(message, float(after) if isinstance(after, int | float) else 1.0)
        if cls is not None:
            return cls(message)
        if kind and message and status == TemporaryError.status:
            # Of a newer release, or one that does not travel: what it says is still true.
            return TemporaryError(message)
    return InternalError(f"a role answered HTTP {status} without a readable error")
