"""The node's HTTP API to the other roles. Every call but `/healthz` needs a role's credential."""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from greenroom.config import LONGEST_TIMEOUT
from greenroom.errors import BadRequest
from greenroom.node.branching import Branching
from greenroom.node.followers import Followers
from greenroom.node.keeper import Keeper
from greenroom.node.metrics import CLAIMS, RELEASES
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Snapshot
from greenroom.wire import changes, logs, metrics
from greenroom.wire.changes import Position
from greenroom.wire.messages import (
    FOREVER,
    ClaimRequest,
    DeclaredChange,
    ForkRequest,
    Network,
    NodeStatus,
    PauseRequest,
    PoolSpec,
    ResumeRequest,
    RollbackRequest,
    SandboxList,
    SignatureOwner,
    SignedUrl,
    SnapshotList,
    SnapshotRequest,
    TimeoutRequest,
    listed,
)
from greenroom.wire.serving import Handler, endpoint, json_response, read_json

_READERS = ("api", "master", "operator")


def _check_ttl(ttl: float, *, above_nothing: bool = False) -> None:
    """Raise BadRequest for a time to live that is too long, or no time at all where that may not be."""
    if above_nothing and not ttl > 0:
        raise BadRequest("ttl: more than 0 seconds are needed")
    if not (ttl <= LONGEST_TIMEOUT or ttl == FOREVER):
        raise BadRequest(f"ttl: at most {LONGEST_TIMEOUT} seconds are allowed, or {FOREVER:.0f} for ever")


def routes(
    keeper: Keeper,
    branching: Branching,
    warmer: Warmer,
    followers: Followers,
    status: Callable[[], NodeStatus],
) -> list[Route]:
    """All routes of a node."""

    async def claim(request: Request) -> Response:
        wanted = await read_json(request, ClaimRequest)
        _check_ttl(wanted.ttl, above_nothing=True)
        if not 0 <= wanted.wait <= 300:
            raise BadRequest("wait must lie between 0 and 300 seconds")

        async def source() -> Snapshot:
            return await branching.snapshot_of(wanted.snapshot)

        with metrics.Outcome(CLAIMS, wanted.template, wanted.size.name):
            made = await keeper.claim(wanted, source if wanted.snapshot else None)
        logs.about(made.sandbox_id)
        return json_response(made, 201)

    async def claim_by_key(request: Request) -> Response:
        return json_response(await keeper.by_key(request.path_params["key"]))

    async def sandboxes(_request: Request) -> Response:
        return json_response(SandboxList(sandboxes=keeper.list()))

    async def sandbox(request: Request) -> Response:
        ended = request.query_params.get("ended") == "1"
        return json_response(keeper.get(request.path_params["sandbox_id"], ended=ended))

    async def release(request: Request) -> Response:
        with metrics.Outcome(RELEASES):
            ended = request.query_params.get("ended") == "1"
            await keeper.release(request.path_params["sandbox_id"], ended=ended)
        return Response(status_code=204)

    async def timeout(request: Request) -> Response:
        wanted = await read_json(request, TimeoutRequest)
        _check_ttl(wanted.ttl)
        return json_response(await keeper.set_timeout(request.path_params["sandbox_id"], wanted))

    async def pause(request: Request) -> Response:
        wanted = await read_json(request, PauseRequest)
        return json_response(await keeper.pause(request.path_params["sandbox_id"], memory=wanted.memory))

    async def resume(request: Request) -> Response:
        wanted = await read_json(request, ResumeRequest)
        _check_ttl(wanted.ttl)
        if not wanted.ttl >= 0:
            raise BadRequest("ttl: less than 0 seconds is no time")
        resumed = await keeper.resume(request.path_params["sandbox_id"], wanted.ttl, memory=wanted.memory)
        return json_response(resumed)

    async def past(request: Request) -> Response:
        return json_response(keeper.past(request.path_params["sandbox_id"]))

    async def take_snapshot(request: Request) -> Response:
        wanted = await read_json(request, SnapshotRequest)
        return json_response(await branching.take(request.path_params["sandbox_id"], wanted), 201)

    async def snapshots(_request: Request) -> Response:
        return json_response(SnapshotList(branching.list()))

    async def snapshot(request: Request) -> Response:
        return json_response(branching.get(request.path_params["snapshot_id"]))

    async def delete_snapshot(request: Request) -> Response:
        await branching.delete(request.path_params["snapshot_id"])
        return Response(status_code=204)

    async def roll_back(request: Request) -> Response:
        wanted = await read_json(request, RollbackRequest)
        return json_response(await branching.roll_back(request.path_params["sandbox_id"], wanted.snapshot_id))

    async def fork(request: Request) -> Response:
        wanted = await read_json(request, ForkRequest)
        _check_ttl(wanted.ttl, above_nothing=True)
        return json_response(await branching.fork(request.path_params["sandbox_id"], wanted), 201)

    async def confirm(request: Request) -> Response:
        return json_response(await keeper.confirm(request.path_params["sandbox_id"]))

    async def network(request: Request) -> Response:
        wanted = await read_json(request, Network)
        return json_response(await keeper.set_network(request.path_params["sandbox_id"], wanted))

    async def declare(request: Request) -> Response:
        wanted = await read_json(request, DeclaredChange)
        return json_response(listed(await keeper.declare(request.path_params["sandbox_id"], wanted)))

    async def signatures(request: Request) -> Response:
        url = await read_json(request, SignedUrl)
        return json_response(SignatureOwner(keeper.signer(url)))

    async def set_pools(request: Request) -> Response:
        specs = await read_json(request, list[PoolSpec])
        await warmer.set_pools(specs, lambda _step, _done: None)
        return json_response(status())

    async def node_status(_request: Request) -> Response:
        return json_response(status())

    async def follow(request: Request) -> Response:
        return followers.answer(Position.parse(request.query_params.get("after", "")))

    def placed(
        method: str, path: str, handler: Handler, admits: Collection[str], *, passed: bool = True
    ) -> Route:
        """A route whose answer says where the stream stood, once the followers were sent that much. Without `passed`
        it does not wait for that: what it did is nobody's to see yet."""

        async def answered(request: Request) -> Response:
            try:
                response = await handler(request)
            finally:
                if passed:
                    await followers.passed()
            response.headers[changes.HEADER] = str(keeper.changes.position)
            return response

        return endpoint(method, path, answered, admits)

    return [
        endpoint("GET", changes.PATH, follow, _READERS),
        placed("POST", "/v1/claims", claim, ("master",), passed=False),
        endpoint("GET", "/v1/claims/{key}", claim_by_key, ("api", "master")),
        endpoint("GET", "/v1/sandboxes", sandboxes, _READERS),
        placed("GET", "/v1/sandboxes/{sandbox_id}", sandbox, _READERS),
        placed("DELETE", "/v1/sandboxes/{sandbox_id}", release, _READERS),
        placed("POST", "/v1/sandboxes/{sandbox_id}/confirm", confirm, ("api",)),
        placed("POST", "/v1/sandboxes/{sandbox_id}/timeout", timeout, ("api", "operator")),
        placed("PUT", "/v1/sandboxes/{sandbox_id}/network", network, ("api", "operator")),
        placed("PUT", "/v1/sandboxes/{sandbox_id}/declared", declare, ("api", "operator")),
        placed("POST", "/v1/sandboxes/{sandbox_id}/pause", pause, ("api", "operator")),
        placed("POST", "/v1/sandboxes/{sandbox_id}/resume", resume, ("api", "operator")),
        endpoint("POST", "/v1/sandboxes/{sandbox_id}/snapshots", take_snapshot, ("api",)),
        endpoint("GET", "/v1/sandboxes/{sandbox_id}/past", past, ("api", "operator")),
        placed("POST", "/v1/sandboxes/{sandbox_id}/fork", fork, ("master",)),
        placed("POST", "/v1/sandboxes/{sandbox_id}/rollback", roll_back, ("api",)),
        endpoint("GET", "/v1/snapshots", snapshots, ("api", "master", "operator")),
        endpoint("GET", "/v1/snapshots/{snapshot_id}", snapshot, ("api", "master", "operator")),
        endpoint("DELETE", "/v1/snapshots/{snapshot_id}", delete_snapshot, ("api", "operator")),
        endpoint("POST", "/v1/signatures", signatures, ("proxy",)),
        endpoint("PUT", "/v1/pools", set_pools, ("master",)),
        endpoint("GET", "/v1/status", node_status, ("master", "operator")),
    ]
