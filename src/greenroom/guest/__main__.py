"""Starts the agent: ``python3 -m agent --host 0.0.0.0 --port 49983`` in the guest.

The life story: read the options, open the port, say so, serve until SIGTERM, end the commands, leave.
Everything is imported and the threads exist before the port opens, because the guest is snapshotted when it
first answers, and whatever is done before that is done once for all its clones.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from contextlib import suppress

from . import VERSION
from .app import App
from .executions import Keeping, ProcessTable
from .machine import Machine, RecordingMachine
from .outputs import Limits
from .reaping import adopt_orphans, watch_orphans
from .server import Server
from .sessions import CommandGroups
from .settings import Settings
from .spawning import shield_from_oom
from .workers import Workers

DEFAULT_PORT = 49983
DEFAULT_CGROUPS = "/sys/fs/cgroup/commands"
DEFAULT_SPILL = "/var/lib/greenroom"
_WANTED_FILES = 65536
_LEAVE_SECONDS = 2.0

_log = logging.getLogger(__name__)


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="agent", description="Agent inside a Greenroom sandbox.")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104 - in a VM
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on, 0 chooses one")
    parser.add_argument("--default-user", default="user", help="user of requests that name none")
    parser.add_argument(
        "--cgroups",
        metavar="DIR",
        help="where each command gets a cgroup (version 2) of its own; 'none' for no groups "
        f"(default: {DEFAULT_CGROUPS}, with --dry-identity none)",
    )
    parser.add_argument(
        "--subreaper", action="store_true", help="adopt and reap orphans though another process is init"
    )
    parser.add_argument("--spill", metavar="DIR", help=f"where output is spilled (default: {DEFAULT_SPILL})")
    limits = Limits()
    for name, default, what in (
        ("output-memory", limits.memory, "of one command kept in memory"),
        ("output-disk", limits.disk, "of one command spilled to disk"),
        ("output-memory-total", limits.memory_total, "of all commands kept in memory"),
        ("output-disk-total", limits.disk_total, "of all commands spilled to disk"),
    ):
        parser.add_argument(
            f"--{name}",
            type=_size,
            default=default,
            metavar="BYTES",
            help=f"output {what} (default: {default})",
        )
    parser.add_argument("--executions", type=_size, default=1024, help="ended commands remembered")
    parser.add_argument(
        "--execution-seconds", type=float, default=3600.0, help="how long ended commands are remembered"
    )
    parser.add_argument(
        "--dry-identity",
        metavar="DIR",
        help="FOR TESTS ONLY: record clock, host name, machine id and entropy in DIR instead of setting them",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    return parser.parse_args(arguments)


def keeping(chosen: argparse.Namespace) -> Keeping:
    """What the command line says about kept output and exits."""
    return Keeping(
        directory=chosen.spill or chosen.dry_identity or DEFAULT_SPILL,
        limits=Limits(
            chosen.output_memory, chosen.output_disk, chosen.output_memory_total, chosen.output_disk_total
        ),
        executions=chosen.executions,
        seconds=chosen.execution_seconds,
    )


def command_groups(chosen: argparse.Namespace) -> CommandGroups | None:
    """The cgroups for commands, where wanted and possible."""
    place = chosen.cgroups or ("none" if chosen.dry_identity else DEFAULT_CGROUPS)
    return None if place == "none" else CommandGroups.open(place)


def _size(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


async def serve(chosen: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT. Prints one line with the port once it is open."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if chosen.subreaper:
        adopt_orphans()
    if chosen.subreaper or os.getpid() == 1:
        watch_orphans(loop)
    machine = RecordingMachine(chosen.dry_identity) if chosen.dry_identity else Machine()
    workers = Workers()
    table = ProcessTable(workers, keeping(chosen), command_groups(chosen))
    settings = Settings(default_user=chosen.default_user)
    settings.restore(machine.recall())
    app = App(settings, machine, workers, table)
    server = Server(app.handle)
    port = await server.listen(chosen.host, chosen.port)
    # What exists now stays for good: the collector need not visit (and so copy) it in every clone.
    gc.collect()
    gc.freeze()
    print(f"agent listening on {chosen.host}:{port}", flush=True)
    await stop.wait()
    server.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LEAVE_SECONDS):
            await table.end_all()
    workers.close()


def main() -> int:
    """Entry point; answers the exit status."""
    chosen = options()
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    os.umask(0o022)
    if not chosen.dry_identity and os.geteuid() == 0:
        shield_from_oom()
    _allow_many_files()
    try:
        asyncio.run(serve(chosen))
    except OSError as error:
        _log.error("the agent cannot start: %s", error)
        return 1
    return 0


def _allow_many_files() -> None:
    """Each connection and each pipe is a descriptor; the default of 1024 is soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if os.geteuid() == 0 and hard != resource.RLIM_INFINITY:
        hard = max(hard, _WANTED_FILES)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


if __name__ == "__main__":
    sys.exit(main())
