"""A template's `networkPolicy` as a sandbox's network rules, or what of it cannot be kept. Pure.

Kubernetes' rules add up: something may be reached when one rule allows it, and with rules for egress nothing else may.
Here an address is allowed by `allow_out` first, denied by `deny_out` after it. So `egress` becomes a list of allowed
ranges before "everything denied". Ports, and peers that are chosen by labels, have no such form: a policy that has
them is refused, because to leave them out would open what somebody wanted closed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, Final

from greenroom.api.kube.status import Cause
from greenroom.api.kube.validation import not_allowed, wrong
from greenroom.config import NetworkConfig
from greenroom.errors import BadRequest
from greenroom.wire.messages import Network
from greenroom.wire.network import EVERYTHING, MAX_RULES, always_denied, check

PATH: Final = "spec.networkPolicy"
_denied: Final = always_denied(NetworkConfig())


def template_network(spec: Mapping[str, Any], path: str = "spec") -> Network | list[Cause]:
    """The network of a SandboxTemplate's spec."""
    if spec.get("networkPolicyManagement") == "Unmanaged":
        return Network()
    return network_of(spec.get("networkPolicy"), f"{path}.networkPolicy")


def network_of(policy: Mapping[str, Any] | None, path: str = PATH) -> Network | list[Cause]:
    """The network of a policy, or everything in it that cannot be kept, each with the field it is about."""
    if not policy:
        return Network()
    causes: list[Cause] = []
    if policy.get("ingress"):
        detail = (
            "who may connect cannot be chosen: sandboxes are reached through the proxy alone; leave it out"
        )
        causes.append(not_allowed(f"{path}.ingress", detail))
    egress = policy.get("egress")
    if egress is None:
        return causes or Network()
    allowed: list[ipaddress.IPv4Network] = []
    everything = False
    for number, rule in enumerate(egress):
        where = f"{path}.egress[{number}]"
        if rule.get("ports"):
            causes.append(not_allowed(f"{where}.ports", "egress is by address; leave the ports out"))
        peers = rule.get("to")
        if not peers:
            # A rule without peers means all of them.
            everything = True
        for place, peer in enumerate(peers or ()):
            blocks = _blocks(peer, f"{where}.to[{place}]", causes)
            allowed += blocks
    if causes:
        return causes
    return _network(allowed, everything=everything, path=path)


def _blocks(peer: Mapping[str, Any], path: str, causes: list[Cause]) -> list[ipaddress.IPv4Network]:
    for selector in ("podSelector", "namespaceSelector"):
        if selector in peer:
            detail = "sandboxes are not chosen by labels here; name addresses with ipBlock"
            causes.append(not_allowed(f"{path}.{selector}", detail))
    block = peer.get("ipBlock")
    if block is None:
        return []
    within = _range(block.get("cidr"), f"{path}.ipBlock.cidr", causes)
    if within is None:
        return []
    left = [within]
    for number, text in enumerate(block.get("except") or ()):
        where = f"{path}.ipBlock.except[{number}]"
        hole = _range(text, where, causes)
        if hole is None:
            continue
        if not hole.subnet_of(within):
            causes.append(wrong(where, text, "must be a strict subset of cidr"))
            continue
        left = [piece for each in left for piece in _without(each, hole)]
    if any(within.subnet_of(each) for each in _denied.blocks):
        return left  # which is refused below: nothing of what was asked for can be had
    return [each for each in left if not any(each.subnet_of(block) for block in _denied.blocks)]


def _without(block: ipaddress.IPv4Network, hole: ipaddress.IPv4Network) -> list[ipaddress.IPv4Network]:
    if block.subnet_of(hole):
        return []
    return list(block.address_exclude(hole)) if hole.subnet_of(block) else [block]


def _range(text: object, path: str, causes: list[Cause]) -> ipaddress.IPv4Network | None:
    try:
        found = ipaddress.ip_network(str(text), strict=False)
    except ValueError:
        causes.append(wrong(path, text, "must be a valid CIDR value, (e.g. 10.9.8.0/24)"))
        return None
    if isinstance(found, ipaddress.IPv6Network):
        causes.append(wrong(path, text, "sandboxes have IPv4 only"))
        return None
    return found


def _network(
    allowed: Sequence[ipaddress.IPv4Network], *, everything: bool, path: str
) -> Network | list[Cause]:
    if everything:
        return Network()
    blocks = list(ipaddress.collapse_addresses(allowed))
    if sum(block.num_addresses for block in blocks) == 1 << 32:
        return Network()
    if len(blocks) > MAX_RULES:
        detail = f"it comes to {len(blocks)} ranges, at most {MAX_RULES} are possible; name fewer exceptions"
        return [not_allowed(f"{path}.egress", detail)]
    network = Network(allow_out=[str(block) for block in blocks], deny_out=[EVERYTHING])
    try:
        check(network)
    except BadRequest as error:
        return [not_allowed(f"{path}.egress", error.message.replace("network.allowOut: ", ""))]
    return network
