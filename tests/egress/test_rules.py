"""Judging: what holds for every rules, every address and every name."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address

from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.config import NetworkConfig
from greenroom.egress.rules import Verdict, judge, may_resolve, may_stay
from greenroom.wire.messages import Network
from greenroom.wire.network import ALWAYS_DENIED, parse

ADDRESSES = st.integers(0, 2**32 - 1).map(IPv4Address)
PUBLIC = st.builds(
    lambda number, length: str(ipaddress.IPv4Network((number, length), strict=False)),
    st.integers(11 << 24, (100 << 24) - 1),
    st.integers(8, 32),
)
NAMES = st.sampled_from(["a.test", "b.test", "sub.a.test", "deep.sub.a.test", "c.example"])
NETWORKS = st.builds(
    Network,
    allow_out=st.lists(PUBLIC | NAMES | st.sampled_from(["*.a.test", "0.0.0.0/0"]), max_size=5),
    deny_out=st.lists(PUBLIC | st.just("0.0.0.0/0"), max_size=5),
    allow_internet_access=st.sampled_from([None, True, False]),
)
SETTINGS = st.builds(NetworkConfig, egress_default=st.sampled_from(["allow", "deny"]))
DENIED = [ipaddress.IPv4Network(text) for text in ALWAYS_DENIED]


def holds(entries: list[str], address: IPv4Address) -> bool:
    return any(address in ipaddress.IPv4Network(text, strict=False) for text in entries if text[0].isdigit())


def named(entries: list[str], name: str) -> bool:
    return any(
        name == text or (text.startswith("*.") and name.endswith(text[1:]) and name != text[2:])
        for text in entries
    )


@settings(deadline=None)
@given(NETWORKS, SETTINGS, ADDRESSES)
def test_the_order_is_always_denied_then_allowed_then_denied_then_the_default(
    network: Network, settings: NetworkConfig, address: IPv4Address
) -> None:
    rules = parse(network, settings)
    everything = network.allow_internet_access is False or settings.egress_default == "deny"
    has_names = any(not text[0].isdigit() for text in network.allow_out)
    expected = Verdict.ALLOW
    if any(address in block for block in DENIED):
        expected = Verdict.DENY
    elif holds(network.allow_out, address):
        expected = Verdict.ALLOW
    elif everything or holds(network.deny_out, address):
        expected = Verdict.ASK if has_names else Verdict.DENY
    assert judge(rules, address) is expected


@settings(deadline=None)
@given(NETWORKS, SETTINGS, st.sampled_from(DENIED), st.integers(0, 2**32 - 1), NAMES)
def test_nothing_ever_opens_what_is_always_denied(
    network: Network, settings: NetworkConfig, block: ipaddress.IPv4Network, number: int, name: str
) -> None:
    address = block.network_address + number % block.num_addresses
    rules = parse(network, settings)
    assert judge(rules, address) is Verdict.DENY
    assert not may_stay(rules, address, name)


@settings(deadline=None)
@given(NETWORKS, SETTINGS, ADDRESSES, NAMES | st.none())
def test_a_connection_may_stay_exactly_if_it_could_be_made_anew(
    network: Network, settings: NetworkConfig, address: IPv4Address, name: str | None
) -> None:
    rules = parse(network, settings)
    verdict = judge(rules, address)
    by_name = name is not None and named(network.allow_out, name)
    assert may_stay(rules, address, name) == (
        verdict is Verdict.ALLOW or (verdict is Verdict.ASK and by_name)
    )


@settings(deadline=None)
@given(NETWORKS, SETTINGS, NAMES)
def test_names_resolve_where_something_is_open_and_only_allowed_ones_where_all_else_is_closed(
    network: Network, settings: NetworkConfig, name: str
) -> None:
    rules = parse(network, settings)
    if rules.closed:
        assert not may_resolve(rules, name)
        assert all(not text for text in network.allow_out)
    elif rules.restricted:
        assert may_resolve(rules, name) == named(network.allow_out, name)
    else:
        assert may_resolve(rules, name)


def test_an_empty_list_of_dns_servers_closes_dns_where_names_would_open_it() -> None:
    network = Network(allow_out=["a.test"], deny_out=["0.0.0.0/0"], dns_servers=[])
    assert not may_resolve(parse(network, NetworkConfig()), "a.test")
    assert may_resolve(parse(Network(dns_servers=[]), NetworkConfig()), "a.test")
