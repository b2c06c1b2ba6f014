"""HTTP around the storages: the paths of every kind, and the application (`site` has what is beside the objects).

Handlers read a request's bounded body and options, ask whether the caller may, call `Writer` or `reading`, and write
the answer in the form that the client wants. All rules are in those. Sources: "Kubernetes API Concepts".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from greenroom.api.kube import negotiation, options, paging, protobufs, reading
from greenroom.api.kube.access import CALLER
from greenroom.api.kube.crowd import Crowd
from greenroom.api.kube.decoding import BODY_LIMIT, decoded, decoded_object
from greenroom.api.kube.kinds import Action
from greenroom.api.kube.negotiation import JSON, PATCHES
from greenroom.api.kube.objects import Key, Object, metadata_of
from greenroom.api.kube.resources import VISIBLE, Admit, Attempt, Handler, Resource
from greenroom.api.kube.rows import Item, key_of_item, object_of
from greenroom.api.kube.selectors import Selection
from greenroom.api.kube.site import Site
from greenroom.api.kube.status import (
    no_such_path,
    not_found,
    render,
    success,
    unsupported_media_type,
)
from greenroom.api.kube.storage import Storage
from greenroom.api.kube.validation import warning_header
from greenroom.api.kube.watching import plan_of, truth_of
from greenroom.api.kube.writing import Body, Outcome, Writer
from greenroom.api.rules import Caller
from greenroom.errors import GreenroomError
from greenroom.errors import NotFound as NoSuchPath
from greenroom.wire.requests import Application
from greenroom.wire.serving import Lifespan, error_handlers, read_body

STREAMED: Final = 1 << 20
"""A list of more bytes is sent in pieces."""
AT_ONCE: Final = 32
"""Objects of a collection that are deleted at the same time."""
HEADER: Final = 1000
"""Characters of a header's value."""


class Objects:
    """The handlers of one kind."""

    def __init__(self, storage: Storage, admit: Admit, watches: set[reading.Watch], crowd: Crowd) -> None:
        self.kind = storage.kind
        self._storage = storage
        self._writer = Writer(storage)
        self._admit = admit
        self._watches = watches
        self._crowd = crowd

    def routes(self) -> list[Route]:
        """The paths of the kind."""
        kind, subject = self.kind, self.kind.subject()
        scope = "/namespaces/{namespace}" if kind.namespaced else ""
        collection = f"{kind.prefix}{scope}/{kind.plural}"
        single = f"{collection}/{{name}}"
        table: dict[str, dict[str, tuple[str, Handler]]] = {}
        if kind.namespaced:
            table[f"{kind.prefix}/{kind.plural}"] = {"GET": ("list", self.list)}
        table[collection] = {
            "GET": ("list", self.list),
            "POST": ("create", self.create),
            "DELETE": ("deletecollection", self.delete_collection),
        }
        table[single] = {
            "GET": ("get", self.get),
            "PUT": ("update", self.update),
            "PATCH": ("patch", self.patch),
            "DELETE": ("delete", self.delete),
        }
        routes = [
            Route(
                path,
                Resource(
                    subject, {how: handler for how, (verb, handler) in methods.items() if verb in kind.verbs}
                ),
            )
            for path, methods in table.items()
        ]
        if kind.has_status:
            status: dict[str, Handler] = {
                "GET": self.get_status,
                "PUT": self.update_status,
                "PATCH": self.patch_status,
            }
            routes.append(Route(f"{single}/status", Resource(subject, status)))
        if kind.scale is not None:
            scale: dict[str, Handler] = {
                "GET": self.get_scale,
                "PUT": self.put_scale,
                "PATCH": self.patch_scale,
            }
            routes.append(Route(f"{single}/scale", Resource(subject, scale)))
        routes += [
            Route(f"{single}/{action.name}", Resource(subject, {"POST": self._acting(action)}))
            for action in kind.actions
        ]
        return routes

    async def list(self, request: Request) -> Response:
        """List, or watch."""
        query = request.query_params
        answer = options.answering(query, request.headers.get("accept", ""))
        selection = options.selection(query, self._key(request)[0], self.kind)
        if truth_of("watch", query.get("watch")):
            await self._may(request, "watch")
            selection = _visible(selection, request)
            plan = plan_of(
                query.get("resourceVersion"),
                query.get("resourceVersionMatch"),
                query.get("sendInitialEvents"),
                query.get("allowWatchBookmarks"),
            )
            # Not all watches that began together shall end together.
            seconds = options.watch_seconds(query.get("timeoutSeconds"), lambda: 1800 * (1 + random.random()))  # noqa: S311
            caller = request.scope.get(CALLER)
            who = (caller.uid or caller.user) if isinstance(caller, Caller) else ""
            self._crowd.enter(who)
            try:
                watch = await reading.watch(self._storage, selection, answer, plan, seconds=seconds)
            except BaseException:
                self._crowd.leave(who)
                raise
            return Streamed(watch, self._watches, lambda: self._crowd.leave(who))
        await self._may(request, "list")
        page = await reading.listed(self._storage, _visible(selection, request), query)
        response = self._page(page, answer)
        if page.missing:
            response.headers.append("Warning", warning_header(_incomplete(page.missing)))
            response.headers["X-Greenroom-Partial"] = ", ".join(page.missing)[:HEADER]
        return response

    async def get(self, request: Request, part: str = "") -> Response:
        """Read one object."""
        answer = options.answering(request.query_params, request.headers.get("accept", ""))
        key = await self._may(request, "get", part)
        return Response(reading.object_body(self.kind, await self._existing(key), answer), media_type=JSON)

    async def create(self, request: Request) -> Response:
        """Create an object."""
        asked = options.writing(request.query_params, request.headers.get("user-agent", ""))
        namespace, _ = await self._may(request, "create")
        return self._answer(request, await self._writer.create(namespace, await self._body(request), asked))

    async def update(self, request: Request, part: str = "") -> Response:
        """Replace an object."""
        asked = options.writing(request.query_params, request.headers.get("user-agent", ""))
        key = await self._may(request, "update", part)
        return self._answer(request, await self._writer.update(key, await self._body(request), asked, part))

    async def patch(self, request: Request, part: str = "") -> Response:
        """Change an object in part."""
        media_type = self._patch_type(request)
        asked = options.writing(
            request.query_params,
            request.headers.get("user-agent", ""),
            apply=media_type == negotiation.APPLY_PATCH,
        )
        key = await self._may(request, "patch", part)
        body = decoded(await read_body(request, BODY_LIMIT))

        async def may_create() -> None:
            await self._may(request, "create")

        outcome = await self._writer.patch(key, media_type, body, asked, part, may_create)
        return self._answer(request, outcome)

    async def delete(self, request: Request) -> Response:
        """Delete an object."""
        key = await self._may(request, "delete")
        asked = await self._deleting(request)
        obj, gone = await self._writer.delete(key, asked)
        if gone and not self.kind.answers_deleted:
            told = success(self.kind.subject(key[1]), metadata_of(obj).get("uid", ""))
            return Response(msgspec.json.encode(told), media_type=JSON)
        return self._answer(request, Outcome(obj))

    async def delete_collection(self, request: Request) -> Response:
        """Delete the objects that are selected; answers them as they were, or as they are going."""
        await self._may(request, "deletecollection")
        asked = await self._deleting(request)
        query = request.query_params
        selection = options.selection(query, self._key(request)[0], self.kind)
        page = await reading.listed(self._storage, selection, query)
        turns = asyncio.Semaphore(AT_ONCE)

        async def going(item: Item) -> Object | None:
            async with turns:
                try:
                    return (await self._writer.delete_known(object_of(item), asked))[0]
                except GreenroomError as error:
                    if getattr(error, "reason", "") == "NotFound":
                        return None  # somebody else has deleted it meanwhile
                    if getattr(error, "reason", "") != "Conflict":
                        raise
                # It has changed meanwhile; what it is now is to go as well.
                try:
                    return (await self._writer.delete(key_of_item(item), asked))[0]
                except GreenroomError as error:
                    if getattr(error, "reason", "") != "NotFound":
                        raise
                    return None

        # All are tried, and the first that failed is told of.
        ends = await asyncio.gather(*map(going, page.objects), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        left = [end for end in ends if isinstance(end, dict)]
        answer = options.answering({}, JSON)
        return self._page(paging.Page(left, page.metadata), answer)

    async def get_status(self, request: Request) -> Response:
        """Read an object for its status."""
        return await self.get(request, "status")

    async def update_status(self, request: Request) -> Response:
        """Replace an object's status."""
        return await self.update(request, "status")

    async def patch_status(self, request: Request) -> Response:
        """Change an object's status in part."""
        return await self.patch(request, "status")

    async def get_scale(self, request: Request) -> Response:
        """Read how many there are and shall be."""
        key = await self._may(request, "get", "scale")
        return self._answer(request, Outcome(await self._writer.read_scale(key)), alone=True)

    async def put_scale(self, request: Request) -> Response:
        """Set how many there shall be."""
        asked = options.writing(request.query_params, request.headers.get("user-agent", ""))
        key = await self._may(request, "update", "scale")
        outcome = await self._writer.write_scale(key, "", await self._body(request), asked)
        return self._answer(request, outcome, alone=True)

    async def patch_scale(self, request: Request) -> Response:
        """Set how many there shall be, by a patch."""
        media_type = self._patch_type(request)
        if media_type == negotiation.APPLY_PATCH:
            raise unsupported_media_type(PATCHES[:3])
        asked = options.writing(request.query_params, request.headers.get("user-agent", ""))
        key = await self._may(request, "patch", "scale")
        body = decoded(await read_body(request, BODY_LIMIT))
        return self._answer(request, await self._writer.write_scale(key, media_type, body, asked), alone=True)

    def _acting(self, action: Action) -> Handler:
        async def act(request: Request) -> Response:
            asked = options.writing(request.query_params, request.headers.get("user-agent", ""))
            key = await self._may(request, "create", action.name)
            body = await self._body(request, optional=True)
            return self._answer(request, await self._writer.act(key, action, body, asked), alone=True)

        return act

    def _key(self, request: Request) -> Key:
        return (request.path_params.get("namespace", ""), request.path_params.get("name", ""))

    async def _may(self, request: Request, verb: str, part: str = "") -> Key:
        namespace, name = self._key(request)
        attempt = Attempt(verb=verb, kind=self.kind, part=part, namespace=namespace, name=name)
        await self._admit(request, attempt)
        return (namespace, name)

    async def _existing(self, key: Key) -> Object:
        if (found := await self._storage.get(key)) is None:
            raise not_found(self.kind.subject(key[1]))
        return found

    async def _body(self, request: Request, *, optional: bool = False) -> Body:
        told = request.headers.get("content-type", "")
        readable = self.kind.name in protobufs.KINDS
        form = negotiation.body_type(told, (JSON, protobufs.MEDIA_TYPE) if readable else (JSON,))
        body = await read_body(request, BODY_LIMIT)
        if form == protobufs.MEDIA_TYPE:
            return protobufs.decoded(body, self.kind.name), []
        return ({}, []) if optional and not body else decoded_object(body)

    @staticmethod
    def _patch_type(request: Request) -> str:
        told = request.headers.get("content-type", "")
        if not told:
            raise unsupported_media_type(PATCHES)
        return negotiation.body_type(told, PATCHES)

    async def _deleting(self, request: Request) -> options.Deleting:
        body = await read_body(request, BODY_LIMIT)
        if body:
            negotiation.body_type(request.headers.get("content-type", ""))
        return options.deleting(request.query_params, decoded_object(body)[0] if body else {})

    def _page(self, page: paging.Page, answer: options.Answering) -> Response:
        parts = reading.list_parts(self.kind, page, answer, STREAMED)
        if isinstance(parts, bytes):
            return Response(parts, media_type=JSON)
        return StreamingResponse(parts, media_type=JSON)

    def _answer(self, request: Request, outcome: Outcome, *, alone: bool = False) -> Response:
        accept = request.headers.get("accept", "")
        if alone:
            negotiation.form_of(accept, alone=True)
            body = msgspec.json.encode(outcome.obj)
        else:
            body = reading.object_body(
                self.kind, outcome.obj, options.answering(request.query_params, accept)
            )
        response = Response(body, 201 if outcome.created else 200, media_type=JSON)
        for text in outcome.warnings:
            response.headers.append("Warning", warning_header(text))
        return response


def _visible(selection: Selection, request: Request) -> Selection:
    """A selection without what the caller may not see."""
    return msgspec.structs.replace(selection, names=request.scope.get(VISIBLE))


def _incomplete(nodes: Sequence[str]) -> str:
    return f"not all that is on these nodes, or not its latest state, is listed: {', '.join(nodes)}"


class Streamed(StreamingResponse):
    """The answer to a watch. It is known to the application while it lasts, so that a server that leaves can end it."""

    def __init__(self, watch: reading.Watch, watches: set[reading.Watch], ended: Callable[[], None]) -> None:
        super().__init__(watch.lines(), media_type=JSON)
        self._watch = watch
        self._watches = watches
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until one of the two ends it."""
        self._watches.add(self._watch)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()
            self._watches.discard(self._watch)
            self._watch.close()


def application(
    storages: Sequence[Storage],
    admit: Admit,
    lifespan: Lifespan | None = None,
    *,
    ready: Callable[[], bool] = lambda: True,
    crowd: Crowd | None = None,
    more: Sequence[Route] = (),
) -> Starlette:
    """The ASGI application over some storages.

    `admit` is asked before anything but the health checks is answered; `ready` is what `/readyz` tells; `more` are
    paths beside those of the storages. Watches end when the callables in `app.state.on_leave` are called.
    """
    watches: set[reading.Watch] = set()
    crowd = Crowd() if crowd is None else crowd
    routes: list[Route] = []
    for storage in storages:
        routes += Objects(storage, admit, watches, crowd).routes()
    routes += more
    routes += Site([storage.kind for storage in storages], admit, ready).routes()

    def answered(error: GreenroomError) -> Response:
        return render(no_such_path() if type(error) is NoSuchPath else error)

    app = Application(
        routes=routes,
        quiet=[route.path for route in routes if route.path in ("/healthz", "/livez", "/readyz")],
        lifespan=lifespan,
        exception_handlers=error_handlers(answered),
    )
    app.router.redirect_slashes = False

    def leave() -> None:
        for watch in list(watches):
            watch.close()

    app.state.on_leave = [leave]
    return app
