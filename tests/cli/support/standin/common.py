"""What the stand-in roles have in common. THESE ARE TEST DOUBLES: no sandbox, no VM, no store is behind them.

A stand-in keeps the contract between a role and its supervisor (spec file, ready pipe, SIGTERM) and answers
the few requests that the command line sends. Environment variables, which the supervisor passes on because of
their prefix, make it misbehave:

    GREENROOM_STANDIN_TRACE   a file to which each start, readiness and end is appended, one line each
    GREENROOM_STANDIN_<ROLE>  words separated by commas:
        fail      end at once with a complaint
        once      the same, from the second start on
        mute      never get ready
        deaf      ignore SIGTERM
        late      ignore the first SIGTERM
        progress  report two steps before being ready
        child     start a child that would outlive it
        left      (node) a sweep leaves something
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from aiohttp import web

from greenroom.config import RoleSpec
from greenroom.wire.credentials import Verifier
from greenroom.wire.messages import (
    MasterStatus,
    NodeInfo,
    NodeStatus,
    PoolSpec,
    PoolStatus,
    Sandbox,
    SandboxList,
    Size,
    Template,
)
from standin.sandboxes import sandbox_routes

SMALL = Size("small", 1, 256, 1024)


def trace(spec: RoleSpec, what: str) -> None:
    """Append a line to the trace, if there is one."""
    if path := os.environ.get("GREENROOM_STANDIN_TRACE"):
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(f"{what} {spec.name} {os.getpid()}\n")


def starts_of(spec: RoleSpec) -> int:
    """How often this stand-in was started, according to the trace."""
    lines = Path(os.environ["GREENROOM_STANDIN_TRACE"]).read_text(encoding="utf-8").splitlines()
    return sum(line.startswith(f"started {spec.name} ") for line in lines)


def habits(role: str) -> set[str]:
    """How this stand-in is to misbehave."""
    return set(os.environ.get(f"GREENROOM_STANDIN_{role.upper()}", "").split(","))


def main() -> None:
    """Run as a role, or as the sweep of a node."""
    if sys.argv[1] == "--sweep":
        spec = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=RoleSpec)
        trace(spec, "swept")
        left = {"namespaces": ["gr-1"]} if "left" in habits("node") else {}
        print(msgspec.json.encode({"removed": {"processes": [1, 2]}, "left": left}).decode())
        return
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RoleSpec)
    trace(spec, "started")
    manners = habits(spec.role)
    if "fail" in manners or ("once" in manners and starts_of(spec) > 1):
        print(f"greenroom {spec.role}: a tool is missing; install it", file=sys.stderr)
        sys.exit(78)
    if "deaf" in manners:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in manners:
        child = subprocess.Popen(["sleep", "300"])
        trace(spec, f"child-{child.pid}")
    asyncio.run(serve(spec, manners))
    trace(spec, "ended")


async def serve(spec: RoleSpec, manners: set[str]) -> None:
    """Serve until SIGTERM."""
    leaving = asyncio.Event()

    def asked() -> None:
        if "late" in manners:
            manners.discard("late")
            trace(spec, "late")
        else:
            leaving.set()

    if "deaf" not in manners:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked)
    app = web.Application()
    routes = {
        "master": master_routes,
        "node": node_routes,
        "proxy": lambda spec: sandbox_routes(spec, app.on_cleanup),
    }
    app.add_routes(routes[spec.role](spec) if spec.role in routes else [])
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    port = spec.config.proxy.port if spec.role == "proxy" else spec.port
    site = web.TCPSite(runner, spec.host, port)
    await site.start()
    host, bound = runner.addresses[0][:2]
    pipe = int(os.environ.pop("GREENROOM_READY_FD", "-1"))
    if pipe >= 0 and "progress" in manners:
        for line in ({"step": "building the image", "done": 0.5}, {"step": "booting once", "done": None}):
            os.write(pipe, msgspec.json.encode({"progress": line}) + b"\n")
    if pipe >= 0 and "mute" not in manners:
        os.write(
            pipe, msgspec.json.encode({"url": f"http://{host}:{bound}", "detail": {"noise_pid": 7}}) + b"\n"
        )
        os.close(pipe)
        trace(spec, "ready")
    await leaving.wait()
    await runner.cleanup()


def checked(spec: RoleSpec, request: web.Request) -> None:
    """Only the operator may ask."""
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if Verifier.load(spec.secrets).role_of(token) != "operator":
        raise web.HTTPUnauthorized


def answer(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")


def master_routes(spec: RoleSpec) -> list[web.RouteDef]:
    """`GET /v1/status`, with every node whose spec lies beside the master's."""

    async def status(request: web.Request) -> web.Response:
        checked(spec, request)
        nodes = []
        for path in sorted((spec.state / "run").glob("node-*.spec.json")):
            node = msgspec.json.decode(path.read_bytes(), type=RoleSpec)
            records = msgspec.json.decode((spec.state / "run/roles.json").read_bytes())
            url = next((role["url"] for role in records if role["name"] == node.name), "")
            pool = PoolStatus(template="base", size="small", target=2, warm=1, starting=1, waiting=0)
            nodes.append(
                NodeInfo(
                    status=NodeStatus(
                        name=node.name, code="abcd", api_url=url, relay_host="127.0.0.1", relay_port=1,
                        engine="standin", accelerator="", pools=[pool], sandboxes=3, paused=2, snapshots=5,
                    ),
                    live=True,
                    last_seen=time.time(),
                )
            )  # fmt: skip
        # As a master's store has them: nodes of an earlier run, which count as alive for a lease.
        names = {node.status.name for node in nodes}
        for home in sorted(spec.state.glob("node-*")):
            if home.name not in names:
                old = msgspec.structs.replace(
                    nodes[0].status, name=home.name, api_url="http://127.0.0.1:1", pools=[], sandboxes=0
                )
                nodes.append(NodeInfo(status=old, live=True, last_seen=time.time()))
        template = Template(template_id="t" * 20, name="base", size=SMALL, created_at=time.time())
        return answer(
            MasterStatus(
                nodes=nodes, pools=[PoolSpec(template="base", size=SMALL, target=2)], templates=[template]
            )
        )

    return [web.get("/v1/status", status)]


def node_routes(spec: RoleSpec) -> list[web.RouteDef]:
    """`GET /v1/sandboxes`, with one sandbox that has a token nobody may see."""

    async def sandboxes(request: web.Request) -> web.Response:
        checked(spec, request)
        one = Sandbox(
            sandbox_id="iabcd" + "0" * 15, template="base", size=SMALL, state="running",
            started_at=time.time() - 5, ends_at=time.time() + 300, node=spec.name, token="top-secret",
        )  # fmt: skip
        return answer(SandboxList([one]))

    return [web.get("/v1/sandboxes", sandboxes)]
