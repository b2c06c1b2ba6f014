"""A test double for a node: it keeps the node API's contract in memory, runs no VM, and misbehaves on demand.

It serves real HTTP with real credentials on a thread of its own, so that tests may be synchronous (the SDKs
are), and reports to masters like a node does. A test switches its misbehaviour on by setting attributes.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from greenroom.errors import GreenroomError, KeyConflict, NotFound, PoolDry, UnknownSandbox
from greenroom.node.changelog import ChangeLog
from greenroom.node.followers import Followers
from greenroom.wire import changes, credentials, serving
from greenroom.wire.calling import RoleClient
from greenroom.wire.changes import HeldName, Position
from greenroom.wire.ids import new_node_code, new_sandbox_id
from greenroom.wire.messages import (
    ClaimRequest,
    Fork,
    ForkList,
    ForkRequest,
    Network,
    NodeStatus,
    PoolCounts,
    PoolSpec,
    PoolStatus,
    Registered,
    Resumed,
    ResumeRequest,
    Sandbox,
    SandboxList,
    SnapshotList,
    TimeoutRequest,
)
from greenroom.wire.serving import Handler, application, json_response, listen, read_json, url_of
from tests.support.waiting import until

DEADLINE = 20.0
"""Seconds for starting, stopping and anything a test waits for."""


class FakeNode:
    """One fake node. Use as a context manager; `heartbeats` and misbehaviour may be changed at any time."""

    def __init__(
        self, secrets_dir: Path, name: str = "node-0", masters: list[str] | None = None, warm: int = 100
    ) -> None:
        self.name = name
        self.code = new_node_code()
        self.masters = masters or []
        self.warm = warm
        self.draining = False
        self.beat = 0.05
        """Seconds between heartbeats."""
        self.heartbeats = True
        """Whether it reports to its masters."""
        self.tells_stock = True
        """Whether its stream tells how many members are warm."""
        self.pools: list[PoolSpec] = []
        """The targets that a master has told it last, between heartbeats."""
        self.pools_error: GreenroomError | None = None
        """What it answers to a master that tells it."""
        self.drop_claim_answers = 0
        """So many claims are carried out, but their connection is cut instead of answering."""
        self.drop_delete_answers = 0
        """The same for DELETE."""
        self.hide_claims = False
        self.confirm_error: GreenroomError | None = None
        self.drop_confirm_answers = 0
        """Whether it denies knowing any claim key, as one does whose claim is still under way."""
        self.network_error: GreenroomError | None = None
        """What it answers to other network rules."""
        self._list_error: GreenroomError | None = None
        self.claim_error: GreenroomError | None = None
        """What it answers to a claim."""
        self.hold_claims = threading.Event()
        """Claims wait until this is set; it is set from the start."""
        self.hold_claims.set()
        self.claims: list[ClaimRequest] = []
        self.fork_error: str | None = None
        """Why the last of some forks is not made."""
        """Every claim that arrived."""
        self.shares: dict[str, Registered] = {}
        """By master URL, the last answer to a report."""
        self.calls: list[str] = []
        self.sandboxes: dict[str, Sandbox] = _Told(self._tell)
        self.by_key: dict[str, tuple[ClaimRequest, str]] = {}
        self._token = credentials.own_token(secrets_dir, "node")
        self._verifier = credentials.Verifier.load(secrets_dir)
        self._socket = listen("127.0.0.1", 0)
        self.url = url_of(self._socket)
        self._log = ChangeLog(self.code)
        self._followers = Followers(self._log)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fake-{name}")

    # Life

    def __enter__(self) -> FakeNode:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop serving and reporting, as a killed node does. May be called twice."""
        self._stop.set()
        self.hold_claims.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the fake node does not end"
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` holds; it is looked at after each request and report."""
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE), "this did not come true in time"

    def behave(self, warm: int = 100) -> None:
        """Back to good behaviour."""
        self.warm = warm
        self.draining = False
        self.heartbeats = self.tells_stock = True
        self.pools_error = None
        self.drop_claim_answers = self.drop_delete_answers = 0
        self.hide_claims = False
        self.confirm_error = None
        self.drop_confirm_answers = 0
        self.list_error = self.claim_error = self.network_error = None
        self.hold_claims.set()

    @property
    def list_error(self) -> GreenroomError | None:
        """What it answers to those who want to know of its sandboxes, also those who know of some already."""
        return self._list_error

    @list_error.setter
    def list_error(self, error: GreenroomError | None) -> None:
        self._list_error = error
        if error is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._break_off(), self._loop).result(DEADLINE)

    async def _break_off(self) -> None:
        self._followers.close()
        self._followers = Followers(self._log)

    def _tell(self, sandbox_id: str) -> None:
        """Let its followers know of a change, and return when they were sent it, as a node does before it answers."""
        if self._loop is None or threading.current_thread() is self._thread:
            self._publish(sandbox_id)
        else:
            asyncio.run_coroutine_threadsafe(self._told(sandbox_id), self._loop).result(DEADLINE)

    async def _told(self, sandbox_id: str) -> None:
        self._publish(sandbox_id)
        await self._followers.passed()

    def _publish(self, sandbox_id: str) -> None:
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is not None and _lives(sandbox) and sandbox.confirm_by is None:
            self._log.put(sandbox)
        elif sandbox is not None and _lives(sandbox) and sandbox.name:
            self._log.hold(HeldName(sandbox_id, sandbox.owner, sandbox.name))
        else:
            self._log.drop(sandbox_id)

    def _count(self) -> None:
        if self.tells_stock:
            target = max(self.warm, 1)
            self._log.count(
                PoolCounts(
                    template="base", size="small", target=target, warm=self.warm, starting=0, waiting=0
                )
            )

    def wait_registered(self) -> None:
        """Wait until every master has this node, and was sent what it has."""
        self.wait_until(lambda: set(self.shares) >= set(self.masters))
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._followed(), self._loop).result(DEADLINE)

    async def _followed(self) -> None:
        await until(lambda: self._followers.current >= len(self.masters), DEADLINE)

    def status(self) -> NodeStatus:
        """What it reports."""
        pool = PoolStatus(
            template="base", size="small", target=max(self.warm, 1), warm=self.warm, starting=0, waiting=0
        )
        return NodeStatus(
            name=self.name,
            code=self.code,
            api_url=self.url,
            relay_host="127.0.0.1",
            relay_port=1,
            engine="simulated",
            pools=[pool],
            sandboxes=len(self.sandboxes),
            draining=self.draining,
        )

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error

    async def _main(self) -> None:
        app = application(self._routes(), self._verifier)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="httptools",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        self._loop = asyncio.get_running_loop()
        async with RoleClient(self._token) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[self._socket]))
            reporting = [tasks.create_task(self._report(client, master)) for master in self.masters]
            while not self._stop.is_set():
                await asyncio.sleep(0.01)
                self._count()
                for sandbox_id in list(self._log.sandboxes):
                    self._publish(sandbox_id)  # it may have ended
            self._loop = None
            self._followers.close()
            for task in reporting:
                task.cancel()
            server.should_exit = True

    async def _report(self, client: RoleClient, master: str) -> None:
        register = True
        while True:
            if self.heartbeats:
                path = "register" if register else f"{self.name}/heartbeat"
                try:
                    answer = await client.call(
                        "POST", f"{master}/v1/nodes/{path}", Registered, self.status(), deadline=5.0
                    )
                except NotFound:
                    register = True
                except GreenroomError:
                    pass
                else:
                    register = False
                    with self._changed:
                        self.shares[master] = answer
                        self._changed.notify_all()
            await asyncio.sleep(self.beat)

    # The node API

    def _routes(self) -> list[Any]:
        def endpoint(method: str, path: str, handler: Handler, admits: tuple[str, ...]) -> Any:
            """Every answer of it says where its stream stands, once its followers were sent that much."""

            async def placed(request: Request) -> Response:
                response = await handler(request)
                await self._followers.passed()
                response.headers[changes.HEADER] = str(self._log.position)
                return response

            return serving.endpoint(method, path, placed, admits)

        return [
            serving.endpoint("GET", changes.PATH, self._follow, ("api", "master", "operator")),
            endpoint("POST", "/v1/claims", self._claim, ("master",)),
            endpoint("PUT", "/v1/pools", self._put_pools, ("master",)),
            endpoint("GET", "/v1/claims/{key}", self._by_key, ("master", "api")),
            endpoint("GET", "/v1/sandboxes", self._list, ("api", "master", "operator")),
            endpoint("GET", "/v1/sandboxes/{id}", self._get, ("api", "master", "operator")),
            endpoint("DELETE", "/v1/sandboxes/{id}", self._delete, ("api", "master", "operator")),
            endpoint("POST", "/v1/sandboxes/{id}/confirm", self._confirm, ("api",)),
            endpoint("POST", "/v1/sandboxes/{id}/timeout", self._timeout, ("api", "master", "operator")),
            endpoint("PUT", "/v1/sandboxes/{id}/network", self._network, ("api", "operator")),
            endpoint("POST", "/v1/sandboxes/{id}/resume", self._resume, ("api",)),
            endpoint("POST", "/v1/sandboxes/{id}/fork", self._fork, ("master",)),
            endpoint("GET", "/v1/snapshots", self._snapshots, ("api",)),
            endpoint("GET", "/v1/status", self._status, ("operator", "master")),
        ]

    def _note(self, request: Request) -> None:
        with self._changed:
            self.calls.append(f"{request.method} {request.url.path}")
            self._changed.notify_all()

    async def _claim(self, request: Request) -> Response:
        claim = await read_json(request, ClaimRequest)
        self.claims.append(claim)
        self._note(request)
        while not self.hold_claims.is_set():  # noqa: ASYNC110 - the event is a thread's
            await asyncio.sleep(0.005)
        if self.claim_error is not None:
            raise self.claim_error
        # How long a claim may wait is no part of what is asked for.
        asked = msgspec.structs.replace(claim, wait=0.0)
        if claim.key in self.by_key:
            before, sandbox_id = self.by_key[claim.key]
            if before != asked:
                raise KeyConflict("this idempotency key was used with another request")
            return json_response(self._alive(sandbox_id), 201)
        if self.warm == 0:
            raise PoolDry("no sandbox came free in time", retry_after=2.5)
        self.warm -= 1
        self._count()
        now = time.time()
        sandbox = Sandbox(
            sandbox_id=new_sandbox_id(self.code),
            template=claim.template,
            size=claim.size,
            state="running",
            started_at=now,
            ends_at=now + claim.ttl,
            node=self.name,
            metadata=claim.metadata,
            owner=claim.owner,
            name=claim.name,
            declared=claim.declared,
            token=secrets.token_hex(16) if claim.secure else None,
            inbound=claim.inbound,
            traffic_token=None if claim.inbound.public else secrets.token_hex(32),
            confirm_by=now + 20,
            network=claim.network,
        )
        self.sandboxes[sandbox.sandbox_id] = sandbox
        self.by_key[claim.key] = (asked, sandbox.sandbox_id)
        if self.drop_claim_answers:
            self.drop_claim_answers -= 1
            return _Cut()
        return json_response(sandbox, 201)

    async def _put_pools(self, request: Request) -> Response:
        pools = await read_json(request, list[PoolSpec])
        self._note(request)
        if self.pools_error is not None:
            raise self.pools_error
        self.pools = pools
        return json_response(self.status())

    async def _by_key(self, request: Request) -> Response:
        self._note(request)
        found = self.by_key.get(request.path_params["key"])
        if found is None or self.hide_claims:
            raise NotFound("no such claim")
        return json_response(self._alive(found[1]))

    async def _list(self, request: Request) -> Response:
        self._note(request)
        if self.list_error is not None:
            raise self.list_error
        return json_response(SandboxList([entry for entry in self.sandboxes.values() if _lives(entry)]))

    async def _follow(self, request: Request) -> Response:
        if self.list_error is not None:
            raise self.list_error
        return self._followers.answer(Position.parse(request.query_params.get("after", "")))

    async def _get(self, request: Request) -> Response:
        self._note(request)
        return json_response(self._alive(request.path_params["id"]))

    async def _delete(self, request: Request) -> Response:
        self._note(request)
        del self.sandboxes[self._alive(request.path_params["id"]).sandbox_id]
        if self.drop_delete_answers:
            self.drop_delete_answers -= 1
            return _Cut()
        return Response(status_code=204)

    async def _confirm(self, request: Request) -> Response:
        self._note(request)
        if self.confirm_error is not None:
            raise self.confirm_error
        sandbox = msgspec.structs.replace(self._alive(request.path_params["id"]), confirm_by=None)
        self.sandboxes[sandbox.sandbox_id] = sandbox
        if self.drop_confirm_answers:
            self.drop_confirm_answers -= 1
            return _Cut()
        return json_response(sandbox)

    async def _timeout(self, request: Request) -> Response:
        self._note(request)
        wish = await read_json(request, TimeoutRequest)
        sandbox = self._alive(request.path_params["id"])
        ends_at = time.time() + wish.ttl
        if wish.extend_only:
            ends_at = max(ends_at, sandbox.ends_at)
        sandbox = msgspec.structs.replace(sandbox, ends_at=ends_at)
        self.sandboxes[sandbox.sandbox_id] = sandbox
        return json_response(sandbox)

    async def _network(self, request: Request) -> Response:
        self._note(request)
        if self.network_error is not None:
            raise self.network_error
        wish = await read_json(request, Network)
        sandbox = msgspec.structs.replace(self._alive(request.path_params["id"]), network=wish)
        self.sandboxes[sandbox.sandbox_id] = sandbox
        return json_response(sandbox)

    async def _resume(self, request: Request) -> Response:
        """None of its sandboxes is ever paused."""
        self._note(request)
        wish = await read_json(request, ResumeRequest)
        sandbox = self._alive(request.path_params["id"])
        sandbox = msgspec.structs.replace(sandbox, ends_at=max(time.time() + wish.ttl, sandbox.ends_at))
        self.sandboxes[sandbox.sandbox_id] = sandbox
        return json_response(Resumed(sandbox, resumed=False))

    async def _fork(self, request: Request) -> Response:
        wanted = await read_json(request, ForkRequest)
        self._note(request)
        source = self._alive(request.path_params["id"])
        forks: list[Fork] = []
        for number, key in enumerate(wanted.keys):
            if self.fork_error is not None and number == len(wanted.keys) - 1:
                forks.append(Fork(error=self.fork_error))
                continue
            name = wanted.names[number] if wanted.names else ""
            made = msgspec.structs.replace(
                source, sandbox_id=new_sandbox_id(self.code), name=name, confirm_by=time.time() + 20
            )
            if key in self.by_key:
                made = self._alive(self.by_key[key][1])
            else:
                asked = ClaimRequest(key=key, template=made.template, size=made.size, ttl=wanted.ttl)
                self.sandboxes[made.sandbox_id] = made
                self.by_key[key] = (asked, made.sandbox_id)
            forks.append(Fork(sandbox=made))
        return json_response(ForkList(forks), 201)

    async def _snapshots(self, request: Request) -> Response:
        self._note(request)
        return json_response(SnapshotList([]))

    async def _status(self, _request: Request) -> Response:
        return json_response(self.status())

    def _alive(self, sandbox_id: str) -> Sandbox:
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None or not _lives(sandbox):
            raise UnknownSandbox(f"there is no sandbox {sandbox_id!r}")
        return sandbox

    def add(self, **changes: Any) -> Sandbox:
        """Put a sandbox here without a claim, for lists; `changes` are fields of `Sandbox`."""
        now = time.time()
        fields: dict[str, Any] = {
            "sandbox_id": new_sandbox_id(self.code),
            "template": "base",
            "size": {"name": "small", "cpus": 1, "memory_mib": 512, "disk_mib": 4096},
            "state": "running",
            "started_at": now,
            "ends_at": now + 300,
            "node": self.name,
        }
        sandbox = msgspec.convert(fields | changes, Sandbox)
        self.sandboxes[sandbox.sandbox_id] = sandbox
        return sandbox


class _Told(dict[str, Sandbox]):
    """Sandboxes by id; every change of one is told."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def __setitem__(self, sandbox_id: str, sandbox: Sandbox) -> None:
        super().__setitem__(sandbox_id, sandbox)
        self._tell(sandbox_id)

    def __delitem__(self, sandbox_id: str) -> None:
        super().__delitem__(sandbox_id)
        self._tell(sandbox_id)


class _Cut(Response):
    """Loses the answer: announces a body and ends without it, so that the server drops the connection."""

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})


def _lives(sandbox: Sandbox) -> bool:
    return sandbox.ends_at > time.time()
