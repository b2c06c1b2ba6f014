"""The stand-in proxy's E2B surface. A TEST DOUBLE: commands run as plain processes of this machine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from greenroom.config import RoleSpec

TOKEN = "0123456789abcdef"


def sandbox_routes(
    spec: RoleSpec, cleanup: list[Callable[[web.Application], Awaitable[None]]]
) -> list[web.RouteDef]:
    """Create, connect and kill, and `process.Process/Start` and `SendSignal`; `cleanup` is called at the end."""
    live: dict[str, dict[str, Any]] = {}
    commands: dict[str, dict[str, asyncio.subprocess.Process]] = {}
    journal = os.environ.get("GREENROOM_STANDIN_SANDBOXES")
    refusals = int(os.environ.get("GREENROOM_STANDIN_REFUSALS", "0"))
    keys: list[str] = []

    def note(line: str) -> None:
        if journal:
            with open(journal, "a", encoding="utf-8") as stream:
                stream.write(line + "\n")

    def refuse(status: int, message: str, **headers: str) -> web.Response:
        body = msgspec.json.encode({"code": status, "message": message})
        return web.Response(status=status, body=body, content_type="application/json", headers=headers)

    def authorised(request: web.Request) -> bool:
        known = (spec.secrets / "default.key").read_text(encoding="utf-8").strip()
        return request.headers.get("X-API-Key") == known

    def shown(sandbox_id: str) -> web.Response:
        body = {
            "templateID": "t", "sandboxID": sandbox_id, "clientID": "c", "envdVersion": "0.6.13",
            "envdAccessToken": TOKEN,
        }  # fmt: skip
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def create(request: web.Request) -> web.Response:
        nonlocal refusals
        if not authorised(request):
            return refuse(401, "unknown API key")
        body = msgspec.json.decode(await request.read())
        keys.append(request.headers["Idempotency-Key"])
        if refusals > 0:
            refusals -= 1
            return refuse(503, "the pool is dry", **{"Retry-After": "0"})
        if body["templateID"] != "base":
            return refuse(404, f"no template {body['templateID']}")
        sandbox_id = "iabcd" + f"{len(live):015d}"
        live[sandbox_id] = body
        note(f"created {sandbox_id} {body['timeout']} keys={len(set(keys))}/{len(keys)}")
        response = shown(sandbox_id)
        response.set_status(201)
        return response

    async def connect(request: web.Request) -> web.Response:
        sandbox_id = request.match_info["id"]
        if sandbox_id not in live:
            return refuse(404, f"sandbox {sandbox_id} not found")
        note(f"connected {sandbox_id} {msgspec.json.decode(await request.read())['timeout']}")
        return shown(sandbox_id)

    async def kill(request: web.Request) -> web.Response:
        sandbox_id = request.match_info["id"]
        note(f"killed {sandbox_id}")
        for running in commands.pop(sandbox_id, {}).values():
            _kill(running)
        return web.Response(status=204) if live.pop(sandbox_id, None) else refuse(404, "not found")

    async def start(request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-Access-Token") != TOKEN:
            return refuse(401, "bad token")
        body = live.get(request.headers["E2b-Sandbox-Id"])
        if body is None or request.headers["E2b-Sandbox-Port"] != "49983":
            return refuse(502, "The sandbox was not found")
        raw = await request.read()
        message = msgspec.json.decode(raw[5:])
        process = message["process"]
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        running = await asyncio.create_subprocess_exec(  # a double needs no supervision
            process["cmd"], *process["args"],
            env={"PATH": os.environ["PATH"], "HOME": "/", **body["envVars"], **process.get("envs", {})},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

        async def send(event: dict[str, Any], flags: int = 0) -> None:
            data = msgspec.json.encode(event)
            await response.write(struct.pack(">BI", flags, len(data)) + data)

        async def pump(name: str, stream: asyncio.StreamReader) -> None:
            while chunk := await stream.read(4096):
                await send({"event": {"data": {name: base64.b64encode(chunk).decode()}}})

        note(f"running {running.pid}")
        # As in a real sandbox a command goes on when nobody follows it any more.
        commands.setdefault(request.headers["E2b-Sandbox-Id"], {})[message.get("tag", "")] = running
        silent = os.environ.get("GREENROOM_STANDIN_SILENT_START", "")
        if silent and silent in process["args"][-1]:
            await asyncio.sleep(60)  # it runs, but its start is not told
        with contextlib.suppress(ConnectionError):
            await send({"event": {"start": {"pid": running.pid}}})
            assert running.stdout is not None
            assert running.stderr is not None
            await asyncio.gather(pump("stdout", running.stdout), pump("stderr", running.stderr))
            status = await running.wait()
            if status < 0:
                end = {"exitCode": -1, "exited": False, "status": f"signal: {_name(-status)}"}
            else:
                end = {"exitCode": status, "exited": True, "status": f"exit status {status}"}
            await send({"event": {"end": end}})
            await send({}, 2)
        return response

    async def send_signal(request: web.Request) -> web.Response:
        if request.headers.get("X-Access-Token") != TOKEN:
            return refuse(401, "bad token")
        message = msgspec.json.decode(await request.read())
        running = commands.get(request.headers["E2b-Sandbox-Id"], {}).get(message["process"]["tag"])
        if running is None:
            return refuse(404, "no such process")
        note(f"signalled {running.pid} {message['signal']}")
        _kill(running)
        return web.json_response({})

    async def end_commands(_app: web.Application) -> None:
        for started in commands.values():
            for running in started.values():
                _kill(running)

    cleanup.append(end_commands)
    return [
        web.post("/v2/sandboxes", create),
        web.post("/v2/sandboxes/{id}/connect", connect),
        web.delete("/sandboxes/{id}", kill),
        web.post("/process.Process/Start", start),
        web.post("/process.Process/SendSignal", send_signal),
    ]


def _kill(running: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


def _name(number: int) -> str:
    return {9: "killed", 15: "terminated"}.get(number, str(number))


def lines(path: Path) -> list[str]:
    """What a stand-in noted so far."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
