"""VMs without a platform around them: the same engine and golden, driven from here, the guest asked in its namespace.

What the platform's way through api, proxy and relay costs, and what a restore saves over a boot, shows only beside
a VM that has none of it. So the settings are the platform's, and a VM is restored ahead and waits paused as a
pool's member does; what is timed begins with QMP's `cont`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import struct
import time

import msgspec

from greenroom.bench.lanes import unbroken
from greenroom.bench.report import Meter
from greenroom.bench.stages import StagedRuntime
from greenroom.bench.supply import without_stock
from greenroom.config import RoleSpec
from greenroom.errors import RuntimeFailure
from greenroom.runtime import guestclient
from greenroom.runtime.engine import EngineInfo, Golden, Identity, Vm
from greenroom.wire.messages import Size

ANSWER_DEADLINE = 60.0
"""Seconds for a started guest to answer what it is asked."""
BOOT_DEADLINE = 240.0
_ANSWER_LIMIT = 1 << 20


class Direct:
    """Use as an async context manager, at whose end nothing that was made is left on the host."""

    def __init__(self, spec: RoleSpec, template: str, size: Size, meter: Meter) -> None:
        """`spec` is the platform's node's, with a state directory that nothing else uses."""
        self._spec = without_stock(spec)
        self._template = template
        self._size = size
        self._meter = meter
        self._runtime: StagedRuntime | None = None
        self._golden: Golden | None = None

    async def __aenter__(self) -> Direct:
        self._runtime = StagedRuntime(self._spec)
        try:
            self._golden = await unbroken(
                self._runtime.snapshot_golden(
                    self._template, self._size, lambda step, _done: self._meter.say(step)
                ),
                "golden",
            )
        except BaseException:
            await unbroken(self._runtime.close(), "close the engine")
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        runtime = self.runtime
        await unbroken(runtime.close(), "close the engine")
        left = {kind: count for kind, count in runtime.left().items() if count}
        if left:
            raise RuntimeFailure(f"the benchmark could not remove all it had made: {left}")

    @property
    def runtime(self) -> StagedRuntime:
        """The engine, while this is open."""
        if self._runtime is None:
            raise RuntimeFailure("the engine is not open")
        return self._runtime

    @property
    def golden(self) -> Golden:
        """What VMs are restored from."""
        if self._golden is None:
            raise RuntimeFailure("the engine is not open")
        return self._golden

    async def describe(self) -> EngineInfo:
        """The engine's facts."""
        return await unbroken(self.runtime.describe(), "probe")

    async def paused(self) -> Vm:
        """A restored VM that waits as a pool's member does. Raises RuntimeFailure."""
        return await unbroken(self.runtime.restore(self.golden), "restore")

    async def stop(self, vm: Vm) -> None:
        """End a VM."""
        await unbroken(self.runtime.stop(vm), "stop")

    async def restored_ms(self) -> float:
        """Milliseconds from nothing to the first answer of a VM that is restored."""
        began = time.perf_counter()
        vm = await self.paused()
        try:
            await self.runtime.start(vm)
            await guestclient.wait_ready(vm, ANSWER_DEADLINE)
            return (time.perf_counter() - began) * 1000
        finally:
            await self.stop(vm)

    async def booted_ms(self) -> float:
        """Milliseconds from nothing to the first answer of a VM that boots, with the same machine and image."""
        return await unbroken(self.runtime.cold_boot(self._template, self.golden, BOOT_DEADLINE), "cold boot")


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of a hand-over, in milliseconds."""

    resume_ms: float
    """QMP's `cont`."""
    first_answer_ms: float | None = None
    """From there to the agent's first answer, which is the one to the identity."""
    identity_ms: float | None = None
    """The one request that gave it."""
    clock_ms: float | None = None
    """Measuring and setting the guest's clock."""


def identity() -> tuple[Identity, str]:
    """One such as a claim gives, and its access token."""
    name, token = f"bench-{secrets.token_hex(4)}", secrets.token_hex(32)
    made = Identity(
        entropy=secrets.token_bytes(64),
        machine_id=secrets.token_hex(16),
        hostname=name,
        sandbox_id=name,
        template_id="base",
        token=token,
    )
    return made, token


async def resume(direct: Direct, vm: Vm) -> HandOver:
    """`cont` and nothing else."""
    began = time.perf_counter()
    await direct.runtime.start(vm)
    return HandOver(resume_ms=(time.perf_counter() - began) * 1000)


async def hand_over(direct: Direct, vm: Vm) -> tuple[HandOver, str]:
    """What a node does with a claimed VM; returns its access token too. Raises RuntimeFailure."""
    made, token = identity()
    resumed = await resume(direct, vm)
    reading = await direct.runtime.introduce(vm, made, ANSWER_DEADLINE)
    stages = msgspec.structs.replace(
        resumed,
        first_answer_ms=reading.answer_s * 1000,
        identity_ms=reading.identity_s * 1000,
        clock_ms=reading.clock_s * 1000,
    )
    return stages, token


async def first_output(vm: Vm, word: str, token: str = "") -> None:
    """Have the agent run `echo WORD` in a login shell, as the SDK does, and return when the word comes back.

    Asks over a plain socket in the VM's namespace. Raises RuntimeFailure when it does not come in time.
    """
    asked = msgspec.json.encode(
        {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", f"echo {word}"]}, "stdin": False}
    )
    body = struct.pack(">BI", 0, len(asked)) + asked
    lines = [
        "POST /process.Process/Start HTTP/1.1",
        "Host: guest",
        "Content-Type: application/connect+json",
        "Connect-Protocol-Version: 1",
        f"Content-Length: {len(body)}",
        *([f"X-Access-Token: {token}"] if token else []),
    ]
    request = "\r\n".join([*lines, "", ""]).encode() + body
    # In the stream's frames a piece of output is base64 text; this word's cannot be mistaken for anything else.
    wanted = base64.b64encode(f"{word}\n".encode())
    try:
        async with asyncio.timeout(ANSWER_DEADLINE):
            while True:
                with contextlib.suppress(OSError):
                    await _ask(vm, request, wanted)
                    return
                if vm.ended.is_set():
                    raise RuntimeFailure("the VM ended before its command had")
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise RuntimeFailure(f"the command's output did not come within {ANSWER_DEADLINE:.0f} s") from error


async def _ask(vm: Vm, request: bytes, wanted: bytes) -> None:
    loop = asyncio.get_running_loop()
    sock = await vm.connect(guestclient.AGENT_PORT, ANSWER_DEADLINE)
    try:
        await loop.sock_sendall(sock, request)
        answer = bytearray()
        while chunk := await loop.sock_recv(sock, 65536):
            answer += chunk
            if wanted in answer:
                return
            if len(answer) > _ANSWER_LIMIT:
                raise RuntimeFailure("the guest agent answers too much")
    finally:
        sock.close()
    head = bytes(answer[:200]).decode("latin-1").split("\r\n", 1)[0]
    raise RuntimeFailure(f"the agent ended its answer without the command's output: {head}")
