"""The stock: places and waiting QEMUs made ahead, so that a restore has little left to do.

A restore takes 40 to 60 ms from nothing, nearly all of it for the place and for starting QEMU; with a QEMU that
waits for its state it takes about 10. What is stocked has an owner record like any VM and no note of what it
was restored from, so that after a node's death it is swept and never adopted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from greenroom.errors import GreenroomError
from greenroom.runtime.places import Place
from greenroom.runtime.stocking import Level, Step, Wants, plan
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)
_LOOK_AGAIN = 1.0
"""Seconds between two looks at the host's memory while there is too little of it."""
_BACKOFF_FIRST, _BACKOFF_LAST = 0.5, 60.0
"""Seconds without a further try after one that failed; doubles each time."""


class Waiting(Protocol):
    """A QEMU that waits for its state."""

    @property
    def ended(self) -> asyncio.Event: ...

    @property
    def directory(self) -> Path: ...

    async def destroy(self) -> None: ...


W = TypeVar("W", bound=Waiting)
G = TypeVar("G")
Made_co = TypeVar("Made_co", bound=Waiting, covariant=True)
Golden_contra = TypeVar("Golden_contra", contravariant=True)


class Maker(Protocol[Made_co, Golden_contra]):
    """Makes and removes what is stocked."""

    async def make_place(self, golden: Golden_contra) -> Place: ...

    async def drop_place(self, place: Place) -> None: ...

    async def make_waiting(self, golden: Golden_contra, place: Place | None) -> Made_co: ...


class _Shelf(Generic[W, G]):
    """The stock of one golden."""

    def __init__(self, golden: G) -> None:
        self.golden = golden
        self.places: deque[Place] = deque()
        self.waiting: deque[W] = deque()
        self.making = {"place": 0, "waiting": 0}


class Stock(Generic[W, G]):
    """Belongs to one event loop. `close` it at the end, which removes all that is stocked."""

    def __init__(self, maker: Maker[W, G], wants: Wants, hands: int, room: Callable[[], bool]) -> None:
        """`hands` things are made at the same time; `room` says whether the host has memory to spare."""
        self._maker = maker
        self.wants = wants
        self._hands = hands
        self._room = room
        self._shelves: dict[str, _Shelf[W, G]] = {}
        self._restoring = 0
        self._kick = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._held_until = 0.0
        self._backoff = _BACKOFF_FIRST
        self._closing = False

    def add(self, name: str, golden: G) -> None:
        """Stock for a golden from now on."""
        self._shelves.setdefault(name, _Shelf(golden))
        if self.wants.most and (self.wants.places or self.wants.waiting) and self._loop is None:
            self._loop = spawn(self._run(), "stock")
        self._kick.set()

    async def remove(self, name: str) -> None:
        """Stock for a golden no more; when this returns nothing uses it."""
        shelf = self._shelves.pop(name, None)
        if shelf is None:
            return
        while any(shelf.making.values()):
            await asyncio.wait(self._tasks)
        await self._clear(shelf)

    async def _clear(self, shelf: _Shelf[W, G]) -> None:
        waiting, places = list(shelf.waiting), list(shelf.places)
        shelf.waiting.clear()
        shelf.places.clear()
        await asyncio.gather(
            *(vm.destroy() for vm in waiting),
            *(self._maker.drop_place(place) for place in places),
        )

    def want(self, wants: Wants) -> None:
        """Hold other amounts from now on."""
        self.wants = wants
        for name, shelf in list(self._shelves.items()):
            self.add(name, shelf.golden)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """While a VM is restored in the block, nothing new is begun for the stock."""
        self._restoring += 1
        try:
            yield
        finally:
            self._restoring -= 1
            self._kick.set()

    def take_waiting(self, name: str) -> W | None:
        """A waiting QEMU, the caller's from now on; None when none is there."""
        shelf = self._use(name)
        while shelf is not None and shelf.waiting:
            vm = shelf.waiting.popleft()
            if not vm.ended.is_set():
                return vm
            self._work(vm.destroy(), "drop a QEMU that ended while it waited")
        return None

    def take_place(self, name: str) -> Place | None:
        """A place, the caller's from now on; None when none is there."""
        shelf = self._use(name)
        return shelf.places.popleft() if shelf is not None and shelf.places else None

    def _use(self, name: str) -> _Shelf[W, G] | None:
        shelf = self._shelves.pop(name, None)
        if shelf is not None:
            self._shelves[name] = shelf  # the last is the one used last
            self._kick.set()
        return shelf

    def levels(self) -> list[Level]:
        """What there is, beginning with the golden used last."""
        return [
            Level(
                golden=name,
                places=len(shelf.places),
                waiting=len(shelf.waiting),
                making_places=shelf.making["place"],
                making_waiting=shelf.making["waiting"],
            )
            for name, shelf in reversed(self._shelves.items())
        ]

    async def filled(self) -> None:
        """Wait until nothing is missing and nothing is being made."""
        while True:
            steps = plan(self.levels(), self.wants, room=True, restoring=0, hands=1)
            if self._tasks:
                await asyncio.wait(self._tasks)
            elif any(step.do == "make" for step in steps):
                await asyncio.sleep(0.01)
            else:
                return

    def hold(self, on: bool = True) -> None:
        """Begin nothing any more, as when the process is about to leave; `hold(False)` goes on."""
        self._closing = on
        self._kick.set()

    async def close(self) -> None:
        """Remove everything that is stocked."""
        self.hold()
        await stop(self._loop)
        self._loop = None
        while self._tasks:
            await asyncio.wait(self._tasks)
        for shelf in self._shelves.values():
            await self._clear(shelf)
        self._shelves.clear()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._kick.clear()
            room = self._room()
            held = loop.time() < self._held_until
            if not self._closing:
                hands = 0 if held else self._hands
                for step in plan(
                    self.levels(), self.wants, room=room, restoring=self._restoring, hands=hands
                ):
                    self._carry_out(step)
            pause = None if room else _LOOK_AGAIN
            if held:
                pause = max(0.001, self._held_until - loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._kick.wait()

    def _carry_out(self, step: Step) -> None:
        shelf = self._shelves[step.golden]
        if step.do == "make":
            shelf.making[step.kind] += 1
            self._work(self._make(shelf, step), f"stock a {step.kind} of {step.golden}")
        elif step.kind == "waiting":
            self._work(shelf.waiting.popleft().destroy(), "drop a waiting QEMU")
        else:
            self._work(self._maker.drop_place(shelf.places.popleft()), "drop a place")

    def _work(self, work: Awaitable[None], name: str) -> None:
        async def done() -> None:
            await work

        task = spawn(done(), name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, shelf: _Shelf[W, G], step: Step) -> None:
        try:
            if step.kind == "place":
                shelf.places.append(await self._maker.make_place(shelf.golden))
            else:
                place = shelf.places.popleft() if shelf.places else None
                vm = await self._maker.make_waiting(shelf.golden, place)
                shelf.waiting.append(vm)
                spawn(self._watch(shelf, vm), "watch a waiting QEMU")
            self._backoff = _BACKOFF_FIRST
        except (GreenroomError, OSError) as error:
            _log.warning("nothing could be put in stock, next try in %.1f s: %s", self._backoff, error)
            self._held_until = asyncio.get_running_loop().time() + self._backoff
            self._backoff = min(2 * self._backoff, _BACKOFF_LAST)
        finally:
            shelf.making[step.kind] -= 1
            self._kick.set()

    async def _watch(self, shelf: _Shelf[W, G], vm: W) -> None:
        """One that ends while it waits is dropped, and another is made."""
        await vm.ended.wait()
        if vm in shelf.waiting:
            shelf.waiting.remove(vm)
            self._work(vm.destroy(), "drop a QEMU that ended while it waited")
            self._held_until = asyncio.get_running_loop().time() + self._backoff
            self._backoff = min(2 * self._backoff, _BACKOFF_LAST)
            self._kick.set()
