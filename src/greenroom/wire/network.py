"""What a sandbox's network rules mean: read from the texts that people write, checked, ready to be judged by.

Pure, and on the floor that api (which refuses bad rules), node (which writes nftables rules) and egress (which
judges connections and names) share, so that all three mean the same. IPv4 only: guests have no IPv6.

The order of judging, first match wins: ranges that are always denied; addresses in `allowOut`; if `allowOut` has
names, a connection that would be denied below may still name one; `denyOut`; the default.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from bisect import bisect_right
from collections.abc import Iterable

from greenroom.config import NetworkConfig
from greenroom.errors import BadRequest, SetupError
from greenroom.wire.messages import Network

ALWAYS_DENIED = (
    "0.0.0.0/8",  # "this network"; 0.0.0.0 reaches the host itself
    "10.0.0.0/8",
    "100.64.0.0/10",  # carrier-grade NAT (RFC 6598)
    "127.0.0.0/8",
    "169.254.0.0/16",  # link-local, the clouds' metadata services among it
    "172.16.0.0/12",
    "192.0.0.0/24",  # IETF protocol assignments (RFC 6890)
    "192.88.99.0/24",  # 6to4 relays: a way into IPv6 (RFC 7526)
    "192.168.0.0/16",
    "198.18.0.0/15",  # benchmarks (RFC 2544): private by use
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, with the broadcast address
)
"""Ranges that no sandbox reaches, whatever its rules say (IANA's registry of special-purpose addresses). The
documentation ranges are left out: they lead nowhere, unless somebody tests. The host's own addresses cannot be
listed; they are denied where connections are dialled (`egress.dialling`)."""

MAX_RULES = 200
"""Entries of `allowOut`, and separately of `denyOut`."""
MAX_DNS_SERVERS = 10
"""E2B's bound."""
MAX_NAME = 253
EVERYTHING = "0.0.0.0/0"
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ADDRESSLIKE = re.compile(r"[0-9./]+|.*\.[0-9]+")
_WHOLE = 1 << 32


class Ranges:
    """A set of IPv4 addresses, asked in O(log n)."""

    def __init__(self, blocks: Iterable[ipaddress.IPv4Network] = ()) -> None:
        self.blocks = tuple(ipaddress.collapse_addresses(blocks))
        self._starts = [int(block.network_address) for block in self.blocks]
        self._ends = [int(block.broadcast_address) for block in self.blocks]

    def __contains__(self, address: ipaddress.IPv4Address) -> bool:
        place = bisect_right(self._starts, int(address)) - 1
        return place >= 0 and int(address) <= self._ends[place]

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash(self.blocks)

    def __repr__(self) -> str:
        return f"Ranges({', '.join(map(str, self.blocks))})"

    @property
    def everything(self) -> bool:
        """Whether no address is left out, however it was written."""
        return sum(block.num_addresses for block in self.blocks) == _WHOLE


class Rules:
    """A sandbox's network rules, checked. Immutable by convention; made by `parse`."""

    __slots__ = ("allow", "denied", "deny", "dns_servers", "exact", "restricted", "suffixes")

    def __init__(
        self,
        *,
        denied: Ranges,
        allow: Ranges,
        deny: Ranges,
        exact: frozenset[str],
        suffixes: frozenset[str],
        deny_by_default: bool,
        dns_servers: tuple[str, ...] | None,
    ) -> None:
        self.denied = denied
        """Always; nothing below can change it."""
        self.allow = allow
        self.deny = deny
        self.exact = exact
        self.suffixes = suffixes
        """Names, and domains whose subdomains are allowed, in lower case without a final dot."""
        self.restricted = deny_by_default or deny.everything
        """Nothing is allowed but what `allow` and the names say."""
        self.dns_servers = dns_servers

    @property
    def named(self) -> bool:
        """Whether a name can allow something."""
        return bool(self.exact or self.suffixes)

    @property
    def closed(self) -> bool:
        """Whether there is no way out at all."""
        return self.restricted and not self.allow and not self.named

    def allows_name(self, name: str) -> bool:
        """Whether `allowOut` names this host name, which is in lower case without a final dot."""
        if name in self.exact:
            return True
        rest = name
        while "." in rest:
            rest = rest.partition(".")[2]
            if rest in self.suffixes:
                return True
        return False


def check(network: Network) -> None:
    """Raise BadRequest, naming the field and saying what to do, unless the rules can be kept."""
    parse(network, NetworkConfig())


def closed(network: Network, settings: NetworkConfig) -> bool:
    """Whether a sandbox with these rules, which may come from a time of other settings, has no way out at all."""
    try:
        return parse(network, settings).closed
    except BadRequest:
        return True


def parse(network: Network, settings: NetworkConfig) -> Rules:
    """The rules of a sandbox on a platform with these settings. Raises BadRequest naming the field."""
    allow: list[ipaddress.IPv4Network] = []
    exact: set[str] = set()
    suffixes: set[str] = set()
    denied = always_denied(settings)
    for field, entries in (("allowOut", network.allow_out), ("denyOut", network.deny_out)):
        if len(entries) > MAX_RULES:
            raise BadRequest(
                f"network.{field}: at most {MAX_RULES} entries are possible; join addresses to CIDR blocks"
            )
    for text in network.allow_out:
        if (block := _block("allowOut", text)) is not None:
            if isinstance(block, ipaddress.IPv6Network):
                raise BadRequest(f"network.allowOut: {_quoted(text)}: sandboxes have IPv4 only")
            if any(block.subnet_of(range_) for range_ in denied.blocks):
                raise BadRequest(
                    f"network.allowOut: {_quoted(text)} lies in a range that no sandbox may reach; remove it"
                )
            allow.append(block)
        elif text.startswith("*."):
            suffixes.add(_host("allowOut", text[2:], text))
        else:
            exact.add(_host("allowOut", text, text))
    deny: list[ipaddress.IPv4Network] = []
    for text in network.deny_out:
        block = _block("denyOut", text)
        if block is None:
            raise BadRequest(
                f"network.denyOut: {_quoted(text)} is not an IP address or CIDR block. Names are only possible in "
                f"allowOut: deny {EVERYTHING} and allow the names that are needed"
            )
        # IPv6 is denied already, so such an entry is kept by doing nothing.
        if isinstance(block, ipaddress.IPv4Network):
            deny.append(block)
    if network.allow_internet_access is False:
        deny.append(ipaddress.IPv4Network(EVERYTHING))
    servers = _servers(network, denied)
    if exact or suffixes:
        allow += [ipaddress.IPv4Network(server) for server in servers or ()]
    return Rules(
        denied=denied,
        allow=Ranges(allow),
        deny=Ranges(deny),
        exact=frozenset(exact),
        suffixes=frozenset(suffixes),
        deny_by_default=settings.egress_default == "deny",
        dns_servers=servers,
    )


def always_denied(settings: NetworkConfig) -> Ranges:
    """The ranges that no sandbox reaches. Raises SetupError when the setting `also_denied` is wrong."""
    return _always_denied(tuple(settings.also_denied))


@functools.lru_cache(maxsize=8)
def _always_denied(also: tuple[str, ...]) -> Ranges:
    # Asked for at every claim, and always the same.
    try:
        more = [ipaddress.IPv4Network(text, strict=False) for text in also]
    except ValueError as error:
        raise SetupError(f"[network] also_denied: {error}; write IPv4 CIDR blocks there") from error
    return Ranges([*map(ipaddress.IPv4Network, ALWAYS_DENIED), *more])


def _block(field: str, text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """An address or CIDR block; None for what can only be a name. Raises BadRequest for what is nearly one."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        if _ADDRESSLIKE.fullmatch(text) or ":" in text.replace("://", ""):
            raise BadRequest(
                f"network.{field}: {_quoted(text)} is not an IP address or CIDR block such as 192.0.2.0/24"
            ) from None
        return None


def _host(field: str, name: str, text: str) -> str:
    lower = name.lower().removesuffix(".")
    if len(lower) > MAX_NAME or _NAME.fullmatch(lower) is None:
        raise BadRequest(
            f"network.{field}: {_quoted(text)} is not an IP address, a CIDR block, a host name such as example.com "
            "(without scheme, port and path; international names in their xn-- form) or a pattern such as *.example.com"
        )
    return lower


def _servers(network: Network, denied: Ranges) -> tuple[str, ...] | None:
    if network.dns_servers is None:
        return None
    if len(network.dns_servers) > MAX_DNS_SERVERS:
        raise BadRequest(f"network.dnsServers: at most {MAX_DNS_SERVERS} are possible")
    for text in network.dns_servers:
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            raise BadRequest(f"network.dnsServers: {_quoted(text)} is not an IPv4 address") from None
        if address in denied:
            raise BadRequest(
                f"network.dnsServers: {_quoted(text)} lies in a range that no sandbox may reach; remove it"
            )
    return tuple(network.dns_servers)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
