"""Names in first bytes: found however the bytes are cut, and never found in what only looks like it."""

from __future__ import annotations

import functools
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.egress.naming import LIMIT, MORE, sniff

NAMES = st.from_regex(r"[a-z0-9]{1,20}(\.[a-z0-9-]{1,20}[a-z]){0,4}", fullmatch=True).filter(
    lambda name: "-." not in name and ".-" not in name
)


@functools.cache
def client_hello(name: str) -> bytes:
    """What Python's own TLS client sends first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def in_records(hello: bytes, size: int) -> bytes:
    """The same handshake message, spread over records of `size` bytes."""
    message = hello[5:]
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


def test_a_real_client_hello_is_read_however_it_is_cut() -> None:
    hello = client_hello("Api.Example.com")
    for end in range(1, len(hello)):
        assert sniff(hello[:end]) is MORE
    assert sniff(hello) == "api.example.com"
    assert sniff(hello + b"more") == "api.example.com"
    for size in (1, 7, 100):
        records = in_records(hello, size)
        assert sniff(records) == "api.example.com"
        assert sniff(records[:-1]) is MORE


def test_a_client_hello_without_a_name_names_nothing() -> None:
    assert sniff(client_hello("192.0.2.1")) is None


@settings(deadline=None)
@given(NAMES)
def test_any_name_in_an_http_head_is_found(name: str) -> None:
    head = f"GET /x HTTP/1.1\r\nAccept: */*\r\nhOST:  {name.upper()}:8080 \r\n\r\nbody".encode()
    assert sniff(head) == name
    end = head.index(b"\r\n\r\n") + 4
    assert all(sniff(head[:cut]) is MORE for cut in range(1, end))


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test\r\nhost : b.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test\r\n folded\r\n\r\n",
        b"GET http://b.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET http://a.test@b.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"CONNECT b.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a.test\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test/x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test, b.test\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a.test\n\n\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"get / HTTP/1.1\r\n",
        b"\x00\x01\x02",
        b"\x17\x03\x03\x00\x05hello",
        b"\x16\x02\x00\x00\x05hello",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
    ],
)
def test_what_names_no_one_host_names_nothing(head: bytes) -> None:
    assert sniff(head) is None


def test_an_absolute_target_that_agrees_is_fine() -> None:
    assert sniff(b"GET http://a.test:80/x HTTP/1.1\r\nHost: a.test\r\n\r\n") == "a.test"
    assert sniff(b"OPTIONS * HTTP/1.1\r\nHost: a.test\r\n\r\n") == "a.test"


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_survived(data: bytes) -> None:
    found = sniff(data)
    assert found is None or found is MORE or isinstance(found, str)


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 300), st.integers(1, 255))
def test_a_damaged_client_hello_is_survived(tail: bytes, at: int, change: int) -> None:
    hello = bytearray(client_hello("a.test") + tail)
    hello[at % len(hello)] ^= change
    found = sniff(bytes(hello))
    assert found is None or found is MORE or isinstance(found, str)


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nX: ", b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"])
def test_nobody_is_waited_for_beyond_the_limit(start: bytes) -> None:
    assert sniff(start.ljust(LIMIT - 1, b"a")) is MORE
    assert sniff(start.ljust(LIMIT, b"a")) is None
