"""A path with its methods, and the question that is asked before one is answered: may this caller do that?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from greenroom.api.kube.kinds import Kind
from greenroom.api.kube.status import Subject, method_not_allowed

Handler = Callable[[Request], Awaitable[Response]]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is about to do, for whoever decides whether it may. `kind` is None beside the objects."""

    verb: str
    kind: Kind | None = None
    part: str = ""
    """The subresource."""
    namespace: str = ""
    name: str = ""


VISIBLE: Final = "greenroom.visible"
"""Under this name a request's scope has the names of the objects that its caller may see, where that is not all."""
Admit = Callable[[Request, Attempt], Awaitable[None]]
"""Raises `status.unauthorized` or `status.forbidden`, or lets a request pass."""


class Resource:
    """The ASGI endpoint of one path: a handler per method, each with the verb that it stands for."""

    def __init__(self, subject: Subject, handlers: Mapping[str, Handler]) -> None:
        self._subject = subject
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]
        self._allowed = ", ".join(sorted(self._handlers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        handler = self._handlers.get(request.method)
        if handler is None:
            raise method_not_allowed(self._subject, request.method, self._allowed)
        response = await handler(request)
        await response(scope, receive, send)
