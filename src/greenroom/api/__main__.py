"""`python -m greenroom.api SPEC.json`: one api process, until SIGTERM.

It serves as soon as it listens, with or without a master: what needs the node table asks for it then.
"""

from __future__ import annotations

import sys

from greenroom.api.assembly import Parts
from greenroom.api.dialects import Dialects
from greenroom.api.e2b.openapi import described
from greenroom.api.e2b.resources import application
from greenroom.api.kube import aggregated
from greenroom.config import RoleSpec
from greenroom.errors import SetupError
from greenroom.store.sqlite import SqliteStore
from greenroom.wire import metrics
from greenroom.wire.calling import role_client
from greenroom.wire.credentials import Verifier, own_token
from greenroom.wire.process import run_process
from greenroom.wire.serving import run_role
from greenroom.wire.tasks import spawn, stop


async def main(spec: RoleSpec) -> None:
    """Run the api that the spec describes. Raises SetupError when it cannot start."""
    if not spec.master_urls:
        raise SetupError("an api needs the URL of at least one master")
    verifier = Verifier.load(spec.secrets)
    token = own_token(spec.secrets, "api")
    store = await SqliteStore.open(spec.store)
    try:
        async with role_client(token, masters=spec.master_urls) as client:
            parts = Parts(spec, client, store)
            fleet, kube = parts.fleet, parts.kube.application
            app = Dialects(application(described(parts.e2b.paths()), verifier=verifier), kube)
            following = spawn(fleet.follow(), "node-table")
            try:
                async with parts.kube.running(client), aggregated.serving(kube, spec) as url:
                    with metrics.reading(fleet.seen.read):
                        await run_role(app, spec, {"aggregated_url": url} if url else {})
            finally:
                await stop(following)
                await fleet.seen.close()
    finally:
        await store.close()


if __name__ == "__main__":
    sys.exit(run_process("api", main, sys.argv[1:]))
