"""The node's side of the guest agent: a few HTTP/1.1 calls over a socket into the VM's namespace.

The answers come from a guest, so they are bounded and never trusted: a call returns a small JSON object or
raises RuntimeFailure. (What users send to their guest goes through the relay and never through here.)
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from greenroom.errors import RuntimeFailure
from greenroom.runtime.engine import ClockReading, Identity, Vm
from greenroom.wire.tasks import stop

AGENT_PORT = 49983
_ANSWER_LIMIT = 1 << 20
_CLOCK_ROUNDS = 8
_CONNECT = 1.0
"""Seconds for one try to connect."""
INSIDE_DEADLINE = 3.0
"""Seconds for the agent to open a way to its loopback. It takes milliseconds; under TCG and load, some tenths."""
_HEAD_LIMIT = 4096


class _Unknown(RuntimeFailure):
    """The agent treats a control route as one that does not exist: the secret is not the one it knows."""


async def request(
    vm: Vm,
    method: str,
    path: str,
    body: object = None,
    *,
    deadline: float,
    headers: dict[str, str] | None = None,
    content_type: str = "application/json",
) -> tuple[int, bytes]:
    """One request to the agent; returns (status, body).

    Raises OSError when it is not there or its VM ends meanwhile (a dead guest resets nothing), TimeoutError
    after `deadline` seconds.
    """
    # Not by `spawn`: what these raise is this function's answer, and no background task's failure.
    loop = asyncio.get_running_loop()
    asking: asyncio.Task[tuple[int, bytes]] = loop.create_task(
        _request(vm, method, path, body, deadline, headers or {}, content_type)
    )
    ended = loop.create_task(vm.ended.wait())
    try:
        await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise ConnectionResetError("the VM ended before its agent had answered")
        return asking.result()
    finally:
        await stop(asking, ended)


async def _request(
    vm: Vm, method: str, path: str, body: object, deadline: float, headers: dict[str, str], content_type: str
) -> tuple[int, bytes]:
    payload = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: guest", "Connection: close"]
    if body is not None:
        lines += [f"Content-Type: {content_type}", f"Content-Length: {len(payload)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    async with asyncio.timeout(deadline):
        sock = await _connected(vm)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode() + payload)
            answer = bytearray()
            while chunk := await loop.sock_recv(sock, 65536):
                answer += chunk
                if len(answer) > _ANSWER_LIMIT:
                    raise RuntimeFailure("the guest agent answers too much")
                if (whole := _complete(answer)) is not None:
                    return whole
        finally:
            sock.close()
    raise ConnectionResetError("the guest agent closed the connection before it had answered")


async def _connected(vm: Vm) -> socket.socket:
    """A connection to the agent, tried for as long as it is waited for.

    Anew each second: a guest that boots hears nothing at first, and TCP would ask again only after 1, 3, 7 and 15.
    """
    while True:
        with contextlib.suppress(TimeoutError):
            return await vm.connect(AGENT_PORT, _CONNECT)


def _complete(data: bytearray) -> tuple[int, bytes] | None:
    """Status and body once all of an answer has come. A chunked body is returned as it came, undecoded."""
    head, separator, body = bytes(data).partition(b"\r\n\r\n")
    if not separator:
        return None
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ", 2)
    if len(parts) < 2 or not (len(parts[1]) == 3 and parts[1].isdigit()):
        raise RuntimeFailure("the guest agent answers something that is not HTTP")
    status, length = int(parts[1]), 0
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        name, value = name.strip().lower(), value.strip()
        if name == b"content-length":
            # Bounded before it is read as a number: a guest may say anything.
            if not (len(value) <= 9 and value.isdigit()):
                raise RuntimeFailure("the guest agent answers something that is not HTTP")
            length = int(value)
        if name == b"transfer-encoding" and value.lower() == b"chunked":
            return (status, body) if body.endswith(b"0\r\n\r\n") else None
    return (status, body[:length]) if len(body) >= length else None


async def wait_ready(vm: Vm, deadline: float) -> None:
    """Return when the agent answers its health check. Raises RuntimeFailure past `deadline` seconds."""
    pause = 0.01
    try:
        async with asyncio.timeout(deadline):
            while True:
                with contextlib.suppress(OSError, TimeoutError):
                    status, _ = await request(vm, "GET", "/health", deadline=5.0)
                    if 200 <= status < 300:
                        return
                if vm.ended.is_set():
                    raise RuntimeFailure("the VM ended before its agent answered")
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 0.25)
    except TimeoutError as error:
        raise RuntimeFailure(f"the guest agent did not answer within {deadline:.0f} s") from error


async def _control(
    vm: Vm, method: str, path: str, body: object, control: str, deadline: float
) -> tuple[dict[str, Any], float, float]:
    """A control call: the answer, and host time (ns) right before and after it."""
    headers = {"X-Greenroom-Control": control}
    before = time.time_ns()
    status, raw = await request(vm, method, path, body, deadline=deadline, headers=headers)
    after = time.time_ns()
    if status == 404:
        raise _Unknown(f"the guest agent does not know its node: it answered {status} to {method} {path}")
    if status != 200:
        raise RuntimeFailure(f"the guest agent answered {status} to {method} {path}")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any]), before, after
    except (msgspec.DecodeError, RecursionError) as error:
        raise RuntimeFailure("the guest agent's answer is not JSON") from error


async def open_inside(vm: Vm, port: int, control: str) -> socket.socket:
    """A connected socket to `port` of the guest's loopback: an upgraded connection to the agent (`guest.loopback`).

    Raises ConnectionRefusedError when nothing listens there, or the agent does not open it within INSIDE_DEADLINE
    seconds, for whatever reason: from outside the port is closed anyway.
    """
    lines = [
        f"GET /upgrade/loopback/{port} HTTP/1.1",
        "Host: guest",
        "Connection: Upgrade",
        "Upgrade: greenroom-loopback",
        f"X-Greenroom-Control: {control}",
    ]
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(INSIDE_DEADLINE):
            sock = await vm.connect(AGENT_PORT, INSIDE_DEADLINE)
            await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode())
            answer = bytearray()
            while b"\r\n\r\n" not in answer and len(answer) < _HEAD_LIMIT:
                chunk = await loop.sock_recv(sock, _HEAD_LIMIT)
                if not chunk:
                    break
                answer += chunk
        # What follows the head would be the service's own words. None that is asked by HTTP speaks first, with TLS
        # or without, so there are none to be kept.
        if not answer.startswith(b"HTTP/1.1 101 ") or not answer.endswith(b"\r\n\r\n"):
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"the agent opens no way to port {port}")
    except OSError as error:  # which TimeoutError is
        if sock is not None:
            sock.close()
        if isinstance(error, ConnectionRefusedError):
            raise
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"the agent opens no way to port {port}") from error
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    return sock


async def sync(vm: Vm, deadline: float, control: str) -> None:
    """Have the guest write its file systems out. Raises RuntimeFailure."""
    try:
        await _control(vm, "POST", "/sync", {}, control, deadline)
    except (OSError, TimeoutError) as error:
        raise RuntimeFailure(f"the guest did not write its disk out within {deadline:.0f} s") from error


async def introduce(
    vm: Vm,
    identity: Identity,
    deadline: float,
    tolerance_ms: float,
    control: str,
    inherited: Sequence[str] = (),
) -> ClockReading:
    """Give the guest its identity, then its clock. `control` is the secret that the guest learns the first time
    and asks for ever after; one that comes from a snapshot asks for one of those `inherited` until then.

    The clock is set in rounds: each measures the offset from the middle of a round trip and corrects it. The
    first rounds after a restore are slow (the translator is cold), so the best of at most eight counts.
    """
    fields: dict[str, Any] = {
        "entropy": base64.b64encode(identity.entropy).decode(),
        "timestampNs": time.time_ns(),
        "machineId": identity.machine_id,
        "hostname": identity.hostname,
        "sandboxId": identity.sandbox_id,
        "templateId": identity.template_id,
        "envVars": identity.env,
        "accessToken": identity.token,
        "controlToken": control,
    }
    body = {key: value for key, value in fields.items() if value is not None}
    end = time.monotonic() + deadline
    try:
        begun = time.monotonic()
        identity_s = await _until_connected(vm, body, [*inherited, control], end)
        answered = time.monotonic()
        reading = await _set_clock(vm, control, end, tolerance_ms)
        return msgspec.structs.replace(
            reading,
            answer_s=answered - begun,
            identity_s=identity_s,
            clock_s=time.monotonic() - answered,
        )
    except (OSError, TimeoutError) as error:
        raise RuntimeFailure(f"the guest did not take its identity within {deadline:.0f} s") from error


async def _until_connected(vm: Vm, body: dict[str, Any], controls: Sequence[str], end: float) -> float:
    """POST /init, trying again while nothing listens yet. It is idempotent: the same fields are applied again.

    Of `controls` the guest knows one, which a try that was not heard of again may have changed: so each is tried.
    Returns the seconds that the try took which was answered.
    """
    pause = 0.01
    left_over = list(controls)
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        tried = time.monotonic()
        try:
            await _control(vm, "POST", "/init", body, left_over[0], left)
            return time.monotonic() - tried
        except _Unknown:
            if len(left_over) == 1:
                raise
            del left_over[0]
        except OSError:
            if vm.ended.is_set():
                raise RuntimeFailure("the VM ended while it was started") from None
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.1)


async def _set_clock(vm: Vm, control: str, end: float, tolerance_ms: float) -> ClockReading:
    reading: ClockReading | None = None
    for _ in range(_CLOCK_ROUNDS):
        left = end - time.monotonic()
        if left <= 0:
            break
        answer, before, after = await _control(vm, "GET", "/clock", None, control, left)
        error_ms = (after - before) / 2e6
        offset_ns = int(answer.get("nowNs", 0)) - (before + after) // 2
        reading = ClockReading(offset_ns / 1e6, error_ms)
        if abs(reading.offset_ms) + error_ms <= tolerance_ms:
            return reading
        # A correction smaller than what the round trip leaves open would only move the error about.
        if abs(reading.offset_ms) > error_ms / 2:
            await _control(
                vm, "POST", "/clock", {"adjustNs": -offset_ns}, control, max(0.1, end - time.monotonic())
            )
    if reading is None:
        raise TimeoutError
    return reading
