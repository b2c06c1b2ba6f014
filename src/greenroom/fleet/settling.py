"""What is to be done once the view is as far as a node's answer has said: pure.

Whoever asked a node for something knows more than the view until the node's stream has told of it too. What is kept
for that while (a claim that is taken off a node's stock, a name, a reservation) is given up here, at the right moment:
when the view has reached the place that the answer named, when the stream that it was of is over, or after `LONGEST`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from greenroom.fleet.view import View
from greenroom.wire.changes import Position

LONGEST = 10.0
"""Seconds after which a place that the view has not reached is taken for one that it will not reach."""


class _Waiting(NamedTuple):
    position: Position
    until: float
    then: Callable[[], None]


class Settling:
    """See the module. Times are seconds of any one clock that never goes back."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._heard: dict[str, Position] = {}
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._streams: dict[str, str] = {}
        """By node, the stream that the view was in at the last move."""

    def statistics(self) -> dict[str, int]:
        """How much waits for the view."""
        return {"waiting": sum(map(len, self._waiting.values()))}

    def heard(self, position: Position) -> None:
        """A node has answered with this place. To be told before the answer is used."""
        self._heard[position.code] = position

    def after(self, code: str, now: float, then: Callable[[], None]) -> None:
        """Call `then` once the view is as far as the node's last answer: at once if it is, or if none named a place."""
        position = self._heard.get(code)
        if position is None or self._view.node(code) is None or self._reached(position):
            then()
        else:
            self._waiting.setdefault(code, deque()).append(_Waiting(position, now + LONGEST, then))

    def moved(self, code: str, now: float) -> None:
        """The view has taken in something of a node, or it has left the view."""
        node = self._view.node(code)
        place = None if node is None else node.position
        before = self._streams.get(code)
        if place is not None:
            self._streams[code] = place.stream
        waiting = self._waiting.get(code)
        if node is None:
            self._heard.pop(code, None)
            self._streams.pop(code, None)
        if waiting is None:
            return
        over = before if place is not None and place.stream != before else None
        while waiting:
            first = waiting[0]
            gone = node is None or first.until <= now or first.position.stream == over
            if not gone and not self._reached(first.position):
                break
            waiting.popleft().then()
        if not waiting:
            del self._waiting[code]

    def _reached(self, wanted: Position) -> bool:
        node = self._view.node(wanted.code)
        place = None if node is None else node.position
        return place is not None and place.stream == wanted.stream and place.seq >= wanted.seq
