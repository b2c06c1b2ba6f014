"""The part of E2B's `network` that is about what comes in, checked and made a message between roles. Pure."""

from __future__ import annotations

import re

from greenroom.api.e2b.schemas import NetworkOptions
from greenroom.errors import BadRequest
from greenroom.wire.messages import Inbound

MAX_HTTPS_PORTS = 64
AGENT_PORT = 49983
PLACEHOLDER = "${PORT}"

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"({_LABEL}(\.{_LABEL})*\.?|\[[0-9A-Fa-f:.]{{2,45}}\])(:(?P<port>[0-9]{{1,5}}))?")


def inbound_of(options: NetworkOptions | None, *, secure: bool) -> Inbound:
    """What a create asks for. `secure` says whether the sandbox will have a token of its own.

    Raises BadRequest naming the field.
    """
    if options is None:
        return Inbound()
    public = options.allow_public_traffic is not False
    if not public and not secure:
        # Its agent would be open to everybody, and through it every port.
        raise BadRequest("network.allowPublicTraffic: false needs a secure sandbox; send secure: true")
    return Inbound(
        public=public, mask_host=_mask(options.mask_request_host), https_ports=_ports(options.https_ports)
    )


def _mask(text: str | None) -> str | None:
    """A host name or address, with a port or without, anywhere in which `${PORT}` may stand."""
    if not text:
        return None
    # As with the longest port, so that what fits here fits with every one.
    filled = text.replace(PLACEHOLDER, "65535")
    found = _HOST.fullmatch(filled)
    if found is None or len(text) > 255 or int(found["port"] or 0) > 65_535:
        raise BadRequest(
            "network.maskRequestHost: a host name is needed, with or without a port; ${PORT} may stand in it"
        )
    return text


def _ports(ports: list[int] | None) -> tuple[int, ...]:
    chosen = tuple(sorted(set(ports or ())))
    if len(chosen) > MAX_HTTPS_PORTS:
        raise BadRequest(f"network.httpsPorts: at most {MAX_HTTPS_PORTS} ports are allowed")
    for port in chosen:
        if not 1 <= port <= 65_535:
            raise BadRequest("network.httpsPorts: a port is a number from 1 to 65535")
        if port == AGENT_PORT:
            raise BadRequest(
                f"network.httpsPorts: {AGENT_PORT} is the sandbox's own agent, which speaks no TLS"
            )
    return chosen
