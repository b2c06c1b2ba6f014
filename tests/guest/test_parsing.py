"""Request heads and chunked bodies, byte by byte."""

from __future__ import annotations

import itertools
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest.errors import AgentError
from greenroom.guest.parsing import ChunkedDecoder, parse_head


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


def test_a_head_is_taken_apart() -> None:
    head = parse_head(
        b"POST /files?path=%2Ftmp%2F%C3%A9&x= HTTP/1.1\r\nHost: a\r\nX-A:  b \r\nx-a: c\r\nContent-Length: 12"
    )
    assert (head.method, head.path, head.length, head.chunked, head.keep_alive) == (
        "POST",
        "/files",
        12,
        False,
        True,
    )
    assert head.headers == {"host": "a", "x-a": "b, c", "content-length": "12"}
    assert head.arguments() == {"path": "/tmp/é", "x": ""}


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=40), max_size=8))
def test_a_query_says_what_was_put_into_it(arguments: dict[str, str]) -> None:
    query = urlencode(arguments, errors="surrogatepass") if arguments else ""
    try:
        query.encode("ascii")
        [value.encode() for pair in arguments.items() for value in pair]
    except UnicodeEncodeError:
        return  # lone surrogates are in no URL
    head = parse_head(f"GET /files?{query} HTTP/1.1".encode())
    assert head.arguments() == arguments


@given(st.text(alphabet="ab=&%+;?/#2F0\xff", max_size=60))
def test_any_query_is_read_or_refused(query: str) -> None:
    head = parse_head(f"GET /files?{query} HTTP/1.1".encode("latin-1"))
    found = head.arguments()
    assert all(isinstance(value, str) for pair in found.items() for value in pair)


def test_a_query_is_bounded_and_its_first_value_counts() -> None:
    assert parse_head(b"GET /f?a=1&a=2 HTTP/1.1").arguments() == {"a": "1"}
    many = "&".join(f"a{number}=1" for number in range(101)).encode()
    with pytest.raises(AgentError, match="query"):
        parse_head(b"GET /f?" + many + b" HTTP/1.1").arguments()


def test_an_absolute_target_gives_its_path() -> None:
    assert parse_head(b"GET http://host:1/health?q=1 HTTP/1.1").path == "/health"
    assert parse_head(b"GET http://host HTTP/1.1").path == "/"
    assert parse_head(b"OPTIONS * HTTP/1.1").path == "*"


@pytest.mark.parametrize(("version", "connection", "kept"), [
    ("1.1", None, True), ("1.1", "close", False), ("1.0", None, False), ("1.0", "keep-alive", False),
])  # fmt: skip
def test_keep_alive(version: str, connection: str | None, kept: bool) -> None:
    raw = f"GET / HTTP/{version}" + (f"\r\nConnection: {connection}" if connection else "")
    assert parse_head(raw.encode()).keep_alive is kept


@pytest.mark.parametrize("raw", [
    b"", b"GET /", b"GET / HTTP/1.1 x", b"GET  / HTTP/1.1", b"GET / HTTP/1.1\r\nno colon",
    b"GET / HTTP/1.1\r\nA : b", b"GET / HTTP/1.1\r\n folded: x", b"GET / HTTP/1.1\r\nA: b\nC: d",
    b"GET / HTTP/1.1\r\nA: b\rC: d", b"GET / HTTP/1.1\r\nA: \0", b"G@T / HTTP/1.1", b"GET x HTTP/1.1",
    b"GET / HTTP/1.1\r\nContent-Length: -1", b"GET / HTTP/1.1\r\nContent-Length: +1",
    b"GET / HTTP/1.1\r\nContent-Length: 1, 1", b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2",
    b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
    b"GET / HTTP/1.1\r\nContent-Length: ",
])  # fmt: skip
def test_what_can_be_read_in_two_ways_is_refused(raw: bytes) -> None:
    with pytest.raises(AgentError) as caught:
        parse_head(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(("raw", "status"), [
    (b"GET / HTTP/2.0", 505),
    (b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked", 501),
    (b"GET / HTTP/1.1" + b"\r\nA: b" * 300, 431),
])  # fmt: skip
def test_what_is_not_supported_says_so(raw: bytes, status: int) -> None:
    with pytest.raises(AgentError) as caught:
        parse_head(raw)
    assert caught.value.status == status


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    try:
        parse_head(raw)
    except AgentError as error:
        assert error.status >= 400  # noqa: PT017 - both outcomes are fine, nothing else is


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=200), max_size=8),
    extension=st.sampled_from([b"", b";x", b" ;a=b"]),
    trailers=st.sampled_from([b"", b"X: y\r\n", b"A: b\r\nC: d\r\n"]),
    rest=st.binary(max_size=30),
    cuts=st.lists(st.integers(0, 3000), max_size=20),
)
def test_a_chunked_body_survives_any_split(
    chunks: list[bytes], extension: bytes, trailers: bytes, rest: bytes, cuts: list[int]
) -> None:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    body += b"0\r\n" + trailers + b"\r\n"
    decoder = ChunkedDecoder()
    out = b""
    for piece in pieces_of(body, cuts):
        assert not decoder.done
        out += b"".join(decoder.feed(piece))
    assert decoder.done
    assert out == b"".join(chunks)
    assert decoder.rest() == b""
    whole = ChunkedDecoder()
    assert b"".join(whole.feed(body + rest)) == out
    assert whole.rest() == rest


@pytest.mark.parametrize("body", [
    b"x\r\n", b"\r\n", b"-1\r\n", b"0x1\r\n", b"1 1\r\n", b"2\r\nabXY", b"1\r\na\n\n", b"f" * 16 + b"\r\n",
    b"1" * 2000, b"0\r\n" + b"A" * 20000, b"0\r\n" + b"A: b\r\n" * 6000,
])  # fmt: skip
def test_a_malformed_chunked_body_is_refused(body: bytes) -> None:
    with pytest.raises(AgentError):
        ChunkedDecoder().feed(body)


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=5))
def test_any_bytes_are_decoded_or_refused(data: bytes, cuts: list[int]) -> None:
    decoder = ChunkedDecoder()
    try:
        for piece in pieces_of(data, cuts):
            if decoder.done:
                break
            decoder.feed(piece)
    except AgentError as error:
        assert error.code == "invalid_argument"  # noqa: PT017 - both outcomes are fine
