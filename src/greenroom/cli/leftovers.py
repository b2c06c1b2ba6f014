"""Ending what a dead supervisor left behind, by its records, and having the nodes' leftovers swept.

A supervisor that is killed takes its roles with it (`children`), but not at once and not for certain, and a
node that is killed leaves VMs, network and cgroups, which only `python -m greenroom.node --sweep` knows.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from greenroom.cli.children import role_environment
from greenroom.cli.plans import NODE_STOP_DEADLINE, STOP_DEADLINE
from greenroom.cli.processes import end, kill_group
from greenroom.cli.records import RoleRecord, StateDir
from greenroom.cli.words import plain_log_line

SWEEP_DEADLINE = 120.0
"""Seconds for the sweep of one node."""


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What the sweep of one node removed and could not remove, by kind, or why there was none."""

    node: str
    removed: dict[str, Any] = {}
    left: dict[str, Any] = {}
    error: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing of the node is left."""
        return not self.error and not any(self.left.values())


def live_roles(state: StateDir) -> list[RoleRecord]:
    """Recorded roles whose process still runs."""
    return [role for role in state.roles() if role.process is not None and role.process.alive()]


def end_roles(state: StateDir) -> tuple[list[str], list[str]]:
    """End the recorded roles that still run, and what is left of their process groups.

    All at once, since they already got SIGTERM when their supervisor died. Returns the names of those ended
    and of those that could not be.
    """
    supervisor = state.supervisor()
    if supervisor is None:
        return [], []

    def one(role: RoleRecord) -> tuple[str, bool, bool]:
        if role.process is None:
            return role.name, False, True
        was = role.process.alive()
        gone = end(role.process, NODE_STOP_DEADLINE if role.role == "node" else STOP_DEADLINE)
        hit = kill_group(role.process.pid, supervisor.mark)
        return role.name, was or hit > 0, gone

    roles = state.roles()
    if not roles:
        return [], []
    with ThreadPoolExecutor(max_workers=len(roles)) as pool:
        results = list(pool.map(one, roles))
    return (
        [name for name, was, gone in results if was and gone],
        [name for name, _was, gone in results if not gone],
    )


def sweep(spec: Path, module: str) -> Swept:
    """Have one node's leftovers removed; the node must not be running. Never raises."""
    name = spec.name.removesuffix(".spec.json")
    command = [sys.executable, "-m", module.format(role="node"), "--sweep", str(spec)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=SWEEP_DEADLINE,
            env=role_environment("node", "sweep"),
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Swept(node=name, error=f"the sweep took longer than {SWEEP_DEADLINE:g} s")
    except OSError as error:
        return Swept(node=name, error=f"the sweep could not be started: {error.strerror}")
    last = done.stdout.strip().splitlines()[-1:] or [b""]
    try:
        told = msgspec.json.decode(last[0], type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError):
        complaint = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return Swept(
            node=name,
            error=f"the sweep failed (exit status {done.returncode}): {plain_log_line(complaint[0])}",
        )
    return Swept(node=name, removed=told.get("removed", {}), left=told.get("left", {}))


def sweep_nodes(specs: list[Path], module: str) -> list[Swept]:
    """Sweep several nodes, and forget the specs of those of which nothing is left."""
    results: list[Swept] = []
    for spec in specs:
        result = sweep(spec, module)
        if result.clean:
            spec.unlink(missing_ok=True)
        results.append(result)
    return results


def describe(swept: Swept) -> str:
    """A line for people."""
    if swept.error:
        return f"{swept.node}: {swept.error}"
    removed = _count(swept.removed)
    left = _count(swept.left)
    text = f"{swept.node}: removed {removed}" if removed else f"{swept.node}: nothing to remove"
    return f"{text}; still there: {left}" if left else text


def _count(found: dict[str, Any]) -> str:
    """`3 cgroups, 2 processes` from {"cgroups": 3, "processes": [12, 13]}."""
    parts = []
    for kind, what in found.items():
        number = len(what) if isinstance(what, list | dict) else what
        if number:
            parts.append(f"{number} {kind}")
    return ", ".join(parts)
