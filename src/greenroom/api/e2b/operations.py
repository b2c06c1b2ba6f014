"""What each operation of the E2B API takes and answers, for its description (`openapi`). Only data.

Which operations there are is said by the paths table of `routes` alone; a test fails when an operation of it is
not here, or one is here that it does not have. Statuses that every operation of a kind has (401, 413, 500, 503)
are added by `openapi`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from greenroom.api.e2b import schemas
from greenroom.api.e2b.observing import MOST_LINES

Whole = Annotated[int, msgspec.Meta(ge=0)]
PageSize = Annotated[int, msgspec.Meta(ge=1)]
"""The upper bound is a setting (`[api] page_limit`)."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. Types are Python's; None as an answer is one without a body."""

    answers: dict[int, Any]
    errors: frozenset[int] = frozenset()
    """Beyond those that `openapi` adds by itself."""
    body: Any = None
    """Type of the request's body; None where none is read."""
    body_required: bool = False
    query: dict[str, tuple[Any, str]] = {}
    """Type and meaning of each query parameter; none is required, unless in `required`."""
    required: frozenset[str] = frozenset()
    idempotent: bool = False
    """Takes the header `Idempotency-Key`."""
    headers: dict[str, str] = {}
    """Meaning of each header that a success may have."""


_METADATA = (str, "pairs that must match, as a form whose names and values are percent-encoded once more")
_PAGE: dict[str, tuple[Any, str]] = {
    "limit": (PageSize, "entries on a page, at most"),
    "nextToken": (str, "where the page before ended: its `X-Next-Token`"),
}
_NEXT = {"X-Next-Token": "the `nextToken` of the next page; absent on the last"}
_PARTIAL = {"X-Greenroom-Partial": "nodes whose sandboxes are missing, or not the latest"}
_CREATE = Operation(
    answers={201: schemas.SandboxBody},
    errors=frozenset({404, 409, 410}),
    body=schemas.NewSandbox,
    body_required=True,
    idempotent=True,
)
_CONNECT = Operation(
    answers={200: schemas.SandboxBody, 201: schemas.SandboxBody},
    errors=frozenset({409}),
    body=schemas.ConnectBody,
)
_LINES: dict[str, tuple[Any, str]] = {"limit": (Annotated[int, msgspec.Meta(ge=0, le=MOST_LINES)], "lines")}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/sandboxes"): _CREATE,
    ("POST", "/v2/sandboxes"): _CREATE,
    ("GET", "/sandboxes"): Operation(
        answers={200: list[schemas.ListedBody]}, query={"metadata": _METADATA}, headers=_PARTIAL
    ),
    ("GET", "/v2/sandboxes"): Operation(
        answers={200: list[schemas.ListedBody]},
        query={
            "metadata": _METADATA,
            "state": (str, "`running`, `paused`, or both with a comma between them, which is the default"),
            "order": (Literal["asc", "desc"], "by the time of their start; the newest first is the default"),
            "startedAfter": (str, "ISO 8601 with its zone; one that started just then belongs to the list"),
            "template": (str, "id or name"),
            **_PAGE,
        },
        headers={**_NEXT, **_PARTIAL, "X-Total-Running": "how many running ones match, on all pages"},
    ),
    ("GET", "/sandboxes/{id}"): Operation(answers={200: schemas.DetailBody}),
    ("DELETE", "/sandboxes/{id}"): Operation(answers={204: None}),
    ("POST", "/sandboxes/{id}/timeout"): Operation(
        answers={204: None}, body=schemas.TimeoutBody, body_required=True
    ),
    ("POST", "/sandboxes/{id}/refreshes"): Operation(answers={204: None}, body=schemas.RefreshBody),
    ("POST", "/sandboxes/{id}/connect"): _CONNECT,
    ("POST", "/v2/sandboxes/{id}/connect"): _CONNECT,
    ("PUT", "/sandboxes/{id}/network"): Operation(
        answers={204: None}, errors=frozenset({409}), body=schemas.NetworkUpdate, body_required=True
    ),
    ("POST", "/sandboxes/{id}/pause"): Operation(
        answers={204: None}, errors=frozenset({409}), body=schemas.PauseBody
    ),
    ("POST", "/sandboxes/{id}/resume"): Operation(
        answers={201: schemas.SandboxBody}, errors=frozenset({409}), body=schemas.ResumeBody
    ),
    ("POST", "/sandboxes/{id}/fork"): Operation(
        answers={201: list[schemas.ForkEntry]},
        errors=frozenset({409, 410}),
        body=schemas.ForkBody,
        idempotent=True,
    ),
    ("POST", "/sandboxes/{id}/snapshots"): Operation(
        answers={201: schemas.SnapshotAnswer}, errors=frozenset({409}), body=schemas.SnapshotBody
    ),
    ("POST", "/sandboxes/{id}/rollback"): Operation(
        answers={200: schemas.SandboxBody},
        errors=frozenset({409}),
        body=schemas.RollbackBody,
        body_required=True,
    ),
    ("GET", "/snapshots"): Operation(
        answers={200: list[schemas.SnapshotAnswer]},
        query={"sandboxID": (str, "of this sandbox"), "name": (str, "of this name"), **_PAGE},
        headers=_NEXT,
    ),
    ("GET", "/sandboxes/{id}/metrics"): Operation(
        answers={200: list[schemas.MetricBody]},
        query={"start": (Whole, "Unix seconds, inclusive"), "end": (Whole, "Unix seconds, inclusive")},
    ),
    ("GET", "/sandboxes/metrics"): Operation(
        answers={200: schemas.LatestBody},
        query={"sandbox_ids": (str, "ids with commas between them")},
        required=frozenset({"sandbox_ids"}),
    ),
    ("GET", "/sandboxes/{id}/logs"): Operation(
        answers={200: schemas.OldLogsBody}, query={"start": (Whole, "Unix milliseconds"), **_LINES}
    ),
    ("GET", "/v2/sandboxes/{id}/logs"): Operation(
        answers={200: schemas.LogsBody},
        query={
            "cursor": (Whole, "Unix milliseconds to begin with"),
            "direction": (Literal["forward", "backward"], "the latest first (backward) is the default"),
            "level": (Literal["debug", "info", "warn", "error"], "of this level at least"),
            "search": (str, "with this text in the message"),
            **_LINES,
        },
    ),
    ("GET", "/templates"): Operation(answers={200: list[schemas.TemplateBody]}),
    ("GET", "/templates/aliases/{alias}"): Operation(answers={200: schemas.AliasBody}),
    ("DELETE", "/templates/{id}"): Operation(answers={204: None}, errors=frozenset({403})),
}
"""By method and path, without those that are not supported: for those there is nothing to say."""
