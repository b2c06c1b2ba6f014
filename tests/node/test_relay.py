"""The relay as a server: what it forwards, refuses, bounds and cuts, with guests played on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from greenroom.config import NodesConfig
from greenroom.errors import RuntimeFailure, SetupError, UnknownSandbox
from greenroom.node import relay as relay_module
from greenroom.node.relay_targets import CONNECT_PAUSES
from tests.support.guests import (
    SANDBOX,
    Raw,
    answer_of,
    guest_listening,
    head,
    read_head,
    relaying,
    reset_on_close,
)
from tests.support.loops import eventually, on_both_loops

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
OTHER = "iabcd" + "1" * 15


async def settled(relay: relay_module.Relay) -> relay_module.RelayStatistics:
    """The statistics once no connection is left."""

    def quiet() -> bool:
        now = relay.statistics()
        return not (now.spliced or now.connecting or now.waiting)

    await eventually(quiet)
    return relay.statistics()


@on_both_loops
async def test_request_reaches_the_guest_without_our_headers() -> None:
    seen = asyncio.get_running_loop().create_future()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(await read_head(reader) + await reader.readexactly(5))
        writer.write(OK)

    async with relaying() as (relay, address, directory), guest_listening(directory.add(), 8000, guest):
        spoofed = "x-greenroom-control: 1\r\nX_Greenroom_Control: 1\r\nconnection: keep-alive\r\n"
        request = head(
            "/a%2Fb//../c?q=%00", method="POST", fields=f"{spoofed}X-Mine: yes\r\ncontent-length: 5\r\n"
        )
        status, body = await answer_of(address, request + b"hello")
        assert (status, body) == (200, b"ok")
        got = await seen
        assert got == (
            b"POST /a%2Fb//../c?q=%00 HTTP/1.1\r\nhost: example.test\r\nX-Mine: yes\r\ncontent-length: 5\r\n"
            b"Connection: close\r\n\r\nhello"
        )
        now = await settled(relay)
        assert (now.bytes_up, now.bytes_down) == (len(got), len(OK))


@on_both_loops
async def test_a_local_user_without_the_credential_gets_401() -> None:
    async with relaying() as (relay, address, directory):
        target = directory.add()
        for token in (None, "", "wrong", "relay-secret\r\nx-greenroom-relay: relay-secret"):
            status, body = await answer_of(address, head(token=token))
            assert (status, json.loads(body)["code"]) == (401, 401)
        assert target.attempts == []
        assert relay.statistics().refused == {401: 4}


@on_both_loops
async def test_unknown_sandbox_is_answered_as_e2b_clients_expect() -> None:
    async with relaying() as (_relay, address, _directory):
        status, body = await answer_of(address, head())
        expected = {"sandboxId": SANDBOX, "message": "The sandbox was not found", "code": 502}
        assert (status, json.loads(body)) == (502, expected)


@on_both_loops
async def test_a_person_with_a_browser_gets_a_page_and_a_program_json() -> None:
    browser = "accept: text/html,*/*;q=0.8\r\n"
    async with relaying() as (_relay, address, directory):
        directory.add()
        for fields, page in (
            (browser + "sec-fetch-mode: navigate\r\n", True),
            (browser + "sec-fetch-mode: cors\r\n", False),
            (browser, False),
            ("accept: */*\r\nsec-fetch-mode: navigate\r\n", False),
            ("", False),
        ):
            status, body = await answer_of(address, head(port=8123, fields=fields))
            assert status == 502
            if page:
                assert body.startswith(b"<!doctype html>")
                assert b"The sandbox is running but port is not open" in body
                assert SANDBOX.encode() in body
            else:
                assert json.loads(body)["port"] == 8123
        # Whatever stands in it of the client's is no markup.
        odd = head(sandbox="<script>alert(1)</script>", fields=browser + "sec-fetch-mode: navigate\r\n")
        _status, body = await answer_of(address, odd)
        assert b"&lt;script&gt;" in body
        assert b"<script" not in body


@on_both_loops
async def test_closed_port_is_tried_again_then_named() -> None:
    async with relaying() as (_relay, address, directory):
        target = directory.add()
        status, body = await answer_of(address, head(port=8123))
        assert status == 502
        assert json.loads(body) == {
            "sandboxId": SANDBOX,
            "message": "The sandbox is running but port is not open",
            "port": 8123,
            "code": 502,
        }
        assert target.attempts == [8123] * (len(CONNECT_PAUSES) + 1)


@on_both_loops
async def test_service_that_starts_meanwhile_is_reached() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK)

    async with relaying() as (_relay, address, directory), await Raw.connect(address) as raw:
        target = directory.add()
        await raw.send(head())
        await target.connecting.wait()
        async with guest_listening(target, 8000, guest):
            assert (await raw.receive_all()).endswith(b"ok")


@on_both_loops
async def test_guest_that_does_not_answer_is_504() -> None:
    async with relaying(NodesConfig(relay_connect_deadline=0.05)) as (_relay, address, directory):
        directory.add().hold = asyncio.Event()
        status, body = await answer_of(address, head())
        assert (status, json.loads(body)["code"]) == (504, 504)


@on_both_loops
async def test_sandbox_that_ends_while_connecting_is_not_found() -> None:
    async with relaying() as (_relay, address, directory), await Raw.connect(address) as raw:
        target = directory.add()
        target.hold = asyncio.Event()
        await raw.send(head())
        await target.connecting.wait()
        directory.targets.clear()
        target.hold.set()
        assert b"The sandbox was not found" in await raw.receive_all()


@on_both_loops
async def test_agents_internal_routes_never_reach_the_guest() -> None:
    async with relaying() as (_relay, address, directory):
        target = directory.add()
        for path in ("/init", "/init/", "//init?x=1", "/x/%2e%2e/in%69t", "http://example.test/freeze"):
            status, body = await answer_of(address, head(path, method="POST", port=49983))
            assert (status, json.loads(body)["code"]) == (404, 404)
        assert target.attempts == []


@on_both_loops
async def test_head_request_is_refused_without_a_body() -> None:
    async with relaying() as (_relay, address, _directory):
        assert await answer_of(address, head(method="HEAD")) == (502, b"")


@on_both_loops
async def test_malformed_head_is_refused() -> None:
    async with relaying() as (_relay, address, _directory):
        status, body = await answer_of(address, b"GET / HTTP/1.1\r\nhost: a\r\n folded\r\n\r\n")
        assert (status, json.loads(body)["code"]) == (400, 400)


@on_both_loops
async def test_head_in_pieces_is_put_together() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK)

    async with (
        relaying() as (_relay, address, directory),
        guest_listening(directory.add(), 8000, guest),
        await Raw.connect(address) as raw,
    ):
        raw.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head():
            await raw.send(bytes((byte,)))
        assert (await raw.receive_all()).endswith(b"ok")


@on_both_loops
async def test_head_over_its_bound_is_431() -> None:
    async with relaying(NodesConfig(relay_head_limit=1024)) as (_relay, address, _directory):
        status, _body = await answer_of(address, head(fields=f"x: {'a' * 5000}\r\n"))
        assert status == 431


@on_both_loops
async def test_head_past_its_deadline_is_408() -> None:
    async with relaying(NodesConfig(relay_head_deadline=0.05)) as (relay, address, _directory):
        status, _body = await answer_of(address, b"GET / HTTP/1.1\r\n")
        assert status == 408
        assert relay.statistics().waiting == 0


@on_both_loops
async def test_oldest_headless_connection_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "HEADLESS", 2)
    async with relaying() as (relay, address, _directory):
        first, second, third = [await Raw.connect(address) for _ in range(3)]
        with pytest.raises(ConnectionResetError):
            await first.receive()
        assert relay.statistics().waiting == 2
        for raw in (first, second, third):
            raw.close()


@on_both_loops
async def test_limit_per_sandbox_is_429_and_in_all_503() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()

    config = NodesConfig(relay_connections=3, relay_connections_per_sandbox=2)
    async with (
        relaying(config) as (relay, address, directory),
        guest_listening(directory.add(), 8000, guest),
        guest_listening(directory.add(OTHER), 8000, guest),
    ):
        held: list[Raw] = []

        async def hold(sandbox: str) -> None:
            held.append(await Raw.connect(address))
            await held[-1].send(head(sandbox=sandbox))
            await held[-1].receive_until(b"200 OK")

        await hold(SANDBOX)
        await hold(SANDBOX)
        assert (await answer_of(address, head()))[0] == 429
        await hold(OTHER)
        assert (await answer_of(address, head(sandbox=OTHER)))[0] == 503
        for raw in held:
            raw.close()
        await settled(relay)
        await hold(SANDBOX)
        held[-1].close()
        await settled(relay)


@on_both_loops
async def test_taken_address_is_a_setup_error() -> None:
    async with relaying() as (_relay, (host, port), directory):
        second = relay_module.Relay(directory, lambda _token: True, NodesConfig())
        with pytest.raises(SetupError, match=str(port)):
            await second.start(host, port)
        await second.close()


@on_both_loops
async def test_cut_resets_both_sides_at_once_and_nobody_else() -> None:
    ends: asyncio.Queue[str] = asyncio.Queue()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await read_head(reader)
        try:
            await reader.read()
            await ends.put("end of stream")
        except ConnectionResetError:
            await ends.put("reset")

    async with (
        relaying() as (relay, address, directory),
        guest_listening(directory.add(), 8000, guest),
        guest_listening(directory.add(OTHER), 8000, guest),
        await Raw.connect(address) as cut,
        await Raw.connect(address) as other,
    ):
        await cut.send(head())
        await other.send(head(sandbox=OTHER))
        await cut.receive_until(b"200 OK")
        await other.receive_until(b"200 OK")
        await relay.cut(SANDBOX)
        with pytest.raises(ConnectionResetError):
            await cut.receive()
        assert await ends.get() == "reset"
        assert (relay.statistics().spliced, relay.statistics().dropped) == (1, 1)
        # Nothing of the other was touched: it ends when its own client leaves.
        other.end()
        assert await ends.get() == "reset"


@on_both_loops
async def test_a_client_that_leaves_frees_its_place_whatever_the_guest_does() -> None:
    hanging = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        hanging.set()
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        await asyncio.sleep(0)

    async with relaying() as (relay, address, directory), guest_listening(directory.add(), 8000, guest):
        for leave in ("end", "close"):
            hanging.clear()
            async with await Raw.connect(address) as raw:
                await raw.send(head())
                await hanging.wait()
                assert relay.statistics().spliced == 1
                if leave == "end":
                    raw.end()
                    await settled(relay)
            await settled(relay)


@on_both_loops
async def test_one_owners_connections_leave_room_for_another_and_for_the_agent() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            await reader.read()

    config = NodesConfig(
        relay_connections=100, relay_connections_per_owner=8, relay_connections_per_sandbox=50
    )
    async with contextlib.AsyncExitStack() as stack:
        _relay, address, directory = await stack.enter_async_context(relaying(config))
        mine, others = directory.add(), directory.add(OTHER)
        others.owner = "another"
        for target in (mine, others):
            for port in (8000, 49983):
                await stack.enter_async_context(guest_listening(target, port, guest))

        async def held(sandbox: str, port: int) -> bytes:
            raw = await stack.enter_async_context(await Raw.connect(address))
            await raw.send(head(sandbox=sandbox, port=port))
            return await raw.receive_until(b"\r\n\r\n")

        for _ in range(7):
            assert b" 200 " in await held(SANDBOX, 8000)
        assert b" 429 " in await held(SANDBOX, 8000)
        assert b" 200 " in await held(SANDBOX, 49983)
        assert b" 429 " in await held(SANDBOX, 49983)
        assert b" 200 " in await held(OTHER, 8000)


@on_both_loops
async def test_cut_reaches_a_connection_that_is_still_connecting() -> None:
    async with relaying() as (relay, address, directory), await Raw.connect(address) as raw:
        target = directory.add()
        target.hold = asyncio.Event()
        await raw.send(head())
        await target.connecting.wait()
        await relay.cut(SANDBOX)
        with pytest.raises(ConnectionResetError):
            await raw.receive()
        assert relay.statistics().connecting == 0


@on_both_loops
async def test_close_resets_what_is_left() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()

    async with relaying() as (relay, address, directory), guest_listening(directory.add(), 8000, guest):
        spliced, waiting = await Raw.connect(address), await Raw.connect(address)
        await spliced.send(head())
        await spliced.receive_until(b"200 OK")
        await relay.close()
        for raw in (spliced, waiting):
            with pytest.raises(ConnectionResetError):
                await raw.receive()
            raw.close()
        with socket.socket() as late:
            late.setblocking(False)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.get_running_loop().sock_connect(late, address)


@on_both_loops
async def test_silent_connection_is_dropped_after_the_idle_time() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()

    config = NodesConfig(relay_idle_timeout=0.2)
    async with (
        relaying(config) as (_relay, address, directory),
        guest_listening(directory.add(), 8000, guest),
        await Raw.connect(address) as raw,
    ):
        await raw.send(head())
        await raw.receive_until(b"200 OK")
        with pytest.raises(ConnectionResetError):
            await raw.receive()


@on_both_loops
async def test_guest_reset_arrives_as_reset() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.readexactly(1)
        reset_on_close(writer)
        writer.transport.abort()

    async with (
        relaying() as (_relay, address, directory),
        guest_listening(directory.add(), 8000, guest),
        await Raw.connect(address) as raw,
    ):
        await raw.send(head(fields="content-length: 1\r\n"))
        await raw.receive_until(b"200 OK")
        await raw.send(b"x")
        with pytest.raises(ConnectionResetError):
            await raw.receive()


@on_both_loops
async def test_bytes_beyond_the_request_never_reach_the_guest() -> None:
    """A second request behind the first one is nobody's: neither at once nor later."""
    smuggled = b"POST /init HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
    got = asyncio.get_running_loop().create_future()

    async def guest(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        everything = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := await reader.read(65536):
                everything += chunk
        got.set_result(everything)

    for fields in ("", "content-length: 3\r\n", "connection: upgrade\r\nupgrade: websocket\r\n"):
        body = b"abc" if "length" in fields else b""
        got = asyncio.get_running_loop().create_future()
        async with (
            relaying() as (_relay, address, directory),
            guest_listening(directory.add(), 49983, guest),
            await Raw.connect(address) as raw,
        ):
            await raw.send(head(port=49983, fields=fields) + body + smuggled)
            await raw.send(smuggled)
            await eventually(lambda: _relay.statistics().spliced == 1)
            raw.end()
            received = await got
            assert received.endswith(b"Connection: close\r\n\r\n" + body)
            assert b"/init" not in received


@on_both_loops
async def test_a_request_waits_for_the_sandbox_that_it_wakes_and_for_its_service() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(OK)

    async with relaying() as (_relay, address, directory):
        target = directory.add()
        target.asleep = asyncio.Event()
        asking = asyncio.get_running_loop().create_task(answer_of(address, head(port=8000)))
        await eventually(lambda: _relay.statistics().connecting == 1)
        assert target.attempts == []
        target.asleep.set()
        # A service that was starting when its sandbox was paused needs longer than one tries otherwise.
        await eventually(lambda: len(target.attempts) > len(CONNECT_PAUSES) + 1)
        async with guest_listening(target, 8000, guest):
            assert await asking == (200, b"ok")


@on_both_loops
async def test_a_request_for_a_sandbox_that_cannot_be_woken_is_told_why() -> None:
    async with relaying() as (_relay, address, directory):
        target = directory.add()
        target.refuses = RuntimeFailure("no room for it")
        status, body = await answer_of(address, head(port=8000))
        assert status == 503
        assert b"no room for it" in body
        target.refuses = UnknownSandbox("it has ended")
        assert (await answer_of(address, head(port=8000)))[0] == 502
