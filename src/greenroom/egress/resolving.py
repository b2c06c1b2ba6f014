"""Looking names up: questions of our own to the platform's resolvers, UDP first, TCP for what does not fit.

Every question has a socket and so a source port of its own, and a random number: who does not see it cannot answer
it. Nothing is remembered: that is the resolvers' business, and one sandbox could read another's questions off it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from greenroom.egress import dns
from greenroom.egress.dialling import connect
from greenroom.egress.dns import Answer, Malformed
from greenroom.errors import SetupError

Server = tuple[str, int]
TRY = 2.0
"""Seconds for one server, before the next is asked."""
_ROUNDS = 2
_PARALLEL = 512
"""Questions under way, of all sandboxes."""
_LOOK = 5.0
"""Seconds for which the host's resolv.conf is believed not to have changed."""
_RESOLV_CONF = Path("/etc/resolv.conf")
_STRAY_ANSWERS = 16
"""Answers to something else that are passed over while waiting for one."""


class Unanswered(Exception):
    """No resolver gave an answer in time."""


def parse_server(text: str) -> Server:
    """`address` or `address:port`. Raises SetupError."""
    host, colon, port = text.rpartition(":")
    try:
        if not colon:
            return str(ipaddress.IPv4Address(text)), 53
        if 0 < int(port) < 1 << 16:
            return str(ipaddress.IPv4Address(host)), int(port)
    except ValueError:
        pass
    raise SetupError(
        f"[network] resolvers: {text!r} is not an IPv4 address, with or without a port, such as 192.0.2.53:53"
    )


def read_resolv_conf(text: str) -> tuple[Server, ...]:
    """The IPv4 servers that a resolv.conf(5) names."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                found.append((str(ipaddress.IPv4Address(words[1])), 53))
            except ValueError:
                continue
    return tuple(found)


class Resolver:
    """Asks the given servers; without any, those of the host, as they change."""

    def __init__(self, servers: Sequence[str], deadline: float, source: Path = _RESOLV_CONF) -> None:
        """Raises SetupError for a server that cannot be read. `deadline` is in seconds, for a whole lookup."""
        self._fixed = tuple(parse_server(text) for text in servers)
        self._deadline = deadline
        self._source = source
        self._found: tuple[Server, ...] = ()
        self._looked = float("-inf")
        self._turns = asyncio.Semaphore(_PARALLEL)

    def servers(self) -> tuple[Server, ...]:
        """Whom it asks."""
        now = time.monotonic()
        if not self._fixed and now - self._looked > _LOOK:
            self._looked = now
            try:
                self._found = read_resolv_conf(self._source.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                self._found = ()
        return self._fixed or self._found

    async def addresses(self, name: str, servers: Sequence[Server] | None = None) -> Answer:
        """The addresses of `name`, asked of `servers` or else of its own. Raises Unanswered."""
        asked = self.servers() if servers is None else servers
        try:
            async with asyncio.timeout(self._deadline), self._turns:
                for _ in range(_ROUNDS):
                    for server in asked:
                        answer = await self._ask(server, name)
                        if answer is not None and answer.code in (dns.NO_ERROR, dns.NO_SUCH_NAME):
                            return answer
        except TimeoutError:
            pass
        raise Unanswered

    async def _ask(self, server: Server, name: str) -> Answer | None:
        """One server's answer, or None when there is no good one in time."""
        number = secrets.randbelow(1 << 16)
        try:
            async with asyncio.timeout(TRY):
                answer = await _by_udp(server, number, name)
                return await _by_tcp(server, number, name) if answer.truncated else answer
        except (OSError, Malformed):
            return None


async def _by_udp(server: Server, number: int, name: str) -> Answer:
    loop = asyncio.get_running_loop()
    with socket.socket(
        socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    ) as sock:
        sock.connect(server)
        await loop.sock_sendall(sock, dns.write_query(number, name))
        for _ in range(_STRAY_ANSWERS):
            try:
                return dns.read_answer(await loop.sock_recv(sock, 4096), number, name)
            except Malformed:
                continue
    raise Malformed


async def _by_tcp(server: Server, number: int, name: str) -> Answer:
    loop = asyncio.get_running_loop()
    with socket.socket(
        socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    ) as sock:
        await connect(sock, server)
        query = dns.write_query(number, name)
        await loop.sock_sendall(sock, len(query).to_bytes(2, "big") + query)
        data = b""
        while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2], "big"):
            chunk = await loop.sock_recv(sock, 65_536)
            if not chunk:
                raise Malformed
            data += chunk
    return dns.read_answer(data[2 : 2 + int.from_bytes(data[:2], "big")], number, name)
