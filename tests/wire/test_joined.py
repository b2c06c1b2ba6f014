"""Small writes that leave together: playbooks of one connection's transport."""

from __future__ import annotations

import asyncio
from typing import Any

from greenroom.wire.joined import MOST, Joined


class Recorder:
    """Stands for a transport; `sent` is what was written, piece by piece."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ended = ""

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def write_eof(self) -> None:
        self.ended = "eof"

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def is_closing(self) -> bool:
        return bool(self.ended)


def joined() -> tuple[Any, Recorder]:
    recorder = Recorder()
    return Joined(recorder), recorder  # type: ignore[arg-type]


async def test_what_is_written_in_one_turn_leaves_in_one_piece() -> None:
    transport, recorder = joined()
    transport.write(b"head")
    transport.write(b"")
    transport.writelines([b"bo", b"dy"])
    assert recorder.sent == []
    await asyncio.sleep(0)
    assert recorder.sent == [b"headbody"]
    transport.write(b"next")
    await asyncio.sleep(0)
    assert recorder.sent == [b"headbody", b"next"]


async def test_what_is_complete_leaves_at_once_and_not_again() -> None:
    transport, recorder = joined()
    transport.write(b"a")
    transport.flush()
    assert recorder.sent == [b"a"]
    await asyncio.sleep(0)
    assert recorder.sent == [b"a"]


async def test_what_is_large_is_not_held() -> None:
    transport, recorder = joined()
    transport.write(b"head")
    transport.write(bytes(MOST))
    assert recorder.sent == [b"head" + bytes(MOST)]


async def test_an_end_sends_the_rest_and_an_abort_does_not() -> None:
    for end, told, sent in (
        ("close", "closed", [b"x"]),
        ("write_eof", "eof", [b"x"]),
        ("abort", "aborted", []),
    ):
        transport, recorder = joined()
        transport.write(b"x")
        getattr(transport, end)()
        assert (recorder.ended, recorder.sent, transport.is_closing()) == (told, sent, True)
        await asyncio.sleep(0)
        assert recorder.sent == sent
