"""A client with eyes: it declares pools, makes claims and sandboxes, and sees by watches what becomes of them.

Times are those of the bytes: from just before a request is sent until the piece of a watch's stream that brought the
news was read. A `Tenant` has one watch of each kind it is interested in, so what is timed is what a controller would
see, and not the answer alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType

import msgspec

from greenroom.api.kube.kinds import CLAIM, SANDBOX, TEMPLATE, WARM_POOL, Kind
from greenroom.bench import kube_client
from greenroom.bench.kube_client import Kube, Object, Refused, event_of, launch_of, name_of, now
from greenroom.bench.report import Meter, reason
from greenroom.errors import GreenroomError, NodeUnavailable, RuntimeFailure
from greenroom.wire.tasks import spawn, stop

IMAGE = "base"
"""Image of every sandbox: the template that is always there."""
SEEN_DEADLINE = 60.0
"""Seconds for a watch to bring what is waited for."""
POOL_DEADLINE = 180.0
"""Seconds for a pool to be as it was declared."""
_INITIAL = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"

Condition = Callable[[Object | None], bool]
"""Of an object as it is, or None where there is none."""


class Watched:
    """One kind's objects of a namespace as a watch brings them. Use as an async context manager."""

    def __init__(self, kube: Kube, kind: Kind) -> None:
        self._kube = kube
        self._kind = kind
        self.objects: dict[str, Object] = {}
        self.events = 0
        """That have come, bookmarks left out."""
        self._at: dict[str, float] = {}
        self._waiting: dict[str, list[tuple[Condition, asyncio.Future[float]]]] = {}
        self._begun = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._problem: GreenroomError | None = None

    async def __aenter__(self) -> Watched:
        self._reading = spawn(self._read(), f"watch of {self._kind.plural}")
        begun = spawn(self._begun.wait(), "beginning of a watch")
        try:
            async with asyncio.timeout(SEEN_DEADLINE):
                await asyncio.wait({begun, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await stop(self._reading)
            raise NodeUnavailable(f"a watch of {self._kind.plural} does not begin") from None
        finally:
            await stop(begun)
        if self._problem is not None:
            raise self._problem
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await stop(self._reading)

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self._kube.watch(self._kind, _INITIAL)) as arriving:
                async for lines in arriving:
                    at = now()
                    for line in lines:
                        self._take(line, at)
        except GreenroomError as error:
            self._problem = error
            for waiting in self._waiting.values():
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(error)

    def _take(self, line: bytes, at: float) -> None:
        event = event_of(line, at)
        if event.type == "BOOKMARK":
            self._begun.set()
            return
        self.events += 1
        name = name_of(event.object)
        self._at[name] = at
        obj = None if event.type == "DELETED" else event.object
        if obj is None:
            self.objects.pop(name, None)
        else:
            self.objects[name] = obj
        if (waiting := self._waiting.get(name)) is None:
            return
        for entry in list(waiting):
            condition, future = entry
            if not future.done() and condition(obj):
                future.set_result(at)
                waiting.remove(entry)
        if not waiting:
            del self._waiting[name]

    def expect(self, name: str, condition: Condition) -> asyncio.Future[float]:
        """Becomes the time (`kube_client.now`) at which the object was first seen to be so, from now on."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if self._problem is not None:
            future.set_exception(self._problem)
            return future
        if (name in self.objects or name in self._at) and condition(self.objects.get(name)):
            future.set_result(self._at[name])
            return future
        self._waiting.setdefault(name, []).append((condition, future))
        return future

    async def until(self, name: str, condition: Condition, deadline: float = SEEN_DEADLINE) -> float:
        """Wait for the same. Raises NodeUnavailable when that takes more than `deadline` seconds."""
        return await within(self.expect(name, condition), f"{self._kind.singular} {name}", deadline)


async def within(future: asyncio.Future[float], what: str, deadline: float = SEEN_DEADLINE) -> float:
    """What was expected of `what`. Raises NodeUnavailable when it does not come in time."""
    try:
        async with asyncio.timeout(deadline):
            return await future
    except TimeoutError:
        raise NodeUnavailable(
            f"the watch did not show within {deadline:.0f} s what was waited for of {what}"
        ) from None


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """One claim, or one sandbox that was created directly, in milliseconds from just before it was sent."""

    name: str
    answered_ms: float | None = None
    ready_ms: float | None = None
    """Until a watch had brought it with its condition Ready."""
    launch: str = ""
    """`warm` or `cold`, as its sandbox says."""
    node: str = ""
    sandbox_id: str = ""
    error: str = ""


class Tenant:
    """One namespace's client with its watches. Use as an async context manager."""

    def __init__(self, kube: Kube, *, claims: bool = True) -> None:
        self.kube = kube
        self.pools = Watched(kube, WARM_POOL)
        self.claims = Watched(kube, CLAIM) if claims else None
        self.sandboxes = Watched(kube, SANDBOX)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Tenant:
        try:
            enter = self._stack.enter_async_context
            await enter(self.kube)
            await enter(self.pools)
            if self.claims is not None:
                await enter(self.claims)
            await enter(self.sandboxes)
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def declare(self, pool: str, replicas: int) -> float:
        """Make a pool, with a template of its own, or set how large it shall be; wait until it is full.

        Returns the seconds from the request to a watch's showing it. Raises RuntimeFailure when it does not get there.
        """
        begun = now()
        if pool in self.pools.objects:
            await self.kube.scale(pool, replicas)
        else:
            await self._make_template(pool)
            begun = now()
            await self.kube.create(WARM_POOL, kube_client.warm_pool(pool, pool, replicas))
        return await self.full(pool, replicas) - begun

    async def full(self, pool: str, replicas: int) -> float:
        """Wait until a pool says that it has so many, all ready; returns when that was seen. Raises RuntimeFailure."""
        try:
            return await self.pools.until(pool, lambda obj: _full(obj, replicas), POOL_DEADLINE)
        except NodeUnavailable:
            status = self.pools.objects.get(pool, {}).get("status")
            raise RuntimeFailure(f"the pool {pool} did not get to {replicas}; it says {status}") from None

    async def _make_template(self, name: str) -> None:
        try:
            await self.kube.create(TEMPLATE, kube_client.template(name, IMAGE))
        except Refused as refusal:
            if refusal.reason != "AlreadyExists":
                raise

    async def claim(self, name: str, pool: str) -> ClaimRow:
        """One SandboxClaim, until it is seen to be ready."""
        assert self.claims is not None  # noqa: S101
        return await self._make(CLAIM, self.claims, name, kube_client.claim(name, pool))

    async def sandbox(self, name: str) -> ClaimRow:
        """One Sandbox that is created directly, until it is seen to be ready."""
        return await self._make(SANDBOX, self.sandboxes, name, kube_client.sandbox(name, IMAGE))

    async def _make(self, kind: Kind, watched: Watched, name: str, obj: Object) -> ClaimRow:
        row = ClaimRow(name=name)
        expected = watched.expect(name, lambda found: found is not None and kube_client.ready(found))
        begun = now()
        try:
            await self.kube.create(kind, obj)
            row = msgspec.structs.replace(row, answered_ms=(now() - begun) * 1000)
            at = await within(expected, f"{kind.singular} {name}")
            return msgspec.structs.replace(row, ready_ms=(at - begun) * 1000)
        except (GreenroomError, OSError) as error:
            expected.cancel()
            return msgspec.structs.replace(row, error=reason(error))

    async def told(self, rows: Iterable[ClaimRow]) -> list[ClaimRow]:
        """The same rows with what their sandboxes say of themselves."""
        found = await self.kube.objects(SANDBOX)
        by_name = {name_of(obj): obj for obj in found.get("items", [])}
        made: list[ClaimRow] = []
        for row in rows:
            obj = by_name.get(row.name)
            if obj is None:
                made.append(row)
                continue
            status = obj.get("status", {})
            made.append(
                msgspec.structs.replace(
                    row,
                    launch=launch_of(obj),
                    node=str(status.get("nodeName", "")),
                    sandbox_id=str(status.get("sandboxID", "")),
                )
            )
        return made

    async def clear(self) -> None:
        """Delete every claim and sandbox of the namespace, and wait until the watch has shown that."""
        if self.claims is not None and self.claims.objects:
            await self.kube.delete_all(CLAIM)
        await self.kube.delete_all(SANDBOX)
        for name in list(self.sandboxes.objects):
            await self.sandboxes.until(name, lambda obj: obj is None)


def _full(obj: Object | None, replicas: int) -> bool:
    status = {} if obj is None else obj.get("status", {})
    return bool(status.get("readyReplicas", 0) == replicas == status.get("replicas", 0))


async def burst(
    names: Iterable[str], parallel: int, one: Callable[[str], Awaitable[ClaimRow]], meter: Meter
) -> list[ClaimRow]:
    """Do `one` for each name, `parallel` at a time: each worker takes the next name once it is done with one."""
    waiting = iter(list(names))
    rows: list[ClaimRow] = []

    async def work() -> None:
        for name in waiting:
            rows.append(await one(name))
            meter.advance()

    workers = [spawn(work(), "a client") for _ in range(parallel)]
    try:
        await asyncio.gather(*workers)
    finally:
        await stop(*workers)
    return rows


class Silent:
    """A meter that counts nothing, for what is not of the count that was begun."""

    def say(self, text: str) -> None:
        """Nothing."""

    def begin(self, total: int) -> None:
        """Nothing."""

    def advance(self) -> None:
        """Nothing."""


def served_once(rows: Iterable[ClaimRow]) -> int:
    """How many of the rows have a sandbox that no other row has."""
    ids = [row.sandbox_id for row in rows if row.sandbox_id and not row.error]
    return sum(ids.count(each) == 1 for each in set(ids))


def warm_count(rows: Iterable[ClaimRow]) -> int:
    """How many of the rows were served from the warm pool, as their sandboxes say."""
    return sum(row.launch == "warm" for row in rows if not row.error)
