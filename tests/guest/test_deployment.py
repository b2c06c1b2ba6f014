"""The agent as it is in the guest: copied, started as ``agent``, snapshotted when warm."""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

import greenroom.guest
from greenroom.guest.app import App
from greenroom.guest.executions import Keeping, ProcessTable
from greenroom.guest.machine import RecordingMachine
from greenroom.guest.server import Server
from greenroom.guest.settings import Settings
from greenroom.guest.workers import Workers
from tests.guest.harness import ME, Agent, b64, envelope, running_agent, shell

PACKAGE = Path(greenroom.guest.__file__).parent


def imports(path: Path) -> list[tuple[int, str]]:
    """Level and name of every import of a module."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_only_the_standard_library_and_siblings_are_imported(module: Path) -> None:
    for level, name in imports(module):
        assert level == 1 or (level == 0 and name.partition(".")[0] in sys.stdlib_module_names), name


def test_it_runs_as_a_package_called_agent(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    shutil.copytree(PACKAGE, library / "agent", ignore=shutil.ignore_patterns("__pycache__"))
    with running_agent(tmp_path / "identity", cwd=tmp_path, module="agent", path=library) as agent:
        assert agent.request("GET", "/health").status == 204
        assert agent.run("echo here").stdout == b"here\n"


WARM_PROGRAM = """
import sys
from greenroom.guest import __main__ as program, server

known = set()

class Spy(server.Connection):
    def connection_made(self, transport):
        if not known:
            known.update(sys.modules)
        super().connection_made(transport)

server.Connection = Spy
status = program.main()
print(*(name for name in sys.modules if name not in known), flush=True)
sys.exit(status)
"""


def test_nothing_is_imported_by_the_first_requests(tmp_path: Path) -> None:
    """The snapshot is taken when the agent first answers; what comes later is paid for in every clone."""
    (tmp_path / "warm.py").write_text(WARM_PROGRAM)
    path = Path(f"{tmp_path}:{PACKAGE.parent.parent}")
    with running_agent(tmp_path / "identity", module="warm", path=path) as agent:
        use_everything(agent, tmp_path)
    assert agent.farewell.split() == []


def use_everything(agent: Agent, folder: Path) -> None:
    """One request of each kind."""
    agent.request("GET", "/health")
    agent.run("echo hi")
    agent.run("echo hi", pty={"size": {"cols": 80, "rows": 24}})
    agent.run("head -c 3000000 /dev/zero", offsets=True)
    agent.process_call("Inspect", {"process": {"executionId": "x"}})
    watcher = agent.call("CreateWatcher", {"path": str(folder), "recursive": True, "includeEntry": True})
    agent.call("GetWatcherEvents", watcher.json)
    agent.call("RemoveWatcher", watcher.json)
    with agent.stream("filesystem.Filesystem/WatchDir", {"path": str(folder)}):
        pass
    agent.run("x", user="no-such-user")
    agent.call("Stat", {"path": "/"})
    agent.call("ListDir", {"path": "/etc"})
    agent.call("MakeDir", {"path": str(folder / "made")})
    agent.call("Move", {"source": str(folder / "made"), "destination": str(folder / "moved")})
    agent.call("Remove", {"path": str(folder / "moved")})
    agent.request("POST", f"/files?path={folder}/x", b"x", {"Content-Type": "application/octet-stream"})
    agent.request("GET", f"/files?path={folder}/x", headers={"Accept-Encoding": "gzip"})
    parts = {"source_paths": [f"{folder}/x"], "destination": f"{folder}/y"}
    agent.request("POST", "/files/compose", json.dumps(parts).encode())
    agent.request("GET", "/upgrade/loopback/80")
    agent.request("GET", "/metrics")
    agent.request("GET", "/envs")
    agent.request("POST", "/init", b'{"hostname":"x","entropy":"%b"}' % b64(bytes(32)).encode())


async def test_an_idle_agent_has_no_timer(tmp_path: Path) -> None:
    """Nothing wakes a waiting guest: after the last connection the loop has nothing scheduled."""
    loop = asyncio.get_running_loop()
    workers = Workers()
    table = ProcessTable(workers, Keeping(str(tmp_path)))
    app = App(Settings(default_user=ME), RecordingMachine(str(tmp_path)), workers, table)
    server = Server(app.handle)
    port = await server.listen("127.0.0.1", 0)
    before = pending_timers(loop)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = envelope(b'{"process":{"cmd":"/bin/sh","args":["-c","echo hi"]}}')
    writer.write(
        b"POST /process.Process/Start HTTP/1.1\r\nContent-Type: application/connect+json\r\n"
        b"Connect-Timeout-Ms: 60000\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    assert b'"exitCode":0' in await reader.read()
    writer.close()
    await writer.wait_closed()
    while server.statistics()["connections"]:  # noqa: ASYNC110 - a few turns of the same loop, no waiting
        await asyncio.sleep(0)
    assert pending_timers(loop) == before
    assert table.live() == []
    server.close()
    workers.close()


def pending_timers(loop: asyncio.AbstractEventLoop) -> int:
    scheduled: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
    return sum(not handle.cancelled() for handle in scheduled)


def test_commands_end_with_the_agent(tmp_path: Path) -> None:
    with running_agent(tmp_path / "identity") as agent:
        stream = agent.open_stream("Start", {"process": shell("sleep 600")})
        pid = stream.next()["start"]["pid"]
    stream.close()
    assert not Path(f"/proc/{pid}").exists()
