"""The relay's reading of one request head: strict, without sockets, fail-closed.

`parse` turns the bytes up to the empty line into a `Head`; `decide` turns that into where it is to go, a `Route`;
`forward`, knowing the sandbox, into what the relay does with the connection: `Forward` the rewritten head to a port
of it. Either may answer with a `Refusal` instead. `relay` does the I/O around it.

Why one request is one connection. The proxy opens a connection per request (`max_requests_per_connection: 1`)
and writes one well-formed request on it; whatever its client sends beyond that request stays in the proxy,
which has its own idea of where a request ends and frames it anew. The head that leaves here says
`Connection: close`, so an honest server answers once and closes, and does not read further bytes as a second
request; and no more bytes than the announced body are let through. Two holes remain, and are shut here:

* *Upgrade.* Envoy passes bytes behind an upgrade request on raw, before the server has agreed. A server
  that declines and keeps the connection would parse them as a request that nobody checked. The guest agent
  speaks no upgrade, so on its port an upgrade is forwarded as the plain request it also is, closing. On any
  other port nothing is checked, so there is nothing to get past.
* *Framing on which two readers differ.* Both `Content-Length` and `Transfer-Encoding`, or either repeated or
  odd, is refused, although the proxy does not write it.

A hostile guest can answer what it likes on its own connection and no other: the proxy never reuses it.
"""

from __future__ import annotations

import hmac
import html
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

import msgspec

from greenroom.errors import BadRequest
from greenroom.wire import logs
from greenroom.wire.ids import is_sandbox_id
from greenroom.wire.messages import Inbound

AGENT_PORT = 49983
"""Port of the guest agent."""
INTERNAL_ROUTES = frozenset(
    (b"init", b"clock", b"sync", b"freeze", b"unfreeze", b"fsfreeze", b"fsthaw", b"collapse", b"upgrade")
)
"""First path segments of the agent's routes that only its node may call."""

RELAY_HEADER, SANDBOX_HEADER, PORT_HEADER = b"x-greenroom-relay", b"x-greenroom-sandbox", b"x-greenroom-port"
TRAFFIC_HEADER = b"e2b-traffic-access-token"
_PRIVATE = b"x-greenroom-"

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_ABSOLUTE = re.compile(rb"(?:https?|wss?)://[^/?#]*", re.IGNORECASE)
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_HOST_NAME = re.compile(rb"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_MAX_DECODINGS = 4
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection"))


class Head(msgspec.Struct, frozen=True):
    """A parsed request head. `target` is in origin-form (or `*`); `fields` are as they came, in order."""

    method: bytes
    target: bytes
    fields: list[tuple[bytes, bytes]]

    def values(self, name: bytes) -> list[bytes]:
        """All values of the field called `name` (given in lower case)."""
        return [value for key, value in self.fields if key.lower() == name]


class Route(msgspec.Struct, frozen=True):
    """The request is the proxy's, and for `port` of this sandbox."""

    sandbox_id: str
    port: int


class Forward(msgspec.Struct, frozen=True):
    """Send `head` to `port` of the sandbox and splice what follows, in the client's direction `body` bytes.

    `body` is None when that is not known: a chunked body, or a protocol after an upgrade.
    """

    sandbox_id: str
    port: int
    head: bytes
    body: int | None
    upgrade: bool = False
    """The client may end its direction and still listen; in plain HTTP its end of stream means that it left."""
    tls_name: str | None = None
    """The service speaks TLS, and is asked for under this name."""


class Refusal(msgspec.Struct, frozen=True):
    """Answer `status` with `body` as JSON and close."""

    status: int
    body: dict[str, str | int]

    def encode(self, *, with_body: bool = True, as_page: bool = False) -> bytes:
        """The whole HTTP/1.1 response, as JSON or as a page for people; without its body for a HEAD request."""
        payload, kind = msgspec.json.encode(self.body), "application/json"
        if as_page:
            payload, kind = _page(self.body), "text/html; charset=utf-8"
        retry = "Retry-After: 1\r\n" if self.status in (429, 503) else ""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(payload)}\r\n{retry}Connection: close\r\n\r\n"
        )
        return head.encode() + (payload if with_body else b"")


def _page(body: dict[str, str | int]) -> bytes:
    """What a browser shows instead of JSON. Some of it may be the client's own text."""
    about = " · ".join(html.escape(f"{name} {body[name]}") for name in ("sandboxId", "port") if name in body)
    message = html.escape(str(body["message"]))
    return (
        f'<!doctype html><html lang="en"><title>{body["code"]}</title>'
        f"<h1>{message}</h1><p>{about}</p></html>\n".encode("utf-8", "replace")
    )


def refuse(status: int, message: str) -> Refusal:
    """A refusal in E2B's general form `{"code", "message"}`."""
    return Refusal(status, {"code": status, "message": message})


def not_found(sandbox_id: str) -> Refusal:
    """No such sandbox runs here. E2B's clients look for the words `was not found`."""
    return Refusal(502, {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502})


def port_closed(sandbox_id: str, port: int) -> Refusal:
    """The sandbox runs, nothing listens. E2B's clients look for the words `port is not open`."""
    message = "The sandbox is running but port is not open"
    return Refusal(502, {"sandboxId": sandbox_id, "message": message, "port": port, "code": 502})


def not_permitted(sandbox_id: str, message: str) -> Refusal:
    """The sandbox's ports are not public, and the request does not show its traffic token."""
    return Refusal(403, {"sandboxId": sandbox_id, "message": message, "code": 403})


def no_tls(sandbox_id: str, port: int) -> Refusal:
    """What listens on one of `httpsPorts` does not speak TLS as any client could accept it."""
    message = "The port is one of httpsPorts, but what listens there does not speak TLS"
    return Refusal(502, {"sandboxId": sandbox_id, "message": message, "port": port, "code": 502})


def no_answer(sandbox_id: str, port: int) -> Refusal:
    """The guest's network does not answer: it is hung, or too busy to accept a connection in time."""
    message = "The sandbox did not accept the connection in time"
    return Refusal(504, {"sandboxId": sandbox_id, "message": message, "port": port, "code": 504})


def parse(raw: bytes) -> Head:
    """Parse a head that ends with its empty line.

    Raises BadRequest on anything RFC 9112 lets a server refuse: obs-fold, NUL and other control characters,
    bare CR or LF, a space before a colon, a version other than 1.1, no or several Host fields, ambiguous
    framing, CONNECT and other targets that name no path.
    """
    if not raw.endswith(b"\r\n\r\n"):
        raise BadRequest("the request head does not end")
    request_line, *lines = raw[:-4].split(b"\r\n")
    parts = request_line.split(b" ")
    if len(parts) != 3 or parts[2] != b"HTTP/1.1":
        raise BadRequest("the request line is not one of HTTP/1.1")
    method, target, _version = parts
    if not _TOKEN.fullmatch(method) or not _TARGET.fullmatch(target):
        raise BadRequest("the request line holds characters that are not allowed")
    head = Head(method, _origin_form(method, target), list(map(_field, lines)))
    _check_framing(head)
    return head


def request_id(head: Head) -> str:
    """The id that the proxy gave the request; empty if there is none that a log may carry."""
    offered = head.values(logs.HEADER.encode())
    text = offered[0].decode("latin-1") if len(offered) == 1 else ""
    return text if logs.acceptable(text) else ""


def is_navigation(head: Head) -> bool:
    """True if a browser is about to show the answer to a person; programs, and scripts in pages, get JSON."""
    wants_html = any(b"text/html" in value.lower() for value in head.values(b"accept"))
    return wants_html and head.values(b"sec-fetch-mode") == [b"navigate"]


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise BadRequest("a header field is malformed")
    return name, value.strip(b" \t")


def _origin_form(method: bytes, target: bytes) -> bytes:
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None or method == b"CONNECT":
        raise BadRequest("the request target names no path")
    rest = target[absolute.end() :]
    return rest if rest.startswith(b"/") else b"/" + rest


def _check_framing(head: Head) -> None:
    lengths, codings = head.values(b"content-length"), head.values(b"transfer-encoding")
    if len(head.values(b"host")) != 1:
        raise BadRequest("a request has exactly one Host")
    if len(lengths) + len(codings) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise BadRequest("the length of the request body is ambiguous")
    if any(value.lower() != b"chunked" for value in codings):
        raise BadRequest("the only transfer coding is chunked")


def decide(head: Head, token_ok: Callable[[str], bool]) -> Route | Refusal:
    """Where a request goes: the proxy's credential first, then the place, then whether that may be asked for."""
    offered = head.values(RELAY_HEADER)
    if len(offered) != 1 or not token_ok(offered[0].decode("latin-1")):
        return refuse(401, "this port is for the platform's proxy only")
    ids, ports = head.values(SANDBOX_HEADER), head.values(PORT_HEADER)
    if len(ids) != 1 or len(ports) != 1:
        return refuse(400, "a relayed request names one sandbox and one port")
    sandbox_id, port_text = ids[0].decode("latin-1"), ports[0].decode("latin-1")
    if not is_sandbox_id(sandbox_id):
        return not_found(sandbox_id)
    if not _PORT.fullmatch(port_text) or int(port_text) > 65535:
        return refuse(400, "a port is a number from 1 to 65535")
    port = int(port_text)
    if port == AGENT_PORT and is_internal(head.target):
        return refuse(404, "no such path")
    return Route(sandbox_id, port)


def forward(head: Head, route: Route, inbound: Inbound, traffic_token: str | None) -> Forward | Refusal:
    """What a request to a sandbox that asks for `inbound` becomes. Fail-closed: without a token nobody gets in."""
    port = route.port
    if port == AGENT_PORT:
        return Forward(route.sandbox_id, port, _rewritten(head, upgrade=False), _body_size(head))
    if not inbound.public and (message := _not_shown(head, traffic_token)):
        return not_permitted(route.sandbox_id, message)
    upgrade = _is_upgrade(head)
    host = head.values(b"host")[0]
    if inbound.mask_host is not None:
        host = inbound.mask_host.replace("${PORT}", str(port)).encode("ascii")
    return Forward(
        route.sandbox_id,
        port,
        _rewritten(head, upgrade=upgrade, host=host),
        None if upgrade else _body_size(head),
        upgrade,
        _server_name(host) if port in inbound.https_ports else None,
    )


def _not_shown(head: Head, traffic_token: str | None) -> str:
    """Why a request does not prove that it may reach the ports; empty if it does."""
    offered = head.values(TRAFFIC_HEADER)
    if not offered:
        return "The sandbox's ports are not public; the header e2b-traffic-access-token is missing"
    if len(offered) == 1 and traffic_token and hmac.compare_digest(offered[0], traffic_token.encode()):
        return ""
    return "The sandbox's ports are not public, and this is not its e2b-traffic-access-token"


def _server_name(host: bytes) -> str:
    """The name to ask a TLS service for: the host without its port, where that is a name."""
    name = host.partition(b":")[0].rstrip(b".").lower()
    return name.decode("ascii") if _HOST_NAME.fullmatch(name) and len(name) <= 253 else "localhost"


def _body_size(head: Head) -> int | None:
    """Bytes of the body, or None if it is chunked."""
    if head.values(b"transfer-encoding"):
        return None
    return sum(map(int, head.values(b"content-length")))


def is_internal(target: bytes) -> bool:
    """True if any reading of `target` might reach one of the agent's internal routes.

    The agent's public paths have no segment called like an internal route (file names travel in the query),
    so the rule is the widest one: decode for as long as decoding changes anything, take a backslash for a
    slash, and look at *every* segment without regard to case, parameters or padding. Then it does not matter
    how a reader treats dot segments, repeated slashes, `//authority/…` or the order of decoding and
    splitting.
    """
    path = re.split(rb"[?#]", target, maxsplit=1)[0]
    for _ in range(_MAX_DECODINGS):
        if (decoded := unquote_to_bytes(path)) == path:
            return any(segment in INTERNAL_ROUTES for segment in _segments(path))
        path = decoded
    return True  # nobody honest encodes a path so often, and going on would cost quadratic time


def _segments(path: bytes) -> Iterator[bytes]:
    for segment in re.split(rb"[/\\?#]", path):
        yield re.sub(rb"[\x00-\x20\x7f]", b"", segment.partition(b";")[0]).rstrip(b".").lower()


def _is_upgrade(head: Head) -> bool:
    """True for an upgrade request without a body; with a body it is forwarded as a plain request."""
    if not head.values(b"upgrade") or head.values(b"transfer-encoding"):
        return False
    if any(int(value) for value in head.values(b"content-length")):
        return False
    options = b",".join(head.values(b"connection")).lower().split(b",")
    return b"upgrade" in (option.strip() for option in options)


def _rewritten(head: Head, *, upgrade: bool, host: bytes | None = None) -> bytes:
    """The head for the guest: nothing of ours, no credential but the agent's own, `host` where one is given, and
    `Connection: close` unless it is an upgrade."""
    lines = [b"%s %s HTTP/1.1" % (head.method, head.target)]
    for name, value in head.fields:
        key = name.lower()
        # Some frameworks read `_` in a field name as `-`.
        if (plain := key.replace(b"_", b"-")).startswith(_PRIVATE) or plain == TRAFFIC_HEADER:
            continue
        if not upgrade and (key in _HOP_BY_HOP or key == b"upgrade"):
            continue
        lines.append(name + b": " + (host if key == b"host" and host is not None else value))
    if not upgrade:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"
