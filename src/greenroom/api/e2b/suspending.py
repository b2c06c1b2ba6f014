"""Pause, resume, snapshots and forks, as E2B's clients ask for them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from greenroom.api.e2b.errors import CreateUnknown, ErrorBody
from greenroom.api.e2b.keys import Authenticator, claim_key
from greenroom.api.e2b.listing import decode_cursor, encode_cursor, page_of, parse_limit
from greenroom.api.e2b.resources import Handler, sandbox_id_of
from greenroom.api.e2b.schemas import (
    ForkBody,
    ForkEntry,
    PauseBody,
    ResumeBody,
    RollbackBody,
    SnapshotBody,
    check_timeout,
    micros,
    snapshot_answer,
)
from greenroom.api.nodes import Fleet
from greenroom.config import ApiConfig
from greenroom.errors import (
    BadRequest,
    Forbidden,
    GreenroomError,
    OutcomeUnknown,
    UnknownSnapshot,
    UnknownTemplate,
)
from greenroom.wire.messages import MOST_FORKS, Fork, ForkRequest, PauseRequest, SnapshotRequest
from greenroom.wire.serving import json_response

if TYPE_CHECKING:
    from greenroom.api.e2b.routes import Dialect

_NAME = re.compile(r"[a-z0-9_-]{1,128}(?::[a-z0-9_.-]{1,128})?")
_NO_CONTENT = 204


class Suspending:
    """The handlers. What they share with others is the dialect's."""

    def __init__(self, dialect: Dialect, fleet: Fleet, keys: Authenticator, api: ApiConfig) -> None:
        self._dialect = dialect
        self._fleet = fleet
        self._keys = keys
        self._api = api

    async def _mine(self, request: Request) -> tuple[str, str]:
        """Owner and sandbox id of a request. Raises UnknownSandbox for somebody else's."""
        owner = await self._keys.owner_of(request)
        sandbox_id = sandbox_id_of(request)
        await self._dialect.check_owner(owner, sandbox_id)
        return owner, sandbox_id

    async def pause(self, request: Request) -> Response:
        """`POST /sandboxes/{id}/pause`: let its VM go; 204 once all of it is on disk, 409 when it was paused."""
        _, sandbox_id = await self._mine(request)
        body = await self._dialect.read(request, PauseBody, PauseBody())
        await self._fleet.pause(sandbox_id, PauseRequest(body.memory is not False))
        return Response(status_code=_NO_CONTENT)

    async def resume(self, request: Request) -> Response:
        """`POST /sandboxes/{id}/resume`: the older form of connect, 201 also when it was running."""
        _, sandbox_id = await self._mine(request)
        body = await self._dialect.read(request, ResumeBody, ResumeBody())
        timeout = self._api.default_timeout_v1 if body.timeout is None else body.timeout
        check_timeout(timeout, 0, self._api.max_timeout)
        answer = await self._dialect.resumed(sandbox_id, timeout, body.memory)
        answer.status_code = 201
        return answer

    async def fork(self, request: Request) -> Response:
        """`POST /sandboxes/{id}/fork`: up to 20 that go on where it stands; 201, one entry for each, in order."""
        owner, sandbox_id = await self._mine(request)
        key = claim_key(owner, request.headers.get("idempotency-key"))
        body = await self._dialect.read(request, ForkBody, ForkBody())
        count = 1 if body.count is None else body.count
        if not 1 <= count <= MOST_FORKS:
            raise BadRequest(f"count: 1 to {MOST_FORKS} forks can be made at once")
        timeout = self._api.default_timeout if body.timeout is None else body.timeout
        check_timeout(timeout, 1, self._api.max_timeout)
        keys = [f"{key}-fork{number}" for number in range(count)]
        try:
            answer = await self._fleet.fork(sandbox_id, ForkRequest(keys=keys, ttl=float(timeout)))
        except OutcomeUnknown as error:
            if request.headers.get("idempotency-key") is not None:
                raise
            # 503 would make the SDK send it again, and that would be other sandboxes.
            raise CreateUnknown(f"{error.message}; forks that were made end within seconds") from error
        if await request.is_disconnected():
            return Response(status_code=499)
        return json_response(await asyncio.gather(*(self._entry(fork) for fork in answer.forks)), 201)

    async def _entry(self, fork: Fork) -> ForkEntry:
        if fork.sandbox is None:
            return ForkEntry(error=ErrorBody(500, fork.error))
        try:
            sandbox = await self._fleet.confirm(fork.sandbox)
        except GreenroomError as error:
            return ForkEntry(error=ErrorBody(error.status, error.message))
        return ForkEntry(sandbox=await self._dialect.sandbox_answer(sandbox))

    async def roll_back(self, request: Request) -> Response:
        """`POST /sandboxes/{id}/rollback`: it goes on from a snapshot of its own (E2B has not this); 200 and it."""
        owner, sandbox_id = await self._mine(request)
        body = await self._dialect.read(request, RollbackBody)
        snapshot = await self._fleet.snapshot(owner, body.snapshot_id)
        sandbox = await self._fleet.roll_back(sandbox_id, snapshot.snapshot_id)
        return json_response(await self._dialect.sandbox_answer(sandbox))

    async def take(self, request: Request) -> Response:
        """`POST /sandboxes/{id}/snapshots`: keep what it is now, to start others from; 201 once it is on disk."""
        _, sandbox_id = await self._mine(request)
        body = await self._dialect.read(request, SnapshotBody, SnapshotBody())
        name = body.name or ""
        if name and _NAME.fullmatch(name) is None:
            raise BadRequest("name: a-z, 0-9, - and _ are allowed, and a tag after a colon")
        if name:
            # A template's name leads to the template, so a snapshot of that name could never be found.
            with contextlib.suppress(UnknownTemplate):
                template = await self._fleet.template(name)
                raise BadRequest(f"name: there is a template {template.name!r}; take another name")
        wish = SnapshotRequest(name=name, memory=body.memory is not False)
        return json_response(snapshot_answer(await self._fleet.take_snapshot(sandbox_id, wish)), 201)

    async def list(self, request: Request) -> Response:
        """`GET /snapshots`: list the owner's, the newest first, by pages."""
        owner = await self._keys.owner_of(request)
        params = request.query_params
        limit = parse_limit(params.get("limit"), self._api.page_limit)
        token = params.get("nextToken")
        after = decode_cursor(token) if token else None
        sandbox_id, name = params.get("sandboxID"), params.get("name")
        found = [
            snapshot
            for snapshot in await self._fleet.snapshots()
            if snapshot.owner == owner
            and (not sandbox_id or snapshot.sandbox_id == sandbox_id)
            and (not name or name in (snapshot.name, snapshot.name.partition(":")[0]))
        ]
        found.sort(key=lambda snapshot: (micros(snapshot.created_at), snapshot.snapshot_id), reverse=True)
        positions = [(micros(snapshot.created_at), snapshot.snapshot_id) for snapshot in found]
        page, end = page_of(positions, after, limit)
        headers = {} if end is None else {"X-Next-Token": encode_cursor(end)}
        return json_response([snapshot_answer(snapshot) for snapshot in found[page]], headers=headers)

    async def delete_template(self, request: Request) -> Response:
        """`DELETE /templates/{id}`: delete a snapshot; templates of the platform stay."""
        owner = await self._keys.owner_of(request)
        ref = request.path_params["id"]
        try:
            snapshot = await self._fleet.snapshot(owner, ref)
        except UnknownSnapshot:
            try:
                template = await self._fleet.template(ref)
            except UnknownTemplate:
                raise UnknownTemplate(f"there is no snapshot or template {ref[:80]!r}") from None
            raise Forbidden(f"the template {template.name} belongs to the platform") from None
        await self._fleet.delete_snapshot(snapshot.snapshot_id)
        return Response(status_code=_NO_CONTENT)

    def paths(self) -> dict[str, dict[str, Handler]]:
        """Its part of the API."""
        return {
            "/sandboxes/{id}/pause": {"POST": self.pause},
            "/sandboxes/{id}/resume": {"POST": self.resume},
            "/sandboxes/{id}/fork": {"POST": self.fork},
            "/sandboxes/{id}/snapshots": {"POST": self.take},
            "/sandboxes/{id}/rollback": {"POST": self.roll_back},
            "/snapshots": {"GET": self.list},
            "/templates/{id}": {"DELETE": self.delete_template},
        }
