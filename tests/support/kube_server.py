"""The Kubernetes dialect over storages in memory, served on a loopback port; and kubectl pointed at it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request

from greenroom.api.kube.crowd import Crowd
from greenroom.api.kube.kinds import CORE, KINDS
from greenroom.api.kube.resources import VISIBLE, Attempt
from greenroom.api.kube.rest import application
from greenroom.wire.serving import listen, serving_beside
from tests.support.memory_storage import MemoryStorage

KUBECTL = shutil.which("kubectl.1.32") or shutil.which("kubectl")
"""A kubectl, of version 1.32 where there is one."""


class KubeServer:
    """A running server; `attempts` are the requests that it was asked about, `watched` is set by a watch."""

    def __init__(self, watches: int) -> None:
        self.storages = {kind.plural: MemoryStorage(kind) for kind in (*KINDS, *CORE)}
        self.attempts: list[Attempt] = []
        self.watched = asyncio.Event()
        self.refusal: Exception | None = None
        self.refused: dict[str, Exception] = {}
        """By verb."""
        self.ready = True
        self.visible: frozenset[str] | None = None
        """Names of the objects that callers may see; None for all."""
        self.app = application(
            list(self.storages.values()), self._admit, ready=lambda: self.ready, crowd=Crowd(each=watches)
        )
        self.url = ""
        self.client: httpx.AsyncClient

    async def _admit(self, request: Request, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        request.scope[VISIBLE] = self.visible
        if attempt.verb == "watch":
            self.watched.set()
        if self.refusal is not None:
            raise self.refusal
        if attempt.verb in self.refused:
            raise self.refused[attempt.verb]

    def leave(self) -> None:
        """End what only waits, as a server that stops does."""
        for farewell in self.app.state.on_leave:
            farewell()


@contextlib.asynccontextmanager
async def kube_server(watches: int = 100) -> AsyncIterator[KubeServer]:
    """A server for the length of a block, where one caller may have so many watches."""
    server = KubeServer(watches)
    async with serving_beside(server.app, listen("127.0.0.1", 0)) as url:
        server.url = url
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
            server.client = client
            try:
                yield server
            finally:
                server.leave()


class Kubectl:
    """kubectl with a home and a kubeconfig of its own."""

    def __init__(self, url: str, home: Path) -> None:
        assert KUBECTL is not None
        config: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            "users": [{"name": "u", "user": {}}],
            "current-context": "c",
        }
        path = home / "kubeconfig"
        path.write_text(json.dumps(config))
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(home), "KUBECONFIG": str(path)}

    async def start(self, *arguments: str, given: object = None) -> asyncio.subprocess.Process:
        """Start a command; `given` is an object for its standard input."""
        assert KUBECTL is not None
        pipe = asyncio.subprocess.PIPE
        running = await asyncio.create_subprocess_exec(
            KUBECTL, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=self._environment
        )
        assert running.stdin is not None
        if given is not None:
            running.stdin.write(json.dumps(given).encode())
        running.stdin.close()
        return running

    async def run(self, *arguments: str, given: object = None, status: int = 0) -> str:
        """Run a command to its end; what it wrote, to either stream."""
        running = await self.start(*arguments, given=given)
        async with asyncio.timeout(60):
            out, errors = await asyncio.gather(running.stdout.read(), running.stderr.read())  # type: ignore[union-attr]
            code = await running.wait()
        text = (out + errors).decode()
        assert code == status, text
        return text


def sandbox(name: str = "box", **spec: Any) -> dict[str, Any]:
    """A Sandbox as clients write it."""
    containers = [{"name": "main", "image": "base"}]
    return {
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "metadata": {"name": name},
        "spec": {"podTemplate": {"spec": {"containers": containers}}, **spec},
    }
