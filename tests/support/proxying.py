"""Test doubles around a real proxy process: a master that only lists nodes, an api that tells what it got.

Nodes are real relays in front of loopback guests (`tests.support.guests`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from greenroom.config import Config, NodesConfig, ProxyConfig, RoleSpec, VmConfig
from greenroom.node.relay import Relay
from greenroom.wire import credentials
from greenroom.wire.messages import NodeInfo, NodeList, NodeStatus
from tests.support.guests import FakeDirectory, relaying

DEADLINE = 20.0
"""Seconds for a process to get ready or to end."""


def node_info(code: str, address: tuple[str, int], api_url: str = "http://127.0.0.1:1") -> NodeInfo:
    status = NodeStatus(
        name=f"node-{code}",
        code=code,
        api_url=api_url,
        relay_host=address[0],
        relay_port=address[1],
        engine="simulated",
    )
    return NodeInfo(status=status, live=True, last_seen=0.0)


class StubMaster:
    """Answers `GET /v1/nodes` as a master does, with the nodes a test says there are."""

    def __init__(self, token: str) -> None:
        self.url = ""
        self.questions = 0
        self._token = token
        self.nodes: dict[str, NodeInfo] = {}
        self.stop: Callable[[], Awaitable[None]]
        self._addresses: dict[str, tuple[str, int]] = {}
        self.hold = asyncio.Event()
        """Cleared, nobody gets an answer."""
        self.hold.set()
        self._revision = 1
        self._changed = asyncio.Event()

    def set(self, code: str, address: tuple[str, int] | None, api_url: str = "http://127.0.0.1:1") -> None:
        """Add or move a node; with None, remove it."""
        if address is None:
            self.nodes.pop(code, None)
        else:
            self._addresses[code] = address
            self.nodes[code] = node_info(code, address, api_url)
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def address_of(self, code: str) -> tuple[str, int]:
        """Where the relay of a node that was listed is or was."""
        return self._addresses[code]

    async def list_nodes(self, request: web.Request) -> web.Response:
        self.questions += 1
        await self.hold.wait()
        if request.headers.get("Authorization") != f"Bearer {self._token}":
            return web.Response(status=401)
        if request.query.get("after") == str(self._revision):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["wait"])):
                    await self._changed.wait()
        nodes = NodeList(self._revision, list(self.nodes.values()))
        return web.Response(body=msgspec.json.encode(nodes), content_type="application/json")


class StubApi:
    """Answers every path with the request it got as JSON; one that ends in `/hold` waits for `release`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.stop: Callable[[], Awaitable[None]]
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.more: dict[str, str] = {}
        """Further headers of its answers."""

    async def answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/hold"):
            self.entered.set()
            await self.release.wait()
        if request.path == "/lost":
            assert request.transport is not None
            request.transport.abort()
        body = await request.read()
        seen = {
            "api": self.name,
            "path": request.raw_path,
            "headers": [[name.lower(), value] for name, value in request.headers.items()],
            "size": len(body),
        }
        return web.json_response(seen, headers=self.more)


async def serve(handler: Any, path: str = "/{anything:.*}") -> tuple[str, Callable[[], Awaitable[None]]]:
    """`handler` behind a loopback port for all methods: its URL and how to stop it."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, sock).start()
    return f"http://127.0.0.1:{sock.getsockname()[1]}", runner.cleanup


class ProxyProcess:
    """A running `python -m greenroom.proxy`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, home: Path) -> None:
        self.process = process
        self.home = home
        self.host, self.port, self.envoy_pid, self.tls_port, self.kube_port = "", 0, 0, 0, 0
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def tls_address(self) -> tuple[str, int]:
        return self.host, self.tls_port

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/"

    async def wait(self) -> int:
        """Wait for the controller's end by itself; returns its exit status."""
        async with asyncio.timeout(DEADLINE):
            return await self.process.wait()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the controller and wait for its end; returns its exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.wait()

    def envoys(self) -> list[int]:
        """Pids of the Envoys that run in this proxy's directory."""
        return envoys_in(self.home / "envoy")


def envoys_in(directory: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").samefile(directory) and _is_alive(entry):
                found.append(int(entry.name))
    return found


def _is_alive(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")


class Stage:
    """A proxy's surroundings: state directory, credentials, master, apis."""

    def __init__(self, state: Path, token: str, master: StubMaster, apis: list[StubApi]) -> None:
        self.state, self.token, self.master, self.apis = state, token, master, apis
        self.proxies: list[ProxyProcess] = []
        self.relays: dict[str, Relay] = {}
        self._ready = -1

    def _forget_pipe(self) -> None:
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1

    def spec(self, **proxy: Any) -> RoleSpec:
        settings = {"port": 0, "drain": 3.0, **proxy}
        return RoleSpec(
            role="proxy",
            replica=0,
            state_dir=str(self.state),
            cache_dir=str(self.state / "cache"),
            master_urls=[self.master.url],
            api_urls=[api.url for api in self.apis],
            domain="sbx.example.test:8700",
            config=Config(proxy=ProxyConfig(**settings), vm=VmConfig(uid_base=310_000)),
        )

    async def launch(self, spec: RoleSpec | None = None) -> ProxyProcess:
        """Start the process without waiting for it to be ready."""
        spec = spec or self.spec()
        path = self.state / "spec.json"
        path.write_bytes(msgspec.json.encode(spec))
        log = self.state / f"proxy-{len(self.proxies)}.log"
        self._forget_pipe()
        self._ready, write_end = os.pipe()
        try:
            with log.open("wb") as stream:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "greenroom.proxy", str(path)),
                    stderr=stream,
                    env={**os.environ, "GREENROOM_READY_FD": str(write_end)},
                    pass_fds=(write_end,),
                )
        finally:
            os.close(write_end)
        proxy = ProxyProcess(process, log, spec.home)
        self.proxies.append(proxy)
        return proxy

    def is_ready(self) -> bool:
        """True if the process launched last wrote (or closed) its ready pipe."""
        return bool(select.select([self._ready], [], [], 0)[0])

    async def ready(self, proxy: ProxyProcess) -> ProxyProcess:
        """Wait for the ready message of the process launched last."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        stream = os.fdopen(self._ready, "rb")
        self._ready = -1
        transport, _protocol = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stream
        )
        try:
            async with asyncio.timeout(DEADLINE):
                line = await reader.readline()
        except TimeoutError:
            raise AssertionError(f"the proxy is not ready:\n{proxy.log}") from None
        finally:
            transport.close()
        assert line, f"the proxy ended before it was ready:\n{proxy.log}"
        told = json.loads(line)
        host, _, port = told["url"].removeprefix("http://").rpartition(":")
        proxy.host, proxy.port, proxy.envoy_pid = host, int(port), told["detail"]["envoy_pid"]
        proxy.tls_port = int(told["detail"].get("tls_url", ":0").rpartition(":")[2])
        proxy.kube_port = int(told["detail"].get("kube_url", ":0").rpartition(":")[2])
        return proxy

    async def start(self, **proxy: Any) -> ProxyProcess:
        return await self.ready(await self.launch(self.spec(**proxy)))

    @contextlib.asynccontextmanager
    async def node(
        self, code: str, config: NodesConfig | None = None, api_url: str = "http://127.0.0.1:1"
    ) -> AsyncIterator[FakeDirectory]:
        """A node with a real relay, known to the master for the length of the block."""
        async with relaying(config, self.token) as (relay, address, directory):
            self.relays[code] = relay
            self.master.set(code, address, api_url)
            try:
                yield directory
            finally:
                self.master.set(code, None)


@contextlib.asynccontextmanager
async def staged(state: Path, apis: int = 1) -> AsyncIterator[Stage]:
    """A stage; at the end every proxy that a test left running is ended, and nothing may be left."""
    secrets_dir = state / "secrets"
    credentials.ensure(secrets_dir)
    token = credentials.own_token(secrets_dir, "proxy")
    master = StubMaster(token)
    async with contextlib.AsyncExitStack() as stack:
        master.url, master.stop = await serve(master.list_nodes, "/v1/nodes")
        stack.push_async_callback(master.stop)
        stubs = []
        for number in range(apis):
            api = StubApi(f"api-{number}")
            api.url, api.stop = await serve(api.answer)
            stack.push_async_callback(api.stop)
            stubs.append(api)
        stage = Stage(state, token, master, stubs)
        try:
            yield stage
        finally:
            stage._forget_pipe()
            for proxy in stage.proxies:
                await proxy.end(signal.SIGTERM)
            assert not [pid for proxy in stage.proxies for pid in proxy.envoys()]


def sandbox_on(code: str) -> str:
    """A sandbox id homed on the node with `code`."""
    return f"i{code}" + "".join(secrets.choice("abcdefghij0123456789") for _ in range(15))
