"""Following nodes over real connections: the streams are real nodes' (their log, their server), without sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from greenroom.fleet import following as module
from greenroom.fleet.following import Following
from greenroom.fleet.view import View
from greenroom.fleet.warm import WarmIndex
from greenroom.node.changelog import ChangeLog
from greenroom.node.followers import Followers
from greenroom.wire import changes, credentials
from greenroom.wire.calling import RoleClient
from greenroom.wire.changes import Position
from greenroom.wire.credentials import Verifier
from greenroom.wire.messages import NodeInfo, NodeStatus, PoolCounts
from greenroom.wire.serving import application, endpoint, listen, serving_beside
from greenroom.wire.tasks import spawn, stop
from tests.fleet.test_view import sandbox
from tests.support.waiting import until

WAIT = 10.0


class Node:
    """A test double of a node that serves nothing but its stream; `run` is one run of it."""

    def __init__(self, code: str, secrets: Path) -> None:
        self.code = code
        self.url = "http://127.0.0.1:1"
        self.log = ChangeLog(code)
        self.asked: list[str] = []
        """What each connection asked to go on from."""
        self.answer: Response | None = None
        """Instead of its stream."""
        self._secrets = secrets
        self._port = 0

    @contextlib.asynccontextmanager
    async def run(self, log: ChangeLog | None = None) -> AsyncIterator[Followers]:
        self.log = log or self.log
        followers = Followers(self.log)

        async def follow(request: Request) -> Response:
            after = request.query_params.get("after", "")
            self.asked.append(after)
            return self.answer or followers.answer(Position.parse(after))

        app = application([endpoint("GET", changes.PATH, follow, ("api",))], Verifier.load(self._secrets))
        sock = listen("127.0.0.1", self._port)
        self._port = sock.getsockname()[1]
        async with serving_beside(app, sock) as self.url:
            yield followers
            followers.close()

    def info(self, live: bool = True, draining: bool = False) -> NodeInfo:
        status = NodeStatus(
            name=f"node-{self.code}",
            code=self.code,
            api_url=self.url,
            relay_host="x",
            relay_port=1,
            engine="simulated",
            draining=draining,
        )
        return NodeInfo(status=status, live=live, last_seen=0.0)


class World:
    """A view that is kept by following, and what it may follow."""

    def __init__(self, following: Following, view: View, warm: WarmIndex, secrets: Path) -> None:
        self.following = following
        self.view = view
        self.warm = warm
        self._secrets = secrets

    def node(self, code: str = "aaaa") -> Node:
        return Node(code, self._secrets)

    async def whole(self, *nodes: Node) -> None:
        assert await self.following.settled([node.code for node in nodes], WAIT)

    def ids(self) -> set[str]:
        return {entry.sandbox.sandbox_id for entry in self.view}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    credentials.ensure(tmp_path)
    warm = WarmIndex()
    view = View(warm)
    async with RoleClient(credentials.own_token(tmp_path, "api")) as client:
        following = Following(client, view, warm)
        client.heard = following.heard
        yield World(following, view, warm, tmp_path)
        await following.close()


async def test_the_view_has_what_the_nodes_have(world: World) -> None:
    first, second = world.node("aaaa"), world.node("bbbb")
    first.log.put(sandbox(1))
    async with first.run(), second.run():
        world.following.nodes([first.info(), second.info()])
        assert set(world.view.partial()) == {"aaaa", "bbbb"}
        await world.whole(first, second)
        second.log.put(sandbox(2))
        first.log.drop(sandbox(1).sandbox_id)
        second.log.count(PoolCounts(template="base", size="small", target=3, warm=2, starting=0, waiting=0))
        await until(lambda: world.ids() == {sandbox(2).sandbox_id})
        await until(lambda: world.warm.left("bbbb", ("base", "small")) == 2)


async def test_a_node_that_is_away_is_partial_and_goes_on_where_it_was(world: World) -> None:
    node = world.node()
    node.log.put(sandbox(1))
    async with node.run():
        world.following.nodes([node.info()])
        await world.whole(node)
    await until(lambda: "aaaa" in world.view.partial())
    assert world.ids() == {sandbox(1).sandbox_id}
    node.log.put(sandbox(2))
    async with node.run():
        await world.whole(node)
        assert world.ids() == {sandbox(1).sandbox_id, sandbox(2).sandbox_id}
        assert node.asked[0] == ""
        assert node.asked[-1] == f"{node.log.position.stream}:1"


async def test_a_node_that_was_started_anew_is_read_anew(world: World) -> None:
    node = world.node()
    node.log.put(sandbox(1))
    async with node.run():
        world.following.nodes([node.info()])
        await world.whole(node)
    again = ChangeLog("aaaa")
    again.put(sandbox(2))
    async with node.run(again):
        await until(lambda: world.ids() == {sandbox(2).sandbox_id})
        await world.whole(node)


async def test_a_node_that_moved_is_found_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST", 1000.0)
    node = world.node()
    world.following.nodes([node.info()])
    await until(lambda: bool(world.view.partial()))
    async with node.run():
        world.following.nodes([node.info()])
        await world.whole(node)


async def test_a_node_that_left_the_table_is_gone(world: World) -> None:
    node = world.node()
    node.log.put(sandbox(1))
    async with node.run() as followers:
        world.following.nodes([node.info()])
        await world.whole(node)
        world.following.nodes([])
        assert len(world.view) == 0
        assert world.view.partial() == {}
        await until(lambda: followers.statistics()["following"] == 0)


async def test_only_nodes_that_take_work_are_picked(world: World) -> None:
    node = world.node()
    key = ("base", "small")
    node.log.count(PoolCounts(template="base", size="small", target=3, warm=3, starting=0, waiting=0))
    async with node.run():
        world.following.nodes([node.info()])
        await world.whole(node)
        assert world.warm.pick(key) == "aaaa"
        world.following.nodes([node.info(draining=True)])
        assert world.warm.pick(key) is None
        world.following.nodes([node.info(live=False)])
        assert world.warm.pick(key) is None
        world.following.nodes([node.info()])
        assert world.warm.pick(key) == "aaaa"


async def test_a_node_that_falls_silent_is_partial(tmp_path: Path, world: World) -> None:
    node = world.node()
    async with RoleClient(credentials.own_token(tmp_path, "api")) as client:
        following = Following(client, world.view, silence=0.05)
        async with node.run():
            following.nodes([node.info()])
            # It says something once a second, and so little is too seldom here.
            assert await following.settled(["aaaa"], WAIT)
            await until(lambda: "aaaa" in world.view.partial())
            assert await following.settled(["aaaa"], WAIT), "and is asked again"
        await following.close()


@pytest.mark.parametrize(
    "text",
    [b"this is no frame\n", b'{"type":"whole","stream":"bbbb-1","seq":0,"sandboxes":[]}\n', b"", b"x" * 5000],
    ids=["garbage", "of another node", "nothing", "a line without end"],
)
async def test_a_stream_that_cannot_be_used(
    world: World, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRAME_LIMIT", 4096)

    async def body() -> AsyncIterator[bytes]:
        yield text

    node = world.node()
    async with node.run():
        node.answer = StreamingResponse(body())
        world.following.nodes([node.info()])
        await until(lambda: len(node.asked) > 1)
        assert "aaaa" in world.view.partial()
        assert not await world.following.settled(["aaaa"], 0.01)
        node.answer = None
        await world.whole(node)


async def test_what_an_answer_has_shown_is_waited_for(world: World) -> None:
    node = world.node()
    async with node.run():
        world.following.nodes([node.info()])
        await world.whole(node)
        stream = node.log.position.stream
        world.following.heard(Position(stream, 1))
        assert world.following.behind(["aaaa"]) == {"aaaa"}
        assert not await world.following.settled(["aaaa"], 0.01)
        waiting = spawn(world.following.settled(["aaaa"], WAIT), "settled")
        await asyncio.sleep(0)
        node.log.put(sandbox(1))
        assert await waiting
        assert world.ids() == {sandbox(1).sandbox_id}
        world.following.heard(Position(stream, 1))
        assert world.following.behind(["aaaa"]) == set(), "it was there already"
        assert await world.following.settled(["aaaa", "unknown"], WAIT)


async def test_a_place_in_a_run_that_is_over_is_not_waited_for(world: World) -> None:
    node = world.node()
    async with node.run():
        world.following.nodes([node.info()])
        await world.whole(node)
        world.following.heard(Position(node.log.position.stream, 7))
    async with node.run(ChangeLog("aaaa")):
        await world.whole(node)
        # And one that nothing is known of is given up by and by.
        world.following.heard(Position("aaaa-never", 1))
        assert world.following.behind(["aaaa"]) == {"aaaa"}
        wanted = world.following._wanted["aaaa"]
        world.following._wanted["aaaa"] = wanted._replace(until=time.monotonic() - 1.0)
        assert world.following.behind(["aaaa"]) == set()


async def test_many_changes_while_it_reads(world: World) -> None:
    """More than the log keeps, faster than they are read: nothing is lost and nothing is left over."""
    node = world.node()
    log = ChangeLog("aaaa", keep=8)
    async with node.run(log):
        world.following.nodes([node.info()])

        async def work() -> None:
            for number in range(2000):
                log.put(sandbox(number % 50, ends_at=float(number)))
                if number % 3 == 0:
                    log.drop(sandbox((number * 7) % 50).sandbox_id)
                if number % 20 == 0:
                    await asyncio.sleep(0)

        working = spawn(work(), "changes")
        async with asyncio.timeout(WAIT):
            await working
        world.following.heard(log.position)
        await world.whole(node)
        assert {entry.sandbox.sandbox_id: entry.sandbox for entry in world.view} == log.sandboxes
        await stop(working)
