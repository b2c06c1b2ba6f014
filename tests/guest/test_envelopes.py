"""Connect envelopes, messages and gzip bodies: the other pure readers."""

from __future__ import annotations

import gzip
import itertools
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest import messages
from greenroom.guest.connect import COMPRESSED_FLAG, END_FLAG, FrameDecoder, end_error, frame
from greenroom.guest.errors import HTTP_STATUS, AgentError
from greenroom.guest.events import end_event, output_event
from greenroom.guest.uploads import BLOCK, GzipReader


@given(
    st.lists(st.tuples(st.sampled_from([0, END_FLAG]), st.binary(max_size=100)), max_size=8),
    st.lists(st.integers(0, 1000), max_size=20),
)
def test_envelopes_survive_any_split(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(frame(payload, flags) for flags, payload in frames)
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    decoder = FrameDecoder()
    found = [one for a, b in itertools.pairwise(marks) for one in decoder.feed(data[a:b])]
    assert found == frames
    assert not decoder.partial


def test_an_unfinished_envelope_is_noticed() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(frame(b"{}")[:-1]) == []
    assert decoder.partial


def test_large_and_compressed_envelopes_are_refused() -> None:
    with pytest.raises(AgentError) as caught:
        FrameDecoder(10).feed(b"\0" + (11).to_bytes(4, "big"))
    assert caught.value.code == "resource_exhausted"
    with pytest.raises(AgentError) as caught:
        FrameDecoder().feed(frame(b"x", COMPRESSED_FLAG))
    assert caught.value.code == "unimplemented"


def test_every_code_has_a_status_and_an_end_envelope() -> None:
    for code, status in HTTP_STATUS.items():
        error = AgentError(code, 'with "quotes" and é')
        assert error.status == status
        [(flags, payload)] = FrameDecoder().feed(end_error(error))
        assert flags == END_FLAG
        assert json.loads(payload) == {"error": {"code": code, "message": error.message}}


@given(st.binary(max_size=200))
def test_output_is_carried_untouched(data: bytes) -> None:
    [(_, payload)] = FrameDecoder().feed(output_event("stderr", data))
    assert messages.octets(json.loads(payload)["event"]["data"], "stderr") == data


@pytest.mark.parametrize(("status", "end"), [
    (0, {"exitCode": 0, "exited": True, "status": "exit status 0"}),
    (3, {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}),
    (-9, {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}),
    (-15, {"exitCode": -1, "exited": False, "status": "signal: terminated", "error": "signal: terminated"}),
])  # fmt: skip
def test_the_end_is_told_as_in_the_contract(status: int, end: dict[str, object]) -> None:
    [(_, payload)] = FrameDecoder().feed(end_event(status))
    assert json.loads(payload) == {"event": {"end": end}}


def test_fields_follow_the_json_mapping() -> None:
    assert messages.decode(b"") == {}
    assert messages.text({"a": None}, "a", "x") == "x"
    assert messages.integer({"a": "12"}, "a") == 12
    assert messages.integer({"a": 3.0}, "a") == 3
    assert messages.octets({"a": "-_8"}, "a") == b"\xfb\xff"
    assert messages.octets({"a": ""}, "a") == b""
    assert messages.flag({}, "a", True) is True


@pytest.mark.parametrize(("read", "value"), [
    (messages.text, 1), (messages.integer, True), (messages.integer, "x"), (messages.integer, 1.5),
    (messages.child, []), (messages.texts, ["a", 1]), (messages.text_map, {"a": 1}), (messages.octets, "*"),
    (messages.octets, 1), (messages.texts, "a"), (messages.text_map, []),
])  # fmt: skip
def test_a_field_of_the_wrong_type_is_refused(read: object, value: object) -> None:
    assert callable(read)
    with pytest.raises(AgentError, match="field 'a' must be"):
        read({"a": value}, "a")


@pytest.mark.parametrize("raw", [b"x", b"[]", b'"x"', b"\xff", b"[" * 100000])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(AgentError):
        messages.decode(raw)


def inflate(data: bytes, size: int) -> bytes:
    reader = GzipReader()
    out = b""
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        while piece or reader.pending:
            plain = reader.feed(piece)
            assert len(plain) <= BLOCK
            out += plain
            piece = b""
    reader.finish()
    return out


@given(st.lists(st.binary(max_size=300), max_size=4), st.integers(1, 400), st.integers(0, 20))
def test_gzip_members_in_any_pieces(members: list[bytes], size: int, padding: int) -> None:
    data = b"".join(gzip.compress(member) for member in members) + b"\0" * (padding if members else 0)
    assert inflate(data, size) == b"".join(members)


def test_a_gzip_bomb_comes_out_in_blocks() -> None:
    assert inflate(gzip.compress(bytes(20_000_000)), 4096) == bytes(20_000_000)
    noise = os.urandom(700_000)
    assert inflate(gzip.compress(noise, 1), 1 << 20) == noise


@pytest.mark.parametrize(
    "data", [b"no gzip at all", gzip.compress(b"x" * 1000)[:-5]], ids=["no gzip", "cut off"]
)
def test_a_broken_gzip_body_is_refused(data: bytes) -> None:
    with pytest.raises(AgentError):
        inflate(data, 100)
