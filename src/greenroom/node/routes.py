"""The node's HTTP API to the other roles. Every call but `/healthz` needs a role's credential."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from greenroom.errors import BadRequest
from greenroom.node.keeper import Keeper
from greenroom.node.metrics import CLAIMS, RELEASES
from greenroom.node.signatures import owner_of
from greenroom.node.warmer import Warmer
from greenroom.wire import logs, metrics
from greenroom.wire.messages import (
    ClaimRequest,
    NodeStatus,
    PoolSpec,
    SandboxList,
    SignatureOwner,
    SignedUrl,
    TimeoutRequest,
)
from greenroom.wire.serving import endpoint, json_response, read_json

_READERS = ("api", "master", "operator")
_LONGEST_TTL = 366 * 86_400.0


def routes(keeper: Keeper, warmer: Warmer, status: Callable[[], NodeStatus]) -> list[Route]:
    """All routes of a node."""

    async def claim(request: Request) -> Response:
        wanted = await read_json(request, ClaimRequest)
        if not 0 < wanted.ttl <= _LONGEST_TTL:
            raise BadRequest("ttl must be a positive number of seconds")
        if not 0 <= wanted.wait <= 300:
            raise BadRequest("wait must lie between 0 and 300 seconds")
        with metrics.Outcome(CLAIMS, wanted.template, wanted.size.name):
            made = await keeper.claim(wanted)
        logs.about(made.sandbox_id)
        return json_response(made, 201)

    async def claim_by_key(request: Request) -> Response:
        return json_response(await keeper.by_key(request.path_params["key"]))

    async def sandboxes(_request: Request) -> Response:
        return json_response(SandboxList(sandboxes=keeper.list()))

    async def sandbox(request: Request) -> Response:
        return json_response(keeper.get(request.path_params["sandbox_id"]))

    async def release(request: Request) -> Response:
        with metrics.Outcome(RELEASES):
            await keeper.release(request.path_params["sandbox_id"])
        return Response(status_code=204)

    async def timeout(request: Request) -> Response:
        wanted = await read_json(request, TimeoutRequest)
        if not wanted.ttl <= _LONGEST_TTL:
            raise BadRequest("ttl is too long")
        return json_response(await keeper.set_timeout(request.path_params["sandbox_id"], wanted))

    async def confirm(request: Request) -> Response:
        return json_response(await keeper.confirm(request.path_params["sandbox_id"]))

    async def signatures(request: Request) -> Response:
        url = await read_json(request, SignedUrl)
        return json_response(SignatureOwner(owner_of(url, keeper.tokens())))

    async def set_pools(request: Request) -> Response:
        specs = await read_json(request, list[PoolSpec])
        await warmer.set_pools(specs, lambda _step, _done: None)
        return json_response(status())

    async def node_status(_request: Request) -> Response:
        return json_response(status())

    return [
        endpoint("POST", "/v1/claims", claim, ("master",)),
        endpoint("GET", "/v1/claims/{key}", claim_by_key, ("api", "master")),
        endpoint("GET", "/v1/sandboxes", sandboxes, _READERS),
        endpoint("GET", "/v1/sandboxes/{sandbox_id}", sandbox, _READERS),
        endpoint("DELETE", "/v1/sandboxes/{sandbox_id}", release, _READERS),
        endpoint("POST", "/v1/sandboxes/{sandbox_id}/confirm", confirm, ("api",)),
        endpoint("POST", "/v1/sandboxes/{sandbox_id}/timeout", timeout, ("api", "operator")),
        endpoint("POST", "/v1/signatures", signatures, ("proxy",)),
        endpoint("PUT", "/v1/pools", set_pools, ("master",)),
        endpoint("GET", "/v1/status", node_status, ("master", "operator")),
    ]
