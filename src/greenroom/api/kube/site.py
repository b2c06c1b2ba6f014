"""What is served beside the objects: discovery, OpenAPI, version, health. All but the health checks ask `admit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from greenroom.api.kube import discovery, negotiation, openapi, openapi2
from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.negotiation import JSON
from greenroom.api.kube.objects import Object
from greenroom.api.kube.resources import Admit, Attempt, Handler, Resource
from greenroom.api.kube.status import Subject, no_such_path, unavailable


class Site:
    """What is beside the objects: discovery, OpenAPI, version, health."""

    def __init__(self, kinds: Sequence[Kind], admit: Admit, ready: Callable[[], bool]) -> None:
        self._kinds = kinds
        self._admit = admit
        self._ready = ready
        self._documents = openapi.documents(kinds)
        self._second = openapi2.documents(kinds)
        self._index = msgspec.json.encode(openapi.index(self._documents))

    def routes(self) -> list[Route]:
        """Their paths."""
        table: dict[str, Handler] = {
            "/version": self.version,
            "/healthz": self.alive,
            "/livez": self.alive,
            "/readyz": self.ready,
            "/api": self.core,
            "/api/{version}": self.core_resources,
            "/apis": self.groups,
            "/apis/{group}": self.group,
            "/apis/{group}/{version}": self.resources,
            "/openapi/v2": self.openapi_second,
            "/openapi/v3": self.openapi_index,
            "/openapi/v3/{name:path}": self.openapi_document,
        }
        subject = Subject(resource="path")
        return [Route(path, Resource(subject, {"GET": handler})) for path, handler in table.items()]

    async def version(self, request: Request) -> Response:
        """`/version`: whose conventions are followed."""
        return await self._told(request, discovery.version())

    async def alive(self, _request: Request) -> Response:
        """`/livez`, `/healthz`: this process answers. For anyone."""
        return Response(b"ok", media_type="text/plain")

    async def ready(self, _request: Request) -> Response:
        """`/readyz`: this process can serve. For anyone."""
        if not self._ready():
            raise unavailable("not ready")
        return Response(b"ok", media_type="text/plain")

    async def core(self, request: Request) -> Response:
        """`/api`: versions of the core group."""
        return await self._discovered(request, discovery.core_versions(self._kinds), core=True)

    async def groups(self, request: Request) -> Response:
        """`/apis`: the groups."""
        return await self._discovered(request, discovery.group_list(self._kinds), core=False)

    async def group(self, request: Request) -> Response:
        """`/apis/<group>`: its versions."""
        return await self._told(request, discovery.group(request.path_params["group"], self._kinds))

    async def resources(self, request: Request) -> Response:
        """`/apis/<group>/<version>`: its resources."""
        place = request.path_params
        return await self._told(
            request, discovery.resource_list(place["group"], place["version"], self._kinds)
        )

    async def core_resources(self, request: Request) -> Response:
        """`/api/<version>`: its resources."""
        return await self._told(
            request, discovery.resource_list("", request.path_params["version"], self._kinds)
        )

    async def openapi_second(self, request: Request) -> Response:
        """`/openapi/v2`: everything in one document, in JSON or Protocol Buffers."""
        await self._admit(request, Attempt(verb="get"))
        document, media_type = self._second.wanted(request.headers.get("accept", ""))
        headers = {"ETag": f'"{document.hash}"', "Vary": "Accept"}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(document.body, media_type=media_type, headers=headers)

    async def openapi_index(self, request: Request) -> Response:
        """`/openapi/v3`: where the documents are."""
        await self._admit(request, Attempt(verb="get"))
        return Response(self._index, media_type=JSON)

    async def openapi_document(self, request: Request) -> Response:
        """`/openapi/v3/<group and version>`: a document."""
        await self._admit(request, Attempt(verb="get"))
        document = self._documents.get(request.path_params["name"])
        if document is None:
            raise no_such_path()
        if not negotiation.accepts(request.headers.get("accept", "")):
            negotiation.form_of(request.headers.get("accept", ""))
        etag = f'"{document.hash}"'
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"ETag": etag})
        # A document that is asked for by its hash never changes.
        keep = "public, immutable" if request.query_params.get("hash") == document.hash else "no-cache"
        return Response(document.body, media_type=JSON, headers={"ETag": etag, "Cache-Control": keep})

    async def _discovered(self, request: Request, older: Object, *, core: bool) -> Response:
        form = discovery.wants_aggregated(request.headers.get("accept", ""))
        if not form:
            return await self._told(request, older)
        await self._admit(request, Attempt(verb="get"))
        told = discovery.aggregated(self._kinds, form, core=core)
        response = Response(msgspec.json.encode(told))
        # Not as media_type: the parameters would be followed by a charset.
        response.headers["Content-Type"] = discovery.aggregated_type(form)
        return response

    async def _told(self, request: Request, told: Object | None) -> Response:
        await self._admit(request, Attempt(verb="get"))
        if told is None:
            raise no_such_path()
        return Response(msgspec.json.encode(told), media_type=JSON)
