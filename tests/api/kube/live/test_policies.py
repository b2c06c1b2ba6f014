"""Network policies become rules that mean the same, or are refused where they are."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.api.kube.live.policies import network_of, template_network
from greenroom.config import NetworkConfig
from greenroom.wire.messages import Network
from greenroom.wire.network import always_denied, parse

CLOSED = Network(deny_out=["0.0.0.0/0"])


def block(cidr: str, *holes: str) -> dict[str, Any]:
    return {"ipBlock": {"cidr": cidr, "except": list(holes)}}


def egress(*peers: dict[str, Any]) -> dict[str, Any]:
    return {"egress": [{"to": list(peers)}]}


@pytest.mark.parametrize(
    ("policy", "network"),
    [
        (None, Network()),
        ({}, Network()),
        ({"ingress": []}, Network()),
        ({"egress": []}, CLOSED),
        ({"egress": [{}]}, Network()),
        (egress(block("0.0.0.0/0")), Network()),
        (egress(block("8.8.8.0/24")), Network(allow_out=["8.8.8.0/24"], deny_out=["0.0.0.0/0"])),
        (
            egress(block("8.8.8.0/24", "8.8.8.128/25"), block("1.1.1.1/32")),
            Network(allow_out=["1.1.1.1/32", "8.8.8.0/25"], deny_out=["0.0.0.0/0"]),
        ),
    ],
    ids=["none", "empty", "ingress", "closed", "rule", "all", "block", "except"],
)
def test_what_can_be_said(policy: Any, network: Network) -> None:
    assert network_of(policy) == network


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"ingress": [{}]}, "spec.networkPolicy.ingress"),
        ({"egress": [{"ports": [{"port": 443}]}]}, "spec.networkPolicy.egress[0].ports"),
        (egress({"podSelector": {}}), "spec.networkPolicy.egress[0].to[0].podSelector"),
        (egress(block("nowhere")), "spec.networkPolicy.egress[0].to[0].ipBlock.cidr"),
        (egress(block("::/0")), "spec.networkPolicy.egress[0].to[0].ipBlock.cidr"),
        (
            egress(block("8.8.8.0/24", "9.9.9.0/24")),
            "spec.networkPolicy.egress[0].to[0].ipBlock.except[0]",
        ),
        (egress(block("10.0.0.0/8")), "spec.networkPolicy.egress"),
    ],
    ids=["ingress", "ports", "selector", "cidr", "six", "except", "denied"],
)
def test_what_cannot_be_said(policy: Any, field: str) -> None:
    causes = network_of(policy)
    assert isinstance(causes, list)
    assert [cause.field for cause in causes] == [field]


def test_an_unmanaged_policy_is_not_looked_at() -> None:
    spec = {"networkPolicy": {"egress": [{"ports": [{}]}]}, "networkPolicyManagement": "Unmanaged"}
    assert template_network(spec) == Network()
    del spec["networkPolicyManagement"]
    assert isinstance(template_network(spec), list)


BLOCKS = st.builds(
    lambda address, length: str(ipaddress.ip_network((address, length), strict=False)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 6),
)


@settings(max_examples=60, deadline=None)
@given(BLOCKS, st.integers(0, 2**32 - 1), st.integers(0, 32))
def test_an_address_is_let_through_where_the_policy_has_it(cidr: str, address: int, length: int) -> None:
    hole = ipaddress.ip_network((address, length), strict=False)
    within = ipaddress.ip_network(cidr)
    holes = [str(hole)] if hole.subnet_of(within) else []  # type: ignore[arg-type]
    network = network_of(egress(block(cidr, *holes)))
    if not isinstance(network, Network):
        return
    rules = parse(network, NetworkConfig())
    denied = always_denied(NetworkConfig())
    for each in (address, address ^ 1, address ^ (1 << 31), address ^ (1 << 20)):
        place = ipaddress.IPv4Address(each)
        if place in denied:
            continue
        wanted = place in within and not (holes and place in hole)
        assert (place in rules.allow or not rules.deny.everything) == wanted
