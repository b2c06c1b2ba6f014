"""DNS messages: what is read, what is refused, and that any bytes are survived."""

from __future__ import annotations

import contextlib
from ipaddress import IPv4Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.egress import dns

NAMES = st.from_regex(r"[a-z0-9_]{1,20}(\.[a-z0-9-]{1,30}){0,5}", fullmatch=True)
ADDRESSES = st.lists(st.integers(0, 2**32 - 1).map(IPv4Address), max_size=30)


def asked(name: str, kind: int = dns.A, *, number: int = 7, flags: int = 0x0100, class_: int = 1) -> bytes:
    """A question as a guest's resolver writes it."""
    wire = b"".join(bytes((len(part),)) + part.encode() for part in name.split(".") if part) + b"\0"
    head = b"".join(part.to_bytes(2, "big") for part in (number, flags, 1, 0, 0, 0))
    return head + wire + kind.to_bytes(2, "big") + class_.to_bytes(2, "big")


def answered(query: bytes, records: bytes, count: int, *, flags: int = 0x8180) -> bytes:
    """A server's answer to our own question (whose OPT record takes 11 bytes)."""
    head = query[:2] + flags.to_bytes(2, "big") + b"\0\1" + count.to_bytes(2, "big") + bytes(4)
    return head + query[12:-11] + records


def record(address: str, ttl: int = 60, kind: int = dns.A, class_: int = 1) -> bytes:
    body = IPv4Address(address).packed
    return (
        b"\xc0\x0c"
        + kind.to_bytes(2, "big")
        + class_.to_bytes(2, "big")
        + ttl.to_bytes(4, "big")
        + b"\0\4"
        + body
    )


@settings(deadline=None)
@given(NAMES, ADDRESSES, st.integers(0, 2**31 - 1))
def test_an_answer_says_what_was_found_within_512_bytes(
    name: str, addresses: list[IPv4Address], ttl: int
) -> None:
    question = dns.read_question(asked(name.upper(), number=4711))
    assert isinstance(question, dns.Question)
    assert (question.name, question.kind, question.number) == (name, dns.A, 4711)
    written = dns.write_answer(question, dns.Answer(0, tuple(addresses), ttl))
    assert len(written) <= 512
    read = dns.read_answer(written, 4711, name)
    assert read.addresses == tuple(dict.fromkeys(addresses[: dns.MOST_ADDRESSES]))
    assert read.ttl <= dns.LONGEST_TTL


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_are_survived(data: bytes) -> None:
    try:
        question = dns.read_question(data)
    except dns.Malformed:
        pass
    else:
        assert isinstance(question, bytes | dns.Question)
    with contextlib.suppress(dns.Malformed):
        dns.read_answer(data, 1, "a.test")


@settings(deadline=None)
@given(st.integers(12, 90), st.integers(0, 255))
def test_a_damaged_answer_is_read_or_refused_and_never_answers_another_question(at: int, value: int) -> None:
    query = dns.write_query(7, "a.test")
    data = bytearray(answered(query, record("192.0.2.1") + record("192.0.2.2"), 2))
    data[at % len(data)] = value
    try:
        read = dns.read_answer(bytes(data), 7, "a.test")
    except dns.Malformed:
        return
    assert len(read.addresses) <= 2


def test_only_addresses_of_the_internet_class_are_taken_from_an_answer() -> None:
    query = dns.write_query(7, "a.test")
    alias = b"\xc0\x0c\0\5\0\1\0\0\0\x1e\0\3\1b\0"
    records = alias + record("192.0.2.1") + record("192.0.2.2", kind=16) + record("192.0.2.3", class_=3)
    read = dns.read_answer(answered(query, records, 4), 7, "a.test")
    assert read == dns.Answer(0, (IPv4Address("192.0.2.1"),), 30)
    assert dns.read_answer(answered(query, b"", 0, flags=0x8183), 7, "a.test").code == dns.NO_SUCH_NAME
    assert dns.read_answer(answered(query, b"", 0, flags=0x8380), 7, "a.test").truncated


@pytest.mark.parametrize("what", ["number", "name", "query", "short"])
def test_an_answer_to_something_else_is_none(what: str) -> None:
    query = dns.write_query(7, "a.test")
    good = answered(query, record("192.0.2.1"), 1)
    bad = {
        "number": b"\0\x08" + good[2:],
        "name": answered(dns.write_query(7, "b.test"), record("192.0.2.1"), 1),
        "query": answered(query, record("192.0.2.1"), 1, flags=0x0180),
        "short": good[:-1],
    }[what]
    with pytest.raises(dns.Malformed):
        dns.read_answer(bad, 7, "a.test")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (asked("a.test", flags=0x2100), dns.NOT_IMPLEMENTED),
        (asked("a.test", class_=3), dns.REFUSED),
        (asked("a b.test"), dns.FORMAT_ERROR),
        (asked("a.test")[:-2], dns.FORMAT_ERROR),
        (asked("a.test")[:4] + b"\0\2" + asked("a.test")[6:], dns.FORMAT_ERROR),
        (asked("a.test")[:12] + b"\xc0\x0c\0\1\0\1", dns.FORMAT_ERROR),
        (asked(".".join(["a" * 60] * 5)), dns.FORMAT_ERROR),
    ],
)
def test_a_question_that_makes_no_sense_is_told_so(data: bytes, code: int) -> None:
    reply = dns.read_question(data)
    assert isinstance(reply, bytes)
    assert len(reply) == 12
    assert reply[:2] == data[:2]
    assert reply[3] & 0xF == code


def test_what_is_no_question_gets_no_answer() -> None:
    for data in (b"", b"\0" * 11, asked("a.test", flags=0x8100)):
        with pytest.raises(dns.Malformed):
            dns.read_question(data)


def test_the_longest_name_is_taken() -> None:
    name = ".".join(["a" * 63] * 3 + ["a" * 61])
    assert len(name) == 253
    question = dns.read_question(asked(name))
    assert isinstance(question, dns.Question)
    assert question.name == name
    full = dns.write_answer(question, dns.Answer(0, tuple(IPv4Address(n) for n in range(40)), 60))
    assert len(full) <= 512
