"""A sandbox's way out without a VM: limits, deadlines, changes of rules, and its end.

The "guest" is a client of this process on loopback. Only the kernel's answer to where it meant to go is stood in for;
what it reaches are real servers in the stand-in internet.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address

import pytest

from greenroom.config import NetworkConfig
from greenroom.egress import connections
from greenroom.egress.boxes import Box, Common
from greenroom.egress.counting import Tally
from greenroom.egress.dialling import dial, is_own
from greenroom.egress.resolving import Resolver, Unanswered, parse_server, read_resolv_conf
from greenroom.errors import SetupError
from greenroom.wire.messages import Network
from greenroom.wire.network import parse
from greenroom.wire.splice import CHUNK
from tests.support.internet import Internet
from tests.support.waiting import until

EVERYTHING = "0.0.0.0/0"


class Guest:
    """Opens connections that a box serves as if they had been redirected to it."""

    def __init__(self, box: Box, listener: tuple[str, int], dns: tuple[str, int]) -> None:
        self.box = box
        self.listener = listener
        self.dns = dns
        self.meant: dict[int, tuple[IPv4Address, int]] = {}
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(
        self, address: str, port: int = 80
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            own = probe.getsockname()
        self.meant[own[1]] = (IPv4Address(address), port)
        reader, writer = await asyncio.open_connection(*self.listener, local_addr=own)
        self._writers.append(writer)
        return reader, writer

    async def get(self, address: str, head: str = "GET / HTTP/1.1\r\nHost: x.test\r\n\r\n") -> str:
        """The whole answer; empty when the connection was reset."""
        try:
            reader, writer = await self.connect(address)
            writer.write(head.encode())
            answer = (await reader.read()).decode()
            writer.close()
        except OSError:
            return ""
        return answer

    def original(self, sock: socket.socket) -> tuple[IPv4Address, int]:
        return self.meant[sock.getpeername()[1]]

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


Make = Callable[..., Guest]


@pytest.fixture
async def guest(internet: Internet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes a guest whose box has these rules and settings."""
    made: list[Guest] = []

    def make(network: Network | None = None, **settings: float | int | str | list[str]) -> Guest:
        config = NetworkConfig(**({"resolvers": [f"{internet.dns}:53"]} | settings))  # type: ignore[arg-type]
        listener, tcp = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        common = Common(
            config, Resolver(config.resolvers, config.dns_deadline), Tally(), memoryview(bytearray(CHUNK))
        )
        where, dns = listener.getsockname(), udp.getsockname()
        box = Box("sandbox", parse(network or Network(), config), [listener, udp, tcp], common)
        one = Guest(box, where, dns)
        monkeypatch.setattr(connections, "original_destination", one.original)
        made.append(one)
        return one

    yield make
    for one in made:
        one.box.close()
        await until(lambda one=one: one.box.tally.open == 0)
        await one.close()


def outcomes(guest: Guest) -> dict[str, int]:
    return dict(guest.box.tally.connections)


async def drip(guest: Guest, address: str) -> asyncio.StreamReader:
    """A connection that goes on for ever."""
    reader, writer = await guest.connect(address)
    writer.write(b"GET /drip HTTP/1.1\r\nHost: x.test\r\n\r\n")
    await reader.readuntil(b"drip\n")
    return reader


async def is_reset(reader: asyncio.StreamReader) -> bool:
    try:
        await reader.read()
    except ConnectionResetError:
        return True
    return False


async def test_what_is_allowed_is_joined_and_counted(guest: Make, internet: Internet) -> None:
    one = guest()
    assert internet.one in await one.get(internet.one)
    await until(lambda: one.box.tally.open == 0)
    counts = one.box.tally.counts()
    assert counts.connections == {"allowed": 1}
    assert counts.bytes_out > 20
    assert counts.bytes_in > 50


async def test_what_is_denied_is_reset(guest: Make, internet: Internet) -> None:
    one = guest(Network(deny_out=[internet.one]))
    for address in (internet.one, "10.0.0.1", "127.0.0.1", "169.254.169.254", internet.host_side):
        assert await one.get(address) == "", address
    assert outcomes(one) == {"denied": 5}


async def test_who_cannot_be_reached_is_told_apart(guest: Make, internet: Internet) -> None:
    one = guest(dial_deadline=0.2)
    assert await one.get(internet.nowhere) == ""
    reader, _ = await one.connect(internet.one, 9)
    assert await is_reset(reader)
    assert outcomes(one) == {"unreachable": 2}


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("", "denied"),
        ("GET / HT", "denied"),
        ("SSH-2.0-x\r\n", "denied"),
        ("GET / HTTP/1.1\r\nHost: one.test\r\n\r\n", "allowed"),
    ],
)
async def test_where_a_name_is_needed_silence_and_other_protocols_are_refused(
    guest: Make, internet: Internet, said: str, outcome: str
) -> None:
    one = guest(Network(allow_out=["one.test"], deny_out=[EVERYTHING]), peek_deadline=0.3)
    answer = await one.get(internet.far, said)
    assert outcomes(one) == {outcome: 1}
    assert (internet.one in answer) == (outcome == "allowed")


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("gone.test", "unresolved"), ("lost.test", "unresolved"), ("inward.test", "denied")],
)
async def test_an_allowed_name_that_leads_nowhere_or_inwards_is_refused(
    guest: Make, internet: Internet, name: str, outcome: str
) -> None:
    one = guest(Network(allow_out=["*.test"], deny_out=[EVERYTHING]), dns_deadline=0.5)
    assert await one.get(internet.one, f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n") == ""
    assert outcomes(one) == {outcome: 1}


async def test_rules_that_are_replaced_cut_what_they_do_not_allow_and_nothing_else(
    guest: Make, internet: Internet
) -> None:
    one = guest()
    first, second = await drip(one, internet.one), await drip(one, internet.two)
    one.box.change(parse(Network(deny_out=[internet.one]), one.box.settings))
    assert await is_reset(first)
    await second.readuntil(b"drip\n")
    one.box.change(parse(Network(allow_out=["x.test"], deny_out=[EVERYTHING]), one.box.settings))
    # It was allowed by its address: nobody knows which name it would have told.
    assert await is_reset(second)
    assert outcomes(one) == {"allowed": 2, "cut": 2}


async def test_rules_replaced_while_a_connection_is_under_way_hold_for_it(
    guest: Make, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = guest()

    async def slow(*arguments: object) -> tuple[socket.socket, IPv4Address]:
        result = await dial(*arguments)  # type: ignore[arg-type]
        one.box.change(parse(Network(deny_out=[internet.one]), one.box.settings))
        return result

    monkeypatch.setattr(connections, "dial", slow)
    assert await one.get(internet.one) == ""
    assert outcomes(one) == {"denied": 1}


async def test_a_silent_connection_ends(guest: Make, internet: Internet) -> None:
    one = guest(idle_timeout=5.0)
    reader, writer = await one.connect(internet.one)
    writer.write(b"GET / HT")
    await until(lambda: outcomes(one) == {"allowed": 1})
    now = asyncio.get_running_loop().time()
    one.box.look(now)
    assert outcomes(one) == {"allowed": 1}
    one.box.look(now + 6.0)
    assert await is_reset(reader)
    assert outcomes(one) == {"allowed": 1, "idle": 1}


async def test_a_sandbox_has_so_many_connections_and_no_more(guest: Make, internet: Internet) -> None:
    one = guest(connections_per_sandbox=2)
    kept = [await drip(one, internet.one) for _ in range(2)]
    assert await one.get(internet.one) == ""
    assert outcomes(one)["limited"] == 1
    await kept[0].readuntil(b"drip\n")


async def test_connections_that_come_too_fast_are_reset(guest: Make, internet: Internet) -> None:
    one = guest(new_connections_per_second=1)
    for _ in range(5):
        await one.get("10.0.0.1")
    assert outcomes(one)["denied"] >= 2
    assert outcomes(one)["limited"] >= 1


async def test_the_end_of_a_sandbox_resets_all_it_has_also_what_is_under_way(
    guest: Make, internet: Internet
) -> None:
    one = guest(Network(allow_out=[internet.two, "a.test"], deny_out=[EVERYTHING]))
    open_one = await drip(one, internet.two)
    asked, _ = await one.connect(internet.one)  # waits to be named
    await until(lambda: one.box.tally.open == 2)
    one.box.close()
    assert await is_reset(open_one)
    assert await is_reset(asked)
    await until(lambda: one.box.tally.open == 0)


async def test_dns_asks_no_more_than_it_may(guest: Make, internet: Internet) -> None:
    one = guest(dns_per_second=1)
    query = bytes.fromhex("0007010000010000000000000378797a04746573740000010001")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.setblocking(False)
        for _ in range(6):
            asker.sendto(query, one.dns)
        await until(lambda: sum(one.box.tally.dns.values()) == 6)
    assert one.box.tally.dns["limited"] >= 3
    assert one.box.tally.dns["empty"] <= 3


def test_the_hosts_own_addresses_are_known_without_a_list(internet: Internet) -> None:
    assert is_own(IPv4Address(internet.host_side))
    assert is_own(IPv4Address("127.0.0.1"))
    assert not is_own(IPv4Address(internet.one))
    assert not is_own(IPv4Address(internet.far))


async def test_the_first_address_that_answers_is_taken(internet: Internet) -> None:
    sock, address = await dial([IPv4Address(internet.nowhere), IPv4Address(internet.two)], 80, 0.3)
    sock.close()
    assert address == IPv4Address(internet.two)
    with pytest.raises(OSError, match="no address"):
        await dial([], 80, 1.0)


async def test_a_resolver_that_is_silent_is_followed_by_the_next(internet: Internet) -> None:
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 0))
    with silent:
        port = silent.getsockname()[1]
        both = Resolver([f"127.0.0.1:{port}", f"{internet.dns}:53"], 5.0)
        assert (await both.addresses("one.test")).addresses == (IPv4Address(internet.one),)
        with pytest.raises(Unanswered):
            await Resolver([f"127.0.0.1:{port}"], 0.2).addresses("one.test")
    many = await Resolver([f"{internet.dns}:53"], 5.0).addresses("many.test")
    assert len(many.addresses) > 40  # by TCP: it does not fit into a datagram


def test_resolvers_are_read_from_settings_and_from_the_host() -> None:
    assert parse_server("192.0.2.1") == ("192.0.2.1", 53)
    assert parse_server("192.0.2.1:5353") == ("192.0.2.1", 5353)
    for text in ("", "dns.example", "192.0.2.1:0", "192.0.2.1:x", "::1"):
        with pytest.raises(SetupError, match="resolvers"):
            parse_server(text)
    text = "search x\nnameserver ::1\nnameserver 192.0.2.1\n# nameserver 192.0.2.9\nnameserver\n"
    assert read_resolv_conf(text) == (("192.0.2.1", 53),)
