"""A stream that has ended stays ended, whatever else happens in the same turn of the loop."""

from __future__ import annotations

from typing import Any, cast

import pytest

from greenroom.guest.exchange import Response
from greenroom.guest.following import Follower, Subscription
from greenroom.guest.processes import Process
from greenroom.guest.recording import Chunk


class FakeResponse:
    """A test double: notes what is written, and whether anything came after the end."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.finished = False
        self.late: list[bytes] = []
        self.writable = True

    def write(self, data: bytes) -> None:
        (self.late if self.finished else self.written).append(data)

    def finish(self, data: bytes = b"") -> None:
        assert not self.finished
        self.written.append(data)
        self.finished = True

    def listen(self, listener: object) -> None:
        """Nobody comes or goes here."""

    async def drain(self) -> None:
        """The peer keeps up."""


class FakeRecorder:
    """A test double: there is always more output."""

    async def read(self, offset: int) -> Any:

        return Chunk(offset, "stdout", b"x")


class FakeProcess:
    """A test double: a process that goes on and on."""

    timed_out = False
    end_envelope = None

    def __init__(self) -> None:
        self.recorder = FakeRecorder()

    def subscribe(self, subscriber: object) -> None:
        """Nobody is told anything."""

    def follow(self, wake: object) -> None:
        """Nobody is told anything."""

    unsubscribe = subscribe
    unfollow = follow

    def update_flow(self) -> None:
        """There are no pipes."""


@pytest.fixture
def response() -> FakeResponse:
    return FakeResponse()


async def test_a_deadline_and_output_in_one_turn(response: FakeResponse) -> None:
    stream = Subscription(cast(Response, response), cast(Process, FakeProcess()), 60.0)
    stream.deliver(b"before")
    stream._on_deadline()
    stream.deliver(b"after")
    stream.ended(b"end")
    await stream.run()
    assert response.written[0] == b"before"
    assert b"deadline_exceeded" in response.written[1]
    assert response.late == []


async def test_a_follower_stops_reading_at_its_deadline(response: FakeResponse) -> None:
    stream = Follower(cast(Response, response), cast(Process, FakeProcess()), 60.0, 0)
    stream.stop_after(0.0)
    await stream.run()
    assert response.finished
    assert response.late == []


async def test_silence_after_the_end_is_not_filled(response: FakeResponse) -> None:
    stream = Subscription(cast(Response, response), cast(Process, FakeProcess()), 0.0)
    stream._on_deadline()
    stream._on_silence()
    stream._timer.cancel()
    await stream.run()
    assert response.late == []
