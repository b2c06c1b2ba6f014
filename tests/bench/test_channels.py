"""A kept connection to something like an agent: whole answers, connections that end, and the streams of commands."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.bench.channels import Channel, Ended, ended_of
from greenroom.errors import RuntimeFailure


class Agent:
    """A test double: answers each request with the next of its answers and closes after the last."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                writer.write(answer)
                await writer.drain()
                if b"connection: close" in answer:
                    break


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[Callable[[], Awaitable[socket.socket]]]:
    """A server for the block; gives what connects to it. Every connection must be closed by then."""
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def connect() -> socket.socket:
        sock = socket.create_connection(server.sockets[0].getsockname())
        sock.setblocking(False)
        return sock

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield connect
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*tasks)


Talking = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Agent, Channel]]]


@pytest.fixture
def talking() -> Talking:
    @contextlib.asynccontextmanager
    async def start(*answers: bytes) -> AsyncIterator[tuple[Agent, Channel]]:
        agent = Agent(*answers)
        async with served(agent.serve) as connect:
            channel = Channel("guest", connect, {"X-Access-Token": "t"})
            try:
                yield agent, channel
            finally:
                channel.close()

    return start


def frame(content: object, flags: int = 0) -> bytes:
    body = msgspec.json.encode(content)
    return struct.pack(">BI", flags, len(body)) + body


def output(data: bytes) -> bytes:
    return frame({"event": {"data": {"stdout": base64.b64encode(data).decode()}}})


END = frame({"event": {"end": {"exited": True}}}) + frame({}, 2)


def chunked(body: bytes, size: int = 7) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


async def test_one_connection_serves_answers_of_either_form(talking: Talking) -> None:
    answers = (
        b"HTTP/1.1 204 No Content\r\n\r\n",
        chunked(b"x" * 100),
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    )
    async with talking(*answers) as (agent, channel):
        assert await channel.ask(channel.request("GET", "/health")) == (204, b"")
        assert await channel.ask(channel.request("POST", "/list", b"{}")) == (200, b"x" * 100)
        assert await channel.ask(channel.request("GET", "/")) == (200, b"ok")
        assert agent.connections == 1
        assert all(b"X-Access-Token: t" in request for request in agent.requests)
        assert agent.requests[1].endswith(b"\r\n\r\n{}")


async def test_a_connection_that_an_answer_closes_is_made_again(talking: Talking) -> None:
    last = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    async with talking(last, last) as (agent, channel):
        request = channel.request("GET", "/")
        assert (await channel.ask(request)).status == 200
        assert (await channel.ask(request)).status == 200
        assert agent.connections == 2


async def test_a_connection_for_each_request_is_asked_for_and_closed() -> None:
    agent = Agent(*2 * [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"])
    async with served(agent.serve) as connect:
        channel = Channel("guest", connect, keep=False)
        for _ in range(2):
            assert (await channel.ask(channel.request("GET", "/"))).status == 200
        assert agent.connections == 2
        assert all(b"Connection: close" in request for request in agent.requests)


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nhalf", b"SSH-2.0-x\r\n"],
)
async def test_an_answer_that_is_not_whole_is_a_failure(talking: Talking, answer: bytes) -> None:
    async with talking(answer) as (_, channel):
        with pytest.raises(RuntimeFailure, match="did not answer"):
            await channel.ask(channel.request("GET", "/"))


async def test_nobody_is_waited_for_for_ever() -> None:
    async def never() -> socket.socket:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(RuntimeFailure, match="within 0 s"):
        await Channel("guest", never).ask(b"", 0.01)


async def test_a_command_runs_to_its_end(talking: Talking) -> None:
    async with talking(chunked(output(b"one\n") + output(b"two\n") + END)) as (agent, channel):
        assert await channel.run("echo one; echo two") == b"one\ntwo\n"
        (request,) = agent.requests
        assert b'"echo one; echo two"' in request


async def test_a_command_that_fails_says_what_it_said(talking: Talking) -> None:
    failed = frame({"event": {"end": {"exitCode": 3, "exited": True}}})
    async with talking(chunked(output(b"no room") + failed)) as (_, channel):
        with pytest.raises(RuntimeFailure, match="status 3 in the guest: no room"):
            await channel.run("false")


async def test_a_refused_command_is_a_failure(talking: Talking) -> None:
    async with talking(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n") as (_, channel):
        with pytest.raises(RuntimeFailure, match="401"):
            await channel.run("true")


@given(pieces=st.lists(st.binary(max_size=40), max_size=6), code=st.integers(0, 255))
def test_a_stream_gives_back_what_was_put_out(pieces: list[bytes], code: int) -> None:
    end = frame({"event": {"end": {"exitCode": code} if code else {}}})
    stream = frame({"event": {"start": {"pid": 7}}}) + b"".join(map(output, pieces)) + end + frame({}, 2)
    assert ended_of(stream) == Ended(code, b"".join(pieces))


def test_a_command_that_a_signal_ended_has_not_succeeded() -> None:
    assert ended_of(frame({"event": {"end": {"status": "signal: killed"}}})).status != 0


@given(st.data())
def test_a_stream_that_is_cut_off_is_never_taken_for_an_end(data: st.DataObject) -> None:
    stream = output(b"word\n") + frame({"event": {"end": {}}})
    cut = data.draw(st.integers(0, len(stream) - 1))
    with pytest.raises(RuntimeFailure):
        ended_of(stream[:cut])


def test_a_stream_that_ends_with_an_error_is_one() -> None:
    with pytest.raises(RuntimeFailure, match="no such user"):
        ended_of(frame({"error": {"code": "not_found", "message": "no such user"}}, 2))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(stream: bytes) -> None:
    with contextlib.suppress(RuntimeFailure):
        ended_of(stream)
