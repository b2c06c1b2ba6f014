"""`python -m greenroom.master SPEC.json`: one master process, until SIGTERM."""

from __future__ import annotations

import sys

from greenroom.config import RoleSpec
from greenroom.master.routes import Master
from greenroom.store.sqlite import SqliteStore
from greenroom.wire.calling import role_client
from greenroom.wire.credentials import Verifier, own_token
from greenroom.wire.process import run_process
from greenroom.wire.serving import application, run_role


async def main(spec: RoleSpec) -> None:
    """Run the master that the spec describes. Raises SetupError when it cannot start."""
    verifier = Verifier.load(spec.secrets)
    token = own_token(spec.secrets, "master")
    store = await SqliteStore.open(spec.store)
    try:
        async with role_client(token) as client:
            master = Master(store, client, spec.config)
            async with master.running():
                app = application(master.routes(), verifier, quiet=master.QUIET)
                app.state.on_leave = [master.close]
                await run_role(app, spec)
    finally:
        await store.close()


if __name__ == "__main__":
    sys.exit(run_process("master", main, sys.argv[1:]))
