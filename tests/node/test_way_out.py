"""The whole way out but for the VM: real rules, redirection, egress process and dialling; the guest is a namespace.

What would be a tap is a veth whose other end lies in a second namespace, which has a guest's address and route. The
tests with real microVMs are in `tests/platform/test_network.py`; these take milliseconds a question.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.config import Config, NetworkConfig, VmConfig
from greenroom.node.egress import Gate
from greenroom.runtime import namespaces
from greenroom.runtime.engine import Vm
from greenroom.runtime.firewall import ruleset
from greenroom.runtime.namespaces import Outlets
from greenroom.runtime.simulated import SimulatedRuntime, SimulatedVm
from greenroom.wire.messages import Network
from greenroom.wire.network import Rules, parse
from tests.node.conftest import SMALL
from tests.support.internet import Internet, run

ALL = "0.0.0.0/0"


class Wired(SimulatedRuntime):
    """An engine whose VMs are pairs of namespaces."""

    def __init__(self, settings: NetworkConfig) -> None:
        super().__init__()
        self._baseline = ruleset(parse(Network(), settings))
        self.guests: list[Guest] = []

    def make(self) -> Guest:
        guest = Guest(self._baseline)
        self.guests.append(guest)
        return guest

    async def restrict(self, vm: Vm, rules: Rules) -> None:
        await asyncio.to_thread(namespaces.change_rules, vm.name, ruleset(rules))

    def open_outlets(self, vm: Vm) -> Outlets | None:
        handle = namespaces.open_handle(vm.name)
        try:
            return namespaces.open_outlets(handle)
        finally:
            os.close(handle)


class Guest:
    """A namespace where a VM's would be, and one behind it where the guest would be."""

    def __init__(self, rules: str) -> None:
        tag = secrets.token_hex(3)
        self.outer, self.inner = f"gr-test-{tag}", f"gr-guest-{tag}"
        self.vm = SimulatedVm(self.outer, "base", SMALL, "golden")
        for name in (self.outer, self.inner):
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            "tap0",
            "netns",
            self.outer,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.inner,
        )
        for name, link, address in ((self.outer, "tap0", "10.0.2.2"), (self.inner, "eth0", "10.0.2.15")):
            inside = ("ip", "-n", name)
            run(*inside, "addr", "add", f"{address}/24", "dev", link)
            run(*inside, "link", "set", "dev", link, "up")
            run(*inside, "link", "set", "dev", "lo", "up")
        run("ip", "-n", self.inner, "route", "add", "default", "via", "10.0.2.2")
        namespaces.change_rules(self.outer, rules)

    async def run(self, *command: str) -> tuple[int, str]:
        """A command where the guest is: its status and output."""
        process = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", self.inner, *command,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    async def get(self, url: str, *options: str) -> dict[str, Any] | int:
        """What the server that curl reached says, or curl's status."""
        status, output = await self.run("curl", "-sS", "-m", "10", "--noproxy", "*", *options, url)
        return status or dict(json.loads(output))

    def close(self) -> None:
        for name in (self.outer, self.inner):
            run("ip", "netns", "del", name)


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    made = Internet(tmp_path_factory.mktemp("internet"))
    yield made
    made.close()


class Way:
    """A gate, and guests behind it."""

    def __init__(self, gate: Gate, engine: Wired) -> None:
        self.gate = gate
        self.engine = engine

    async def guest(self, **network: Any) -> Guest:
        made = self.engine.make()
        await self.gate.apply(made.vm, "sandbox", Network(**network))
        return made

    async def change(self, guest: Guest, **network: Any) -> None:
        await self.gate.apply(guest.vm, "sandbox", Network(**network))


@pytest.fixture
def settings(internet: Internet) -> NetworkConfig:
    return NetworkConfig(resolvers=[f"{internet.dns}:53"])


@pytest.fixture
async def way(settings: NetworkConfig, tmp_path: Path) -> AsyncIterator[Way]:
    engine = Wired(settings)
    try:
        async with Gate(engine, Config(vm=VmConfig(engine="qemu"), network=settings), tmp_path, 0) as gate:
            yield Way(gate, engine)
    finally:
        for guest in engine.guests:
            guest.close()


def at(answer: dict[str, Any] | int) -> str:
    assert isinstance(answer, dict), answer
    return str(answer["at"])


async def test_nobody_gets_out_before_the_outlets_are_open(way: Way, internet: Internet) -> None:
    guest = way.engine.make()
    assert await guest.get(f"http://{internet.one}/") == 7
    await way.gate.apply(guest.vm, "sandbox", Network())
    assert at(await guest.get(f"http://{internet.one}/")) == internet.one
    await way.gate.close(guest.vm)
    assert await guest.get(f"http://{internet.one}/") == 7


async def test_denied_ranges_are_refused_at_once_whatever_is_allowed(way: Way, internet: Internet) -> None:
    guest = await way.guest(allow_out=[ALL])
    for address in (
        "10.0.2.2:47001", "10.0.2.2:47053", "10.9.9.9", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254",
        "198.18.0.1", "192.0.0.8", "240.0.0.1",
    ):  # fmt: skip
        assert await guest.get(f"http://{address}/", "--connect-timeout", "3") == 7, address
    # The host's own public address can only be known where it is dialled.
    assert await guest.get(f"http://{internet.host_side}/") in (7, 35, 52, 55, 56)
    assert at(await guest.get(f"http://{internet.far}/")) == internet.far


async def test_udp_icmp_and_ipv6_have_no_way(way: Way, internet: Internet) -> None:
    guest = await way.guest()
    script = (
        f"import socket; s = socket.socket(2, 2); s.settimeout(5); s.connect(('{internet.one}', 443)); "
        "s.send(b'x'); s.recv(1)"
    )
    _, output = await guest.run("python3", "-c", script)
    assert "refused" in output
    status, _ = await guest.run("python3", "-c", script.replace(internet.one, "10.0.2.2"))
    assert status != 0
    status, output = await guest.run("curl", "-sS", "-m", "3", "http://[fe80::1%eth0]/")
    assert status != 0


async def test_rules_by_address_replace_each_other(way: Way, internet: Internet) -> None:
    guest = await way.guest(allow_out=[internet.one], deny_out=[ALL])
    assert at(await guest.get(f"http://{internet.one}/")) == internet.one
    assert await guest.get(f"http://{internet.two}/") == 7
    await way.change(guest, deny_out=[internet.one])
    assert await guest.get(f"http://{internet.one}/") == 7
    assert at(await guest.get(f"http://{internet.two}/")) == internet.two
    await way.change(guest, allow_internet_access=False)
    assert await guest.get(f"http://{internet.two}/") == 7
    await way.change(guest)
    assert at(await guest.get(f"http://{internet.one}/")) == internet.one


async def test_names_are_judged_by_where_they_lead(way: Way, internet: Internet) -> None:
    guest = await way.guest(allow_out=["two.test", "*.one.test", "inward.test"], deny_out=[ALL])
    ca = ("--cacert", str(internet.ca))

    def forged(name: str, address: str) -> tuple[str, ...]:
        return ("--resolve", f"{name}:80:{address}", "--resolve", f"{name}:443:{address}")

    for name, place in (("two.test", internet.two), ("api.one.test", internet.one)):
        for scheme in ("http", "https"):
            answer = await guest.get(f"{scheme}://{name}/", *ca, *forged(name, internet.far))
            assert at(answer) == place, (scheme, name)
    for name in ("one.test", "other.test", "inward.test"):
        for scheme in ("http", "https"):
            answer = await guest.get(f"{scheme}://{name}/", *ca, *forged(name, internet.one))
            assert answer in (7, 35, 52, 55, 56), (scheme, name)
    assert await guest.get(f"http://{internet.two}/") in (7, 52, 55, 56)


async def test_an_open_connection_outlives_rules_that_allow_it_and_no_others(
    way: Way, internet: Internet
) -> None:
    guest = await way.guest()
    script = (
        "import socket, sys\n"
        f"s = socket.create_connection(('{internet.one}', 80), 10)\n"
        "s.sendall(b'GET /drip HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
        "while True:\n"
        "    if not s.recv(4096): break\n"
        "    print('drip', flush=True)\n"
    )
    process = await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", guest.inner, "python3", "-c", script,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(20):
        await process.stdout.readline()
        await way.change(guest, deny_out=[internet.two])
        for _ in range(10):
            assert await process.stdout.readline() == b"drip\n"
        await way.change(guest, deny_out=[internet.one])
        _, errors = await process.communicate()
    assert b"ConnectionResetError" in errors


async def test_dns_is_answered_whatever_server_is_asked(way: Way, internet: Internet) -> None:
    guest = await way.guest()
    script = (
        "import socket, sys\n"
        "q = bytes.fromhex('123401000001000000000000') + b'\\x03one\\x04test\\0\\0\\x01\\0\\x01'\n"
        "for server in ('10.0.2.2', '8.8.8.8', '192.168.7.7'):\n"
        "    s = socket.socket(2, 2); s.settimeout(8); s.connect((server, 53)); s.send(q)\n"
        "    print(socket.inet_ntoa(s.recv(512)[-4:]))\n"
        "    s = socket.create_connection((server, 53), 8); s.sendall(len(q).to_bytes(2, 'big') + q)\n"
        "    print(socket.inet_ntoa(s.recv(512)[-4:]))\n"
    )
    status, output = await guest.run("python3", "-c", script)
    assert (status, output.split()) == (0, [internet.one] * 6)
    await way.change(guest, allow_internet_access=False)
    asked = len(internet.questions())
    status, output = await guest.run("python3", "-c", script)
    assert status != 0
    assert "refused" in output
    assert len(internet.questions()) == asked


class TestDenyByDefault:
    """A platform where only `allowOut` opens anything, and some ranges stay closed even so."""

    @pytest.fixture
    def settings(self, internet: Internet) -> NetworkConfig:
        return NetworkConfig(
            egress_default="deny", also_denied=[f"{internet.far}/32"], resolvers=[f"{internet.dns}:53"]
        )

    async def test_only_what_is_allowed_is_open(self, way: Way, internet: Internet) -> None:
        closed = await way.guest(allow_internet_access=True)
        assert await closed.get(f"http://{internet.one}/") == 7
        opened = await way.guest(allow_out=[internet.one, "two.test", ALL])
        assert at(await opened.get(f"http://{internet.one}/")) == internet.one
        assert await opened.get(f"http://{internet.far}/") == 7
