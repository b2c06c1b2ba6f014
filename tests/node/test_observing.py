"""Samples and logs: what a guest may answer, and what is kept of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from greenroom.errors import RuntimeFailure
from greenroom.node.observing import ENTRIES, History, Sampler, sample
from greenroom.runtime.engine import VmInfo
from greenroom.wire.tasks import spawn, stop
from tests.support.waiting import until

READING = {
    "ts": 1, "cpu_count": 2, "cpu_used_pct": 12.5, "mem_total": 100, "mem_used": 50, "mem_cache": 5,
    "mem_total_mib": 0, "disk_used": 7, "disk_total": 9,
}  # fmt: skip


class Guest:
    """A test double for a VM: its agent is a small server here, which answers with what the test says."""

    def __init__(self) -> None:
        self.name = "guest"
        self.ended = asyncio.Event()
        self.status = 200
        self.body = json.dumps(READING).encode()
        self.heads: list[str] = []
        self.address: Any = None

    async def connect(self, port: int, deadline: float = 10.0) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self.address)
        except BaseException:
            sock.close()
            raise
        return sock

    def describe(self) -> VmInfo:
        return VmInfo(name=self.name, state="running", pid=None, uid=None, netns=None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            head = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(self.body)}\r\n\r\n"
            writer.write(head.encode() + self.body)
            await writer.drain()
            writer.close()


@pytest.fixture
async def guest() -> AsyncIterator[Guest]:
    made = Guest()
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
        made.address = server.sockets[0].getsockname()
        yield made


async def test_a_sample_is_what_the_guest_says_with_the_hosts_time(guest: Guest) -> None:
    taken = await sample(guest, "secret", 5.0)
    assert (taken.timestamp, taken.cpu_count, taken.cpu_used_pct, taken.mem_used) == (5.0, 2, 12.5, 50)
    assert "X-Access-Token: secret" in guest.heads[0]
    await sample(guest, None, 5.0)
    assert "X-Access-Token" not in guest.heads[1]


LIES = [
    json.dumps({**READING, "cpu_count": 1 << 64}).encode(),
    json.dumps({**READING, "cpu_used_pct": -1e308}).encode(),
    json.dumps({**READING, "mem_total": -1}).encode(),
    b'{"zz":' + b"[" * 60_000 + b"]" * 60_000 + b"," + json.dumps(READING).encode()[1:],
]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"cpu_count": "many"}', b"\xff" * 100, b"[" * 5000, *LIES], ids=range(10)
)
async def test_a_guest_that_answers_anything_else_gives_no_sample(guest: Guest, body: bytes) -> None:
    guest.body = body
    with pytest.raises(RuntimeFailure):
        await sample(guest, None, 5.0)
    guest.status = 500
    with pytest.raises(RuntimeFailure):
        await sample(guest, None, 5.0)


async def test_the_sampler_goes_on_past_a_guest_that_does_not_answer(guest: Guest) -> None:
    silent, good, bad = Guest(), History(), History()
    silent.address = ("127.0.0.1", 1)
    sampler = Sampler(lambda: [(bad, silent, None), (good, guest, None)], lambda: 1.0, 0.001)
    running = spawn(sampler.run(), "samples")
    await until(lambda: len(good.samples) >= 2)
    await stop(running)
    assert not bad.samples


def test_a_history_is_bounded() -> None:
    history = History()
    for number in range(ENTRIES + 10):
        history.note(float(number), "something", "warn", number=str(number))
    assert len(history.entries) == ENTRIES
    assert history.entries[0].timestamp == 10.0
    assert history.entries[-1].fields == {"number": str(ENTRIES + 9)}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 2" + b"2" * 5000 + b" OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 \xb2\xb2\xb2 OK\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["status", "length", "negative", "digits of another kind"],
)
async def test_a_guest_that_lies_about_its_answer_costs_nobody_else_a_sample(
    guest: Guest, answer: bytes
) -> None:
    liar, good, bad = Guest(), History(), History()

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

    async with await asyncio.start_server(lie, "127.0.0.1", 0) as server:
        liar.address = server.sockets[0].getsockname()
        with pytest.raises(RuntimeFailure, match="not HTTP"):
            await sample(liar, None, 1.0)
        running = spawn(
            Sampler(lambda: [(bad, liar, None), (good, guest, None)], lambda: 1.0, 0.001).run(), "samples"
        )
        await until(lambda: len(good.samples) >= 2)
        await stop(running)
    assert not bad.samples


async def test_nothing_that_a_guest_does_ends_the_sampler(
    guest: Guest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd, good = Guest(), History()

    async def connect(port: int, deadline: float = 10.0) -> socket.socket:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr(odd, "connect", connect)
    running = spawn(
        Sampler(lambda: [(History(), odd, None), (good, guest, None)], lambda: 1.0, 0.001).run(), "samples"
    )
    await until(lambda: len(good.samples) >= 2)
    await stop(running)
    assert "nobody foresaw this" in caplog.text
