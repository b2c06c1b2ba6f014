"""Metrics and logs of sandboxes, as E2B's clients ask for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from greenroom.api.e2b.keys import Authenticator
from greenroom.api.e2b.resources import Handler, sandbox_id_of
from greenroom.api.e2b.schemas import (
    LatestBody,
    LineBody,
    LogsBody,
    OldLogsBody,
    log_body,
    metric_body,
    timestamp,
)
from greenroom.api.nodes import Fleet
from greenroom.errors import BadRequest, UnknownSandbox
from greenroom.wire.messages import LogEntry, Past
from greenroom.wire.serving import json_response

if TYPE_CHECKING:
    from greenroom.api.e2b.routes import Dialect

MOST_SANDBOXES = 100
MOST_LINES = 1000
_LEVELS = ("debug", "info", "warn", "error")
_LATEST = 1 << 40
"""Unix seconds; later ones are no time."""


class Observing:
    """The handlers. What they share with others is the dialect's."""

    def __init__(self, dialect: Dialect, fleet: Fleet, keys: Authenticator) -> None:
        self._dialect = dialect
        self._fleet = fleet
        self._keys = keys

    async def _past(self, request: Request) -> Past:
        owner = await self._keys.owner_of(request)
        sandbox_id = sandbox_id_of(request)
        await self._dialect.check_owner(owner, sandbox_id)
        return await self._fleet.past(sandbox_id)

    async def metrics(self, request: Request) -> Response:
        """`GET /sandboxes/{id}/metrics`: samples from `start` to `end` (Unix seconds), oldest first."""
        start, end = _whole(request, "start"), _whole(request, "end")
        if start is not None and end is not None and start > end:
            raise BadRequest("start: it must not be after end")
        samples = (await self._past(request)).samples
        # Whole seconds: a sample belongs to the second in which it was taken.
        return json_response(
            [
                metric_body(each)
                for each in samples
                if (start is None or int(each.timestamp) >= start)
                and (end is None or int(each.timestamp) <= end)
            ]
        )

    async def latest(self, request: Request) -> Response:
        """`GET /sandboxes/metrics?sandbox_ids=a,b`: the last sample of each; those not there are left out."""
        owner = await self._keys.owner_of(request)
        ids = [each for each in request.query_params.get("sandbox_ids", "").split(",") if each]
        if not 1 <= len(ids) <= MOST_SANDBOXES:
            raise BadRequest(f"sandbox_ids: 1 to {MOST_SANDBOXES} ids are needed, with commas between them")

        async def one(sandbox_id: str) -> Past | None:
            try:
                await self._dialect.check_owner(owner, sandbox_id)
                return await self._fleet.past(sandbox_id)
            except UnknownSandbox:
                return None

        pasts = await asyncio.gather(*(one(sandbox_id) for sandbox_id in ids))
        found = {
            sandbox_id: metric_body(past.samples[-1])
            for sandbox_id, past in zip(ids, pasts, strict=True)
            if past is not None and past.samples
        }
        return json_response(LatestBody(found))

    async def logs_v1(self, request: Request) -> Response:
        """`GET /sandboxes/{id}/logs`: what became of it since `start` (milliseconds), oldest first."""
        start, limit = _whole(request, "start"), _limit(request)
        entries = [
            each for each in (await self._past(request)).entries if start is None or _millis(each) >= start
        ]
        shown = entries[:limit]
        return json_response(
            OldLogsBody(
                [LineBody(timestamp(each.timestamp), each.message) for each in shown],
                [log_body(each) for each in shown],
            )
        )

    async def logs_v2(self, request: Request) -> Response:
        """`GET /v2/sandboxes/{id}/logs`: from `cursor` (milliseconds) on in `direction`, of a level at least."""
        params = request.query_params
        cursor, limit = _whole(request, "cursor"), _limit(request)
        direction = params.get("direction") or "backward"
        level, search = params.get("level") or "debug", params.get("search") or ""
        if direction not in ("forward", "backward"):
            raise BadRequest("direction: forward or backward is needed")
        if level not in _LEVELS:
            raise BadRequest(f"level: one of {', '.join(_LEVELS)} is needed")
        entries = [
            each
            for each in (await self._past(request)).entries
            if _LEVELS.index(each.level) >= _LEVELS.index(level) and search in each.message
        ]
        if direction == "forward":
            chosen = [each for each in entries if cursor is None or _millis(each) >= cursor][:limit]
        else:
            chosen = [each for each in reversed(entries) if cursor is None or _millis(each) <= cursor][:limit]
        return json_response(LogsBody([log_body(each) for each in chosen]))

    def paths(self) -> dict[str, dict[str, Handler]]:
        """Its part of the API."""
        return {
            "/sandboxes/metrics": {"GET": self.latest},
            "/sandboxes/{id}/metrics": {"GET": self.metrics},
            "/sandboxes/{id}/logs": {"GET": self.logs_v1},
            "/v2/sandboxes/{id}/logs": {"GET": self.logs_v2},
        }


def _millis(entry: LogEntry) -> int:
    return int(entry.timestamp * 1000)


def _whole(request: Request, name: str) -> int | None:
    """A query value that is a whole number. Raises BadRequest."""
    text = request.query_params.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 13) or int(text) >= _LATEST * 1000:
        raise BadRequest(f"{name}: a whole number is needed")
    return int(text)


def _limit(request: Request) -> int:
    limit = _whole(request, "limit")
    if limit is not None and limit > MOST_LINES:
        raise BadRequest(f"limit: at most {MOST_LINES} are allowed")
    return MOST_LINES if limit is None else limit
