"""The node's calls to an agent that it cannot trust: a guest of the test's own on loopback answers anything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from greenroom.errors import RuntimeFailure
from greenroom.runtime import guestclient
from greenroom.runtime.engine import Identity, VmInfo
from greenroom.wire.tasks import stop

Answer = Callable[[bytes], Awaitable[bytes]]


class LoopbackVm:
    """A test double of a VM: every port is one server on loopback."""

    def __init__(self, port: int) -> None:
        self.name = "loopback"
        self.ended = asyncio.Event()
        self._port = port

    async def connect(self, port: int, deadline: float = 10.0) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        except BaseException:
            sock.close()
            raise
        return sock

    def describe(self) -> VmInfo:
        return VmInfo(name=self.name, state="running", pid=None, uid=None, netns=None)


@contextlib.asynccontextmanager
async def guest(answer: Answer) -> AsyncIterator[LoopbackVm]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = await reader.readexactly(length)
                writer.write(await answer(head + body))
                await writer.drain()
        finally:
            writer.transport.abort()

    serving: set[asyncio.Task[None] | None] = set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield LoopbackVm(server.sockets[0].getsockname()[1])
    await stop(*serving)
    await asyncio.sleep(0)


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Clock:
    """A guest's clock that is off and can be set, and the control calls that speak to it."""

    def __init__(self, off_by_ms: float) -> None:
        self.off_ns = int(off_by_ms * 1e6)
        self.calls: list[bytes] = []

    async def answer(self, request: bytes) -> bytes:
        self.calls.append(request)
        if request.startswith(b"POST /clock"):
            self.off_ns += int(request.rpartition(b":")[2].strip(b" }"))
        return http(b'{"nowNs": %d}' % (time.time_ns() + self.off_ns))


async def test_the_clock_is_corrected_until_it_is_right() -> None:
    clock = Clock(-360_000.0)
    async with guest(clock.answer) as vm:
        reading = await guestclient.introduce(vm, Identity(entropy=b"x" * 64), 20, 20.0, "c")
    assert abs(reading.offset_ms) + reading.error_ms <= 20.0
    assert abs(clock.off_ns) < 50e6


async def test_the_introduction_tells_what_its_parts_took() -> None:
    clock, refusals = Clock(0.0), 2

    async def late(request: bytes) -> bytes:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise ConnectionResetError("not listening yet")
        return await clock.answer(request)

    async with guest(late) as vm:
        begun = time.monotonic()
        reading = await guestclient.introduce(vm, Identity(entropy=b"x" * 64), 20, 1000.0, "c")
        whole = time.monotonic() - begun
    # The tries that nobody answered count for the first answer and not for the identity.
    assert 0 < reading.identity_s < reading.answer_s
    assert reading.clock_s > 0
    assert reading.answer_s + reading.clock_s <= whole


async def test_secrets_travel_in_body_and_header() -> None:
    clock = Clock(0.0)
    async with guest(clock.answer) as vm:
        await guestclient.introduce(vm, Identity(entropy=b"x" * 64, token="tok"), 20, 1000.0, "secret")
    init, later = clock.calls[0], clock.calls[1]
    assert b'"accessToken":"tok"' in init
    assert b'"controlToken":"secret"' in init
    assert b"tok" not in init.split(b"\r\n")[0]
    assert b"X-Greenroom-Control: secret" in later


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 xx OK\r\n\r\n",
        http(b"not json"),
        http(b"[1]"),
        http(b"{}", "500 Internal Server Error"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_a_failure(raw: bytes) -> None:
    async def answer(_request: bytes) -> bytes:
        return raw

    async with guest(answer) as vm:
        with pytest.raises(RuntimeFailure):
            await guestclient.introduce(vm, Identity(entropy=b"x"), 5, 20.0, "c")


async def test_an_endless_answer_is_cut_off() -> None:
    async def answer(_request: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (3 << 20)

    async with guest(answer) as vm:
        with pytest.raises(RuntimeFailure, match="too much"):
            await guestclient.request(vm, "GET", "/health", deadline=10)


async def test_a_guest_that_hangs_runs_into_the_deadline() -> None:
    async def answer(_request: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with guest(answer) as vm:
        with pytest.raises(RuntimeFailure, match="did not take its identity"):
            await guestclient.introduce(vm, Identity(entropy=b"x"), 0.2, 20.0, "c")


async def test_a_vm_that_ended_is_not_waited_for() -> None:
    vm = LoopbackVm(1)
    vm.ended.set()
    with pytest.raises(RuntimeFailure, match="ended"):
        await guestclient.introduce(vm, Identity(entropy=b"x"), 30, 20.0, "c")
    with pytest.raises(RuntimeFailure, match="ended"):
        await guestclient.wait_ready(vm, 30)


async def test_a_guest_from_a_snapshot_is_introduced_by_whichever_secret_it_knows() -> None:
    """A first try may have been heard and its answer lost: then the guest knows the new secret already."""
    for known in ("of-its-parent", "older", "own"):
        tried: list[str] = []

        async def answer(request: bytes, known: str = known, tried: list[str] = tried) -> bytes:
            (secret,) = [
                line.split(b": ")[1].decode()
                for line in request.split(b"\r\n")
                if line.lower().startswith(b"x-greenroom-control")
            ]
            tried.append(secret)
            if request.startswith(b"POST /init"):
                status, body = (b"200 OK", b"{}") if secret == known else (b"404 Not Found", b"{}")
            else:
                now = time.time_ns()
                status, body = b"200 OK", b'{"nowNs": %d}' % now
            return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)

        async with guest(answer) as vm:
            await guestclient.introduce(
                vm, Identity(entropy=b"e" * 64), 20, 1e9, "own", ["of-its-parent", "older"]
            )
        assert tried[: tried.index(known) + 1] == ["of-its-parent", "older", "own"][: tried.index(known) + 1]
        assert set(tried[tried.index(known) + 1 :]) == {"own"}


async def test_a_guest_that_knows_none_of_the_secrets_is_an_error() -> None:
    async def answer(_request: bytes) -> bytes:
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"

    async with guest(answer) as vm:
        with pytest.raises(RuntimeFailure, match="does not know its node"):
            await guestclient.introduce(vm, Identity(entropy=b"e" * 64), 20, 20, "own", ["other"])


class Booting(LoopbackVm):
    """A test double of a VM that hears nothing at first: what is sent to it is lost."""

    deaf = 2

    async def connect(self, port: int, deadline: float = 10.0) -> socket.socket:
        if self.deaf:
            self.deaf -= 1
            raise TimeoutError
        return await super().connect(port, deadline)


async def test_a_guest_that_still_boots_is_asked_anew() -> None:
    async def answer(_request: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    async with guest(answer) as listening:
        vm = Booting(listening._port)
        assert await guestclient.request(vm, "GET", "/health", deadline=20) == (200, b"{}")
        assert vm.deaf == 0


async def test_a_guest_that_never_hears_is_given_up_at_the_deadline() -> None:
    async def answer(_request: bytes) -> bytes:
        return b""

    async with guest(answer) as listening:
        vm = Booting(listening._port)

        async def never(port: int, deadline: float = 10.0) -> socket.socket:
            await asyncio.sleep(min(deadline, 0.01))
            raise TimeoutError

        vm.connect = never  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            await guestclient.request(vm, "GET", "/health", deadline=0.1)


# A way to the guest's loopback


@pytest.mark.parametrize(
    "answered",
    [
        b"",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n220 I speak first",
        b"nonsense",
        b"HTTP/1.1 101 " + b"x" * 100_000,
    ],
)
async def test_any_answer_but_an_open_way_is_a_closed_port(answered: bytes) -> None:
    async def answer(_request: bytes) -> bytes:
        return answered

    async with guest(answer) as vm:
        with pytest.raises(ConnectionRefusedError):
            await guestclient.open_inside(vm, 8000, "control")


async def test_an_agent_that_says_nothing_is_a_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guestclient, "INSIDE_DEADLINE", 0.05)

    async def answer(_request: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with guest(answer) as vm:
        with pytest.raises(ConnectionRefusedError):
            await guestclient.open_inside(vm, 8000, "control")


async def test_the_open_way_is_handed_out_as_it_is() -> None:
    asked = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set_result(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: greenroom-loopback\r\n\r\n")
        writer.write((await reader.readexactly(4)).upper())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    vm = LoopbackVm(server.sockets[0].getsockname()[1])
    sock = await guestclient.open_inside(vm, 8000, "the-secret")
    assert (await asked).startswith(b"GET /upgrade/loopback/8000 HTTP/1.1\r\n")
    assert b"\r\nX-Greenroom-Control: the-secret\r\n" in await asked
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, b"ping")
    assert await loop.sock_recv(sock, 100) == b"PING"
    sock.close()
    server.close()
    await server.wait_closed()
