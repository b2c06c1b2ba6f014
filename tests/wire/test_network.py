"""Network rules: what is refused with which words, and that the sets hold what was written."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.config import NetworkConfig
from greenroom.errors import BadRequest, SetupError
from greenroom.wire.messages import Network
from greenroom.wire.network import ALWAYS_DENIED, MAX_RULES, Ranges, check, parse

BLOCKS = st.builds(
    lambda number, length: ipaddress.IPv4Network((number, length), strict=False),
    st.integers(0, 2**32 - 1),
    st.integers(0, 32),
)
ADDRESSES = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
SETTINGS = NetworkConfig()


@settings(deadline=None)
@given(st.lists(BLOCKS, max_size=20), ADDRESSES)
def test_ranges_hold_exactly_their_blocks(
    blocks: list[ipaddress.IPv4Network], address: ipaddress.IPv4Address
) -> None:
    ranges = Ranges(blocks)
    assert (address in ranges) == any(address in block for block in blocks)
    edges = [edge for block in blocks for edge in (block.network_address, block.broadcast_address)]
    assert all(edge in ranges for edge in edges)
    assert ranges.everything == (sum(block.num_addresses for block in ranges.blocks) == 2**32)


@settings(deadline=None)
@given(st.lists(st.text(max_size=30), max_size=4), st.lists(st.text(max_size=30), max_size=4))
def test_any_text_is_taken_or_refused_with_its_field(allow: list[str], deny: list[str]) -> None:
    try:
        rules = parse(Network(allow_out=allow, deny_out=deny), SETTINGS)
    except BadRequest as error:
        assert error.message.startswith("network.")  # noqa: PT017 - most texts raise, some do not
    else:
        assert rules.named or all(":" in text or ipaddress.ip_network(text, strict=False) for text in allow)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Network(allow_out=["10.0.0.1"]), "'10.0.0.1' lies in a range that no sandbox may reach"),
        (Network(allow_out=["169.254.169.254/32"]), "no sandbox may reach"),
        (Network(allow_out=["2001:db8::1"]), "IPv4 only"),
        (Network(allow_out=["192.0.2.300"]), "not an IP address or CIDR"),
        (Network(allow_out=["192.0.2.0/33"]), "not an IP address or CIDR"),
        (Network(allow_out=["https://example.com"]), "without scheme"),
        (Network(allow_out=["example.com:443"]), "not an IP address or CIDR"),
        (Network(allow_out=["*"]), "a pattern such as"),
        (Network(allow_out=["a.*.example.com"]), "a pattern such as"),
        (Network(allow_out=["bücher.example"]), "xn--"),
        (Network(allow_out=[""]), "a host name such as"),
        (Network(allow_out=["a" * 64 + ".com"]), "a host name such as"),
        (Network(allow_out=["x." * 130 + "com"]), "a host name such as"),
        (Network(deny_out=["example.com"]), "Names are only possible in allowOut"),
        (Network(deny_out=["*.example.com"]), "Names are only possible in allowOut"),
        (Network(allow_out=["192.0.2.1"] * (MAX_RULES + 1)), f"at most {MAX_RULES}"),
        (Network(dns_servers=["10.0.0.1"]), "network.dnsServers"),
        (Network(dns_servers=["dns.example"]), "not an IPv4 address"),
        (Network(dns_servers=["192.0.2.1"] * 11), "at most 10"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_words_that_help(network: Network, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check(network)
    assert words in refused.value.message


def test_names_are_compared_in_lower_case_and_a_star_leaves_the_domain_itself_out() -> None:
    rules = parse(Network(allow_out=["Example.COM.", "*.pypi.org"]), SETTINGS)
    assert rules.allows_name("example.com")
    assert not rules.allows_name("www.example.com")
    assert rules.allows_name("files.pypi.org")
    assert rules.allows_name("a.b.pypi.org")
    assert not rules.allows_name("pypi.org")
    assert not rules.allows_name("evilpypi.org")
    assert not rules.allows_name("pypi.org.evil.example")


def test_every_way_of_denying_everything_is_seen_as_that() -> None:
    for network in (
        Network(allow_internet_access=False),
        Network(deny_out=["0.0.0.0/0"]),
        Network(deny_out=["0.0.0.0/1", "128.0.0.0/1"]),
    ):
        assert parse(network, SETTINGS).closed
    assert parse(Network(), NetworkConfig(egress_default="deny")).closed
    assert parse(Network(allow_internet_access=True), NetworkConfig(egress_default="deny")).closed
    assert not parse(Network(deny_out=["::/0"]), SETTINGS).restricted
    opened = parse(Network(allow_out=["192.0.2.1"], allow_internet_access=False), SETTINGS)
    assert opened.restricted
    assert not opened.closed


def test_dns_servers_may_be_reached_when_a_name_is_allowed_and_only_then() -> None:
    server = ipaddress.IPv4Address("192.0.2.53")
    named = parse(Network(allow_out=["example.com"], dns_servers=["192.0.2.53"]), SETTINGS)
    assert server in named.allow
    assert server not in parse(Network(dns_servers=["192.0.2.53"]), SETTINGS).allow


def test_the_operators_ranges_are_denied_too_and_a_wrong_one_stops_the_start() -> None:
    rules = parse(Network(), NetworkConfig(also_denied=["192.0.2.0/24"]))
    assert ipaddress.IPv4Address("192.0.2.9") in rules.denied
    with pytest.raises(SetupError, match="also_denied"):
        parse(Network(), NetworkConfig(also_denied=["everything"]))


def test_nothing_private_is_missing_from_what_is_always_denied() -> None:
    denied = Ranges(map(ipaddress.IPv4Network, ALWAYS_DENIED))
    for text in (
        "0.0.0.0", "10.0.2.2", "10.0.2.15", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1",
        "172.31.255.255", "192.168.1.1", "224.0.0.1", "239.1.1.1", "255.255.255.255",
    ):  # fmt: skip
        assert ipaddress.IPv4Address(text) in denied
    for text in ("1.1.1.1", "8.8.8.8", "172.32.0.1", "203.0.113.1", "198.51.100.1", "100.128.0.1"):
        assert ipaddress.IPv4Address(text) not in denied
