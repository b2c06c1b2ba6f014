"""A node's stream of changes as it goes over the wire: one JSON object a line, each with its stream and its number.

A *stream* is one run of a node: its name is the node's code and a random part, so that nothing of an earlier run can be
taken for this one's. The changes of a stream have numbers from 1 on without gaps. A follower gets, once it asks:

    whole, whole, …      all there is, in parts, as it was after the change `seq`; or, if it named a place not too
    beat                 far back, just this: it goes on behind `seq`
    put, gone, held, …   the changes that came after, in order
    beat                 when nothing happens: `seq` is the last that was sent, `head` the last there is

So a follower that has seen the numbers without a gap has what the node has. `Position` names a place in a stream; a
node puts its own into the header of its answers, and whoever has seen it in the stream has seen what was answered.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from greenroom.errors import NodeUnavailable
from greenroom.wire.ids import CODE_LENGTH
from greenroom.wire.messages import Listed, PoolCounts

PATH = "/v1/changes"
HEADER = "x-greenroom-position"
"""In a node's answers: where its stream stood."""
CONTENT_TYPE = "application/x-ndjson"
FRAME_LIMIT = 8 << 20
"""Bytes of one line: a sandbox's record is bounded by what a claim may bring (4 MiB), and parts by `PART`."""
PART = 128 << 10
"""Bytes of one part of a whole, about: small enough that reading it holds nothing up."""
BEAT = 1.0
"""Seconds of silence after which a node says that it is there."""
SILENCE = 5.0
"""Seconds of silence after which a follower gives a stream up."""


class Position(NamedTuple):
    """A place in a stream: behind the change with this number, 0 being the beginning."""

    stream: str
    seq: int

    def __str__(self) -> str:
        return f"{self.stream}:{self.seq}"

    @property
    def code(self) -> str:
        """The code of the node whose stream it is."""
        return self.stream[:CODE_LENGTH]

    @classmethod
    def parse(cls, text: str) -> Position | None:
        """The place that a text names, or None where it is no such text."""
        stream, _, seq = text.rpartition(":")
        if not CODE_LENGTH < len(stream) <= 64 or not (seq.isascii() and seq.isdigit() and len(seq) <= 18):
            return None
        return cls(stream, int(seq))


class HeldName(msgspec.Struct, frozen=True):
    """A name that is taken by a sandbox which nobody is shown yet: its claim is under way, or not confirmed."""

    sandbox_id: str
    owner: str
    name: str


class Whole(msgspec.Struct, frozen=True, kw_only=True, tag="whole", tag_field="type"):
    """A part of all there is after the change `seq`, counted from 0; `more` parts follow, or this was the last."""

    stream: str
    seq: int
    part: int = 0
    sandboxes: list[Listed]
    pools: list[PoolCounts] = []
    held: list[HeldName] = []
    more: bool = False


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put", tag_field="type"):
    """A sandbox is there now, or is another than it was."""

    stream: str
    seq: int
    sandbox: Listed


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag="gone", tag_field="type"):
    """A sandbox has ended."""

    stream: str
    seq: int
    sandbox_id: str


class Held(msgspec.Struct, frozen=True, kw_only=True, tag="held", tag_field="type"):
    """A name is taken, before its sandbox is shown. `Put` of that sandbox takes over from it, `Gone` frees the name."""

    stream: str
    seq: int
    name: HeldName


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag="pool", tag_field="type"):
    """A pool's numbers are these now."""

    stream: str
    seq: int
    pool: PoolCounts


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat", tag_field="type"):
    """The node is there: all up to `seq` was sent to this follower, and `head` is the last change there is."""

    stream: str
    seq: int
    head: int


Change = Put | Gone | Held | Counted
Frame = Whole | Put | Gone | Held | Counted | Beat

_decoder: msgspec.json.Decoder[Frame] = msgspec.json.Decoder(Frame)


def line_of(frame: Frame) -> bytes:
    """A frame as it is sent."""
    return msgspec.json.encode(frame) + b"\n"


def frame_of(line: bytes) -> Frame:
    """The frame in a line, with or without its end. Raises NodeUnavailable for what is none."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NodeUnavailable(f"a node's stream has a line that cannot be read: {error}") from error
