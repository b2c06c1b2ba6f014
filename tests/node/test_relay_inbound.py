"""What a sandbox asks of what comes in: a traffic token, another Host, TLS to its services, its loopback."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.config import NodesConfig
from greenroom.node import relay_tls
from greenroom.node.relay_heads import AGENT_PORT, Forward, Refusal, Route, forward, parse
from greenroom.wire import certificates
from greenroom.wire.messages import Inbound
from tests.support.guests import (
    SANDBOX,
    FakeTarget,
    Raw,
    answer_of,
    guest_listening,
    head,
    read_head,
    relaying,
    reset_on_close,
)
from tests.support.loops import eventually, on_both_loops

TOKEN = "7f" * 32
PRIVATE = Inbound(public=False)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def judged(
    *fields: str, port: int = 8000, inbound: Inbound = PRIVATE, token: str | None = TOKEN, host: str = "a"
) -> Forward | Refusal:
    raw = "\r\n".join(["GET / HTTP/1.1", f"Host: {host}", *fields, "", ""]).encode("latin-1")
    return forward(parse(raw), Route(SANDBOX, port), inbound, token)


# The traffic token, without sockets


@pytest.mark.parametrize("name", ["e2b-traffic-access-token", "E2B-Traffic-Access-Token"])
def test_the_token_opens_a_port_and_goes_no_further(name: str) -> None:
    decision = judged(f"{name}: {TOKEN}", "x: 1")
    assert isinstance(decision, Forward)
    assert TOKEN.encode() not in decision.head
    assert b"x: 1" in decision.head


@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("e2b-traffic-access-token:",),
        (f"e2b-traffic-access-token: {TOKEN[:-1]}",),
        (f"e2b-traffic-access-token: {TOKEN}0",),
        (f"e2b-traffic-access-token: {TOKEN.upper()}",),
        (f"e2b-traffic-access-token: {TOKEN}", "e2b-traffic-access-token: wrong"),
        (f"e2b-traffic-access-token: {TOKEN}, {TOKEN}",),
        (f"e2b_traffic_access_token: {TOKEN}",),
        ("e2b-traffic-access-token: \xff\xfe",),
        (f"x-access-token: {TOKEN}",),
        (f"authorization: Bearer {TOKEN}",),
    ],
)
def test_without_exactly_the_token_a_private_port_is_403(fields: tuple[str, ...]) -> None:
    refusal = judged(*fields)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 403
    assert set(refusal.body) == {"sandboxId", "message", "code"}
    assert TOKEN not in str(refusal)


def test_a_private_sandbox_without_a_token_lets_nobody_in() -> None:
    for offered in ("", "None", TOKEN):
        assert isinstance(judged(f"e2b-traffic-access-token: {offered}", token=None), Refusal)
        assert isinstance(judged(f"e2b-traffic-access-token: {offered}", token=""), Refusal)


def test_the_agents_port_has_its_own_token_and_public_ports_need_none() -> None:
    assert isinstance(judged(port=AGENT_PORT), Forward)
    assert isinstance(judged(inbound=Inbound(), token=None), Forward)


def test_a_token_that_is_not_needed_does_not_reach_the_guest_either() -> None:
    for port in (8000, AGENT_PORT):
        for name in ("e2b-traffic-access-token", "E2B_Traffic_Access_Token"):
            decision = judged(f"{name}: {TOKEN}", port=port, inbound=Inbound(), token=None)
            assert isinstance(decision, Forward)
            assert TOKEN.encode() not in decision.head


@given(st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=80))
def test_no_other_text_opens_a_port(offered: str) -> None:
    decision = judged(f"e2b-traffic-access-token: {offered}")
    assert isinstance(decision, Forward) == (offered.strip(" \t") == TOKEN)


# The Host field, without sockets


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        ("localhost:${PORT}", b"localhost:8000"),
        ("app.example.com", b"app.example.com"),
        ("${PORT}.x:${PORT}", b"8000.x:8000"),
        ("[::1]:${PORT}", b"[::1]:8000"),
    ],
)
def test_the_host_is_masked_where_it_stood_and_the_agent_sees_the_true_one(mask: str, shown: bytes) -> None:
    inbound = Inbound(mask_host=mask)
    decision = judged("X-Mine: 1", inbound=inbound, host="8000-x.test")
    assert isinstance(decision, Forward)
    assert decision.head.startswith(b"GET / HTTP/1.1\r\nHost: %s\r\nX-Mine: 1\r\n" % shown)
    assert parse(decision.head).values(b"host") == [shown]
    agents = judged(port=AGENT_PORT, inbound=inbound, host="8000-x.test")
    assert isinstance(agents, Forward)
    assert b"Host: 8000-x.test\r\n" in agents.head


def test_an_upgrade_is_masked_and_judged_like_any_request() -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket")
    assert isinstance(judged(*upgrade), Refusal)
    decision = judged(*upgrade, inbound=Inbound(mask_host="m:${PORT}"))
    assert isinstance(decision, Forward)
    assert decision.upgrade
    assert b"Host: m:8000\r\n" in decision.head


# TLS to the service


@pytest.mark.parametrize(
    ("host", "mask", "name"),
    [
        ("8000-i.sbx.test:443", None, "8000-i.sbx.test"),
        ("A.Test.", None, "a.test"),
        ("a", "inner.test:${PORT}", "inner.test"),
        ("[::1]:80", None, "localhost"),
        ("", None, "localhost"),
        ("a_b", None, "localhost"),
        ("-a", None, "localhost"),
        ("x" * 64 + ".test", None, "localhost"),
    ],
)
def test_the_name_a_tls_service_is_asked_for(host: str, mask: str | None, name: str) -> None:
    decision = judged(inbound=Inbound(https_ports=(8000,), mask_host=mask), host=host)
    assert isinstance(decision, Forward)
    assert decision.tls_name == name


def test_only_the_listed_ports_get_tls_and_never_the_agents() -> None:
    inbound = Inbound(https_ports=(8443, AGENT_PORT))
    for port in (8000, AGENT_PORT):
        decision = judged(port=port, inbound=inbound)
        assert isinstance(decision, Forward)
        assert decision.tls_name is None


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """What a guest's server has whose certificate nobody knows."""
    place = tmp_path_factory.mktemp("guest")
    authority = certificates.new_authority("guest.test", time.time())
    pair = certificates.issue(authority, "guest.test", time.time())
    (place / "cert").write_bytes(pair.certificate)
    (place / "key").write_bytes(pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "cert", place / "key")
    return context


def securing(directory_target: FakeTarget, *ports: int) -> FakeTarget:
    directory_target.inbound = Inbound(https_ports=ports)
    return directory_target


@on_both_loops
async def test_a_tls_service_is_reached_and_big_bodies_pass_both_ways(secured: ssl.SSLContext) -> None:
    size = 3 << 20
    body = bytes(range(256)) * (size // 256)

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = await read_head(reader)
        assert b"content-length: %d" % size in seen
        got = await reader.readexactly(size)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + got)
        await writer.drain()

    async with (
        relaying() as (relay, address, directory),
        guest_listening(securing(directory.add(), 8000), 8000, guest, secured=secured),
    ):
        request = head(method="POST", fields=f"content-length: {size}\r\n") + body
        assert await answer_of(address, request) == (200, body)
        await eventually(lambda: relay.statistics().spliced == 0)


@on_both_loops
async def test_a_tls_service_that_closes_without_a_word_ends_the_answer(secured: ssl.SSLContext) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await writer.drain()

    async with (
        relaying() as (_relay, address, directory),
        guest_listening(securing(directory.add(), 8000), 8000, guest, secured=secured),
    ):
        assert await answer_of(address, head()) == (200, b"all of it")


@on_both_loops
async def test_a_plain_service_on_an_https_port_is_a_502_that_says_so() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with (
        relaying() as (relay, address, directory),
        guest_listening(securing(directory.add(), 8000), 8000, guest),
    ):
        status, body = await answer_of(address, head())
        assert status == 502
        assert json.loads(body) == {
            "sandboxId": SANDBOX,
            "message": "The port is one of httpsPorts, but what listens there does not speak TLS",
            "port": 8000,
            "code": 502,
        }
        assert relay.statistics().refused == {502: 1}


@on_both_loops
async def test_a_silent_service_on_an_https_port_is_504() -> None:
    async def guest(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with (
        relaying(NodesConfig(relay_connect_deadline=0.2)) as (_relay, address, directory),
        guest_listening(securing(directory.add(), 8000), 8000, guest),
    ):
        assert (await answer_of(address, head()))[0] == 504


@on_both_loops
async def test_cut_ends_a_tls_connection_on_both_sides(secured: ssl.SSLContext) -> None:
    ended = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nbegun")
        try:
            await reader.read()
        finally:
            ended.set()

    async with (
        relaying() as (relay, address, directory),
        await Raw.connect(address) as raw,
        guest_listening(securing(directory.add(), 8000), 8000, guest, secured=secured),
    ):
        await raw.send(head())
        await raw.receive_until(b"begun")
        await relay.cut(SANDBOX)
        with pytest.raises(ConnectionResetError):
            await raw.receive()
        async with asyncio.timeout(10):
            await ended.wait()


@on_both_loops
async def test_a_guests_reset_on_a_tls_connection_reaches_the_client(secured: ssl.SSLContext) -> None:
    go = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun")
        await go.wait()
        reset_on_close(writer)
        writer.transport.abort()

    async with (
        relaying() as (relay, address, directory),
        await Raw.connect(address) as raw,
        guest_listening(securing(directory.add(), 8000), 8000, guest, secured=secured),
    ):
        await raw.send(head())
        await raw.receive_until(b"begun")
        go.set()
        with pytest.raises(ConnectionResetError):
            await raw.receive_all()
        await eventually(lambda: relay.statistics().spliced == 0)


@on_both_loops
async def test_a_tunnel_leaves_nothing_open(secured: ssl.SSLContext) -> None:
    def sockets() -> int:
        return sum(1 for fd in Path("/proc/self/fd").iterdir() if _is_socket(fd))

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK)
        await writer.drain()

    async with (
        relaying() as (relay, address, directory),
        guest_listening(securing(directory.add(), 8000), 8000, guest, secured=secured),
    ):
        assert (await answer_of(address, head()))[0] == 200
        await eventually(lambda: relay.statistics().spliced == 0)
        await asyncio.sleep(0)
        before = sockets()
        for _ in range(5):
            assert (await answer_of(address, head()))[0] == 200
        await eventually(lambda: sockets() <= before)


def _is_socket(fd: Path) -> bool:
    try:
        return fd.readlink().name.startswith("socket:")
    except OSError:
        return False


@on_both_loops
async def test_a_handshake_that_fails_closes_the_guests_socket() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.sendall(b"no TLS at all, whatever it says\r\n")
    with pytest.raises(relay_tls.HandshakeFailed):
        await relay_tls.open_tunnel(ours, "localhost", lambda: None)
    await eventually(lambda: ours.fileno() == -1)
    theirs.close()


# The relay as a whole


@on_both_loops
async def test_private_ports_are_opened_by_the_token_alone() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"traffic" not in (await read_head(reader)).lower()
        writer.write(OK)

    async with relaying() as (relay, address, directory):
        target = directory.add()
        target.inbound, target.traffic_token = PRIVATE, TOKEN
        async with guest_listening(target, 8000, guest), guest_listening(target, AGENT_PORT, guest):
            status, body = await answer_of(address, head())
            assert (status, json.loads(body)["sandboxId"]) == (403, SANDBOX)
            assert target.attempts == []
            assert (await answer_of(address, head(fields="e2b-traffic-access-token: x\r\n")))[0] == 403
            assert await answer_of(address, head(fields=f"e2b-traffic-access-token: {TOKEN}\r\n")) == (
                200,
                b"ok",
            )
            assert (await answer_of(address, head(port=AGENT_PORT)))[0] == 200
        # Whether a port is open is not told to those who may not know.
        assert (await answer_of(address, head(port=9999)))[0] == 403
        assert relay.statistics().refused == {403: 3}


@on_both_loops
async def test_who_may_not_come_in_wakes_nobody() -> None:
    async with relaying() as (_relay, address, directory):
        target = directory.add()
        target.inbound, target.traffic_token = PRIVATE, TOKEN
        target.asleep = asyncio.Event()  # nobody ever sets it
        assert (await answer_of(address, head()))[0] == 403


@on_both_loops
async def test_a_service_on_the_guests_loopback_is_reached_by_the_agent_at_once() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK)

    async with relaying() as (_relay, address, directory):
        target = directory.add()
        async with guest_listening(target, 8000, guest, inside=True):
            assert await answer_of(address, head()) == (200, b"ok")
        assert target.attempts == [8000]


@on_both_loops
async def test_the_agents_own_port_is_never_looked_for_inside() -> None:
    async def guest(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    async with (
        relaying() as (_relay, address, directory),
        guest_listening(directory.add(), AGENT_PORT, guest, inside=True),
    ):
        assert (await answer_of(address, head(port=AGENT_PORT)))[0] == 502
