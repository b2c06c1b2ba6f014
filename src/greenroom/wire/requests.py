"""What happens around every HTTP request to a role: it gets its id, is counted and timed, and leaves one line.

The line tells route, status and time, never a path, a query, a header or a body: those are the user's. Changes and
errors are told at INFO, reads and whatever the application calls `quiet` (heartbeats) at DEBUG.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from greenroom.wire import logs, metrics

_log = logging.getLogger("greenroom.access")

REQUESTS = metrics.counter(
    "greenroom_http_requests_total", "Requests answered, by route", ("method", "route", "status")
)
SECONDS = metrics.histogram(
    "greenroom_http_request_seconds", "From a request's head to the end of its answer", ("method", "route")
)
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_READS = frozenset(("GET", "HEAD", "OPTIONS"))
_GONE = 499
"""Stands for the status of a request that ended without an answer."""


class Application(Starlette):
    """Starlette inside `Around`, so that answers to unexpected errors are covered too."""

    def __init__(self, *, quiet: Collection[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._quiet = frozenset(quiet)

    def build_middleware_stack(self) -> ASGIApp:
        """See `Starlette`."""
        return Around(super().build_middleware_stack(), self.routes, self._quiet)


class Around:
    """The ASGI middleware. `quiet` are route templates whose requests are no news."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], quiet: frozenset[str]) -> None:
        self._app = app
        self._quiet = quiet
        self._templates: dict[Any, str] = {
            route.endpoint: route.path for route in routes if isinstance(route, Route)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or pass on what is none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = logs.HEADER.encode()
        offered = [value for key, value in scope["headers"] if key == name]
        trail, token = logs.begin(offered[0].decode("latin-1") if len(offered) == 1 else "")
        own = (name, trail.request_id.encode())
        status, complete = _GONE, False

        async def tagged(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        begun = time.perf_counter()
        try:
            await self._app(scope, receive, tagged)
        except Exception:
            # The error handler has logged it. Once it is answered too, nobody needs to hear of it again.
            if not complete:
                raise
        finally:
            self._note(scope, status, time.perf_counter() - begun)
            logs.end(token)

    def _note(self, scope: Scope, status: int, took: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = self._templates.get(scope.get("endpoint"), "unmatched")
        metrics.child(REQUESTS, method, route, str(status)).inc()
        metrics.child(SECONDS, method, route).observe(took)
        news = status >= 400 or not (method in _READS or route in self._quiet)
        level = logging.INFO if news else logging.DEBUG
        if _log.isEnabledFor(level):
            fields = {"method": method, "route": route, "status": status, "ms": round(took * 1000, 2)}
            if caller := scope.get("state", {}).get("caller"):
                fields["caller"] = caller
            _log.log(level, "%s %s: %d", method, route, status, extra={"fields": fields})
