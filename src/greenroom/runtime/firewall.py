"""The nftables rules of a VM's namespace: pure text from network rules, which `namespaces` loads.

Nothing is forwarded and nothing is routed on: the namespace has no link but the tap. Every TCP connection that the
guest starts is *redirected* to one listening socket inside the namespace and every DNS question to another; all else
is refused. What leaves is therefore dialled by a process of ours in the host's namespace, the host's own firewall and
routes stay as they are, and where nobody listens (a member that still waits, an egress process that is down) the
guest gets a reset: denied by default, by construction.

Addresses that nothing can allow are refused here already, by a reset, so that clients fail at once and a port scan
costs nobody anything. `reject` stands in the prerouting hook, before the redirection, where the address that the
guest meant is still in the packet. Connections *into* the guest pass as established ones.

The table is replaced whole in one transaction: there is no moment without rules. A part of it costs as much, since
the kernel waits for a grace period either way (12 to 16 ms, measured).
"""

from __future__ import annotations

from greenroom.wire.network import Ranges, Rules

TCP_PORT = 47001
"""Port in the namespace where redirected connections are accepted. Only the redirection leads there: whatever else
the guest sends to the namespace's own address is refused as a private one."""
DNS_PORT = 47053
"""Port for DNS questions, UDP and TCP."""

NOTHING = """
table inet greenroom {
    chain input {
        type filter hook input priority filter; policy drop;
        ct state established accept
    }
    chain forward {
        type filter hook forward priority filter; policy drop;
    }
}
"""
"""For a namespace from which nothing is to come, whatever listens in it."""

_SHELL = """\
table inet greenroom
delete table inet greenroom
table inet greenroom {{
    set denied {{ type ipv4_addr; flags interval; auto-merge; {denied} }}
    set allow {{ type ipv4_addr; flags interval; auto-merge; {allow} }}
    set deny {{ type ipv4_addr; flags interval; auto-merge; {deny} }}
    chain gate {{
        type filter hook prerouting priority mangle; policy accept;
        ct state established accept
        iifname "tap0" jump judge
    }}
    chain judge {{
        meta nfproto != ipv4 drop
        {dns}
        meta l4proto udp reject
        meta l4proto != tcp drop
        {judge}
    }}
    chain steer {{
        type nat hook prerouting priority dstnat;
        iifname "tap0" udp dport 53 redirect to :{dns_port}
        iifname "tap0" tcp dport 53 redirect to :{dns_port}
        iifname "tap0" meta l4proto tcp redirect to :{tcp_port}
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        ct state established accept
        iifname "tap0" ct status dnat tcp dport {{ {tcp_port}, {dns_port} }} accept
        iifname "tap0" ct status dnat udp dport {dns_port} accept
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
    }}
}}
"""


def ruleset(rules: Rules) -> str:
    """The whole table for a sandbox with these rules, as text for libnftables."""
    return _SHELL.format(
        denied=_elements(rules.denied),
        allow=_elements(rules.allow),
        deny=_elements(rules.deny),
        dns="" if rules.closed else "meta l4proto { tcp, udp } th dport 53 accept",
        judge="\n        ".join(_judge(rules)),
        tcp_port=TCP_PORT,
        dns_port=DNS_PORT,
    )


def _judge(rules: Rules) -> list[str]:
    refuse = "reject with tcp reset"
    steps = [f"ip daddr @denied {refuse}", "ip daddr @allow accept"]
    # Where a name can allow what an address does not, it takes the egress process to tell.
    if not rules.named:
        steps.append(refuse if rules.restricted else f"ip daddr @deny {refuse}")
    return steps


def _elements(ranges: Ranges) -> str:
    return f"elements = {{ {', '.join(map(str, ranges.blocks))} }}" if ranges else ""
