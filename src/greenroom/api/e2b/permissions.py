"""What each operation of the E2B API is in the words of the rules (`api.rules`). Only data.

An operation acts in the namespace of its key's owner. Those that are not here read what is the same for everybody
(templates), or are answered with 501: for them an API key is enough.
"""

from __future__ import annotations

from typing import Final

from greenroom.api.rules import Action

GROUP: Final = "agents.x-k8s.io"
_OPERATIONS = """
create              POST   /sandboxes
create              POST   /v2/sandboxes
list                GET    /sandboxes
list                GET    /v2/sandboxes
get                 GET    /sandboxes/{id}
delete              DELETE /sandboxes/{id}
patch               POST   /sandboxes/{id}/timeout
patch               POST   /sandboxes/{id}/refreshes
create/resume       POST   /sandboxes/{id}/connect
create/resume       POST   /v2/sandboxes/{id}/connect
create/resume       POST   /sandboxes/{id}/resume
patch               PUT    /sandboxes/{id}/network
create/pause        POST   /sandboxes/{id}/pause
create/fork         POST   /sandboxes/{id}/fork
create/snapshot     POST   /sandboxes/{id}/snapshots
patch               POST   /sandboxes/{id}/rollback
list/snapshot       GET    /snapshots
delete/snapshot     DELETE /templates/{id}
list                GET    /sandboxes/metrics
get                 GET    /sandboxes/{id}/metrics
get                 GET    /sandboxes/{id}/logs
get                 GET    /v2/sandboxes/{id}/logs
"""
"""Verb, and subresource where there is one; method; path."""


def _read() -> dict[tuple[str, str], tuple[str, str]]:
    table = {}
    for line in _OPERATIONS.split("\n"):
        if line:
            what, method, path = line.split()
            verb, _, part = what.partition("/")
            table[method, path] = (verb, part)
    return table


OPERATIONS: Final = _read()
"""Verb and subresource by method and path."""


def action_of(method: str, path: str, namespace: str) -> Action | None:
    """What an operation does, or None where a key is enough. `path` is the one of the paths table."""
    found = OPERATIONS.get(("GET" if method == "HEAD" else method, path))
    if found is None:
        return None
    verb, part = found
    return Action(verb=verb, group=GROUP, resource="sandboxes", part=part, namespace=namespace)
