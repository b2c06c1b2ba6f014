"""`python -m greenroom.bench.kube_bare SPEC.json`: the least server that answers, as the baseline of what is measured.

It reads a request with a Content-Length, asks those that it is told to ask, one after the other over connections that
it keeps, and answers with so many bytes: no routing, no JSON, no credential. Three of them in a row are what a claim
costs on its way through api, master and node if nobody does anything; one with many bytes is what a long list costs if
the bytes are there already.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import uvloop

from greenroom.bench.channels import Channel
from greenroom.bench.processes import started
from greenroom.bench.report import reason
from greenroom.bench.summaries import Sample
from greenroom.errors import GreenroomError
from greenroom.wire.serving import Ready, listen, tell_ready, url_of
from greenroom.wire.tasks import spawn, stop

ANSWER = 1000
"""Bytes of an answer of a hop; about what a claim's is."""
_CHUNK = 65536
_SOCKET_BUFFER = 1 << 20


class BareSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one of them does."""

    ask: list[str] = []
    """URLs that each request is passed on to, one after the other."""
    answer: int = ANSWER
    """Bytes of the body of its answers."""


def connecting(url: str) -> Channel:
    """A connection to `http://host:port`, made when it is first used."""
    host, _, port = url.removeprefix("http://").rpartition(":")

    async def connect() -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        except BaseException:
            sock.close()
            raise
        return sock

    return Channel(f"{host}:{port}", connect)


class Bare:
    """The server."""

    def __init__(self, spec: BareSpec) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {spec.answer}\r\n\r\n"
        self._answer = head.encode() + b"x" * spec.answer
        self._ask = spec.ask

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        channels = [connecting(url) for url in self._ask]
        onwards = [channel.request("POST", "/", b"{}") for channel in channels]
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                _, found, rest = head.lower().partition(b"\r\ncontent-length:")
                if found:
                    await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
                for channel, onward in zip(channels, onwards, strict=True):
                    await channel.ask(onward)
                writer.write(self._answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for channel in channels:
                channel.close()
            writer.close()


async def _run(spec: BareSpec) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    tasks: set[asyncio.Task[None]] = set()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = spawn(bare.connected(reader, writer), "a connection")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    bare = Bare(spec)
    sock = listen("127.0.0.1", 0)
    server = await asyncio.start_server(take, sock=sock)
    tell_ready(Ready(url=url_of(sock)))
    await ending.wait()
    server.close()
    await stop(*tasks)


@contextlib.asynccontextmanager
async def hops(directory: Path) -> AsyncIterator[str]:
    """The URL of three of them in a row, as api, master and node are: the first asks the second, which asks the third;
    then the first asks the third, as an api confirms a claim."""
    async with contextlib.AsyncExitStack() as stack:
        urls: list[str] = []
        for place in ("node", "master", "api"):
            asks = {"node": [], "master": urls[:1], "api": [urls[-1], urls[0]] if urls else []}[place]
            running = started(f"bare-{place}", _MODULE, BareSpec(ask=asks), directory)
            urls.append((await stack.enter_async_context(running)).url)
        yield urls[-1]


async def trip(channel: Channel) -> Sample:
    """Milliseconds of one round trip."""
    request = channel.request("POST", "/", b"{}")
    begun = time.perf_counter()
    try:
        await channel.ask(request)
    except GreenroomError as error:
        return Sample(None, reason(error))
    return Sample((time.perf_counter() - begun) * 1000)


async def trips(url: str, count: int, parallel: int) -> list[Sample]:
    """So many round trips, `parallel` at a time, each client with a connection of its own."""
    waiting = iter(range(count))
    found: list[Sample] = []

    async def work() -> None:
        channel = connecting(url)
        try:
            found.extend([await trip(channel) for _ in waiting])
        finally:
            channel.close()

    workers = [spawn(work(), "a client") for _ in range(parallel)]
    try:
        await asyncio.gather(*workers)
    finally:
        await stop(*workers)
    return found


@contextlib.asynccontextmanager
async def answering(directory: Path, size: int, name: str = "bare-bytes") -> AsyncIterator[Channel]:
    """A connection to one that answers with `size` bytes."""
    async with started(name, _MODULE, BareSpec(answer=size), directory) as running:
        channel = connecting(running.url)
        try:
            yield channel
        finally:
            channel.close()


_MODULE = "greenroom.bench.kube_bare"


def main(arguments: list[str]) -> int:
    """Exit status 0 at a normal end."""
    if len(arguments) != 1:
        print("usage: python -m greenroom.bench.kube_bare SPEC.json", file=sys.stderr)
        return 2
    uvloop.run(_run(msgspec.json.decode(Path(arguments[0]).read_bytes(), type=BareSpec)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
