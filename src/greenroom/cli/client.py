"""A small client of the platform's public HTTP APIs, so that the command line needs no SDK.

Control calls are E2B's REST API, a command's output is a Connect stream (`frames`) from the guest agent. Both
go to the platform's entry; `E2b-Sandbox-*` headers tell which sandbox and port a request is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.parse
import uuid
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import aiohttp
import msgspec

from greenroom.cli.frames import FrameReader, Message, encode_frame, stream_error
from greenroom.cli.target import Target
from greenroom.errors import (
    BadRequest,
    GreenroomError,
    InternalError,
    NodeUnavailable,
    PermanentError,
    TemporaryError,
    Unauthorized,
    UnknownSandbox,
)
from greenroom.wire.tasks import spawn

T = TypeVar("T")

AGENT_PORT = 49983
CALL_DEADLINE = 90.0
"""Seconds for one control call; a create may wait in a dry pool's queue and then for a hand-over."""
CREATE_DEADLINE = 120.0
"""Seconds over which a create that is answered `try again` is repeated, with one key for all tries."""
PING_INTERVAL = 20
"""Seconds of silence after which the agent is asked to send a sign of life."""
KILL_DEADLINE = 5.0
"""Seconds for ending a command that nobody waits for any more."""
SILENCE_LIMIT = 90.0
"""Seconds without any byte after which a stream counts as lost."""


class SandboxHandle(
    msgspec.Struct, frozen=True, rename={"sandbox_id": "sandboxID", "token": "envdAccessToken"}
):
    """What create and connect answer, as far as it is needed here."""

    sandbox_id: str
    token: str | None = None


class Client:
    """Talks to one platform. Use as an async context manager."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0), auto_decompress=False
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def create(self, template: str, timeout: int, env: dict[str, str] | None = None) -> SandboxHandle:
        """Create a sandbox that lives `timeout` seconds.

        A `try again` is followed, within CREATE_DEADLINE, under one idempotency key, so at most one sandbox
        is made. When this is cancelled it still waits for the answer that is on its way and kills what it
        names, so that nothing is left. Raises what the API answers.
        """
        body = {
            "templateID": template,
            "timeout": timeout,
            "envVars": env or {},
            "metadata": {"greenroom.by": "cli"},
        }
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        deadline = time.monotonic() + CREATE_DEADLINE
        while True:
            attempt = spawn(self._call("POST", "/v2/sandboxes", SandboxHandle, body, headers), "create")
            try:
                return await asyncio.shield(attempt)
            except asyncio.CancelledError:
                with contextlib.suppress(GreenroomError, TimeoutError):
                    async with asyncio.timeout(30.0):
                        made = await attempt
                    await self.kill(made.sandbox_id)
                raise
            except TemporaryError as error:
                if time.monotonic() + error.retry_after > deadline:
                    raise
                await asyncio.sleep(error.retry_after)

    async def connect(self, sandbox_id: str, timeout: int) -> SandboxHandle:
        """The handle of a running sandbox, which then lives at least `timeout` seconds more, never less."""
        path = f"/v2/sandboxes/{urllib.parse.quote(sandbox_id, safe='')}/connect"
        return await self._call("POST", path, SandboxHandle, {"timeout": timeout})

    async def kill(self, sandbox_id: str) -> bool:
        """End a sandbox; False when there was none."""
        path = f"/sandboxes/{urllib.parse.quote(sandbox_id, safe='')}"
        try:
            await self._call("DELETE", path, type(None))
        except UnknownSandbox:
            return False
        return True

    async def run(
        self, sandbox: SandboxHandle, command: str, env: dict[str, str] | None = None, tag: str = ""
    ) -> AsyncGenerator[Message, None]:
        """Run a shell command line; yields its start, output as it comes, and end.

        The command has no time limit of its own, and goes on when this generator is closed; `kill_command`
        ends it by the tag that it was given. Raises StreamError and the like when the sandbox refuses,
        NodeUnavailable when the stream is lost.
        """
        process: dict[str, Any] = {"cmd": "/bin/bash", "args": ["-l", "-c", command]}
        if env:
            process["envs"] = env
        request: dict[str, Any] = {"process": process, "stdin": False}
        if tag:
            request["tag"] = tag
        headers = {
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(PING_INTERVAL),
            **_agent_headers(sandbox),
        }
        reader = FrameReader()
        try:
            async with self._opened().post(
                f"{self._target.url}/process.Process/Start",
                data=encode_frame(request),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENCE_LIMIT),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise stream_error(_json_object(await response.read()) or {"code": str(response.status)})
                async for chunk in response.content.iter_any():
                    for message in reader.feed(chunk):
                        yield message
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            if reader.finished:
                return
            raise NodeUnavailable(
                f"the connection to sandbox {sandbox.sandbox_id} was lost; "
                "it was killed, reached its end of life, or its node is down"
            ) from error

    async def kill_command(self, sandbox: SandboxHandle, tag: str, *, started: bool) -> bool:
        """SIGKILL to a command and all of its session; True when it was sent. Takes up to KILL_DEADLINE seconds.

        A command that was not seen to start may still be on its way into the sandbox, so it is looked for
        until then; one that did and cannot be found has ended.
        """
        headers = {"Content-Type": "application/json", **_agent_headers(sandbox)}
        body = msgspec.json.encode({"process": {"tag": tag}, "signal": "SIGNAL_SIGKILL"})
        try:
            async with asyncio.timeout(KILL_DEADLINE):
                while True:
                    async with self._opened().post(
                        f"{self._target.url}/process.Process/SendSignal",
                        data=body,
                        headers=headers,
                        allow_redirects=False,
                    ) as response:
                        if response.status == 200:
                            return True
                        if started or response.status != 404:
                            return started and response.status == 404
                    await asyncio.sleep(0.1)
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return False

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise InternalError("the client is not open")
        return self._session

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> T:
        sent = {"X-API-Key": self._target.key, **(headers or {})}
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            sent["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=CALL_DEADLINE, sock_connect=5.0)
        try:
            async with self._opened().request(
                method,
                self._target.url + path,
                data=data,
                headers=sent,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                payload, status = await response.read(), response.status
                retry_after = response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise NodeUnavailable(
                f"no answer from {self._target.url}; `greenroom status` tells what is down"
            ) from error
        if status >= 400:
            raise _api_error(status, payload, retry_after)
        if kind is type(None):
            return None
        try:
            return msgspec.json.decode(payload, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InternalError(f"the API answered {method} {path} with something unreadable") from error


def _agent_headers(sandbox: SandboxHandle) -> dict[str, str]:
    """What a request to the agent in a sandbox carries."""
    headers = {
        "Connect-Protocol-Version": "1",
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": str(AGENT_PORT),
    }
    return headers | ({"X-Access-Token": sandbox.token} if sandbox.token else {})


def _json_object(payload: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _api_error(status: int, payload: bytes, retry_after: str) -> GreenroomError:
    """E2B's `{"code", "message"}` as one of our errors."""
    message = str(_json_object(payload).get("message", "")) or f"the API answered HTTP {status}"
    if status in (429, 502, 503, 504):
        after = float(retry_after) if retry_after.isdigit() else 1.0
        return TemporaryError(message, retry_after=max(0.1, after))
    kinds: dict[int, type[PermanentError]] = {400: BadRequest, 401: Unauthorized, 404: UnknownSandbox}
    return kinds.get(status, PermanentError)(message)
