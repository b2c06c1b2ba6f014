"""The life of a node process: adopt, sweep, prepare, serve, register, run; on SIGTERM the way back.

The order matters. The VMs that an earlier run left alive are adopted, and the rest of what it left is swept,
before anything is made. The relay and the HTTP API listen
before the node registers, because a registered node gets work. It tells its supervisor that it is ready when
every pool it was given has its golden snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.applications import Starlette

from greenroom.config import RoleSpec
from greenroom.errors import GreenroomError
from greenroom.images.collect import collect
from greenroom.images.commands import interrupt
from greenroom.node.branching import Branching
from greenroom.node.diskguard import DiskGuard
from greenroom.node.egress import Gate
from greenroom.node.followers import Followers
from greenroom.node.journal import Journal
from greenroom.node.keeper import Keeper
from greenroom.node.membership import Membership
from greenroom.node.metrics import SWEPT, read
from greenroom.node.relay import Relay
from greenroom.node.routes import routes
from greenroom.node.warmer import Warmer
from greenroom.runtime.engine import Adopted, EngineInfo, Runtime
from greenroom.runtime.qemu import QemuRuntime
from greenroom.runtime.simulated import Pace, SimulatedRuntime
from greenroom.wire import metrics
from greenroom.wire.calling import role_client
from greenroom.wire.credentials import Verifier, own_token
from greenroom.wire.messages import NodeStatus, PoolSpec
from greenroom.wire.serving import Ready, application, listen, serve, tell_progress, tell_ready, url_of
from greenroom.wire.tasks import spawn, stop

_log = logging.getLogger(__name__)

Serving = Callable[[Starlette, socket.socket], AsyncGenerator[str, None]]
"""Serves an application until the node shall end; gives its URL once, as `wire.serving.serve` does."""


class Leaving:
    """How the node leaves: SIGTERM ends every VM, SIGHUP leaves all of them for the next run (an upgrade)."""

    def __init__(self, *, signals: bool = True) -> None:
        """Without `signals` SIGHUP is left to somebody else: the process has other nodes as well."""
        self.vms_stay = False
        if signals:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)

    def _hang_up(self) -> None:
        self.vms_stay = True
        signal.raise_signal(signal.SIGTERM)

    async def farewell(self, runtime: Runtime) -> None:
        """The last step: nothing uses the VMs any more."""
        await (runtime.detach() if self.vms_stay else runtime.close())


def _leave_early(life: asyncio.Task[None] | None) -> None:
    """SIGTERM before the node serves: end the tools that build an image, then unwind."""
    interrupt()
    if life is not None:
        life.cancel()


def make_runtime(spec: RoleSpec) -> Runtime:
    """The engine that the settings name."""
    if spec.config.vm.engine == "simulated":
        told = spec.config.simulated
        pace = Pace(told.rate, told.variation, f"{told.seed}/{spec.name}") if told.rate > 0 else None
        return SimulatedRuntime(pace=pace)
    return QemuRuntime(spec)


async def _nothing(_keeper: Keeper) -> None:
    """A node begins with what it finds."""


async def run(spec: RoleSpec) -> None:
    """Run a node until it is told to stop, also while it still prepares itself."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _leave_early, asyncio.current_task())
    await live(spec, Leaving, serve)


async def live(
    spec: RoleSpec,
    how: Callable[[], Leaving],
    serving: Serving,
    begin: Callable[[Keeper], Awaitable[None]] = _nothing,
) -> None:
    """A node's life, apart from the signals that end it: `serving` decides how long it is, `how` how it leaves.

    `begin` may make sandboxes before anybody else can; a simulated fleet, of which several live in one process, does.
    """
    spec.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    verifier = Verifier.load(spec.secrets)
    token = own_token(spec.secrets, "node")
    runtime = make_runtime(spec)
    journal = Journal(spec.home / "journal.db")
    try:
        tell_progress("preparing the node", None)
        found = await runtime.adopt()
        removed = {kind: count for kind, count in (await runtime.sweep()).items() if count}
        for kind, count in removed.items():
            SWEPT.labels(kind).inc(count)
        if removed:
            _log.warning("swept what an earlier run had left: %s", removed)
        leaving = how()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(leaving.farewell, runtime)
            await _serve(spec, runtime, journal, verifier, token, found, leaving, stack, serving, begin)
    finally:
        journal.close()


async def _serve(
    spec: RoleSpec,
    runtime: Runtime,
    journal: Journal,
    verifier: Verifier,
    token: str,
    found: list[Adopted],
    leaving: Leaving,
    stack: contextlib.AsyncExitStack,
    serving: Serving,
    begin: Callable[[Keeper], Awaitable[None]],
) -> None:
    config = spec.config
    client = await stack.enter_async_context(role_client(token, masters=spec.master_urls))
    warmer = Warmer(runtime, config, spec.home)
    keeper = Keeper(name=spec.name, runtime=runtime, warmer=warmer, journal=journal, config=config)
    warmer.tell = keeper.changes.count
    followers = Followers(keeper.changes)
    relay = Relay(keeper, lambda offered: verifier.role_of(offered) == "proxy", config.nodes)
    keeper.cut = relay.cut
    way_out = keeper.gate = Gate(runtime, config, spec.home, spec.replica)
    warmer.adopt(keeper.adopt(found))
    if removed := await keeper.tidy():
        SWEPT.labels("snapshots").inc(removed)
        _log.warning("removed %d snapshots that an earlier run had left", removed)
    branching = Branching(keeper, runtime, journal)
    engine = await runtime.describe(tell_progress)
    if engine.engine != "simulated":
        await runtime.prepare_image("base", tell_progress)
    relay_host, relay_port = await relay.start(spec.host, 0)
    stack.push_async_callback(relay.close)
    await stack.enter_async_context(way_out)
    await stack.enter_async_context(warmer)
    await stack.enter_async_context(keeper)
    stack.push_async_callback(stop, spawn(keeper.reopen(), "ways out of adopted sandboxes"))
    stack.enter_context(metrics.reading(way_out.read))
    stack.enter_context(metrics.reading(followers.read))
    guard = DiskGuard(
        spec.home, config.pools.disk_emergency_mib, keeper.disk_use, keeper.evict, keeper.revive
    )
    stack.push_async_callback(stop, spawn(guard.run(), "disk guard"))
    stack.enter_context(metrics.reading(lambda: read(warmer.status(), len(keeper), relay.statistics())))
    await begin(keeper)
    sock = listen(spec.host, spec.port)
    own_url = url_of(sock)
    drained = False

    def status() -> NodeStatus:
        return NodeStatus(
            name=spec.name,
            code=keeper.code,
            api_url=own_url,
            relay_host=relay_host,
            relay_port=relay_port,
            engine=engine.engine,
            accelerator=engine.accelerator,
            pools=warmer.status(),
            sandboxes=len(keeper),
            paused=keeper.paused(),
            snapshots=len(branching),
            draining=drained,
            room_mib=warmer.room_mib(),
        )

    async def apply(pools: list[PoolSpec]) -> None:
        journal.save_pools(pools)
        await warmer.set_pools(pools, tell_progress)

    if known := journal.pools():
        await warmer.set_pools(known, tell_progress)
    membership = Membership(client, spec.master_urls, status, apply, config.nodes.heartbeat, warmer.declared)
    app = application(routes(keeper, branching, warmer, followers, status), verifier)

    def drain() -> None:
        nonlocal drained
        drained = True
        followers.close()
        # A golden or an image that is still being made is given up; it would be of use to nobody.
        interrupt()
        runtime.interrupt()

    app.state.on_leave = [drain]
    async with contextlib.aclosing(serving(app, sock)) as urls:
        async for url in urls:
            joining = spawn(_join(spec, membership, warmer, url, engine), "joining")
            stack.push_async_callback(stop, joining)
    if leaving.vms_stay:
        keeper.leave_running()
    if joining.done():
        joining.result()


async def _collect(spec: RoleSpec) -> None:
    """Once, when all is ready: remove what no node of this machine has used for long."""
    try:
        removed = await asyncio.to_thread(collect, spec.cache, spec.config.vm.cache_keep_days * 86_400)
    except OSError as error:
        _log.warning("the cache could not be collected: %s", error)
    else:
        if removed:
            _log.info("removed from the cache, as nobody uses them: %s", ", ".join(removed))


async def _join(spec: RoleSpec, membership: Membership, warmer: Warmer, url: str, engine: EngineInfo) -> None:
    """Register, tell the supervisor once every pool has its golden snapshot, then send heartbeats for ever."""
    await membership.register()
    heartbeats = spawn(membership.run(), "heartbeats")
    try:
        await warmer.ready()
        facts = {"engine": engine.engine, "accelerator": engine.accelerator, "why": engine.reason}
        tell_ready(Ready(url=url, detail=facts))
        await _collect(spec)
        await heartbeats
    except GreenroomError as error:
        # A pool without its golden is of no use: end, so that the supervisor shows why.
        _log.error("the node cannot be made ready: %s", error.message)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        await stop(heartbeats)


async def sweep(spec: RoleSpec) -> dict[str, dict[str, int]]:
    """Remove what a dead node left on the host and count what is still there under its name."""
    if spec.config.vm.engine == "simulated":
        return {"removed": {}, "left": {}}
    runtime = QemuRuntime(spec)
    removed = await runtime.sweep()
    left = runtime.left()
    await runtime.close()
    return {"removed": removed, "left": left}
