"""The claim over a node's HTTP API: a real node process on the simulated engine, one keep-alive connection.

The hand-over is the simulated engine's, which takes no time, so what is measured is the server, the claim engine
and the journal. Each claim has a `GET /healthz` of the same server right beside it, and the two change places from
pair to pair. The client is a socket and as little parsing as there can be, because a library's own work would be as
long as the claim. The sandbox's end and the wait for a full pool do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from greenroom.bench.report import (
    RATIO_COLUMNS,
    TAIL_COLUMNS,
    Meter,
    Table,
    Target,
    ratio_cells,
    reason,
    tail_cells,
)
from greenroom.bench.rounds import by_round, turns
from greenroom.bench.summaries import Ratio, Sample, Summary, compare, summarise
from greenroom.errors import GreenroomError, NodeUnavailable, RuntimeFailure, from_wire
from greenroom.wire.messages import ClaimRequest, NodeStatus, Sandbox, Size

ROUND = 100
"""Pairs of a round, within which ratios are made."""
DEADLINE = 15.0
"""Seconds for one answer."""
P50_LIMIT = 1.0


class HttpRow(msgspec.Struct, frozen=True, kw_only=True):
    """One claim and the trivial request beside it, in milliseconds."""

    round: int
    claim_ms: float | None = None
    trivial_ms: float | None = None
    error: str = ""


class HttpFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The claim beside the trivial request."""

    runtime: Literal["simulated"] = "simulated"
    trivial: Literal["GET /healthz"] = "GET /healthz"
    claim_ms: Summary
    trivial_ms: Summary
    to_trivial: Ratio
    rows: list[HttpRow]


class Connection:
    """One HTTP/1.1 connection that is kept, for answers with a Content-Length or without a body."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self._sock = sock
        self._host = host
        self._loop = asyncio.get_running_loop()

    def request(self, method: str, path: str, token: str, body: bytes = b"") -> bytes:
        """The bytes of a request, to be made before anything is timed."""
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._host}",
            f"Authorization: Bearer {token}",
            f"Content-Length: {len(body)}",
            "Content-Type: application/json",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises NodeUnavailable when none comes."""
        try:
            async with asyncio.timeout(DEADLINE):
                await self._loop.sock_sendall(self._sock, request)
                answer = bytearray()
                while (whole := _complete(answer)) is None:
                    chunk = await self._loop.sock_recv(self._sock, 65536)
                    if not chunk:
                        raise NodeUnavailable("the node closed the connection")
                    answer += chunk
                return whole
        except (OSError, TimeoutError) as error:
            raise NodeUnavailable(f"the node did not answer: {error or type(error).__name__}") from error


def _complete(answer: bytearray) -> tuple[int, bytes] | None:
    """Status and body once all of an answer is there."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(answer[:end]).lower()
    _, found, rest = head.partition(b"\r\ncontent-length:")
    length = int(rest.split(b"\r\n", 1)[0]) if found else 0
    body = bytes(answer[end + 4 :])
    return (int(head.split(b" ", 2)[1]), body) if len(body) >= length else None


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """A connection to the server at `url`, closed after the block. Raises NodeUnavailable."""
    parts = urllib.parse.urlsplit(url)
    sock = socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async with asyncio.timeout(DEADLINE):
                await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        except (OSError, TimeoutError) as error:
            raise NodeUnavailable(f"cannot connect to {parts.netloc}") from error
        yield Connection(sock, parts.netloc)
    finally:
        sock.close()


class Node:
    """The node's API as far as it is needed here, on one connection."""

    def __init__(self, connection: Connection, tokens: dict[str, str], template: str, size: Size) -> None:
        """`tokens` are the credentials of the `master` and the `operator`."""
        self._connection = connection
        self._tokens = tokens
        self._template = template
        self._size = size
        self._trivial = connection.request("GET", "/healthz", tokens["operator"])

    async def claim(self) -> tuple[float, Sandbox]:
        """Milliseconds of a claim, and what it gave. Raises what the node answers."""
        wanted = ClaimRequest(
            key=f"bench-{secrets.token_hex(8)}", template=self._template, size=self._size, ttl=120.0
        )
        body = msgspec.json.encode(wanted)
        request = self._connection.request("POST", "/v1/claims", self._tokens["master"], body)
        took, answer = await self._timed(request, 201)
        return took, msgspec.json.decode(answer, type=Sandbox)

    async def trivial(self) -> float:
        """Milliseconds of `GET /healthz`."""
        return (await self._timed(self._trivial, 200))[0]

    async def release(self, sandbox_id: str) -> None:
        """End a sandbox, then wait until the pool is full again. Raises RuntimeFailure after DEADLINE seconds."""
        token = self._tokens["operator"]
        await self._timed(self._connection.request("DELETE", f"/v1/sandboxes/{sandbox_id}", token), 204)
        await self.full()

    async def full(self) -> None:
        """Wait until the pool has all its members. Raises RuntimeFailure after DEADLINE seconds."""
        asking = self._connection.request("GET", "/v1/status", self._tokens["operator"])
        end = time.monotonic() + DEADLINE
        while True:
            _, answer = await self._timed(asking, 200)
            pools = msgspec.json.decode(answer, type=NodeStatus).pools
            if pools and all(pool.warm == pool.target and not pool.starting for pool in pools):
                return
            if time.monotonic() > end:
                raise RuntimeFailure("the simulated pool is not full again in time")

    async def _timed(self, request: bytes, expected: int) -> tuple[float, bytes]:
        began = time.perf_counter()
        status, body = await self._connection.send(request)
        took = (time.perf_counter() - began) * 1000
        if status != expected:
            try:
                raise from_wire(status, msgspec.json.decode(body))
            except msgspec.DecodeError:
                raise from_wire(status, None) from None
        return took, body


async def measure(
    url: str, tokens: dict[str, str], template: str, size: Size, count: int, meter: Meter
) -> HttpFigures:
    """`count` pairs against the node at `url`, which must be on the simulated engine. Raises GreenroomError."""
    async with connected(url) as connection:
        node = Node(connection, tokens, template, size)
        meter.say(f"{count} claims over a node's HTTP API, on the simulated engine")
        await node.full()
        for _ in range(min(count, ROUND)):  # bring code into memory; these do not count
            await _pair(node, 0, 0)
        meter.begin(count)
        rows: list[HttpRow] = []
        for index in range(count):
            rows.append(await _pair(node, 1 + index // ROUND, index))
            meter.advance()
    return summarise_run(rows)


async def _pair(node: Node, number: int, index: int) -> HttpRow:
    """A claim and a trivial request, then the claim's end."""
    took: dict[str, float] = {}
    made: Sandbox | None = None
    try:
        for what in turns(["claim", "trivial"], index):
            if what == "claim":
                took["claim"], made = await node.claim()
            else:
                took["trivial"] = await node.trivial()
        if made is not None:
            await node.release(made.sandbox_id)
    except GreenroomError as error:
        if isinstance(error, NodeUnavailable):
            raise  # the one connection is gone
        return HttpRow(round=number, error=reason(error))
    return HttpRow(round=number, claim_ms=took["claim"], trivial_ms=took["trivial"])


def summarise_run(rows: list[HttpRow]) -> HttpFigures:
    """The figures over all rows."""

    def claim(row: HttpRow) -> Sample:
        return Sample(row.claim_ms, row.error)

    def trivial(row: HttpRow) -> Sample:
        return Sample(row.trivial_ms, row.error)

    return HttpFigures(
        claim_ms=summarise(map(claim, rows)),
        trivial_ms=summarise(map(trivial, rows)),
        to_trivial=compare(by_round(rows, claim), by_round(rows, trivial)),
        rows=rows,
    )


def tables(figures: HttpFigures) -> list[Table]:
    """For people."""
    named = [
        ("claim", figures.claim_ms),
        (figures.trivial, figures.trivial_ms),
    ]
    return [
        Table(
            "Claim over a node's HTTP API, one connection, simulated VMs, ms",
            ["", *TAIL_COLUMNS],
            [[name, *tail_cells(summary)] for name, summary in named],
        ),
        Table("Claim over the trivial request", RATIO_COLUMNS, [ratio_cells(figures.to_trivial)]),
    ]


def targets(figures: HttpFigures) -> list[Target]:
    """What is aimed at."""
    return [Target(name="claim over HTTP, p50", value=figures.claim_ms.p50, limit=P50_LIMIT, unit=" ms")]


def failures(figures: HttpFigures) -> list[tuple[str, Summary]]:
    """The summaries in which each failure is counted once."""
    return [("claim over HTTP", figures.claim_ms)]
