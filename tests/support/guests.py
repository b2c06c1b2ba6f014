"""Test doubles for what lies behind a relay: a directory of sandboxes whose guests are loopback listeners."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from greenroom.config import NodesConfig
from greenroom.errors import GreenroomError
from greenroom.node.relay import Relay
from greenroom.wire.messages import Inbound

TOKEN = "relay-secret"
SANDBOX = "i" + "abcd" + "0" * 15
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class FakeTarget:
    """A sandbox whose every guest port is one loopback address; `ports` maps guest ports to real ones."""

    def __init__(self, sandbox_id: str, owner: str = "owner") -> None:
        self.sandbox_id = sandbox_id
        self.owner = owner
        self.inbound = Inbound()
        self.traffic_token: str | None = None
        self.ports: dict[int, int] = {}
        self.inside: dict[int, int] = {}
        """Ports of services that only the guest itself could reach, were it not for its agent."""
        self.attempts: list[int] = []
        self.connecting = asyncio.Event()
        self.hold: asyncio.Event | None = None
        """When set, `connect` waits for it: a guest that is slow to answer."""
        self.asleep: asyncio.Event | None = None
        """When set, `ready` waits for it: a sandbox that is being resumed."""
        self.refuses: GreenroomError | None = None
        """What `ready` raises after that."""

    async def ready(self) -> bool:
        if self.asleep is not None:
            await self.asleep.wait()
        if self.refuses is not None:
            raise self.refuses
        return self.asleep is not None

    async def connect(self, port: int) -> socket.socket:
        self.attempts.append(port)
        self.connecting.set()
        if self.hold is not None:
            await self.hold.wait()
        return await self._dial(self.ports, port)

    async def connect_inside(self, port: int) -> socket.socket:
        return await self._dial(self.inside, port)

    async def _dial(self, ports: dict[int, int], port: int) -> socket.socket:
        if port not in ports:
            raise ConnectionRefusedError(111, "Connection refused")
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", ports[port]))
        except BaseException:
            sock.close()
            raise
        return sock


class FakeDirectory:
    """Sandboxes by id."""

    def __init__(self) -> None:
        self.targets: dict[str, FakeTarget] = {}

    def add(self, sandbox_id: str = SANDBOX) -> FakeTarget:
        self.targets[sandbox_id] = FakeTarget(sandbox_id)
        return self.targets[sandbox_id]

    def lookup(self, sandbox_id: str) -> FakeTarget | None:
        return self.targets.get(sandbox_id)


@contextlib.asynccontextmanager
async def relaying(
    config: NodesConfig | None = None, token: str = TOKEN
) -> AsyncIterator[tuple[Relay, tuple[str, int], FakeDirectory]]:
    """A started relay, its address and its directory."""
    directory = FakeDirectory()
    relay = Relay(directory, lambda offered: offered == token, config or NodesConfig())
    address = await relay.start("127.0.0.1", 0)
    try:
        yield relay, address, directory
    finally:
        await relay.close()
        assert relay.statistics().spliced == relay.statistics().waiting == 0


@contextlib.asynccontextmanager
async def guest_listening(
    target: FakeTarget,
    port: int,
    handler: Handler,
    *,
    inside: bool = False,
    secured: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """`handler` serves `port` of `target`; what it raises beyond a lost connection fails the test.

    `inside`: on the guest's own loopback only. `secured`: with TLS.
    """
    ports = target.inside if inside else target.ports
    errors: list[BaseException] = []
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=secured)
    ports[port] = server.sockets[0].getsockname()[1]
    try:
        yield
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()
        ports.pop(port, None)
    assert not errors, errors


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """A request or response head, with its empty line."""
    return await reader.readuntil(b"\r\n\r\n")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A guest that answers with the head it got, when it has read the whole body.

    A body left unread at the close resets the connection, and the answer is lost with it.
    """
    head = await read_head(reader)
    if announced := re.search(rb"\r\ncontent-length: *([0-9]+)", head.lower()):
        await reader.readexactly(int(announced[1]))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(head), head))
    await writer.drain()


def head(
    target: str = "/",
    *,
    method: str = "GET",
    sandbox: str = SANDBOX,
    port: int | str = 8000,
    token: str | None = TOKEN,
    fields: str = "",
) -> bytes:
    """A request head as the proxy sends it; `fields` are further lines, each with its CRLF."""
    credential = "" if token is None else f"x-greenroom-relay: {token}\r\n"
    return (
        f"{method} {target} HTTP/1.1\r\nhost: example.test\r\n{credential}"
        f"x-greenroom-sandbox: {sandbox}\r\nx-greenroom-port: {port}\r\n{fields}\r\n"
    ).encode()


def reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Make closing this end send RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Raw:
    """A plain client socket driven by the loop, for looking at ends of stream and resets exactly."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Raw:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        return cls(sock)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def receive(self, size: int = 65536) -> bytes:
        """Some bytes; empty at the end of the stream. Raises ConnectionResetError on RST."""
        return await self._loop.sock_recv(self.sock, size)

    async def receive_until(self, mark: bytes) -> bytes:
        seen = b""
        while mark not in seen:
            chunk = await self.receive()
            assert chunk, f"the stream ended before {mark!r}: {seen!r}"
            seen += chunk
        return seen

    async def receive_all(self) -> bytes:
        seen = b""
        while chunk := await self.receive():
            seen += chunk
        return seen

    def end(self) -> None:
        """Half-close: nothing more will be sent."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()


async def answer_of(address: tuple[str, int], request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to `request`: as much as it announces, else until the server closes."""
    async with await Raw.connect(address) as raw:
        await raw.send(request)
        top, _, body = (await raw.receive_until(b"\r\n\r\n")).partition(b"\r\n\r\n")
        announced = re.search(rb"\r\ncontent-length: *([0-9]+)", top.lower())
        size = int(announced[1]) if announced and not request.startswith(b"HEAD ") else None
        while (size is None or len(body) < size) and (chunk := await raw.receive()):
            body += chunk
    return int(top.split(b" ", 2)[1]), body
