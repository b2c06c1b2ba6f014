"""Reading every node's stream of changes into a view: the shell around `view`.

Whoever keeps the node table tells of it (`nodes`). Each node has a task of its own that connects, names the place the
view stands at, and applies what comes; when that fails (the node is away, says nothing for `SILENCE` seconds, or sends
what does not follow) the node is partial, and the task tries again, first soon, then at growing intervals, and at
once when the table says something new of the node.

Answers of nodes say where their stream stood (`wire.changes.HEADER`). `heard` remembers that, and `settled` waits until
the view is as far: so whoever did something through this process finds it in the view. What was done through another
process is in the view as soon as the node's bytes are read: a node sends a change to those who follow before it
answers for it, and `settled` lets the loop take in what has arrived before it looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from typing import NamedTuple

from greenroom.errors import GreenroomError, NodeUnavailable
from greenroom.fleet.view import View
from greenroom.fleet.warm import WarmIndex
from greenroom.wire.calling import RoleClient
from greenroom.wire.changes import FRAME_LIMIT, PATH, SILENCE, Position, frame_of
from greenroom.wire.messages import NodeInfo
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)

RETRY_FIRST, RETRY_LAST = 0.05, 1.0
"""Seconds until a stream that broke off is asked for again: doubling from the first to the last."""
WANTED_FOR = 10.0
"""Seconds for which a place that an answer named is waited for; one not reached by then is of a run that is over."""
_TURNS = 3
"""Turns of the loop from bytes that can be read to their being in the view: the transport, the reader, its task."""


class _Wanted(NamedTuple):
    """A place that the view should reach, and the monotonic time until which that is to be expected."""

    position: Position
    until: float

    @property
    def stream(self) -> str:
        return self.position.stream


class _Followed:
    """A node that is followed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.news = asyncio.Event()
        """The table says something new of it: to wait any longer has no reason."""
        self.task: asyncio.Task[None] | None = None


class Following:
    """Keeps `view` (and `warm`, which may be picked from) by following nodes. `close` ends it."""

    def __init__(
        self,
        client: RoleClient,
        view: View,
        warm: WarmIndex | None = None,
        *,
        silence: float = SILENCE,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._view = view
        self._warm = warm
        self._silence = silence
        self._now = now
        self._followed: dict[str, _Followed] = {}
        self._wanted: dict[str, _Wanted] = {}
        """By node, the furthest place that one of its answers named and the view has not reached."""
        self._moved = asyncio.Event()
        self._closed = False
        self.on_move: Callable[[str], None] = _nobody
        """Hears the code of a node after each piece of its stream that the view has taken in, and when it is lost or
        has left. It raises nothing."""

    def __repr__(self) -> str:
        return f"<Following {sorted(self._followed)} wanted={self._wanted}>"

    def nodes(self, infos: Iterable[NodeInfo]) -> None:
        """The node table as it is now."""
        if self._closed:
            return
        table = {info.status.code: info for info in infos}
        for code in [each for each in self._followed if each not in table]:
            self._leave(code)
        for code, info in table.items():
            status = info.status
            self._view.join(code, status.name, self._now())
            if self._warm is not None:
                self._warm.admit(code, info.live and not status.draining)
            followed = self._followed.get(code)
            if followed is None:
                followed = self._followed[code] = _Followed(status.api_url)
                followed.task = spawn(self._follow(code, followed), f"follow {status.name}")
            else:
                followed.url = status.api_url
                followed.news.set()
        self._turned()

    def _leave(self, code: str) -> None:
        followed = self._followed.pop(code)
        if followed.task is not None:
            followed.task.cancel()
        self._wanted.pop(code, None)
        self._view.leave(code)
        if self._warm is not None:
            self._warm.admit(code, False)
        self.on_move(code)

    async def close(self) -> None:
        """Follow nobody any more. The view stays as it is, every node partial."""
        self._closed = True
        await stop(*(followed.task for followed in self._followed.values()))
        self._turned()

    def heard(self, position: Position) -> None:
        """A node has answered with this place of its stream."""
        code = position.code
        wanted = self._wanted.get(code)
        if wanted is not None and wanted.stream == position.stream and wanted.position.seq >= position.seq:
            return
        if code in self._followed and not self._reached(position):
            self._wanted[code] = _Wanted(position, time.monotonic() + WANTED_FOR)

    def behind(self, codes: Collection[str]) -> set[str]:
        """Those of these nodes that the view does not have as their answers have shown them."""
        now = time.monotonic()
        late = set()
        for code in codes:
            wanted = self._wanted.get(code)
            if wanted is None:
                continue
            if self._reached(wanted.position) or wanted.until < now:
                del self._wanted[code]
            else:
                late.add(code)
        return late

    def _reached(self, place: Position) -> bool:
        node = self._view.node(place.code)
        position = None if node is None else node.position
        return position is not None and position.stream == place.stream and position.seq >= place.seq

    async def settled(self, codes: Collection[str], deadline: float) -> bool:
        """Return True once the view has all of these nodes, each as far as its answers have shown; False when that is
        not so after `deadline` seconds. Nodes that are not in the table are not waited for."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if self._is_settled(codes):
            return True
        for code in codes:
            # Somebody wants it now: one that is between two tries is asked at once.
            if (followed := self._followed.get(code)) is not None:
                followed.news.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                while not (self._closed or self._is_settled(codes)):
                    await self._moved.wait()
        return self._is_settled(codes)

    def _is_settled(self, codes: Collection[str]) -> bool:
        nodes = [self._view.node(code) for code in codes]
        return not self.behind(codes) and all(node is None or node.since is None for node in nodes)

    def _turned(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _follow(self, code: str, followed: _Followed) -> None:
        pause, told = RETRY_FIRST, False
        while True:
            followed.news.clear()
            try:
                async with contextlib.aclosing(self._read(code, followed.url)) as arriving:
                    async for whole in arriving:
                        if whole and told:
                            _log.info("the changes of node %s are followed again", self._name(code))
                        if whole:
                            # Only now it was of use: what breaks off before is asked for ever more seldom.
                            pause, told = RETRY_FIRST, False
            except GreenroomError as error:
                if not told:
                    _log.warning("node %s is not seen as it is: %s", self._name(code), error.message)
                told = True
            finally:
                self._view.lost(code, self._now())
                self.on_move(code)
                self._turned()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await followed.news.wait()
            pause = min(2 * pause, RETRY_LAST)

    def _name(self, code: str) -> str:
        node = self._view.node(code)
        return code if node is None else node.name

    async def _read(self, code: str, url: str) -> AsyncGenerator[bool, None]:
        """Apply what one connection brings; gives after each piece whether the node is whole. Raises NodeUnavailable
        when the stream ends or does not follow from what is known, and what the node answers."""
        place = self._place(code)
        path = f"{url}{PATH}" if place is None else f"{url}{PATH}?after={place}"
        lines = self._client.lines(path, silence=self._silence, limit=FRAME_LIMIT)
        async with contextlib.aclosing(lines) as arriving:
            async for some in arriving:
                before = self._place(code)
                for line in some:
                    if not self._view.apply(code, frame_of(line), self._now()):
                        raise NodeUnavailable("its stream does not go on from where it was")
                self._arrived(code, before)
                self.on_move(code)
                self._turned()
                node = self._view.node(code)
                yield node is not None and node.since is None

    def _place(self, code: str) -> Position | None:
        node = self._view.node(code)
        return None if node is None else node.position

    def _arrived(self, code: str, before: Position | None) -> None:
        """Forget the place that was wanted of a node, if it has been reached or can no longer be."""
        wanted, place = self._wanted.get(code), self._place(code)
        if wanted is None or place is None:
            return
        # All there is in another run was read after the answer that named a place in the run before it.
        over = place.stream != wanted.stream and (before is None or before.stream != place.stream)
        if over or self._reached(wanted.position):
            del self._wanted[code]


def _nobody(_code: str) -> None:
    """Before anybody wants to hear."""
