"""The E2B API's paths and what answers them.

Handlers read and check a request, ask the fleet, and write E2B's answer; rules about bodies are in `schemas`,
about lists in `listing`, about errors in `errors`. A sandbox of another owner is answered like one that does
not exist, so ids tell nobody anything.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from greenroom.api.e2b.errors import CreateUnknown
from greenroom.api.e2b.inbound import inbound_of
from greenroom.api.e2b.keys import Authenticator, claim_key
from greenroom.api.e2b.listing import Query, cut, parse_metadata, parse_query, select
from greenroom.api.e2b.observing import Observing
from greenroom.api.e2b.resources import Handler, Unsupported, sandbox_id_of
from greenroom.api.e2b.schemas import (
    MAX_REFRESH,
    AliasBody,
    ConnectBody,
    NetworkUpdate,
    NewSandbox,
    RefreshBody,
    SandboxBody,
    TimeoutBody,
    changed_network,
    check_create,
    check_timeout,
    detail_body,
    lifespan_of,
    listed_body,
    network_of,
    sandbox_body,
    template_body,
)
from greenroom.api.e2b.suspending import Suspending
from greenroom.api.nodes import Fleet
from greenroom.api.seen import Encoder
from greenroom.config import ApiConfig, ClaimsConfig, NetworkConfig
from greenroom.errors import BadRequest, OutcomeUnknown, UnknownSandbox, UnknownSnapshot, UnknownTemplate
from greenroom.wire import logs
from greenroom.wire.ids import is_snapshot_id
from greenroom.wire.messages import ClaimRequest, Listed, Sandbox, SnapshotInfo, Template, TimeoutRequest
from greenroom.wire.serving import json_response, read_body

T = TypeVar("T")

OWNERS_REMEMBERED = 50_000
"""Sandboxes whose owner is remembered. Owners never change and ids are never used again."""
_NO_CONTENT = 204


class Dialect:
    """The handlers of the E2B API."""

    def __init__(
        self,
        fleet: Fleet,
        keys: Authenticator,
        domain: str,
        api: ApiConfig,
        claims: ClaimsConfig,
        network: NetworkConfig,
    ) -> None:
        self._fleet = fleet
        self._keys = keys
        self._domain = domain
        self._api = api
        self._claims = claims
        self._network = network
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._suspending = Suspending(self, fleet, keys, api)
        self._observing = Observing(self, fleet, keys)

    async def create_v1(self, request: Request) -> Response:
        """`POST /sandboxes`: create by the older contract: 15 s by default and, unless asked for, no token."""
        return await self._create(request, self._api.default_timeout_v1, secure=None)

    async def create_v2(self, request: Request) -> Response:
        """`POST /v2/sandboxes`: create a sandbox, for 300 s by default and always secure."""
        return await self._create(request, self._api.default_timeout, secure=True)

    async def _create(self, request: Request, timeout: int, secure: bool | None) -> Response:
        owner = await self._keys.owner_of(request)
        header = request.headers.get("idempotency-key")
        key = claim_key(owner, header)
        body = await self.read(request, NewSandbox)
        check_create(body, self._api)
        secure = bool(body.secure) if secure is None else secure
        inbound = inbound_of(body.network, secure=secure)
        source = await self._source(owner, body.template_id)
        snapshot = source.snapshot_id if isinstance(source, SnapshotInfo) else ""
        template = source if isinstance(source, Template) else None
        claim = ClaimRequest(
            key=key,
            template=snapshot if template is None else template.name,
            size=source.size,
            snapshot=snapshot,
            lifespan=lifespan_of(body),
            ttl=float(timeout if body.timeout is None else body.timeout),
            metadata=body.metadata or {},
            env=body.env_vars or {},
            secure=secure,
            owner=owner,
            inbound=inbound,
            wait=self._claims.queue_wait,
            network=network_of(body),
        )
        try:
            sandbox = await self._fleet.claim(claim)
            if await request.is_disconnected():
                # Nobody is there to be told: left unconfirmed, the sandbox is given back within seconds.
                return Response(status_code=499)
            sandbox = await self._fleet.confirm(sandbox)
        except OutcomeUnknown as error:
            if header is not None:
                raise
            # 503 would make the SDK send it again, and that would be another sandbox.
            raise CreateUnknown(
                "it is not known whether the sandbox was created; if it was, it ends at its timeout. "
                "Send an Idempotency-Key to be able to ask again safely"
            ) from error
        self.remember(sandbox)
        logs.about(sandbox.sandbox_id)
        return json_response(sandbox_body(sandbox, template, self._domain), 201)

    async def _source(self, owner: str, ref: str) -> Template | SnapshotInfo:
        """What a create starts from: a template, or a snapshot of this owner by its id or name.

        Raises UnknownTemplate when there is neither.
        """
        if not is_snapshot_id(ref):
            with contextlib.suppress(UnknownTemplate):
                return await self._fleet.template(ref)
        try:
            return await self._fleet.snapshot(owner, ref)
        except UnknownSnapshot:
            return await self._fleet.template(ref)

    async def list_v1(self, request: Request) -> Response:
        """`GET /sandboxes`: list the running ones, all on one page."""
        owner = await self._keys.owner_of(request)
        query = Query(
            metadata=parse_metadata(request.query_params.get("metadata", "")),
            states=frozenset({"running"}),
        )
        sandboxes, missing = await self._fleet.sandboxes(owner)
        return await self._listed(select(sandboxes, query, owner), _partial(missing))

    async def list_v2(self, request: Request) -> Response:
        """`GET /v2/sandboxes`: list running and paused ones: filtered, ordered, by pages."""
        owner = await self._keys.owner_of(request)
        params = request.query_params
        query = parse_query(params, params.getlist("state"), self._api.page_limit)
        name = None
        if query.template is not None:
            try:
                name = (await self._fleet.template(query.template)).name
            except UnknownTemplate:
                name = query.template  # that of a snapshot, or of nothing
        sandboxes, missing = await self._fleet.sandboxes(owner)
        page = cut(select(sandboxes, query, owner, name), query)
        headers = {"X-Total-Running": str(page.running), **_partial(missing)}
        if page.next_token is not None:
            headers["X-Next-Token"] = page.next_token
        return await self._listed(page.sandboxes, headers)

    async def _listed(self, sandboxes: list[Listed], headers: dict[str, str]) -> Response:
        """The answer to a list. Its entries are encoded once for as long as they stay as they are."""
        encoders: dict[str, Encoder] = {}
        for sandbox in sandboxes:
            if sandbox.template not in encoders:
                encoders[sandbox.template] = _encoder(await self._fleet.template_of(sandbox))
        entries = self._fleet.seen.encoded(sandboxes, encoders)
        return Response(b"[" + b",".join(entries) + b"]", headers=headers, media_type="application/json")

    async def get(self, request: Request) -> Response:
        """`GET /sandboxes/{id}`: one sandbox, running or paused."""
        owner = await self._keys.owner_of(request)
        sandbox = await self.owned(owner, sandbox_id_of(request))
        template = await self._fleet.template_of(sandbox)
        return json_response(detail_body(sandbox, template, self._domain, self._network))

    async def delete(self, request: Request) -> Response:
        """`DELETE /sandboxes/{id}`: end a sandbox; 204 when it is gone."""
        owner = await self._keys.owner_of(request)
        sandbox_id = sandbox_id_of(request)
        await self.check_owner(owner, sandbox_id)
        await self._fleet.delete(sandbox_id)
        return Response(status_code=_NO_CONTENT)

    async def timeout(self, request: Request) -> Response:
        """`POST /sandboxes/{id}/timeout`: move the end: that many seconds from now; 0 or less ends it."""
        owner = await self._keys.owner_of(request)
        sandbox_id = sandbox_id_of(request)
        body = await self.read(request, TimeoutBody)
        timeout = max(0, body.timeout)
        check_timeout(timeout, 0, self._api.max_timeout)
        await self.check_owner(owner, sandbox_id)
        await self._fleet.set_timeout(sandbox_id, TimeoutRequest(float(timeout)))
        return Response(status_code=_NO_CONTENT)

    async def refresh(self, request: Request) -> Response:
        """`POST /sandboxes/{id}/refreshes`: the sandbox lives at least that long."""
        owner = await self._keys.owner_of(request)
        sandbox_id = sandbox_id_of(request)
        body = await self.read(request, RefreshBody, RefreshBody())
        duration = self._api.default_timeout_v1 if body.duration is None else body.duration
        if not 0 <= duration <= MAX_REFRESH:
            raise BadRequest(f"duration: 0 to {MAX_REFRESH} seconds are allowed")
        await self.check_owner(owner, sandbox_id)
        await self._fleet.set_timeout(sandbox_id, TimeoutRequest(float(duration), extend_only=True))
        return Response(status_code=_NO_CONTENT)

    async def network(self, request: Request) -> Response:
        """`PUT /sandboxes/{id}/network`: these egress rules instead of those before; what is absent is cleared."""
        owner = await self._keys.owner_of(request)
        sandbox_id = sandbox_id_of(request)
        network = changed_network(await self.read(request, NetworkUpdate))
        await self.check_owner(owner, sandbox_id)
        await self._fleet.set_network(sandbox_id, network)
        return Response(status_code=_NO_CONTENT)

    async def connect(self, request: Request) -> Response:
        """`POST (/v2)/sandboxes/{id}/connect`: 200, and the end is moved only if that is later; 201 when the sandbox
        was paused and runs again."""
        owner = await self._keys.owner_of(request)
        sandbox_id = sandbox_id_of(request)
        body = await self.read(request, ConnectBody, ConnectBody())
        timeout = self._api.default_timeout if body.timeout is None else body.timeout
        check_timeout(timeout, 0, self._api.max_timeout)
        await self.check_owner(owner, sandbox_id)
        return await self.resumed(sandbox_id, timeout, body.memory)

    async def resumed(self, sandbox_id: str, timeout: int, memory: bool | None) -> Response:
        """Let a sandbox run for `timeout` seconds at least, and answer with it."""
        answer = await self._fleet.resume(sandbox_id, float(timeout), memory=memory is not False)
        template = await self._fleet.template_of(answer.sandbox)
        body = sandbox_body(answer.sandbox, template, self._domain)
        return json_response(body, 201 if answer.resumed else 200)

    async def sandbox_answer(self, sandbox: Sandbox) -> SandboxBody:
        """E2B's `Sandbox` for one of ours."""
        self.remember(sandbox)
        return sandbox_body(sandbox, await self._fleet.template_of(sandbox), self._domain)

    async def list_templates(self, request: Request) -> Response:
        """`GET /templates`: list all there are."""
        await self._keys.owner_of(request)
        return json_response([template_body(template) for template in await self._fleet.templates()])

    async def alias(self, request: Request) -> Response:
        """`GET /templates/aliases/{alias}`: look a name up; 404 when there is no such template."""
        await self._keys.owner_of(request)
        template = await self._fleet.template(request.path_params["alias"])
        return json_response(AliasBody(template.template_id))

    async def read(self, request: Request, kind: type[T], empty: T | None = None) -> T:
        """The body as `kind`; `empty` stands for a body of no bytes where the contract allows that."""
        body = await read_body(request, self._api.max_body)
        if not body.strip() and empty is not None:
            return empty
        return decode(body, kind)

    async def owned(self, owner: str, sandbox_id: str) -> Sandbox:
        sandbox = await self._fleet.get(sandbox_id)
        self.remember(sandbox)
        if sandbox.owner != owner:
            raise UnknownSandbox(f"there is no sandbox {sandbox_id!r}")
        return sandbox

    async def check_owner(self, owner: str, sandbox_id: str) -> None:
        """Raise UnknownSandbox unless the sandbox is the owner's, asking its node only when not known."""
        known = self._owners.get(sandbox_id)
        if known is None:
            known = self._fleet.seen.owner_of(sandbox_id)
        if known is None:
            await self.owned(owner, sandbox_id)
        elif known != owner:
            raise UnknownSandbox(f"there is no sandbox {sandbox_id!r}")

    def remember(self, sandbox: Sandbox) -> None:
        self._owners[sandbox.sandbox_id] = sandbox.owner
        self._owners.move_to_end(sandbox.sandbox_id)
        if len(self._owners) > OWNERS_REMEMBERED:
            self._owners.popitem(last=False)

    def paths(self) -> dict[str, dict[str, Handler]]:
        """Every path of the E2B API with its methods, those not supported yet too. Earlier paths win."""
        table: dict[str, dict[str, Handler]] = {
            "/sandboxes": {"GET": self.list_v1, "POST": self.create_v1},
            "/v2/sandboxes": {"GET": self.list_v2, "POST": self.create_v2},
            "/templates": {"GET": self.list_templates},
            "/templates/aliases/{alias:path}": {"GET": self.alias},
        }
        for what, method, path in _unsupported():
            table.setdefault(path, {})[method] = Unsupported(what, self._keys.owner_of)
        for path, methods in (*self._suspending.paths().items(), *self._observing.paths().items()):
            table.setdefault(path, {}).update(methods)
        table |= {
            "/sandboxes/{id}": {"GET": self.get, "DELETE": self.delete},
            "/sandboxes/{id}/timeout": {"POST": self.timeout},
            "/sandboxes/{id}/refreshes": {"POST": self.refresh},
            "/sandboxes/{id}/connect": {"POST": self.connect},
            "/sandboxes/{id}/network": {"PUT": self.network},
            "/v2/sandboxes/{id}/connect": {"POST": self.connect},
        }
        return table


def decode(body: bytes, kind: type[T]) -> T:
    """A JSON body as `kind`. Raises BadRequest naming the field that does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"invalid request: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the request body is not valid JSON") from error


def _encoder(template: Template | None) -> Encoder:
    """What encodes the entries of lists for sandboxes of a template, None for one that is not known now."""

    def encode(sandbox: Listed) -> bytes:
        return msgspec.json.encode(listed_body(sandbox, template))

    return ("e2b", None if template is None else template.template_id), encode


def _partial(missing: list[str]) -> dict[str, str]:
    return {"X-Greenroom-Partial": ", ".join(missing)} if missing else {}


_UNSUPPORTED = """
template building       POST        /templates
template building       POST        /v2/templates
template building       POST        /v3/templates
paged template lists    GET         /v2/templates
default templates       GET         /default-templates
template tags           POST,DELETE /templates/tags
template details        GET         /templates/{id}
template building       POST        /templates/{id}
changing templates      PATCH       /templates/{id}
changing templates      PATCH       /v2/templates/{id}
template building       GET         /templates/{id}/files/{hash}
template building       POST        /templates/{id}/builds/{build}
template building       POST        /v2/templates/{id}/builds/{build}
template building       GET         /templates/{id}/builds/{build}/status
template building       GET         /templates/{id}/builds/{build}/logs
template tags           GET         /templates/{id}/tags
template tags           GET         /templates/{id}/tags/count
template tags           GET         /templates/{id}/tags/exists
template tags           GET         /templates/{id}/tags/groups
template tags           GET         /templates/{id}/tags/{tag}/assignments
volumes                 GET,POST    /volumes
volumes                 GET,DELETE  /volumes/{id}
secrets                 GET,POST    /secrets
secrets                 GET,POST,DELETE /secrets/{id}
"""
"""What E2B's clients can call and Greenroom does not do yet: what it is, methods, path."""


def _unsupported() -> Iterator[tuple[str, str, str]]:
    for line in _UNSUPPORTED.strip().splitlines():
        *what, methods, path = line.split()
        for method in methods.split(","):
            yield " ".join(what), method, path
