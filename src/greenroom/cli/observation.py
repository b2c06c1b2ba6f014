"""Gathering what `status` shows: the supervisor's records, then the master's and the nodes' own words.

Whatever cannot be read becomes a line in `problems`; the rest is shown all the same. Access tokens that pass
through here are left behind here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Literal

import msgspec

from greenroom.cli.hints import pasteable
from greenroom.cli.kept import Kept, kept_by, out_of_reach
from greenroom.cli.leftovers import live_roles
from greenroom.cli.records import RoleRecord, StateDir, SupervisorRecord
from greenroom.errors import GreenroomError
from greenroom.wire.calling import RoleClient, role_client
from greenroom.wire.credentials import own_token
from greenroom.wire.messages import MasterStatus, NodeInfo, SandboxList, Template

CALL_DEADLINE = 5.0
"""Seconds for one role to answer; `status` must not hang on one that is frozen."""


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """One role process. Times are Unix seconds."""

    name: str
    role: str
    replica: int
    state: str
    pid: int | None
    url: str
    started_at: float | None
    restarts: int
    last_exit: str
    last_exit_at: float | None
    progress: str


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node as the master sees it."""

    name: str
    code: str
    url: str
    engine: str
    accelerator: str
    started: bool
    """Whether this run started it; the master still knows those of earlier ones."""
    live: bool
    draining: bool
    sandboxes: int
    """Running and paused ones together."""
    paused: int
    snapshots: int
    kept_bytes: int
    """What paused sandboxes and snapshots take on this machine's disk."""
    last_seen: float


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """One warm pool on one node."""

    node: str
    template: str
    size: str
    target: int
    warm: int
    starting: int
    waiting: int
    failed: int
    reason: str


class SandboxView(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox, without its access token."""

    sandbox_id: str
    template: str
    node: str
    state: str
    started_at: float
    ends_at: float
    cpus: int
    memory_mib: int
    metadata: dict[str, str]
    owner: str = ""
    name: str = ""
    """What its owner calls it, who is a namespace in Kubernetes' terms; empty where that is its id."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """All that `status` shows. `state` is `up`, `degraded` or `not running`; `phase` is the supervisor's."""

    state: Literal["up", "degraded", "not running"]
    phase: str
    state_dir: str
    entry_url: str = ""
    domain: str = ""
    tls_port: int | None = None
    kube_port: int | None = None
    pid: int | None = None
    version: str = ""
    started_at: float | None = None
    problems: list[str] = []
    out_of_reach: list[Kept] = []
    """What nodes keep that are not started; no fault of what runs, so it does not degrade."""
    roles: list[RoleView] = []
    nodes: list[NodeView] = []
    pools: list[PoolView] = []
    templates: list[Template] = []
    sandboxes: list[SandboxView] = []


async def observe(state: StateDir) -> Observation:
    """Look at the platform of a state directory. Never raises for what is down."""
    supervisor = state.running()
    if supervisor is None:
        return _not_running(state)
    records = state.roles()
    problems = [_complaint(role) for role in records if role.state != "ready"]
    if supervisor.state != "running":
        problems.insert(0, f"the platform is {supervisor.state}")
    told: MasterStatus | None = None
    sandboxes: list[SandboxView] = []
    try:
        token = own_token(state.secrets, "operator")
    except GreenroomError as error:
        problems.append(error.message)
    else:
        masters = [role.url for role in records if role.role == "master"]
        async with role_client(token, masters=masters) as client:
            told = await _ask_master(client, records, problems)
            sandboxes = await _ask_nodes(client, records, told, problems)
    nodes = told.nodes if told is not None else []
    started = {role.name for role in records if role.role == "node"}
    problems += [
        f"node {node.status.name} does not report"
        for node in nodes
        if not node.live and node.status.name in started
    ]
    return Observation(
        state="degraded" if problems else "up",
        phase=supervisor.state,
        state_dir=str(state.root),
        entry_url=supervisor.entry_url,
        domain=supervisor.domain,
        tls_port=supervisor.tls_port,
        kube_port=supervisor.kube_port,
        pid=supervisor.process.pid,
        version=supervisor.version,
        started_at=supervisor.started_at,
        problems=problems,
        out_of_reach=out_of_reach(state.root, started),
        roles=[_role_view(role) for role in records],
        nodes=[_node_view(node, started, kept_by(state.root, node.status.name)) for node in nodes],
        pools=_pool_views(nodes),
        templates=told.templates if told is not None else [],
        sandboxes=sandboxes,
    )


def _not_running(state: StateDir) -> Observation:
    last: SupervisorRecord | None = state.supervisor()
    problems = []
    if last is not None and last.state != "stopped":
        problems.append(
            pasteable(
                "the supervisor was killed; VMs of its sandboxes may still run\n"
                "`greenroom up --detach` goes on with them, `greenroom down` ends them",
                state.root,
            )
        )
    if last is not None and last.failure:
        problems.append(f"the last start failed: {last.failure}")
    problems += [
        f"{role.name} (pid {role.process.pid}) still runs without a supervisor"
        for role in live_roles(state)
        if role.process is not None
    ]
    return Observation(state="not running", phase="not running", state_dir=str(state.root), problems=problems)


def _complaint(role: RoleRecord) -> str:
    text = f"{role.name} is {role.state}"
    if role.progress:
        text += f" ({role.progress})"
    return f"{text}; it {role.last_exit}" if role.last_exit else text


async def _ask_master(
    client: RoleClient, records: list[RoleRecord], problems: list[str]
) -> MasterStatus | None:
    """The first answer of the masters that are up."""
    for role in records:
        if role.role != "master" or role.state != "ready":
            continue
        try:
            return await client.call("GET", f"{role.url}/v1/status", MasterStatus, deadline=CALL_DEADLINE)
        except GreenroomError as error:
            problems.append(f"{role.name}: {error.message}")
    return None


async def _ask_nodes(
    client: RoleClient, records: list[RoleRecord], told: MasterStatus | None, problems: list[str]
) -> list[SandboxView]:
    """Every node's sandboxes, oldest first. Without a master the nodes are found in the records."""
    places = {role.name: role.url for role in records if role.role == "node" and role.state == "ready"}
    if told is not None:
        known = {role.name for role in records if role.role == "node"}
        places |= {
            node.status.name: node.status.api_url
            for node in told.nodes
            if node.live and node.status.name in known
        }

    async def one(name: str, url: str) -> list[SandboxView]:
        try:
            listed = await client.call("GET", f"{url}/v1/sandboxes", SandboxList, deadline=CALL_DEADLINE)
        except GreenroomError as error:
            problems.append(f"node {name}: {error.message}")
            return []
        return [
            SandboxView(
                sandbox_id=sandbox.sandbox_id,
                template=sandbox.template,
                node=sandbox.node,
                state=sandbox.state,
                started_at=sandbox.started_at,
                ends_at=sandbox.last_at,
                cpus=sandbox.size.cpus,
                memory_mib=sandbox.size.memory_mib,
                metadata=sandbox.metadata,
                owner=sandbox.owner,
                name=sandbox.name,
            )
            for sandbox in listed.sandboxes
        ]

    lists = await asyncio.gather(*(one(name, url) for name, url in places.items()))
    return sorted((view for views in lists for view in views), key=lambda view: view.started_at)


def _role_view(role: RoleRecord) -> RoleView:
    return RoleView(
        name=role.name,
        role=role.role,
        replica=role.replica,
        state=role.state,
        pid=None if role.process is None else role.process.pid,
        url=role.url,
        started_at=role.started_at,
        restarts=role.restarts,
        last_exit=role.last_exit,
        last_exit_at=role.last_exit_at,
        progress=role.progress,
    )


def _node_view(node: NodeInfo, started: Collection[str], kept: Kept) -> NodeView:
    return NodeView(
        name=node.status.name,
        code=node.status.code,
        url=node.status.api_url,
        engine=node.status.engine,
        accelerator=node.status.accelerator,
        started=node.status.name in started,
        live=node.live,
        draining=node.status.draining,
        sandboxes=node.status.sandboxes,
        paused=node.status.paused,
        snapshots=node.status.snapshots,
        kept_bytes=kept.disk_bytes,
        last_seen=node.last_seen,
    )


def _pool_views(nodes: list[NodeInfo]) -> list[PoolView]:
    return [
        PoolView(
            node=node.status.name,
            template=pool.template,
            size=pool.size,
            target=pool.target,
            warm=pool.warm,
            starting=pool.starting,
            waiting=pool.waiting,
            failed=pool.failed,
            reason=pool.reason,
        )
        for node in nodes
        for pool in node.status.pools
    ]
