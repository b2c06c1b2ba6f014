"""Commands in a real guest for tests of the engine: through the agent, without proxy or SDK."""

from __future__ import annotations

import base64
from typing import NamedTuple

import msgspec

from greenroom.runtime import guestclient
from greenroom.runtime.engine import Vm


class Result(NamedTuple):
    """What a command did. `out` holds standard output and error in the order they came."""

    code: int
    out: str


def _dechunk(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        whole += rest[:length]
        body = rest[length + 2 :]
    return whole


async def sh(
    vm: Vm, script: str, *, user: str = "root", token: str | None = None, deadline: float = 60
) -> Result:
    """Run `script` by bash in the guest and wait for its end."""
    process = {"cmd": "/bin/bash", "args": ["-l", "-c", script]}
    message = msgspec.json.encode({"process": process, "stdin": False})
    headers = {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}
    if token is not None:
        headers["X-Access-Token"] = token
    status, raw = await guestclient.request(
        vm,
        "POST",
        "/process.Process/Start",
        b"\0" + len(message).to_bytes(4, "big") + message,
        deadline=deadline,
        headers=headers,
        content_type="application/connect+json",
    )
    assert status == 200, raw
    frames, out, code = _dechunk(raw), b"", None
    while frames:
        length = int.from_bytes(frames[1:5], "big")
        event = msgspec.json.decode(frames[5 : 5 + length]).get("event", {})
        frames = frames[5 + length :]
        for piece in event.get("data", {}).values():
            out += base64.b64decode(piece)
        if "end" in event:
            code = event["end"].get("exitCode", 0)
    assert code is not None, "the stream ended without an end event"
    return Result(code, out.decode(errors="replace"))
