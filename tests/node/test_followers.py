"""Following a node over a real connection: all there is, then each change; resumption, slow ones, one too many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from greenroom.config import LONGEST_TIMEOUT, Config
from greenroom.errors import (
    BadRequest,
    Forbidden,
    NameTaken,
    NodeUnavailable,
    StaleObject,
    Unauthorized,
    UnknownSandbox,
)
from greenroom.node.branching import Branching
from greenroom.node.changelog import ChangeLog
from greenroom.node.followers import Follower, Followers
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.routes import routes
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import quiet
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire import changes, credentials
from greenroom.wire.calling import RoleClient
from greenroom.wire.changes import Beat, Counted, Frame, Gone, Held, Position, Put, Whole, frame_of
from greenroom.wire.credentials import Verifier
from greenroom.wire.messages import (
    FOREVER,
    ClaimRequest,
    Declared,
    DeclaredChange,
    Listed,
    NodeStatus,
    PauseRequest,
    PoolSpec,
    Resumed,
    ResumeRequest,
    Sandbox,
    SandboxList,
    TimeoutRequest,
    listed,
)
from greenroom.wire.serving import application, listen, serving_beside
from greenroom.wire.tasks import spawn, stop
from tests.node.conftest import SMALL
from tests.node.test_changelog import sandbox
from tests.support.waiting import until

Ask = Callable[..., ClaimRequest]
WAIT = 10.0


class Served:
    """A node's HTTP API over the simulated engine."""

    def __init__(self, url: str, keeper: Keeper, followers: Followers, secrets: Path) -> None:
        self.url = url
        self.keeper = keeper
        self.followers = followers
        self.secrets = secrets

    @contextlib.asynccontextmanager
    async def client(self, role: str = "api") -> AsyncIterator[RoleClient]:
        async with RoleClient(credentials.own_token(self.secrets, role)) as made:
            yield made


@pytest.fixture
async def node(
    keeper: Keeper, warmer: Warmer, runtime: SimulatedRuntime, tmp_path: Path
) -> AsyncIterator[Served]:
    credentials.ensure(tmp_path / "secrets")
    followers = Followers(keeper.changes, most=3, send_deadline=0.5)
    warmer.tell = keeper.changes.count
    branching = Branching(keeper, runtime, keeper._journal)

    def status() -> NodeStatus:
        raise AssertionError("nobody asks")

    app = application(
        routes(keeper, branching, warmer, followers, status), Verifier.load(tmp_path / "secrets")
    )
    async with serving_beside(app, listen("127.0.0.1", 0)) as url:
        yield Served(url, keeper, followers, tmp_path / "secrets")
        followers.close()


class Reader:
    """Reads one stream; a line at a time, in order."""

    def __init__(self, lines: AsyncIterator[list[bytes]]) -> None:
        self._lines = lines
        self._left: list[bytes] = []

    async def next(self) -> Frame:
        async with asyncio.timeout(WAIT):
            while not self._left:
                self._left = await anext(self._lines)
        return frame_of(self._left.pop(0))

    async def until(self, wanted: Callable[[Frame], bool]) -> Frame:
        """The first frame that is wanted."""
        while not wanted(frame := await self.next()):
            pass
        return frame

    async def sandboxes(self, seq: int) -> list[Frame]:
        """What is told of sandboxes until the number `seq` has come."""
        found = []
        while True:
            frame = await self.next()
            if isinstance(frame, Put | Gone):
                found.append(frame)
            if frame.seq >= seq:
                return found


@contextlib.asynccontextmanager
async def following(client: RoleClient, node: Served, after: Position | None = None) -> AsyncIterator[Reader]:
    url = f"{node.url}{changes.PATH}" + (f"?after={after}" if after else "")
    async with contextlib.aclosing(client.lines(url, silence=WAIT, limit=changes.FRAME_LIMIT)) as lines:
        yield Reader(lines)


async def test_all_there_is_then_each_change_of_a_sandboxs_life(node: Served, ask: Ask) -> None:
    async with node.client() as client, node.client("master") as master, following(client, node) as reader:
        first = await reader.next()
        assert isinstance(first, Whole)
        assert (first.sandboxes, first.more) == ([], False)
        made = await master.call("POST", f"{node.url}/v1/claims", Sandbox, ask())
        assert node.keeper.list() == []
        url = f"{node.url}/v1/sandboxes/{made.sandbox_id}"
        confirmed = await client.call("POST", f"{url}/confirm", Sandbox)
        (shown,) = await reader.sandboxes(node.keeper.changes.position.seq)
        assert isinstance(shown, Put), "and nothing of it while it was provisional"
        assert shown.sandbox == listed(confirmed)
        renewed = await client.call("POST", f"{url}/timeout", Sandbox, TimeoutRequest(500.0))
        (moved,) = await reader.sandboxes(node.keeper.changes.position.seq)
        assert isinstance(moved, Put)
        assert moved.sandbox.ends_at == renewed.ends_at
        await client.call("POST", f"{url}/pause", Sandbox, PauseRequest())
        paused = (await reader.sandboxes(node.keeper.changes.position.seq))[-1]
        assert isinstance(paused, Put)
        assert paused.sandbox.state == "paused"
        await client.call("POST", f"{url}/resume", Resumed, ResumeRequest(60.0))
        resumed = (await reader.sandboxes(node.keeper.changes.position.seq))[-1]
        assert isinstance(resumed, Put)
        assert resumed.sandbox.state == "running"
        await client.call("DELETE", url, type(None))
        (ended,) = await reader.sandboxes(node.keeper.changes.position.seq)
        assert isinstance(ended, Gone)
        assert ended.sandbox_id == made.sandbox_id
        assert (await client.call("GET", f"{node.url}/v1/sandboxes", SandboxList)).sandboxes == []


async def test_a_sandbox_that_nobody_confirms_is_never_told_of(
    warmer: Warmer, runtime: SimulatedRuntime, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "journal.db")
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as keeper:
        made = await keeper.claim(ask())
        await keeper.release(made.sandbox_id)
        assert keeper.changes.position.seq == 0
    journal.close()


async def test_after_a_restart_there_is_another_stream_with_the_same_sandboxes(
    warmer: Warmer, runtime: SimulatedRuntime, config: Config, tmp_path: Path, ask: Ask
) -> None:
    journal = Journal(tmp_path / "journal.db")
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as first:
        made = await first.confirm((await first.claim(ask())).sandbox_id)
        first.leave_running()
    async with Keeper(name="n", runtime=runtime, warmer=warmer, journal=journal, config=config) as second:
        second.adopt(await runtime.adopt())
        assert second.changes.position.stream != first.changes.position.stream
        assert second.changes.position.code == first.changes.position.code
        assert second.changes.sandboxes == {each.sandbox_id: listed(each) for each in second.list()}
        for each in second.list():
            assert each.sandbox_id == made.sandbox_id
    journal.close()


async def test_pool_numbers_are_told(node: Served, warmer: Warmer) -> None:
    async with node.client() as client, following(client, node) as reader:
        await reader.next()
        await warmer.set_pools([PoolSpec(template="base", size=SMALL, target=2)], quiet)
        full = await reader.until(lambda frame: isinstance(frame, Counted) and frame.pool.warm == 2)
        assert isinstance(full, Counted)
        assert (full.pool.template, full.pool.size, full.pool.target) == ("base", "small", 2)
        warmer.take("base", SMALL)
        await reader.until(lambda frame: isinstance(frame, Counted) and frame.pool.warm == 1)
        await reader.until(lambda frame: isinstance(frame, Counted) and frame.pool.warm == 2)


async def test_one_who_was_away_gets_what_was_missed_and_no_more(node: Served) -> None:
    log = node.keeper.changes
    log.put(sandbox(1))
    async with node.client() as client:
        async with following(client, node) as reader:
            seen = await reader.next()
        log.put(sandbox(2))
        log.drop(sandbox(1).sandbox_id)
        async with following(client, node, Position(seen.stream, seen.seq)) as reader:
            assert await reader.next() == Beat(stream=seen.stream, seq=1, head=3)
            assert [type(await reader.next()) for _ in range(2)] == [Put, Gone]


@pytest.mark.parametrize("after", ["zzzz-other:0", "far", "too-far-back"])
async def test_one_who_cannot_go_on_gets_all_there_is(node: Served, after: str) -> None:
    log = node.keeper.changes
    log._keep = 2
    for number in range(5):
        log.put(sandbox(number))
    place = {
        "far": Position(log.position.stream, 99),
        "too-far-back": Position(log.position.stream, 1),
    }.get(after) or Position.parse(after)
    async with node.client() as client, following(client, node, place) as reader:
        whole = await reader.next()
        assert isinstance(whole, Whole)
        assert len(whole.sandboxes) == 5


async def test_silence_is_broken_by_beats(node: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.node.followers.BEAT", 0.01)
    async with node.client() as client, following(client, node) as reader:
        whole = await reader.next()
        assert await reader.next() == Beat(stream=whole.stream, seq=whole.seq, head=whole.seq)


async def test_only_so_many_follow(node: Served) -> None:
    async with node.client() as client, contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            reader = await stack.enter_async_context(following(client, node))
            await reader.next()
        async with following(client, node) as one_more:
            with pytest.raises(NodeUnavailable, match="3 already follow"):
                await one_more.next()
    await until(lambda: node.followers.statistics()["following"] == 0)


async def test_who_has_no_business_here_is_refused(node: Served) -> None:
    async with node.client("proxy") as proxy, following(proxy, node) as reader:
        with pytest.raises(Forbidden):
            await reader.next()
    async with RoleClient("wrong") as stranger, following(stranger, node) as reader:
        with pytest.raises(Unauthorized):
            await reader.next()


async def test_a_follower_that_leaves_is_noticed(node: Served) -> None:
    async with node.client() as client, following(client, node) as reader:
        await reader.next()
        assert node.followers.statistics() == {"following": 1, "behind": 0}
    await until(lambda: node.followers.statistics()["following"] == 0)


async def test_one_who_takes_nothing_is_cut_off_and_holds_nobody_up(node: Served) -> None:
    host, port = node.url.removeprefix("http://").split(":")
    token = credentials.own_token(node.secrets, "api")
    loop = asyncio.get_running_loop()
    with socket.socket() as lazy:
        # A small window, so that little is on its way.
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.setblocking(False)
        await loop.sock_connect(lazy, (host, int(port)))
        request = f"GET {changes.PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        await loop.sock_sendall(lazy, request.encode())
        await until(lambda: node.followers.statistics()["following"] == 1)
        log = node.keeper.changes
        async with node.client() as client, following(client, node) as quick:
            await quick.next()
            for number in range(40):
                log.put(sandbox(number, metadata={"text": "x" * 200_000}))
            last = log.position.seq
            # The other is served meanwhile.
            assert (await quick.until(lambda frame: frame.seq == last)).seq == last
            await node.followers.passed()
            await until(lambda: node.followers.statistics()["following"] == 1)
            log.drop(sandbox(0).sandbox_id)
            assert isinstance(await quick.until(lambda frame: isinstance(frame, Gone)), Gone)
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(WAIT):
                while await loop.sock_recv(lazy, 65536):
                    pass


async def test_an_answer_comes_after_the_change_and_says_where_it_stands(node: Served, ask: Ask) -> None:
    heard: list[Position] = []
    async with node.client() as client, node.client("master") as master, following(client, node) as reader:
        await reader.next()
        client.heard = heard.append
        made = await master.call("POST", f"{node.url}/v1/claims", Sandbox, ask())
        await client.call("POST", f"{node.url}/v1/sandboxes/{made.sandbox_id}/confirm", Sandbox)
        assert heard == [node.keeper.changes.position]
        # It was on its way before the answer was.
        assert all(each.seq >= heard[0].seq for each in node.followers._followers)
        await client.call("GET", f"{node.url}/v1/sandboxes/{made.sandbox_id}", Sandbox)
        assert len(heard) == 2


async def test_a_claims_answer_says_where_the_stream_stands_with_its_name_in_it(
    node: Served, ask: Ask
) -> None:
    heard: list[Position] = []
    async with node.client() as client, node.client("master") as master, following(client, node) as reader:
        await reader.next()
        master.heard = heard.append
        made = await master.call("POST", f"{node.url}/v1/claims", Sandbox, ask(owner="me", name="box"))
        held = await reader.until(lambda frame: isinstance(frame, Held))
        assert isinstance(held, Held)
        assert (held.name.sandbox_id, held.name.name) == (made.sandbox_id, "box")
        assert held.seq <= heard[0].seq
        with pytest.raises(NameTaken):
            await master.call("POST", f"{node.url}/v1/claims", Sandbox, ask("k2", owner="me", name="box"))


async def test_what_is_declared_is_replaced_and_one_that_stayed_is_read_where_it_is_asked_for(
    node: Served, ask: Ask
) -> None:
    declared = Declared(document=msgspec.Raw(b'{"sandbox": {}}'), retain=True)
    heard: list[Position] = []
    async with node.client() as client, node.client("master") as master:
        made = await master.call("POST", f"{node.url}/v1/claims", Sandbox, ask(ttl=FOREVER))
        url = f"{node.url}/v1/sandboxes/{made.sandbox_id}"
        await client.call("POST", f"{url}/confirm", Sandbox)
        client.heard = heard.append
        answer = await client.call("PUT", f"{url}/declared", Listed, DeclaredChange(0, declared))
        assert answer.declared is not None
        assert (answer.declared.revision, bytes(answer.declared.document)) == (1, b'{"sandbox":{}}')
        assert heard == [node.keeper.changes.position]
        with pytest.raises(StaleObject):
            await client.call("PUT", f"{url}/declared", Listed, DeclaredChange(0, declared))
        no_object = Declared(document=msgspec.Raw(b"[]"))
        with pytest.raises(BadRequest, match="must be an object"):
            await client.call("PUT", f"{url}/declared", Listed, DeclaredChange(1, no_object))
        with pytest.raises(Forbidden):
            await master.call("PUT", f"{url}/declared", Listed, DeclaredChange(1, declared))
        for refused in (FOREVER + 1, LONGEST_TIMEOUT + 1):
            with pytest.raises(BadRequest, match="or 3153600000 for ever"):
                await client.call("POST", f"{url}/timeout", Sandbox, TimeoutRequest(refused))
        await client.call("POST", f"{url}/timeout", Sandbox, TimeoutRequest(FOREVER))
        await node.keeper.evict(made.sandbox_id, "for a test")
        with pytest.raises(UnknownSandbox):
            await client.call("GET", url, Sandbox)
        assert (await client.call("GET", f"{url}?ended=1", Sandbox)).end_reason == "for a test"
        with pytest.raises(UnknownSandbox):
            await client.call("DELETE", url, type(None))
        await client.call("DELETE", f"{url}?ended=1", type(None))
        with pytest.raises(UnknownSandbox):
            await client.call("GET", f"{url}?ended=1", Sandbox)


async def test_a_follower_that_is_behind_is_waited_for_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("greenroom.node.followers.PASSED_WITHIN", 0.01)
    log = ChangeLog("abcd")
    followers = Followers(log)
    taken: asyncio.Queue[bytes] = asyncio.Queue()
    free = asyncio.Event()
    free.set()

    async def send(lines: bytes) -> None:
        await free.wait()
        taken.put_nowait(lines)

    follower = Follower()
    running = spawn(followers.run(follower, None, send), "follower")
    await until(lambda: not follower.behind)
    log.put(sandbox(1))
    await followers.passed()
    assert follower.seq == 1
    free.clear()
    log.put(sandbox(2))
    await followers.passed()
    assert follower.behind
    log.put(sandbox(3))
    async with asyncio.timeout(WAIT):
        await followers.passed()
    free.set()
    await until(lambda: not follower.behind and follower.seq == 3)
    await stop(running)
    assert followers.statistics() == {"following": 0, "behind": 0}


async def test_a_node_that_leaves_ends_its_streams(node: Served) -> None:
    async with node.client() as client, following(client, node) as reader:
        await reader.next()
        node.followers.close()
        with pytest.raises(NodeUnavailable, match="ended its stream"):
            await reader.next()
        async with following(client, node) as another:
            with pytest.raises(NodeUnavailable, match="stopping"):
                await another.next()
