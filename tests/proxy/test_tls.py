"""The TLS listener of a real Envoy: names, protocols, streams and their ends, and certificates that change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from greenroom.proxy import secure
from greenroom.wire import certificate_files
from tests.support.guests import Raw, echo, guest_listening, read_head
from tests.support.loops import eventually
from tests.support.proxying import ProxyProcess, Stage, sandbox_on, staged

ID = sandbox_on("aaaa")
DOMAIN = "sbx.example.test"
AT_GUEST = f"8000-{ID}.{DOMAIN}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def trusting(stage: Stage) -> ssl.SSLContext:
    """What a client has that trusts the authority of this platform and nobody else."""
    return ssl.create_default_context(cafile=str(stage.state / "tls" / DOMAIN / "ca.pem"))


@asynccontextmanager
async def client_of(stage: Stage, version: int) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of that version alone."""
    async with httpx.AsyncClient(
        verify=trusting(stage), http1=version == 1, http2=version == 2, trust_env=False
    ) as client:
        yield client


def at(proxy: ProxyProcess, host: str) -> dict[str, object]:
    """Arguments of a request to `host`, whose name no resolver here knows."""
    return {
        "url": f"https://127.0.0.1:{proxy.tls_port}/where?x=1",
        "headers": {"host": host},
        "extensions": {"sni_hostname": host.partition(":")[0]},
    }


@asynccontextmanager
async def opened(
    stage: Stage, proxy: ProxyProcess, name: str = AT_GUEST
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A TLS connection that offers HTTP/1.1 only."""
    context = trusting(stage)
    context.set_alpn_protocols(["http/1.1"])
    reader, writer = await asyncio.open_connection(*proxy.tls_address, ssl=context, server_hostname=name)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("version", [1, 2])
async def test_names_lead_to_sandboxes_and_the_api_and_the_certificate_is_for_all(
    tmp_path: Path, version: int
) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start(tls_port=0)
        assert proxy.tls_port not in (0, proxy.port)
        async with client_of(stage, version) as client:
            for host in (AT_GUEST, f"{AT_GUEST}:{proxy.tls_port}"):
                answer = await client.get(**at(proxy, host))
                assert answer.status_code == 200, answer.text
                assert answer.http_version == {1: "HTTP/1.1", 2: "HTTP/2"}[version]
                assert answer.text.startswith("GET /where?x=1 HTTP/1.1\r\n")
                assert f"Host: {host}\r\n" in answer.text
                assert "X-Forwarded-Proto: https\r\n" in answer.text
            answer = await client.get(**at(proxy, f"api.{DOMAIN}"))
            assert answer.json()["api"] == "api-0"


async def test_a_client_that_knows_not_the_authority_refuses(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start(tls_port=0)
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection(
                *proxy.tls_address, ssl=ssl.create_default_context(), server_hostname=AT_GUEST
            )


@pytest.mark.parametrize("offered", [["h2", "http/1.1"], ["http/1.1"], ["h2"], None])
async def test_the_protocol_is_agreed_on_in_the_handshake(tmp_path: Path, offered: list[str] | None) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start(tls_port=0)
        context = trusting(stage)
        if offered is not None:
            context.set_alpn_protocols(offered)
        _reader, writer = await asyncio.open_connection(
            *proxy.tls_address, ssl=context, server_hostname=f"api.{DOMAIN}"
        )
        secured = writer.get_extra_info("ssl_object")
        assert secured.selected_alpn_protocol() == (offered[0] if offered else None)
        assert secured.version() == "TLSv1.3"
        writer.transport.abort()


async def test_plain_http_is_not_spoken_on_the_tls_port(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start(tls_port=0)
        async with await Raw.connect(proxy.tls_address) as raw:
            await raw.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"HTTP" not in await raw.receive_all()


@pytest.mark.parametrize("version", [1, 2])
async def test_events_pass_one_by_one_and_a_killed_sandbox_resets_its_stream_alone(
    tmp_path: Path, version: int
) -> None:
    """Over HTTP/2 one connection carries all of a client's streams: only the killed sandbox's may break."""
    other = sandbox_on("aaaa")
    went_on = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(STREAM + chunk(b"data: begun\n\n"))
        await went_on.wait()
        writer.write(chunk(b"data: still\n\n") + b"0\r\n\r\n")

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
        guest_listening(directory.add(other), 8000, guest),
    ):
        proxy = await stage.start(tls_port=0)
        async with client_of(stage, version) as client:
            killed = client.stream("GET", **at(proxy, AT_GUEST))
            spared = client.stream("GET", **at(proxy, f"8000-{other}.{DOMAIN}"))
            async with killed as first, spared as second:
                of_first, of_second = first.aiter_raw(), second.aiter_raw()
                assert await anext(of_first) == await anext(of_second) == b"data: begun\n\n"
                del directory.targets[ID]
                await stage.relays["aaaa"].cut(ID)
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(of_first)
                went_on.set()
                assert [part async for part in of_second] == [b"data: still\n\n"]
            gone = await client.get(**at(proxy, AT_GUEST))
            expected = {"sandboxId": ID, "message": "The sandbox was not found", "code": 502}
            assert (gone.status_code, gone.json()) == (502, expected)


async def test_websocket_bytes_pass_both_ways(tmp_path: Path) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"upgrade: websocket" in (await read_head(reader)).lower()
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while data := await reader.read(1024):
            writer.write(data.upper())

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, guest),
    ):
        proxy = await stage.start(tls_port=0)
        async with opened(stage, proxy) as (reader, writer):
            lines = (
                f"GET /ws HTTP/1.1\r\nHost: {AT_GUEST}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            )
            writer.write(lines.encode())
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            for word in (b"one", b"two"):
                writer.write(word)
                assert await reader.readexactly(3) == word.upper()


async def shown_by(stage: Stage, proxy: ProxyProcess) -> bytes:
    async with opened(stage, proxy, f"api.{DOMAIN}") as (_reader, writer):
        return bytes(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))


async def test_a_renewed_certificate_is_shown_without_cutting_anybody(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start(tls_port=0)
        before = await shown_by(stage, proxy)
        async with opened(stage, proxy, f"api.{DOMAIN}") as (reader, writer):
            held = certificate_files.ensure(stage.state, DOMAIN, time.time(), renew=True)
            wanted = ssl.PEM_cert_to_DER_cert(held.pair.certificate.decode())
            assert wanted != before

            async def renewed() -> bool:
                return await shown_by(stage, proxy) == wanted

            await eventually(renewed)
            writer.write(f"GET /still HTTP/1.1\r\nHost: api.{DOMAIN}\r\nConnection: close\r\n\r\n".encode())
            body = (await reader.read()).partition(b"\r\n\r\n")[2]
            assert json.loads(body)["path"] == "/still"
        assert proxy.envoys() == [proxy.envoy_pid]
        assert "PRIVATE" not in proxy.log


async def test_a_certificate_near_its_end_is_renewed_by_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(secure, "RENEW_EVERY", 0.0)
    long_ago = time.time() - 80 * 86_400
    old = certificate_files.ensure(tmp_path, DOMAIN, long_ago)
    written: list[bytes] = []
    shown = secure.Certificate(tmp_path, f"{DOMAIN}:8443", lambda _name, content: written.append(content))
    shown._hand_on(old.pair)
    keeping = asyncio.get_running_loop().create_task(shown.keep())
    await eventually(lambda: len(written) == 2)
    keeping.cancel()
    assert shown.ends > time.time() + 80 * 86_400
    assert old.pair.certificate.decode() not in str(json.loads(written[1]))


async def test_an_envoy_that_died_comes_back_to_both_ports(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start(tls_port=0)
        before = await shown_by(stage, proxy)
        os.kill(proxy.envoy_pid, signal.SIGKILL)

        async def back() -> bool:
            try:
                return await shown_by(stage, proxy) == before
            except OSError:
                return False

        await eventually(lambda: proxy.envoys() not in ([], [proxy.envoy_pid]))
        await eventually(back)
        async with await Raw.connect(proxy.address):
            pass


async def test_a_domain_without_wildcards_is_refused_at_the_start(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        spec = msgspec.structs.replace(stage.spec(tls_port=0), domain="localhost:1")
        proxy = await stage.launch(spec)
        assert await proxy.wait() == 78
        assert "wildcard" in proxy.log
        assert "Traceback" not in proxy.log
