"""Two sockets joined: half-close, resets and backpressure, on socket pairs and loopback connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from greenroom.wire.splice import CHUNK, Splice
from tests.support.guests import Raw
from tests.support.loops import eventually, on_both_loops


async def tcp_pair() -> tuple[socket.socket, Raw]:
    """The two ends of a loopback connection, both non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        near = socket.socket()
        near.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(near, listener.getsockname())
        far, _address = await loop.sock_accept(listener)
    far.setblocking(False)
    return far, Raw(near)


class Joined:
    """A running splice and the far ends of its two sockets."""

    def __init__(self, splice: Splice, client: Raw, guest: Raw, ended: asyncio.Event) -> None:
        self.splice, self.client, self.guest, self.ended = splice, client, guest, ended


@contextlib.asynccontextmanager
async def joined(first: bytes = b"head") -> AsyncIterator[Joined]:
    (client_sock, client), (guest_sock, guest) = await tcp_pair(), await tcp_pair()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    splice = Splice(loop, client_sock, guest_sock, first, memoryview(bytearray(CHUNK)), ended.set)
    splice.start()
    try:
        yield Joined(splice, client, guest, ended)
    finally:
        splice.reset()
        assert ended.is_set()
        client.close()
        guest.close()


def stuffed(raw: Raw) -> bool:
    """Send what the kernel takes; True when it takes no more."""
    try:
        raw.sock.send(b"x" * CHUNK)
    except BlockingIOError:
        return True
    return False


async def received_until_reset(raw: Raw) -> int:
    """Bytes that came before RST."""
    received = 0
    try:
        while chunk := await raw.receive():
            received += len(chunk)
    except ConnectionResetError:
        return received
    raise AssertionError("the stream ended without a reset")


@on_both_loops
async def test_first_bytes_precede_what_is_read() -> None:
    async with joined(b"one ") as it:
        await it.client.send(b"two")
        assert await it.guest.receive_until(b"two") == b"one two"


@on_both_loops
async def test_client_ends_first_and_still_gets_the_answer() -> None:
    async with joined() as it:
        await it.client.send(b"request")
        it.client.end()
        assert await it.guest.receive_all() == b"headrequest"
        await it.guest.send(b"answer")
        assert await it.client.receive_until(b"answer") == b"answer"
        assert not it.ended.is_set()
        it.guest.end()
        assert await it.client.receive() == b""
        await it.ended.wait()
        assert it.splice.moved == (11, 6)


@on_both_loops
async def test_guest_ends_first_and_still_gets_the_rest() -> None:
    async with joined() as it:
        await it.guest.send(b"answer")
        it.guest.end()
        assert await it.client.receive_all() == b"answer"
        await it.client.send(b"rest")
        it.client.end()
        assert await it.guest.receive_all() == b"headrest"
        await it.ended.wait()


@on_both_loops
async def test_reset_of_one_side_resets_the_other() -> None:
    for side in ("client", "guest"):
        async with joined() as it:
            await it.guest.receive_until(b"head")
            breaking, other = (it.client, it.guest) if side == "client" else (it.guest, it.client)
            breaking.reset()
            with pytest.raises(ConnectionResetError):
                await other.receive()
            await it.ended.wait()


@on_both_loops
async def test_reset_from_within_reaches_both_sides_before_anything_is_awaited() -> None:
    async with joined() as it:
        await it.guest.receive_until(b"head")
        it.splice.reset()
        for raw in (it.client, it.guest):
            with pytest.raises(ConnectionResetError):
                raw.sock.recv(1)


@on_both_loops
async def test_answer_given_before_a_reset_is_delivered() -> None:
    """A server that refuses an upload answers and closes with bytes unread: the kernel makes it a reset."""
    async with joined() as it:
        await it.guest.receive_until(b"head")
        await eventually(lambda: stuffed(it.client) and it.splice.held)
        await it.guest.send(b"413")
        it.guest.close()
        assert await it.client.receive_until(b"413") == b"413"
        with pytest.raises(ConnectionResetError):
            await it.client.receive()
        await it.ended.wait()


@on_both_loops
async def test_bytes_queued_before_a_reset_are_delivered_then_the_reset() -> None:
    """More than one read's worth is queued when the reset comes."""
    async with joined() as it:
        await it.guest.receive_until(b"head")
        it.guest.sock.send(b"z" * (3 * CHUNK))
        it.guest.reset()
        assert await received_until_reset(it.client) == it.splice.moved[1]
        await it.ended.wait()


@on_both_loops
async def test_slow_reader_stops_the_fast_writer() -> None:
    """Beyond the kernel's buffers at most one chunk a direction is held, and nothing is lost."""
    total = 64 << 20
    async with joined() as it:
        loop = asyncio.get_running_loop()
        sent = 0
        block = b"y" * (1 << 20)
        stalled = False
        while not stalled:
            try:
                async with asyncio.timeout(0.3):
                    await loop.sock_sendall(it.guest.sock, block)
                sent += len(block)
                assert sent < total, "nothing ever pushed back"
            except TimeoutError:
                stalled = True
        assert 0 < it.splice.held <= CHUNK
        received = 0
        it.guest.end()
        while chunk := await it.client.receive():
            assert it.splice.held <= CHUNK
            received += len(chunk)
        # The block that stalled was sent in part.
        assert sent <= received < sent + len(block)


@on_both_loops
async def test_big_transfers_in_both_directions_at_once() -> None:
    size = 10 << 20
    data = bytes(range(256)) * (size // 256)

    async def pour(into: Raw) -> None:
        await into.send(data)
        into.end()

    async with joined(b"") as it:
        results = await asyncio.gather(
            pour(it.client), pour(it.guest), it.client.receive_all(), it.guest.receive_all()
        )
        assert results[2] == data
        assert results[3] == data
        await it.ended.wait()
        assert it.splice.moved == (size, size)
        assert it.splice.held == 0
