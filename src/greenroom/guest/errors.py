"""One error type for everything a client can be told.

A failure has a Connect code (https://connectrpc.com/docs/protocol#error-codes); plain HTTP routes answer
with the status that belongs to it. Services raise :class:`AgentError`, ``app`` turns it into bytes.
"""

from __future__ import annotations

import errno
import os

HTTP_STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "data_loss": 500,
    "unauthenticated": 401,
}
"""HTTP status of each Connect code, as clients of the contract expect it."""

_CODE_OF_ERRNO = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EEXIST: "already_exists",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.ENOTEMPTY: "failed_precondition",
    errno.EBUSY: "failed_precondition",
    errno.EISDIR: "invalid_argument",
    errno.ELOOP: "invalid_argument",
    errno.ENAMETOOLONG: "invalid_argument",
    errno.EINVAL: "invalid_argument",
    errno.ENXIO: "invalid_argument",
    errno.E2BIG: "invalid_argument",
    errno.ENOEXEC: "invalid_argument",
    errno.ENOTSUP: "failed_precondition",
    errno.ENOSPC: "resource_exhausted",
    errno.EDQUOT: "resource_exhausted",
    errno.EFBIG: "resource_exhausted",
    errno.EMFILE: "resource_exhausted",
    errno.ENFILE: "resource_exhausted",
    errno.EAGAIN: "resource_exhausted",
    errno.ENOMEM: "resource_exhausted",
}

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class AgentError(Exception):
    """A request that cannot be fulfilled, with words for the client.

    ``code`` is a Connect code; ``status`` overrides the HTTP status that goes with it. The message is
    shown to the client as it stands, so it must never contain a secret.
    """

    def __init__(self, code: str, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = HTTP_STATUS[code] if status is None else status


class ClientGone(ConnectionError):
    """The peer closed or reset its connection; nobody is left to be answered."""


def from_os_error(error: OSError, path: str | None = None) -> AgentError:
    """Words for a failed system call; a full disk answers HTTP 507 as the contract asks."""
    number = error.errno or 0
    text = os.strerror(number) if number else str(error)
    where = path if path is not None else error.filename
    message = f"{text}: {printable(str(where))!r}" if where is not None else text
    status = 507 if number in _NO_SPACE else None
    return AgentError(_CODE_OF_ERRNO.get(number, "internal"), message, status=status)


def printable(text: str) -> str:
    """The text with undecodable file name bytes (and lone surrogates) replaced, so that it can be sent as UTF-8."""
    if text.isascii():
        return text
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # no file name of this system, but a client may send anything
        raw = text.encode("utf-8", "replace")
    return raw.decode("utf-8", "replace")
