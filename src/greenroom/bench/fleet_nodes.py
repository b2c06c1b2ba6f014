"""`python -m greenroom.bench.fleet_nodes SPEC.json`: several simulated nodes in one process, for measurements.

Each is the whole node daemon, as `node.service` puts it together: keeper, warmer, journal on disk, relay, followers,
its own HTTP port, and a membership that registers and sends heartbeats. Only its VMs are simulated. What a process has
but once is shared: the event loop, the file limit and the metrics, which are then of all its nodes together. SIGTERM
and SIGINT end all of them, as does one that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import uvloop
from starlette.applications import Starlette

from greenroom.config import LONGEST_TIMEOUT, RoleSpec
from greenroom.node import service
from greenroom.node.keeper import Keeper
from greenroom.wire.logs import setup_logging
from greenroom.wire.messages import ClaimRequest, Declared, Size
from greenroom.wire.serving import Ready, raise_file_limit, serving_beside, tell_ready
from greenroom.wire.tasks import spawn, stop

_READY_FD = "GREENROOM_READY_FD"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Sandboxes that a node has from the beginning, made by its own claims before anybody can reach it."""

    count: int
    template: str
    size: Size
    owner: str
    declared: Declared | None = None
    """Every other one has a name, and this declared of it, as if it was made through the Kubernetes dialect."""


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of one process."""

    nodes: list[RoleSpec]
    hold: Hold | None = None


class Fleet:
    """The nodes of this process and when they shall end."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._ending = asyncio.Event()
        self._serving = 0
        self._ready_fd = os.environ.pop(_READY_FD, None)
        """A single node would tell that it is ready; here that is told once for all."""

    async def run(self) -> None:
        """Run all until a signal; raises what one raised that failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        leaving = functools.partial(service.Leaving, signals=False)
        lives = [
            spawn(service.live(spec, leaving, self._serve, self._begin), spec.name)
            for spec in self._spec.nodes
        ]
        ending = spawn(self._ending.wait(), "the signal to end")
        try:
            await asyncio.wait({ending, *lives}, return_when=asyncio.FIRST_COMPLETED)
            self._ending.set()
            await asyncio.gather(*lives)
        finally:
            await stop(ending, *lives)

    async def _serve(self, app: Starlette, sock: socket.socket) -> AsyncGenerator[str, None]:
        async with serving_beside(app, sock) as url:
            self._serving += 1
            if self._serving == len(self._spec.nodes) and self._ready_fd is not None:
                os.environ[_READY_FD] = self._ready_fd
                tell_ready(Ready(url=url, detail={"nodes": self._serving}))
            yield url
            await self._ending.wait()
            for farewell in app.state.on_leave:
                farewell()

    async def _begin(self, keeper: Keeper) -> None:
        hold = self._spec.hold
        if hold is None:
            return
        for number in range(hold.count):
            declared = hold.declared if number % 2 else None
            made = await keeper.claim(
                ClaimRequest(
                    key=f"held-{keeper.code}-{number}",
                    template=hold.template,
                    size=hold.size,
                    ttl=LONGEST_TIMEOUT,
                    owner=hold.owner,
                    name=f"held-{keeper.code}-{number}" if declared else "",
                    declared=declared,
                )
            )
            await keeper.confirm(made.sandbox_id)
            if number % 50 == 49:
                await asyncio.sleep(0)


def main(arguments: list[str]) -> int:
    """Exit status 0 at a normal end."""
    if len(arguments) != 1:
        print("usage: python -m greenroom.bench.fleet_nodes SPEC.json", file=sys.stderr)
        return 2
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=FleetSpec)
    first = spec.nodes[0]
    setup_logging("node", first.replica, first.config.logs.level)
    raise_file_limit()
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(_run(spec))
    return 0


async def _run(spec: FleetSpec) -> None:
    await Fleet(spec).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
