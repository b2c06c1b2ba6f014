"""Both dialects on one port: Kubernetes' paths go to the one, all others to E2B's."""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

TREES: Final = ("/api/", "/apis/", "/openapi/")
PATHS: Final = frozenset({"/api", "/apis", "/openapi", "/version", "/livez", "/readyz"})


class Dialects(Starlette):
    """The application of an api process. Its life is that of E2B's; what only waits is ended by Kubernetes'."""

    def __init__(self, e2b: Starlette, kube: Starlette) -> None:
        super().__init__()
        self._e2b = e2b
        self._kube = kube
        self.state.on_leave = [
            *getattr(e2b.state, "on_leave", ()),
            *getattr(kube.state, "on_leave", ()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        app = self._kube if scope["type"] == "http" and is_kube(scope["path"]) else self._e2b
        await app(scope, receive, send)


def is_kube(path: str) -> bool:
    """Whether a path is one of Kubernetes'."""
    return path in PATHS or path.startswith(TREES)
