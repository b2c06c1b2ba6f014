"""Answering a sandbox's DNS questions, by UDP and TCP, whatever server the guest thought it asked.

Only A questions lead anywhere; all others are answered empty, AAAA because guests have no IPv6, the rest because
nothing but addresses is needed and every kind of record is a channel. Addresses that no sandbox may reach are left
out of answers.
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import IPv4Address

from greenroom.config import NetworkConfig
from greenroom.egress import dns
from greenroom.egress.counting import Tally
from greenroom.egress.dialling import is_own
from greenroom.egress.limits import Bucket
from greenroom.egress.resolving import Resolver, Unanswered
from greenroom.egress.rules import may_resolve
from greenroom.wire.network import Rules
from greenroom.wire.splice import reset
from greenroom.wire.tasks import spawn

_BATCH = 32
"""Questions read at one turn of the event loop."""
_LARGEST = 1024
"""Bytes of a question; a longer one is cut and so not understood."""
_TCP_CONNECTIONS = 16
"""DNS connections of one sandbox at the same time."""
_TCP_QUESTIONS = 64
"""On one connection."""


def reachable(rules: Rules, addresses: tuple[IPv4Address, ...]) -> tuple[IPv4Address, ...]:
    """The addresses of an answer that sandboxes may reach at all."""
    return tuple(address for address in addresses if address not in rules.denied and not is_own(address))


class Forwarder:
    """The DNS server of one sandbox. `rules` may be replaced at any time."""

    def __init__(
        self,
        rules: Rules,
        udp: socket.socket,
        tcp: socket.socket,
        resolver: Resolver,
        settings: NetworkConfig,
        tally: Tally,
    ) -> None:
        self.rules = rules
        self._udp = udp
        self._tcp = tcp
        self._resolver = resolver
        self._settings = settings
        self._tally = tally
        self._bucket = Bucket(settings.dns_per_second, 2 * settings.dns_per_second)
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(udp, self._readable)
        self._loop.add_reader(tcp, self._acceptable)
        self._connections = 0

    def close(self) -> None:
        """Stop answering; the sockets are closed."""
        for sock in (self._udp, self._tcp):
            self._loop.remove_reader(sock)
            sock.close()
        for task in self._tasks:
            task.cancel()

    def _start(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _readable(self) -> None:
        for _ in range(_BATCH):
            try:
                data, sender = self._udp.recvfrom(_LARGEST)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                # A guest that went away: an ICMP error of an earlier answer.
                continue
            if not self._admitted():
                continue
            self._start(spawn(self._answer_udp(data, sender), "DNS question"))

    def _admitted(self) -> bool:
        """Whether one more question may be looked at now; it is counted if not."""
        if self._waiting < self._settings.dns_parallel and self._bucket.take(self._loop.time()):
            return True
        self._tally.question("limited")
        return False

    async def _answer_udp(self, data: bytes, sender: tuple[str, int]) -> None:
        reply = await self._answer(data)
        if reply is not None:
            try:
                self._udp.sendto(reply, sender)
            except OSError:
                return

    async def _answer(self, data: bytes) -> bytes | None:
        """The bytes to answer, or None for silence."""
        try:
            question = dns.read_question(data)
        except dns.Malformed:
            self._tally.question("malformed")
            return None
        if isinstance(question, bytes):
            self._tally.question("malformed")
            return question
        self._waiting += 1
        try:
            answer = await self._judge(question)
        finally:
            self._waiting -= 1
        return dns.write_answer(question, answer)

    async def _judge(self, question: dns.Question) -> dns.Answer:
        rules = self.rules
        if not may_resolve(rules, question.name):
            self._tally.question("refused")
            return dns.Answer(dns.REFUSED)
        if question.kind != dns.A or not question.name:
            self._tally.question("empty")
            return dns.Answer(dns.NO_ERROR)
        servers = None
        if rules.named and rules.dns_servers:
            servers = [(text, 53) for text in rules.dns_servers if not is_own(IPv4Address(text))]
        try:
            answer = await self._resolver.addresses(question.name, servers)
        except Unanswered:
            self._tally.question("failed")
            return dns.Answer(dns.SERVER_FAILURE)
        addresses = reachable(self.rules, answer.addresses)
        self._tally.question("answered" if addresses else "empty")
        return dns.Answer(answer.code, addresses, answer.ttl)

    def _acceptable(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, _ = self._tcp.accept()
            except OSError:
                return
            if self._connections >= _TCP_CONNECTIONS:
                self._tally.question("limited")
                reset(sock)
                continue
            sock.setblocking(False)
            self._start(spawn(self._converse(sock), "DNS connection"))

    async def _converse(self, sock: socket.socket) -> None:
        """Answer the questions of one TCP connection, one after the other (RFC 7766)."""
        self._connections += 1
        try:
            async with asyncio.timeout(2 * self._settings.dns_deadline):
                for _ in range(_TCP_QUESTIONS):
                    size = int.from_bytes(await self._exactly(sock, 2), "big")
                    if size > _LARGEST:
                        return
                    data = await self._exactly(sock, size)
                    if not self._admitted() or (reply := await self._answer(data)) is None:
                        return
                    await self._loop.sock_sendall(sock, len(reply).to_bytes(2, "big") + reply)
        except (OSError, EOFError):
            pass
        finally:
            self._connections -= 1
            reset(sock)

    async def _exactly(self, sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = await self._loop.sock_recv(sock, size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data
