"""Clients that try to be sent elsewhere, guests that speak in the platform's name: neither gets anything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.proxy.test_routing import ask, headers_of
from tests.proxy.test_tls import STREAM, chunk, trusting
from tests.support.guests import Raw, answer_of, echo, guest_listening, read_head
from tests.support.http2 import http2
from tests.support.proxying import sandbox_on, staged

ID = sandbox_on("aaaa")
OTHER = sandbox_on("aaaa")
DOMAIN = "sbx.example.test"
HOST = f"8000-{ID}.{DOMAIN}"


async def other_guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_head(reader)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother")


@pytest.mark.parametrize("port", ["0", "99999", "-1", "abc", "", "80:81", "443 "])
async def test_a_hosts_port_changes_nothing(tmp_path: Path, port: str) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start()
        status, body = await ask(proxy, "/", f"{HOST}:{port}")
        assert status == 400 or (status == 200 and body.startswith(b"GET / HTTP/1.1\r\n")), body


@pytest.mark.parametrize(
    ("label", "status"),
    [
        (f"0-{ID}", 400),
        (f"99999-{ID}", 400),
        (f"08000-{ID}", 400),
        (f"8000-{ID}x", 502),
        (f"8000-{OTHER}", 502),
        ("8000-", 502),
        (f"8000--{ID}", 502),
        (f"8000-{ID}-x", 502),
    ],
    # Ids are drawn anew in each process, and names of tests must not be.
    ids=[
        "port 0",
        "port 99999",
        "leading zero",
        "longer id",
        "unknown id",
        "no id",
        "two hyphens",
        "third part",
    ],
)
async def test_host_labels_out_of_form_reach_no_guest(tmp_path: Path, label: str, status: int) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start()
        answer, body = await ask(proxy, "/", f"{label}.{DOMAIN}")
        assert (answer, json.loads(body)["code"]) == (status, status)


async def test_an_absolute_target_decides_alone_and_the_guest_sees_it_as_its_host(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
        guest_listening(directory.add(OTHER), 8000, other_guest),
    ):
        proxy = await stage.start()
        status, body = await ask(proxy, f"http://{HOST}/a?b", f"8000-{OTHER}.{DOMAIN}")
        assert (status, body.split(b"\r\n")[0]) == (200, b"GET /a?b HTTP/1.1")
        assert headers_of(body)["host"] == HOST
        # Nobody else's host is ever dialled.
        for target in ("http://example.com/", "http://127.0.0.1:1/", "http://169.254.169.254/latest"):
            status, body = await ask(proxy, target, HOST)
            assert (status, json.loads(body)["api"]) == (200, "api-0")
        status, _body = await answer_of(
            proxy.address, f"CONNECT {HOST}:80 HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
        )
        assert status in (400, 404)


async def test_a_guest_cannot_speak_in_the_platforms_name(tmp_path: Path) -> None:
    ours = "x-greenroom-partial: node-0\r\nX-Greenroom-Cluster: x\r\nx_greenroom_x: y\r\nx-envoy-overloaded: true\r\n"

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_head(reader)
        if b"upgrade: websocket" in head.lower():
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%s\r\n"
                % ours.encode()
            )
            await writer.drain()
            return
        writer.write(
            f"HTTP/1.1 200 OK\r\n{ours}x-mine: 1\r\nServer: g\r\nContent-Length: 2\r\n\r\nok".encode()
        )

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
    ):
        proxy = await stage.start(tls_port=0)
        for upgrade in ("", "Connection: Upgrade\r\nUpgrade: websocket\r\n"):
            async with await Raw.connect(proxy.address) as raw:
                await raw.send(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n{upgrade}\r\n".encode())
                head = (await raw.receive_until(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 101" if upgrade else b"http/1.1 200")
            assert b"greenroom-" not in head
            assert b"x_greenroom" not in head
            assert b"x-envoy" not in head
            assert (b"x-mine: 1" in head) is not bool(upgrade)
        async with http2(proxy.tls_address, trusting(stage), HOST) as client:
            stream = await client.ask(
                [(":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", "/")]
            )
            assert (stream.status, stream.body) == (200, b"ok")
            assert not [name for name in stream.fields if "greenroom" in name or "envoy" in name]


async def test_the_apis_own_headers_do_reach_clients(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        stage.apis[0].more = {"X-Greenroom-Partial": "node-3"}
        proxy = await stage.start()
        async with await Raw.connect(proxy.address) as raw:
            await raw.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert b"x-greenroom-partial: node-3" in (await raw.receive_all()).lower()


async def test_over_http_2_the_authority_decides_and_nothing_beside_it(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
        guest_listening(directory.add(OTHER), 8000, other_guest),
    ):
        proxy = await stage.start(tls_port=0)
        async with http2(proxy.tls_address, trusting(stage), f"8000-{OTHER}.{DOMAIN}") as client:
            # The name in the handshake is another sandbox's, and so is every header.
            for more in (
                [("host", f"8000-{OTHER}.{DOMAIN}")],
                [("e2b-sandbox-id", OTHER), ("e2b-sandbox-port", "8000")],
                [
                    ("x-greenroom-sandbox", OTHER),
                    ("x-greenroom-port", "8000"),
                    ("x-greenroom-cluster", "node_aaaa"),
                ],
                [("x-forwarded-host", f"8000-{OTHER}.{DOMAIN}")],
            ):
                stream = await client.ask(
                    [(":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", "/p"), *more]
                )
                if stream.reset is None and stream.status != 400:
                    assert stream.status == 200, more
                    assert stream.body.startswith(b"GET /p HTTP/1.1\r\n")
                    assert headers_of(stream.body)["host"] == HOST
                    assert "x-greenroom" not in stream.body.decode()
        for odd in ("*", "http://example.com/", "//example.com/", "/%2e%2e/"):
            async with http2(proxy.tls_address, trusting(stage), HOST) as client:
                stream = await client.ask(
                    [(":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", odd)]
                )
                reached = stream.reset is None and client.gone is None and stream.status == 200
                assert not reached or stream.body.split(b"\r\n")[0] == f"GET {odd} HTTP/1.1".encode()


async def test_a_websocket_over_http_2_passes_both_ways(tmp_path: Path) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await read_head(reader)).lower()
        assert head.startswith(b"get /ws http/1.1\r\n")
        assert b"upgrade: websocket" in head
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while data := await reader.read(1024):
            writer.write(data.upper())

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
    ):
        proxy = await stage.start(tls_port=0)
        async with http2(proxy.tls_address, trusting(stage), HOST) as client:
            connect = [
                (":method", "CONNECT"),
                (":protocol", "websocket"),
                (":scheme", "https"),
                (":path", "/ws"),
            ]
            number = await client.send([*connect, (":authority", HOST)], end=False)
            for word in (b"one", b"two"):
                await client.write(number, word)
                stream = await client.until_body(number, word.upper())
                assert (stream.status, stream.reset) == (200, None)
                assert stream.body.endswith(word.upper())
            # The api offers none.
            refused = await client.send([*connect, (":authority", f"api.{DOMAIN}")], end=False)
            assert (await client.finish(refused)).status == 400


async def test_a_killed_sandboxs_stream_ends_in_a_reset_over_http_2(tmp_path: Path) -> None:
    """RST_STREAM, not an end of stream that looks like a whole answer; the connection goes on."""

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(STREAM + chunk(b"begun"))
        await reader.read()

    get = [(":method", "GET"), (":scheme", "https"), (":path", "/")]
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
    ):
        proxy = await stage.start(tls_port=0)
        async with http2(proxy.tls_address, trusting(stage), HOST) as client:
            number = await client.send([*get, (":authority", HOST)])
            assert (await client.until_body(number, b"begun")).body == b"begun"
            del directory.targets[ID]
            await stage.relays["aaaa"].cut(ID)
            stream = await client.finish(number)
            assert stream.reset not in (None, 0)
            assert (stream.ended, client.gone) == (False, None)
            gone = await client.ask([*get, (":authority", HOST)])
            assert (gone.status, json.loads(gone.body)["message"]) == (502, "The sandbox was not found")
