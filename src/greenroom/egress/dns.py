"""DNS messages, as far as an answerer of A questions needs them (RFC 1035). Pure, bounded, and never trusting.

A guest's question is read strictly and asked anew in words of our own; of an answer only the A records are taken, and
the guest's answer is made from them. So nothing that a guest or a far server wrote is passed on as it came, and names
in answers are skipped, never followed.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address

import msgspec

A, IN = 1, 1
NO_ERROR, FORMAT_ERROR, SERVER_FAILURE, NO_SUCH_NAME, NOT_IMPLEMENTED, REFUSED = 0, 1, 2, 3, 4, 5
MOST_ADDRESSES = 13
"""In one answer: with the longest name it still fits into the 512 bytes that every client takes."""
LONGEST_TTL = 300
"""Seconds a guest may remember an answer: rules and places change."""
UDP_ANSWER = 1232
"""Bytes that servers may send by UDP without fear of fragments (DNS flag day 2020)."""

_RESPONSE, _TRUNCATED, _RECURSION_WANTED, _RECURSION = 0x8000, 0x0200, 0x0100, 0x0080
_OPCODE = 0x7800
_OPT = 41
_LABEL = re.compile(rb"[A-Za-z0-9_-]{1,63}")


class Malformed(Exception):
    """The bytes are no DNS message of the kind that is expected."""


class Question(msgspec.Struct, frozen=True):
    """A question: `name` in lower case without a final dot, `wire` as it came (name, type, class)."""

    number: int
    name: str
    kind: int
    wire: bytes
    recursion: bool = True


class Answer(msgspec.Struct, frozen=True):
    """What a server said: the addresses, for how many seconds they hold, and whether it was cut short."""

    code: int
    addresses: tuple[IPv4Address, ...] = ()
    ttl: int = 0
    truncated: bool = False


def read_question(data: bytes) -> Question | bytes:
    """A guest's question; or, for one that is refused out of hand, the bytes to answer.

    Raises Malformed for what deserves no answer.
    """
    if len(data) < 12:
        raise Malformed
    number, flags, questions = (int.from_bytes(data[at : at + 2], "big") for at in (0, 2, 4))
    if flags & _RESPONSE:
        raise Malformed
    if flags & _OPCODE:
        return _bare(number, flags, NOT_IMPLEMENTED)
    if questions != 1:
        return _bare(number, flags, FORMAT_ERROR)
    labels: list[bytes] = []
    place = 12
    while True:
        if place >= len(data):
            return _bare(number, flags, FORMAT_ERROR)
        size = data[place]
        if size == 0:
            place += 1
            break
        label = data[place + 1 : place + 1 + size]
        # No name that can be looked up here has other characters, a pointer, or more than 255 bytes.
        if size > 63 or _LABEL.fullmatch(label) is None or place + 1 + size > 12 + 254:
            return _bare(number, flags, FORMAT_ERROR)
        labels.append(label)
        place += 1 + size
    if place + 4 > len(data):
        return _bare(number, flags, FORMAT_ERROR)
    kind = int.from_bytes(data[place : place + 2], "big")
    if int.from_bytes(data[place + 2 : place + 4], "big") != IN:
        return _bare(number, flags, REFUSED)
    name = b".".join(labels).decode("ascii").lower()
    return Question(number, name, kind, data[12 : place + 4], bool(flags & _RECURSION_WANTED))


def _bare(number: int, flags: int, code: int) -> bytes:
    """An answer that does not even repeat its question."""
    flags = _RESPONSE | (flags & (_OPCODE | _RECURSION_WANTED)) | _RECURSION | code
    return number.to_bytes(2, "big") + flags.to_bytes(2, "big") + bytes(8)


def write_answer(question: Question, answer: Answer) -> bytes:
    """The answer to a guest's question."""
    flags = _RESPONSE | (_RECURSION_WANTED if question.recursion else 0) | _RECURSION | answer.code
    addresses = answer.addresses[:MOST_ADDRESSES]
    ttl = max(0, min(answer.ttl, LONGEST_TTL))
    head = b"".join(part.to_bytes(2, "big") for part in (question.number, flags, 1, len(addresses), 0, 0))
    # 0xC00C points back to the name of the question.
    record = b"\xc0\x0c" + A.to_bytes(2, "big") + IN.to_bytes(2, "big") + ttl.to_bytes(4, "big") + b"\x00\x04"
    return head + question.wire + b"".join(record + address.packed for address in addresses)


def write_query(number: int, name: str) -> bytes:
    """Our own question for the addresses of a name that was read by `read_question` or checked by the rules."""
    head = b"".join(part.to_bytes(2, "big") for part in (number, _RECURSION_WANTED, 1, 0, 0, 1))
    opt = b"\x00" + _OPT.to_bytes(2, "big") + UDP_ANSWER.to_bytes(2, "big") + bytes(6)
    return head + _question(name) + opt


def _question(name: str) -> bytes:
    labels = name.encode("ascii").split(b".") if name else []
    wire = b"".join(bytes((len(label),)) + label for label in labels)
    return wire + b"\x00" + A.to_bytes(2, "big") + IN.to_bytes(2, "big")


def read_answer(data: bytes, number: int, name: str) -> Answer:
    """A server's answer to `write_query(number, name)`. Raises Malformed for anything else."""
    if len(data) < 12:
        raise Malformed
    got, flags, questions, answers = (int.from_bytes(data[at : at + 2], "big") for at in (0, 2, 4, 6))
    asked = _question(name)
    if got != number or not flags & _RESPONSE or flags & _OPCODE or questions != 1:
        raise Malformed
    # Letters of either case are the same name, and length bytes are no letters.
    if data[12 : 12 + len(asked)].lower() != asked.lower():
        raise Malformed
    code = flags & 0xF
    if flags & _TRUNCATED:
        return Answer(code, truncated=True)
    addresses: list[IPv4Address] = []
    ttls = [LONGEST_TTL]
    place = 12 + len(asked)
    for _ in range(answers):
        place = _skip_name(data, place)
        if place + 10 > len(data):
            raise Malformed
        kind, class_ = (int.from_bytes(data[at : at + 2], "big") for at in (place, place + 2))
        ttl = int.from_bytes(data[place + 4 : place + 8], "big")
        size = int.from_bytes(data[place + 8 : place + 10], "big")
        body = data[place + 10 : place + 10 + size]
        place += 10 + size
        if place > len(data):
            raise Malformed
        if class_ != IN:
            continue
        ttls.append(ttl)
        if kind == A and size == 4:
            addresses.append(IPv4Address(body))
    return Answer(code, tuple(dict.fromkeys(addresses)), min(ttls))


def _skip_name(data: bytes, place: int) -> int:
    """Where a name ends. A pointer ends it; it is not followed."""
    while place < len(data):
        size = data[place]
        if size == 0:
            return place + 1
        if size & 0xC0 == 0xC0:
            return place + 2
        if size & 0xC0:
            raise Malformed
        place += 1 + size
    raise Malformed
