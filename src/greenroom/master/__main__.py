"""`python -m greenroom.master SPEC.json`: one master process, until SIGTERM."""

from __future__ import annotations

import sys

import uvloop

from greenroom.errors import SetupError
from greenroom.master.routes import Master
from greenroom.store.sqlite import SqliteStore
from greenroom.wire.calling import role_client
from greenroom.wire.credentials import Verifier, own_token
from greenroom.wire.serving import application, read_spec, run_role, setup_logging


async def main(spec_path: str) -> None:
    """Run the master that the spec file describes. Raises SetupError when it cannot start."""
    spec = read_spec(spec_path)
    verifier = Verifier.load(spec.secrets)
    token = own_token(spec.secrets, "master")
    store = await SqliteStore.open(spec.store)
    try:
        async with role_client(token) as client:
            master = Master(store, client, spec.config)
            async with master.running():
                app = application(master.routes(), verifier)
                app.state.on_leave = [master.watch.close]
                await run_role(app, spec)
    finally:
        await store.close()


if __name__ == "__main__":
    setup_logging()
    try:
        uvloop.run(main(sys.argv[1]))
    except SetupError as error:
        print(f"greenroom master: {error.message}", file=sys.stderr)
        sys.exit(78)
