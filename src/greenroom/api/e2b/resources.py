"""HTTP around the handlers: one resource per path, so that every method has a JSON answer.

Starlette's own routing answers 405 for the first route that has the path and would not know the other methods
of it; a resource knows them all, answers OPTIONS with them, and HEAD as GET (the server leaves the body out).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from greenroom.api.e2b.errors import MethodMismatch, NotSupported, render
from greenroom.api.e2b.keys import OPERATION
from greenroom.errors import NotFound
from greenroom.wire import logs
from greenroom.wire.credentials import Verifier
from greenroom.wire.ids import is_sandbox_id
from greenroom.wire.metrics import READERS
from greenroom.wire.requests import Application
from greenroom.wire.serving import Lifespan, check_caller, error_handlers, json_response, metrics_response

Handler = Callable[[Request], Awaitable[Response]]


class Resource:
    """The ASGI endpoint of one path: a handler per method."""

    def __init__(self, handlers: dict[str, Handler], path: str = "") -> None:
        self._path = path
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]
        self._allowed = ", ".join(sorted({*self._handlers, "OPTIONS"}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope[OPERATION] = self._path
        request = Request(scope, receive, send)
        handler = self._handlers.get(request.method)
        if handler is not None:
            response = await handler(request)
        elif request.method == "OPTIONS":
            response = Response(status_code=204, headers={"Allow": self._allowed})
        else:
            raise MethodMismatch(self._allowed)
        await response(scope, receive, send)


class Unsupported:
    """The handler of what E2B has and Greenroom does not yet: 501, for those with a key. `what` names it."""

    def __init__(self, what: str, authenticate: Callable[[Request], Awaitable[str]]) -> None:
        self.what = what
        self._authenticate = authenticate

    async def __call__(self, request: Request) -> Response:
        """Refuse a request."""
        await self._authenticate(request)
        raise NotSupported(f"{self.what} is not supported by this server yet")


def sandbox_id_of(request: Request) -> str:
    """The id in the path. Clients of the first generation append `-<clientID>` to it."""
    sandbox_id = str(request.path_params["id"]).partition("-")[0]
    if is_sandbox_id(sandbox_id):
        logs.about(sandbox_id)
    return sandbox_id


async def health(_request: Request) -> Response:
    """`GET /health`: for load balancers and people: this process answers."""
    return PlainTextResponse("Health check successful")


async def healthz(_request: Request) -> Response:
    """`GET /healthz`: for the supervisor, the same as every role's."""
    return json_response({"ok": True})


OPEN_PATHS: dict[str, dict[str, Handler]] = {"/health": {"GET": health}, "/healthz": {"GET": healthz}}
"""What needs no key."""


async def measured(request: Request) -> Response:
    """`/metrics`, on this process's own address and for roles only.

    Clients come through the proxy, which says for whom it asks: for them the path does not exist.
    """
    if "x-forwarded-for" in request.headers:
        raise NotFound("no such path")
    check_caller(request, READERS, "GET /metrics")
    return await metrics_response()


def application(
    paths: dict[str, dict[str, Handler]],
    lifespan: Lifespan | None = None,
    *,
    verifier: Verifier | None = None,
) -> Starlette:
    """The ASGI application for `paths`, in the order in which they are tried; `/metrics` needs `verifier`."""
    table = dict(OPEN_PATHS)
    if verifier is not None:
        table["/metrics"] = {"GET": measured}
    table |= paths
    app = Application(
        routes=[Route(path, Resource(methods, path)) for path, methods in table.items()],
        lifespan=lifespan,
        exception_handlers=error_handlers(render),
    )
    app.router.redirect_slashes = False
    app.state.verifier = verifier
    return app
