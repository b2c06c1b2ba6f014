"""`status` for people."""

from __future__ import annotations

from pathlib import Path

from greenroom.cli.hints import pasteable
from greenroom.cli.kept import describe, mib
from greenroom.cli.observation import NodeView, Observation
from greenroom.cli.output import ago, print_table, until


def show(found: Observation) -> None:
    """Print an observation: first what needs attention, then the tables that have rows."""
    if found.state == "not running":
        print(f"Greenroom is not running on {found.state_dir}")
    else:
        print(f"Greenroom {found.version} is {found.phase if found.phase != 'running' else found.state}")
        secured = "" if found.tls_port is None else f", with TLS on port {found.tls_port}"
        if found.kube_port is not None:
            secured += f", for Kubernetes' clients on port {found.kube_port}"
        print(f"  entry {found.entry_url}{secured}, domain {found.domain}")
        print(f"  supervisor {found.pid}, up for {ago(found.started_at)}")
    place = Path(found.state_dir)
    for mark, text in (
        *(("!", problem) for problem in found.problems),
        *(("-", pasteable(describe(place, kept), place)) for kept in found.out_of_reach),
    ):
        first, *rest = text.splitlines()
        print(f"  {mark} {first}")
        for line in rest:
            print(f"    {line}")
    print()
    if found.roles:
        _show_roles(found)
    if found.nodes:
        _show_nodes(found)
    if found.pools:
        _show_pools(found)
    if found.state != "not running":
        _show_sandboxes(found)


def _show_roles(found: Observation) -> None:
    rows = [
        [
            role.name,
            role.state,
            "" if role.pid is None else str(role.pid),
            role.url,
            ago(role.started_at),
            str(role.restarts),
            f"{role.last_exit}, {ago(role.last_exit_at)} ago" if role.last_exit else role.progress,
        ]
        for role in found.roles
    ]
    print_table(
        "Roles",
        ["name", "state", "pid", "address", "up", "restarts", "last exit"],
        rows,
        texts=["last exit"],
        spare=["restarts", "pid", "up", "address"],
    )


def _show_nodes(found: Observation) -> None:
    rows = [
        [
            node.name,
            _state_of(node),
            node.engine,
            node.accelerator,
            str(node.sandboxes),
            str(node.paused),
            str(node.snapshots),
            mib(node.kept_bytes),
            node.url,
        ]
        for node in found.nodes
    ]
    print_table(
        "Nodes",
        ["name", "state", "engine", "accelerator", "sandboxes", "paused", "snapshots", "kept", "address"],
        rows,
        spare=["address", "accelerator", "engine", "kept", "snapshots", "paused"],
    )


def _state_of(node: NodeView) -> str:
    if not node.started:
        return "not started"
    if node.draining:
        return "draining"
    return "live" if node.live else f"lost {ago(node.last_seen)} ago"


def _show_pools(found: Observation) -> None:
    rows = [
        [
            pool.template,
            pool.size,
            pool.node,
            *(str(n) for n in (pool.target, pool.warm, pool.starting, pool.waiting, pool.failed)),
            pool.reason,
        ]
        for pool in found.pools
    ]
    columns = ["template", "size", "node", "target", "warm", "starting", "waiting", "failed", "held back"]
    spare = ["size", "waiting", "starting", "template", "failed", "held back"]
    print_table("Warm pools", columns, rows, texts=["held back"], spare=spare)


def _show_sandboxes(found: Observation) -> None:
    if not found.sandboxes:
        silent = [node.name for node in found.nodes if node.started and (node.sandboxes or not node.live)]
        print(f"Sandboxes are not known: {', '.join(silent)} cannot be asked." if silent else "No sandboxes.")
        return
    rows = [
        [
            sandbox.sandbox_id,
            f"{sandbox.owner}/{sandbox.name}" if sandbox.name else "",
            sandbox.template,
            sandbox.state,
            sandbox.node,
            f"{ago(sandbox.started_at)} ago",
            until(sandbox.ends_at) if sandbox.state == "running" else "not while paused",
        ]
        for sandbox in found.sandboxes
    ]
    print_table(
        "Sandboxes",
        ["id", "name", "template", "state", "node", "started", "ends"],
        rows,
        spare=["template", "started", "node", "state", "name"],
    )
