"""The rules of a VM's namespace: that the kernel takes them for whatever a sandbox may ask, and replaces them whole."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.config import NetworkConfig
from greenroom.runtime import namespaces
from greenroom.runtime.firewall import DNS_PORT, TCP_PORT, ruleset
from greenroom.wire.messages import Network
from greenroom.wire.network import ALWAYS_DENIED, Ranges, parse

SETTINGS = NetworkConfig()
PUBLIC = st.builds(
    lambda number, length: ipaddress.IPv4Network((number, length), strict=False),
    st.integers(11 << 24, (100 << 24) - 1),
    st.integers(12, 32),
).map(str)


@pytest.fixture
def place() -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"gr-test-{secrets.token_hex(4)}"
    tap = namespaces.create(name, ruleset(parse(Network(), SETTINGS)))
    yield name
    os.close(tap)
    namespaces.remove(name)


def listed(name: str) -> str:
    return subprocess.run(
        ["ip", "netns", "exec", name, "nft", "list", "ruleset"], capture_output=True, text=True, check=True
    ).stdout


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    allow=st.lists(PUBLIC | st.sampled_from(["example.com", "*.example.com"]), max_size=30),
    deny=st.lists(PUBLIC | st.just("0.0.0.0/0"), max_size=30),
)
def test_the_kernel_takes_every_rules_and_holds_just_them(
    place: str, allow: list[str], deny: list[str]
) -> None:
    rules = parse(Network(allow_out=allow, deny_out=deny), SETTINGS)
    namespaces.change_rules(place, ruleset(rules))
    text = listed(place)
    assert text.count("table inet greenroom") == 1
    assert ("dport 53 accept" in text) == (not rules.closed)
    for block in rules.allow.blocks:
        assert str(block.network_address) in text
    if rules.deny.everything and not rules.named:
        assert re.search(r"ip daddr @allow accept\s+(meta l4proto tcp )?reject with tcp reset", text)


def test_all_that_is_always_denied_is_in_every_table(place: str) -> None:
    text = listed(place)
    for block in Ranges(map(ipaddress.IPv4Network, ALWAYS_DENIED)).blocks:
        assert str(block) in text or str(block.network_address) in text


def test_outlets_live_in_the_namespace_and_can_be_made_again(place: str) -> None:
    handle = namespaces.open_handle(place)
    try:
        first = namespaces.open_outlets(handle)
        with pytest.raises(OSError, match="in use"):
            namespaces.open_outlets(handle)
        assert first.tcp.getsockname() == (namespaces.HOST_ADDRESS, TCP_PORT)
        assert first.dns_udp.getsockname() == (namespaces.HOST_ADDRESS, DNS_PORT)
        assert first.dns_tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        first.close()
        first.close()
        namespaces.open_outlets(handle).close()
    finally:
        os.close(handle)


def test_rules_that_cannot_be_loaded_leave_those_that_are(place: str) -> None:
    before = listed(place)
    with pytest.raises(OSError, match="nftables refused"):
        namespaces.change_rules(place, ruleset(parse(Network(), SETTINGS)) + "nonsense")
    assert listed(place) == before
