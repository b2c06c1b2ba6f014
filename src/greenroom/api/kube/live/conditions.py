"""The status of what is made from a sandbox's record: its conditions, phase and place. Pure.

Reasons are those of kubernetes-sigs/agent-sandbox where it has one; `NodeUnreachable` and `SandboxFailed` are ours.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from greenroom.api.kube.live.instants import instant_text
from greenroom.api.kube.objects import Object
from greenroom.wire.messages import Listed

READY: Final = "DependenciesReady"
SUSPENDED: Final = "SandboxSuspended"
EXPIRED: Final = "SandboxExpired"
FAILED: Final = "SandboxFailed"
UNREACHABLE: Final = "NodeUnreachable"
_IN_TIME: Final = ("its time was up", "its shutdown time came")
PHASES: Final = {"running": "Running", "paused": "Paused", "ended": "Expired"}


class Facts(NamedTuple):
    """What an object is made from."""

    listed: Listed
    node: str
    """The name of its node."""
    reachable: bool
    """Whether the node can be read; else this is what was known last."""
    since: float
    """When it came into its state, as far as that is known (Unix seconds)."""
    version: int


def ending(listed: Listed) -> tuple[str, str]:
    """Reason and message of the end of an `ended` one."""
    reason = listed.end_reason
    if reason in _IN_TIME or not reason:
        return EXPIRED, f"the sandbox has ended: {reason or 'its time was up'}"
    return FAILED, f"the sandbox has ended: {reason}"


def _condition(kind: str, status: str, reason: str, message: str, since: float) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": instant_text(since),
    }


def conditions(facts: Facts) -> list[Object]:
    """The conditions of a sandbox, which are those of its claim as well."""
    listed, since = facts.listed, facts.since
    if listed.state == "ended":
        reason, message = ending(listed)
        at = listed.ended_at or since
        return [
            _condition("Ready", "False", reason, message, at),
            _condition("Finished", "True", reason, message, at),
        ]
    if not facts.reachable:
        message = f"node {facts.node} cannot be read; this is what was known last"
        return [_condition("Ready", "Unknown", UNREACHABLE, message, since)]
    if listed.state == "paused":
        message = "the sandbox is paused"
        return [
            _condition("Ready", "False", SUSPENDED, message, since),
            _condition("Suspended", "True", SUSPENDED, message, since),
        ]
    return [_condition("Ready", "True", READY, "the sandbox can be used", since)]


def ready(facts: Facts) -> tuple[str, str]:
    """Status and reason of the condition Ready."""
    if facts.listed.state == "ended":
        return "False", ending(facts.listed)[0]
    if not facts.reachable:
        return "Unknown", UNREACHABLE
    return ("False", SUSPENDED) if facts.listed.state == "paused" else ("True", READY)


def sandbox_status(facts: Facts, id_label: str) -> Object:
    """Status of a Sandbox."""
    listed = facts.listed
    return {
        "conditions": conditions(facts),
        "nodeName": facts.node,
        "phase": PHASES[listed.state],
        "sandboxID": listed.sandbox_id,
        "selector": f"{id_label}={listed.sandbox_id}",
    }


def claim_status(facts: Facts, sandbox: str) -> Object:
    """Status of a SandboxClaim."""
    return {"conditions": conditions(facts), "sandbox": {"name": sandbox}}
