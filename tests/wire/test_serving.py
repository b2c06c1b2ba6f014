"""A role's server and client over real sockets: credentials, bounds, errors, lost answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from greenroom.errors import (
    BadRequest,
    Forbidden,
    GreenroomError,
    InternalError,
    MethodNotAllowed,
    NodeUnavailable,
    NotFound,
    OutcomeUnknown,
    PoolDry,
    SetupError,
    TooLarge,
)
from greenroom.wire import credentials, guarded
from greenroom.wire.calling import RoleClient
from greenroom.wire.credentials import Verifier
from greenroom.wire.messages import Size
from greenroom.wire.serving import application, endpoint, json_response, listen, read_json, serve
from greenroom.wire.tasks import spawn, stop


@pytest.fixture
def app(tmp_path: Path) -> Starlette:
    credentials.ensure(tmp_path)

    async def echo(request: Request) -> Response:
        return json_response(await read_json(request, Size, limit=200), 201)

    async def dry(_request: Request) -> Response:
        raise PoolDry("no member", retry_after=3)

    async def bug(_request: Request) -> Response:
        raise ValueError("a secret detail")

    async def hang(_request: Request) -> Response:
        await asyncio.Event().wait()
        return Response()

    return application(
        [
            endpoint("POST", "/echo", echo, ("master",)),
            endpoint("GET", "/dry", dry, ("master",)),
            endpoint("GET", "/bug", bug, ("master",)),
            endpoint("POST", "/hang", hang, ("master",)),
            endpoint("GET", "/hang-get", hang, ("master",)),
        ],
        Verifier.load(tmp_path),
    )


@contextlib.asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with contextlib.aclosing(serve(app, listen("127.0.0.1", 0), drain=1)) as urls:
            async for url in urls:
                ready.set_result(url)

    task = spawn(run(), "server")
    try:
        async with asyncio.timeout(10):
            yield await ready
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await task
    finally:
        await stop(task)


@contextlib.asynccontextmanager
async def calling(tmp_path: Path, role: str = "master") -> AsyncIterator[RoleClient]:
    async with RoleClient(credentials.own_token(tmp_path, role)) as client:
        yield client


async def test_a_call_and_its_answer(app: Starlette, tmp_path: Path) -> None:
    size = Size("small", 1, 512, 4096)
    async with served(app) as url, calling(tmp_path) as client:
        assert await client.call("POST", f"{url}/echo", Size, size) == size


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic x"}, 401),
        ({"Authorization": "Bearer "}, 401),
    ],
)
async def test_any_other_local_user_gets_401(app: Starlette, headers: dict[str, str], status: int) -> None:
    async with served(app) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/dry", headers=headers) as response:
            assert response.status == status
            assert "no member" not in await response.text()
        async with session.get(f"{url}/healthz") as response:
            assert response.status == 200


async def test_a_role_that_is_known_but_not_admitted_gets_403(app: Starlette, tmp_path: Path) -> None:
    async with served(app) as url, calling(tmp_path, "proxy") as client:
        with pytest.raises(Forbidden):
            await client.call("GET", f"{url}/dry", Size)


async def test_errors_arrive_as_they_were_raised(app: Starlette, tmp_path: Path) -> None:
    async with served(app) as url, calling(tmp_path) as client:
        with pytest.raises(PoolDry) as caught:
            await client.call("GET", f"{url}/dry", Size)
        assert caught.value.retry_after == 3
        with pytest.raises(InternalError) as bug:
            await client.call("GET", f"{url}/bug", Size)
        assert "secret" not in bug.value.message
        with pytest.raises(NotFound):
            await client.call("GET", f"{url}/nowhere", Size)
        with pytest.raises(MethodNotAllowed):
            await client.call("DELETE", f"{url}/dry", Size)


async def test_bodies_are_bounded_and_checked(app: Starlette, tmp_path: Path) -> None:
    async with served(app) as url, calling(tmp_path) as client:
        with pytest.raises(TooLarge):
            await client.call("POST", f"{url}/echo", Size, {"name": "x" * 300})
        with pytest.raises(BadRequest, match="cpus"):
            await client.call("POST", f"{url}/echo", Size, {"name": "x", "cpus": "two"})
        with pytest.raises(BadRequest):
            await client.call("POST", f"{url}/echo", Size, msgspec.Raw(b"{" * 100))


async def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    credentials.ensure(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with calling(tmp_path) as client:
            with pytest.raises(NodeUnavailable):
                await client.call("POST", f"http://127.0.0.1:{taken.getsockname()[1]}/x", Size)


async def test_a_lost_answer_is_unknown_for_a_mutation_and_unavailable_for_a_read(
    app: Starlette, tmp_path: Path
) -> None:
    async with served(app) as url, calling(tmp_path) as client:
        with pytest.raises(OutcomeUnknown):
            await client.call("POST", f"{url}/hang", Size, {}, deadline=0.2)
        with pytest.raises(NodeUnavailable):
            await client.call("GET", f"{url}/hang-get", Size, deadline=0.2)


@pytest.mark.parametrize("role", ["node", "master"])
async def test_an_error_names_no_address_and_the_log_does_once(
    role: str, app: Starlette, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever keeps an answer from coming: the text reaches users, to whom our addresses are nothing."""
    caplog.set_level("INFO", "greenroom.wire.calling")
    credentials.ensure(tmp_path)
    token = credentials.own_token(tmp_path, "master")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with served(app) as url:
            masters = (url, nobody) if role == "master" else ()
            async with RoleClient(token, masters=masters) as client:
                told = []
                for where, method, path, deadline in (
                    (nobody, "GET", "/x", 10.0),
                    (nobody, "POST", "/x", 10.0),
                    (url, "POST", "/hang", 0.05),
                    (url, "GET", "/hang-get", 0.05),
                    (url, "GET", "/healthz", 10.0),
                ):
                    with pytest.raises(GreenroomError) as caught:
                        await client.call(method, where + path, Size, deadline=deadline)
                    told.append(caught.value.message)
    assert not [text for text in told if "127.0.0.1" in text or "http" in text]
    assert all(f"the {role}" in text for text in told)
    records = [(record.levelname, record.getMessage()) for record in caplog.records]
    for where in (url, nobody):
        address = where.removeprefix("http://")
        warned = [text for level, text in records if level == "WARNING" and address in text]
        assert len(warned) == 1, records
    assert any(level == "INFO" and "answers again" in text for level, text in records)


async def test_without_a_credential_nobody_learns_which_paths_there_are(app: Starlette) -> None:
    async with served(app) as url, aiohttp.ClientSession() as session:
        for method, path in (("GET", "/nowhere"), ("DELETE", "/dry"), ("POST", "/")):
            async with session.request(method, url + path) as response:
                assert response.status == 401
                assert response.headers["Connection"] == "close"


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_head_that_does_not_come_in_time_ends_its_connection(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "HEAD_DEADLINE", 0.2)
    async with served(app) as url:
        for begin in (
            b"",
            b"GET /healthz HTTP/1.1\r\nX: ",
            b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /he",
        ):
            reader, writer = await _connect(url)
            writer.write(begin)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    while await reader.read(4096):
                        pass
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    assert guarded.statistics() == {"open": 0, "headless": 0}


@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "next"])
@pytest.mark.parametrize("piece", [b"y" * 1000, b"y: z\r\n" * 200], ids=["value", "many"])
async def test_a_head_without_end_ends_its_connection(app: Starlette, before: bytes, piece: bytes) -> None:
    async with served(app) as url:
        reader, writer = await _connect(url)
        begin = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: "
        writer.write(before + begin)
        reading = asyncio.ensure_future(reader.read(-1))
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                while not reading.done():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            assert (await reading).count(b"HTTP/1.1 200") == bool(before)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_connections_without_a_head_do_not_keep_others_out(
    app: Starlette, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "CONNECTIONS", 5)
    async with served(app) as url, calling(tmp_path) as client:
        idle = [await _connect(url) for _ in range(20)]
        size = Size("small", 1, 512, 4096)
        assert await client.call("POST", f"{url}/echo", Size, size) == size
        assert guarded.statistics()["open"] <= 6
        for _, writer in idle:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def test_a_taken_port_says_so() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(SetupError, match="choose another port"):
        listen("127.0.0.1", first.getsockname()[1])


def test_connections_do_not_hold_small_pieces_back() -> None:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen("127.0.0.1", 0))
        stack.enter_context(socket.create_connection(sock.getsockname()))
        accepted = stack.enter_context(sock.accept()[0])
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
