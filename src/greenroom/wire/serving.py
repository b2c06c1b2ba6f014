"""How a role serves its internal HTTP API: credentials checked, bodies bounded, errors in one form.

`endpoint` declares a route with the caller roles it admits; `serve` runs the application until SIGTERM and
tells the supervisor, through a pipe, the moment it can take requests. Everything but `/healthz` needs a
bearer token (`wire.credentials`); the answer to a missing or wrong one is 401 and says nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from greenroom.config import RoleSpec
from greenroom.errors import (
    BadRequest,
    Forbidden,
    GreenroomError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    SetupError,
    TooLarge,
    Unauthorized,
)
from greenroom.wire import logs, metrics
from greenroom.wire.credentials import Verifier
from greenroom.wire.guarded import GuardedProtocol
from greenroom.wire.requests import Application

_log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]

INTERNAL_BODY_LIMIT = 4 << 20
"""Bytes of a body between roles."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What a role tells its supervisor when it can take requests."""

    url: str
    detail: dict[str, Any] = {}


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response encoded by msgspec."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises TooLarge as soon as more than `limit` bytes are announced or have come."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise TooLarge(f"the request body is larger than {limit} bytes")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLarge(f"the request body is larger than {limit} bytes")
    return bytes(body)


async def read_json(request: Request, kind: type[T], limit: int = INTERNAL_BODY_LIMIT) -> T:
    """The body decoded as `kind`. Raises TooLarge, or BadRequest naming the field that does not fit."""
    body = await read_body(request, limit)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"invalid request: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the request body is not valid JSON") from error


def endpoint(method: str, path: str, handler: Handler, admits: Collection[str]) -> Route:
    """A route for the caller roles in `admits`; the handler finds the caller in `request.state.caller`."""

    async def checked(request: Request) -> Response:
        check_caller(request, admits, f"{method} {path}")
        if sandbox_id := request.path_params.get("sandbox_id"):
            logs.about(sandbox_id)
        return await handler(request)

    return Route(path, checked, methods=[method])


def check_caller(request: Request, admits: Collection[str], what: str) -> None:
    """Raise Unauthorized or Forbidden unless a role in `admits` asks; `request.state.caller` says which."""
    caller = _caller(request)
    if caller not in admits:
        raise Forbidden(f"the {caller} role may not call {what}")
    request.state.caller = caller


async def metrics_response(more: metrics.More | None = None) -> Response:
    """This process's metrics, and those that `more` brings."""
    return Response(await metrics.exposition(more), media_type=metrics.CONTENT_TYPE)


def _caller(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    verifier: Verifier = request.app.state.verifier
    role = verifier.role_of(token.strip()) if scheme.lower() == "bearer" and token else None
    if role is None:
        raise Unauthorized("a credential of a Greenroom role is needed")
    return role


def application(
    routes: Sequence[Route],
    verifier: Verifier,
    lifespan: Lifespan | None = None,
    *,
    quiet: Collection[str] = (),
    more_metrics: metrics.More | None = None,
) -> Starlette:
    """The ASGI application of a role: `/healthz` for anyone, `/metrics`, errors in the internal form.

    `quiet` are the paths of routes whose requests are logged at DEBUG only.
    """

    async def measured(_request: Request) -> Response:
        return await metrics_response(more_metrics)

    async def healthz(_request: Request) -> Response:
        return json_response({"ok": True})

    app = Application(
        routes=[
            Route("/healthz", healthz),
            endpoint("GET", "/metrics", measured, metrics.READERS),
            *routes,
        ],
        quiet=quiet,
        lifespan=lifespan,
        exception_handlers=error_handlers(_render, _caller),
    )
    app.state.verifier = verifier
    return app


def _render(error: GreenroomError) -> Response:
    # A connection without a credential is not kept: whoever has none could hold many.
    headers = {"Connection": "close"} if isinstance(error, Unauthorized) else None
    return json_response(error.to_wire(), error.status, headers)


def error_handlers(
    render: Callable[[GreenroomError], Response], admit: Callable[[Request], object] = lambda _request: None
) -> dict[Any, Any]:
    """Starlette's exception handlers, so that every error of ours, of routing and of bugs has one form.

    `admit` raises for a request that may not even learn which paths there are.
    """

    async def ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, GreenroomError)  # noqa: S101
        return render(error)

    async def routing(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        try:
            admit(_request)
        except GreenroomError as refusal:
            return render(refusal)
        if error.status_code == 405:
            return render(MethodNotAllowed("this path does not take this method"))
        if error.status_code == 404:
            return render(NotFound("no such path"))
        return render(BadRequest(str(error.detail)))

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)

    async def bug(request: Request, error: Exception) -> Response:
        _log.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
        return render(InternalError("internal error; the role's log has the cause"))

    return {GreenroomError: ours, HTTPException: routing, ClientDisconnect: gone, Exception: bug}


def tell_progress(step: str, done: float | None) -> None:
    """Tell the supervisor what a slow start is doing; `done` is a fraction or None where it is not known."""
    if (number := os.environ.get("GREENROOM_READY_FD")) is not None:
        with contextlib.suppress(OSError):
            os.write(int(number), msgspec.json.encode({"progress": {"step": step, "done": done}}) + b"\n")


def tell_ready(ready: Ready) -> None:
    """Write `ready` as one JSON line to the pipe named by `GREENROOM_READY_FD`, if there is one, and close it."""
    if (number := os.environ.pop("GREENROOM_READY_FD", None)) is not None:
        with os.fdopen(int(number), "wb") as pipe:
            pipe.write(msgspec.json.encode(ready) + b"\n")


def raise_file_limit() -> None:
    """Allow this process as many open files as the machine lets it: a relayed connection takes two, a VM four."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_spec(path: str) -> RoleSpec:
    """The role's spec from the file that the supervisor wrote."""
    with open(path, "rb") as stream:
        return msgspec.json.decode(stream.read(), type=RoleSpec)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises SetupError saying which address is taken."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections have it from here. asyncio would set it on each, but only on those whose protocol number is told, as
    # that of a socket made like this is not; and then a small piece of an answer waits 40 ms for the last one's ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise SetupError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """`http://host:port` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us and tells when it has started."""

    started_event: asyncio.Event

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.started_event.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def _server(app: ASGIApp, drain: float, tls: ssl.SSLContext | None = None) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="on",
        loop="uvloop",
        http=GuardedProtocol,
        server_header=False,
        timeout_graceful_shutdown=int(drain),
        timeout_keep_alive=75,
        backlog=1024,
    )
    config.load()
    # Ours, not one of uvicorn's making: its certificate can be replaced while it is in use.
    config.ssl = tls
    server = _Server(config)
    server.started_event = asyncio.Event()
    return server


@contextlib.asynccontextmanager
async def serving_beside(
    app: ASGIApp, sock: socket.socket, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve `app` on `sock` for the length of a block, beside something that deals with signals; gives its URL."""
    server = _server(app, 1.0, tls)
    loop = asyncio.get_running_loop()
    running = loop.create_task(server.serve(sockets=[sock]), name="http-server")
    try:
        yield url_of(sock) if tls is None else url_of(sock).replace("http:", "https:", 1)
    finally:
        server.should_exit = True
        await running


async def serve(app: Starlette, sock: socket.socket, drain: float = 5.0) -> AsyncGenerator[str, None]:
    """Serve `app` on `sock` until SIGTERM or SIGINT; yields its URL once, when it takes requests.

    On the signal no new connection is taken, running requests get `drain` seconds, then the server ends; the
    callables in `app.state.on_leave` are called first, so that requests which only wait can be answered.
    """
    server = _server(app, drain)
    loop = asyncio.get_running_loop()

    def leave() -> None:
        server.should_exit = True
        for farewell in getattr(app.state, "on_leave", ()):
            farewell()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    running = loop.create_task(server.serve(sockets=[sock]), name="http-server")
    started = loop.create_task(server.started_event.wait(), name="http-started")
    try:
        await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
            raise SetupError("the HTTP server ended before it started; the log has the cause")
        yield url_of(sock)
        await running
    finally:
        started.cancel()
        server.should_exit = True
        await running


async def run_role(app: Starlette, spec: RoleSpec, detail: dict[str, Any] | None = None) -> None:
    """Serve a role's application at its place, telling the supervisor when it is ready."""
    sock = listen(spec.host, spec.port)
    async with contextlib.aclosing(serve(app, sock)) as urls:
        async for url in urls:
            tell_ready(Ready(url=url, detail=detail or {}))
