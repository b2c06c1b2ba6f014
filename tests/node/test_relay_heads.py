"""Request heads, without sockets: bytes in, decision out."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from greenroom.errors import BadRequest
from greenroom.node.relay_heads import (
    AGENT_PORT,
    INTERNAL_ROUTES,
    Forward,
    Refusal,
    decide,
    forward,
    is_internal,
    parse,
)
from greenroom.wire.messages import Inbound

TOKEN = "secret"
SANDBOX = "iabcd" + "0" * 15


def request(
    target: str = "/", port: object = 8000, *fields: str, method: str = "GET", sandbox: str = SANDBOX
) -> bytes:
    ours = [f"x-greenroom-relay: {TOKEN}", f"x-greenroom-sandbox: {sandbox}", f"x-greenroom-port: {port}"]
    return "\r\n".join([f"{method} {target} HTTP/1.1", "host: a", *ours, *fields, "", ""]).encode("latin-1")


def playbook(raw: bytes) -> Forward | Refusal:
    head = parse(raw)
    route = decide(head, lambda offered: offered == TOKEN)
    return route if isinstance(route, Refusal) else forward(head, route, Inbound(), None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n",
        b"GET / HTTP/1.0\r\nhost: a\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: a\r\n\r\n",
        b"GET  / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\tx HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\x7f HTTP/1.1\r\nhost: a\r\n\r\n",
        b"G(T / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET init HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET ftp://a/ HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET * HTTP/1.1\r\nhost: a\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"CONNECT http://a HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: 1\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx : 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: a\rb\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: a\nb: c\r\n\r\n",
        b"GET / HTTP/1.1\nhost: a\n\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1, 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    ],
)
def test_malformed_heads_are_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(raw)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_parsed_or_refused_and_nothing_else(noise: bytes) -> None:
    for raw in (noise, noise + b"\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\n" + noise + b"\r\n\r\n"):
        try:
            head = parse(raw)
        except BadRequest:
            continue
        assert not any(byte in b"\r\n\x00" for _name, value in head.fields for byte in value)
        assert isinstance(decide(head, lambda _token: False), Refusal)


_latin = st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f")


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,20}", fullmatch=True),
            st.text(
                st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30
            ),
        ),
        max_size=8,
    )
)
def test_a_forwarded_head_is_wellformed_and_says_nothing_of_ours(fields: list[tuple[str, str]]) -> None:
    try:
        decision = playbook(request("/x?y=1", 8000, *(f"{name}: {value}" for name, value in fields)))
    except BadRequest:
        return
    if isinstance(decision, Refusal):
        assert decision.status in (400, 401)
        return
    again = parse(decision.head)
    assert again.target == b"/x?y=1"
    assert not any(name.lower().replace(b"_", b"-").startswith(b"x-greenroom") for name, _ in again.fields)
    kept = [name.lower() for name, _ in again.fields]
    for name, _value in fields:
        key = name.lower().encode()
        ours = key.replace(b"_", b"-").startswith(b"x-greenroom-")
        assert (key in kept) or ours or key in (b"connection", b"keep-alive", b"proxy-connection", b"upgrade")


def test_the_credential_comes_first() -> None:
    for raw in (
        request().replace(TOKEN.encode(), b"other"),
        request().replace(b"x-greenroom-relay", b"x-greenroom-relax"),
        request("/", 8000, f"x-greenroom-relay: {TOKEN}"),
        request("/init", AGENT_PORT, sandbox="nonsense").replace(TOKEN.encode(), b"other"),
    ):
        decision = playbook(raw)
        assert isinstance(decision, Refusal)
        assert decision.status == 401


@pytest.mark.parametrize("port", ["0", "65536", "-1", "+80", "8e1", "", "080", "99999999999", "\xb2"])
def test_ports_out_of_form_are_400(port: str) -> None:
    decision = playbook(request("/", port))
    assert isinstance(decision, Refusal)
    assert decision.status == 400


@pytest.mark.parametrize(
    "sandbox", ["", "x", "I" + "a" * 19, "i" + "a" * 18, "i" + "a" * 20, "iabcd-" + "0" * 13]
)
def test_ids_out_of_form_are_not_found(sandbox: str) -> None:
    decision = playbook(request(sandbox=sandbox))
    assert isinstance(decision, Refusal)
    assert decision.body == {"sandboxId": sandbox, "message": "The sandbox was not found", "code": 502}


def test_repeated_routing_headers_are_400() -> None:
    for extra in (f"x-greenroom-sandbox: {SANDBOX}", "x-greenroom-port: 8000"):
        decision = playbook(request("/", 8000, extra))
        assert isinstance(decision, Refusal)
        assert decision.status == 400


def test_upgrade_is_left_alone_except_on_the_agents_port() -> None:
    fields = ("Connection: keep-alive, Upgrade", "Upgrade: websocket")
    elsewhere, agent = playbook(request("/ws", 8000, *fields)), playbook(request("/ws", AGENT_PORT, *fields))
    assert isinstance(elsewhere, Forward)
    assert b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n" in elsewhere.head
    assert b"close" not in elsewhere.head
    assert isinstance(agent, Forward)
    assert b"pgrade" not in agent.head
    assert agent.head.endswith(b"Connection: close\r\n\r\n")


@pytest.mark.parametrize("framing", ["content-length: 3", "transfer-encoding: chunked"])
def test_upgrade_with_a_body_is_forwarded_as_a_plain_request(framing: str) -> None:
    decision = playbook(request("/ws", 8000, "Connection: Upgrade", "Upgrade: h2c", framing))
    assert isinstance(decision, Forward)
    assert b"pgrade" not in decision.head
    assert b"Connection: close" in decision.head


@pytest.mark.parametrize(
    "target",
    [
        "/init",
        "/init/",
        "/init?x=/health",
        "/init#x",
        "//init",
        "/init//",
        "/./init",
        "/x/../init",
        "/x/%2e%2E/init",
        "/%69nit",
        "/%2569nit",
        "/%252569nit",
        "/%25252569nit",
        "/x%2f..%2finit",
        "/init%3fx",
        "/init%00",
        "/init%20",
        "/init;a=b",
        "/INIT",
        "/\\init",
        "/x%5cinit",
        "//elsewhere/init",
        "/init/../health",
        "http://elsewhere/init",
        "HTTP://elsewhere/%69nit?x",
        "https://elsewhere//init",
        *(f"/{route.decode()}" for route in INTERNAL_ROUTES),
    ],
)
def test_internal_routes_are_found_in_every_disguise(target: str) -> None:
    decision = playbook(request(target, AGENT_PORT, method="POST"))
    assert isinstance(decision, Refusal)
    assert decision.status == 404
    assert isinstance(playbook(request(target, 8000, method="POST")), Forward), (
        "other ports belong to the user"
    )


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/health",
        "/metrics",
        "/envs",
        "/files?path=/init&username=user",
        "/files?path=%2Finit%2Fclock",
        "/files/compose",
        "/process.Process/Start",
        "/filesystem.Filesystem/ListDir",
        "/initial",
        "/re-init",
    ],
)
def test_public_routes_pass_unaltered(target: str) -> None:
    decision = playbook(request(target, AGENT_PORT))
    assert isinstance(decision, Forward)
    assert decision.head.startswith(f"GET {target} HTTP/1.1\r\n".encode())


_pieces = st.one_of(
    st.sampled_from(
        ["init", "clock", "in%69t", "%2569nit", "%66reeze", "INIT", "x", "http:", "é", "%", "%zz"]
    ),
    st.sampled_from(["..", "%2e%2e", ".", "/", "//", "%2f", "\\", "%5c"]),
    st.sampled_from(["?", "#", ";", "%3f", "%23", "%3b", "%00", "%20"]),
)


@given(st.lists(_pieces, max_size=8).map(lambda pieces: "/" + "".join(pieces)))
@example("//init/init")
def test_no_reading_of_a_forwarded_target_is_an_internal_route(target: str) -> None:
    """Whatever a plausible server makes of the path, it is not a route that we let through."""
    if is_internal(target.encode("latin-1")):
        return
    once = unquote(target)
    for reading in (target, once, unquote(once), once.replace("\\", "/")):
        for path in (reading.split("?")[0], reading.split("#")[0].split("?")[0], _path_by_urlsplit(reading)):
            assert _resolved(path).encode() not in INTERNAL_ROUTES


def _path_by_urlsplit(reading: str) -> str:
    try:
        return urlsplit(reading).path
    except ValueError:
        return ""


def _resolved(path: str) -> str:
    """First-to-last segments joined after dot segments and empty ones are gone."""
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            kept = kept[:-1]
        elif segment not in ("", "."):
            kept.append(segment)
    return "/".join(kept)


def test_deep_encodings_cost_little_and_are_refused() -> None:
    assert is_internal(b"/%" + b"25" * 30_000 + b"69nit")
