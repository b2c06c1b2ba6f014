"""Bytes through a real Envoy and a real relay: streams flow, upgrades pass, ends and resets arrive."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import aiohttp
import httpx
import pytest

from tests.support.guests import Raw, guest_listening, read_head
from tests.support.proxying import Stage, sandbox_on, staged

ID = sandbox_on("aaaa")
TO_GUEST = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "8000"}
TO_GUEST_LINES = f"Host: a\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 8000\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZE = 10 << 20


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_each_piece_passes_before_the_next_is_sent(tmp_path: Path) -> None:
    """Request and response are both open: neither side sends on before it saw the other's piece."""
    at_guest: asyncio.Queue[bytes] = asyncio.Queue()
    at_client: asyncio.Queue[bytes] = asyncio.Queue()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"transfer-encoding: chunked" in (await read_head(reader)).lower()
        writer.write(STREAM)
        for number in range(5):
            await at_guest.put(await reader.readuntil(b"-%d" % number))
            writer.write(chunk(b"answer-%d" % number))
            await at_client.get()
        writer.write(b"0\r\n\r\n")

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
    ):
        proxy = await stage.start()
        async with await Raw.connect(proxy.address) as raw:
            await raw.send(f"POST /s HTTP/1.1\r\n{TO_GUEST_LINES}Transfer-Encoding: chunked\r\n\r\n".encode())
            for number in range(5):
                await raw.send(chunk(b"piece-%d" % number))
                assert (await at_guest.get()).endswith(b"piece-%d" % number)
                seen = await raw.receive_until(b"answer-%d" % number)
                await at_client.put(seen)
            await raw.send(b"0\r\n\r\n")


async def test_websocket_bytes_pass_both_ways(tmp_path: Path) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await read_head(reader)).lower()
        assert b"upgrade: websocket" in head
        assert b"connection: close" not in head
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while data := await reader.read(1024):
            writer.write(data.upper())

    upgrade = f"GET /ws HTTP/1.1\r\n{TO_GUEST_LINES}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
    ):
        proxy = await stage.start()
        async with await Raw.connect(proxy.address) as raw:
            await raw.send(upgrade.encode())
            assert b" 101 " in await raw.receive_until(b"\r\n\r\n")
            for word in (b"one", b"two"):
                await raw.send(word)
                assert await raw.receive_until(word.upper()) == word.upper()


async def test_big_bodies_up_and_down(tmp_path: Path) -> None:
    data = bytes(range(256)) * (SIZE // 256)

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"content-length: %d" % SIZE in (await read_head(reader)).lower()
        body = await reader.readexactly(SIZE)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE)
        writer.write(body)
        await writer.drain()

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
        aiohttp.ClientSession() as session,
    ):
        proxy = await stage.start()
        async with session.post(proxy.url, data=io.BytesIO(data), headers=TO_GUEST) as response:
            assert await response.read() == data
        async with session.post(proxy.url, data=io.BytesIO(data)) as response:
            assert (await response.json())["size"] == SIZE


async def test_http_2_without_tls(tmp_path: Path) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
        httpx.AsyncClient(http1=False, http2=True) as client,
    ):
        proxy = await stage.start()
        response = await client.get(proxy.url, headers=TO_GUEST)
        assert (response.http_version, response.text) == ("HTTP/2", "ok")
        assert (await client.get(proxy.url)).json()["api"] == "api-0"


async def _stream_cut_by(stage: Stage, abort: str) -> None:
    """A client in the middle of a stream learns that it did not end well."""
    aborting = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(STREAM + chunk(b"begun"))
        await aborting.wait()
        if abort == "guest":
            writer.transport.abort()
        else:
            await reader.read()

    async with stage.node("aaaa") as directory, guest_listening(directory.add(ID), 8000, guest):
        proxy = await stage.start()
        async with aiohttp.ClientSession() as session, session.get(proxy.url, headers=TO_GUEST) as response:
            assert await response.content.readexactly(5) == b"begun"
            aborting.set()
            if abort == "cut":
                await stage.relays["aaaa"].cut(ID)
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()


@pytest.mark.parametrize("abort", ["guest", "cut"])
async def test_a_stream_that_is_cut_is_not_ended(tmp_path: Path, abort: str) -> None:
    async with staged(tmp_path) as stage:
        await _stream_cut_by(stage, abort)


async def test_request_to_a_sandbox_is_never_repeated(tmp_path: Path) -> None:
    attempts = 0

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        await read_head(reader)
        writer.transport.abort()

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
        aiohttp.ClientSession() as session,
    ):
        proxy = await stage.start()
        retry = {"x-envoy-retry-on": "5xx,reset", "x-envoy-max-retries": "3"}
        async with session.get(proxy.url, headers=TO_GUEST | retry) as response:
            answer = await response.json()
        assert (response.status, answer["code"], answer["sandboxId"]) == (502, 502, ID)
        assert attempts == 1


async def test_every_request_has_a_relay_connection_of_its_own(tmp_path: Path) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        # A guest that offers to go on all the same.
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session,
    ):
        proxy = await stage.start()
        for _ in range(3):
            async with session.get(proxy.url, headers=TO_GUEST) as response:
                assert await response.text() == "ok"
        assert stage.relays["aaaa"].statistics().accepted == 3


async def test_client_that_leaves_is_noticed_by_the_guest(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(STREAM + chunk(b"begun"))
        try:
            await reader.read()
        finally:
            left.set()

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
    ):
        proxy = await stage.start()
        async with await Raw.connect(proxy.address) as raw:
            await raw.send(f"GET / HTTP/1.1\r\n{TO_GUEST_LINES}\r\n".encode())
            await raw.receive_until(b"begun")
        async with asyncio.timeout(10):
            await left.wait()


async def test_what_kubernetes_clients_watch_may_be_silent_for_longer_than_anything_else(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start(idle_timeout=0.5)
        api = stage.apis[0]
        async with await Raw.connect(proxy.address) as watch, await Raw.connect(proxy.address) as other:
            await watch.send(b"GET /apis/agents.x-k8s.io/v1beta1/hold HTTP/1.1\r\nHost: a\r\n\r\n")
            await api.entered.wait()
            await other.send(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
            # It is given up although it began later.
            assert b"HTTP/1.1 50" in await other.receive_until(b"\r\n")
            api.release.set()
            assert b"HTTP/1.1 200" in await watch.receive_until(b"\r\n")
