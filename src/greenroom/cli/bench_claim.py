"""What `bench claim` starts and asks: platforms of its own, a client that tries once, all parts in turn."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from greenroom.cli.bench_platform import own_platform
from greenroom.cli.bench_support import (
    engine_of_node,
    meter_on_stderr,
    run_to_the_end,
    temporary_directory,
)

if TYPE_CHECKING:
    from greenroom.bench.claim import ClaimPlan, ClaimReport, PlatformFigures
    from greenroom.bench.claim_engine import EngineFigures
    from greenroom.bench.claim_http import HttpFigures
    from greenroom.bench.claim_pool import Platform
    from greenroom.cli.interrupts import Interrupts
    from greenroom.cli.records import StateDir
    from greenroom.cli.target import Target
    from greenroom.config import RoleSpec
    from greenroom.runtime.engine import EngineInfo
    from greenroom.wire.messages import NodeStatus

SIMULATED_WARM = 8
"""Members of the simulated node's pool; a claim takes one, and it is full again before the next."""


def measure(
    interrupts: Interrupts,
    state: StateDir,
    cache_dir: Path,
    key_file: Path | None,
    warm: int,
    plan: ClaimPlan,
) -> ClaimReport:
    """All parts of the plan, on the platform of `state` if one runs, else on one with `warm` members for this."""
    from greenroom.bench import claim as measuring
    from greenroom.bench.report import finish
    from greenroom.cli.output import warn
    from greenroom.errors import RuntimeFailure
    from greenroom.master.catalogue import BASE_SIZE

    wanted = set(plan.parts)
    runs = state.running() is not None
    if wanted & measuring.BESIDE_PLATFORM:
        check_root()
    engine, http, figures = None, None, None
    with temporary_directory() as directory:
        if runs and wanted & measuring.ON_PLATFORM:
            _check_platform(state, key_file)
        if "engine" in wanted:
            engine = _in_process(interrupts, directory, plan)
        if "http" in wanted:
            with own_platform(
                interrupts, directory / "simulated", cache_dir, warm=SIMULATED_WARM, engine="simulated"
            ) as own:
                http = _over_http(interrupts, own, plan)
        if wanted & measuring.ON_PLATFORM:
            if runs:
                figures = _on_platform(interrupts, state, directory, key_file, plan)
            else:
                warn("no platform is running; starting one for this")
                with own_platform(interrupts, directory / "state", cache_dir, warm=warm) as own:
                    figures = _on_platform(interrupts, own, directory, None, plan)
        conditions = measuring.conditions_of(plan, figures, BASE_SIZE, directory)
    if engine is not None and engine.durable < engine.claim_ms.n:
        raise RuntimeFailure(
            f"only {engine.durable} of {engine.claim_ms.n} claims were in the journal's file; "
            "does the temporary directory lie on a file system that keeps what is written?"
        )
    return measuring.put_together(finish(conditions), plan, engine, http, figures)


def check_root() -> None:
    """Raise SetupError unless this user may make VMs."""
    import os

    from greenroom.errors import SetupError

    if os.geteuid() != 0:
        raise SetupError(
            "this benchmark makes VMs and network namespaces of its own; run it as root, or choose parts that "
            "make none, such as --part engine --part http"
        )


def _in_process(interrupts: Interrupts, directory: Path, plan: ClaimPlan) -> EngineFigures:
    from greenroom.bench import claim_engine
    from greenroom.master.catalogue import BASE_SIZE

    home = directory / "engine"
    home.mkdir()
    with meter_on_stderr() as meter:
        return run_to_the_end(
            interrupts, lambda: claim_engine.measure(home, plan.template, BASE_SIZE, plan.claims, meter)
        )


def _over_http(interrupts: Interrupts, state: StateDir, plan: ClaimPlan) -> HttpFigures:
    from greenroom.bench import claim_http
    from greenroom.errors import NodeUnavailable
    from greenroom.master.catalogue import BASE_SIZE
    from greenroom.wire.credentials import own_token

    nodes = [role.url for role in state.roles() if role.role == "node" and role.state == "ready"]
    if not nodes:
        raise NodeUnavailable("the simulated node is not ready; see `greenroom status`")
    tokens = {role: own_token(state.secrets, role) for role in ("master", "operator")}
    with meter_on_stderr() as meter:
        return run_to_the_end(
            interrupts,
            lambda: claim_http.measure(nodes[0], tokens, plan.template, BASE_SIZE, plan.claims, meter),
        )


def _check_platform(state: StateDir, key_file: Path | None) -> None:
    """Raise now what the parts on the running platform would raise later."""
    from greenroom.cli.target import check_runs_commands, find_target

    find_target(state.root, key_file)
    check_runs_commands(state.root)


def _on_platform(
    interrupts: Interrupts, state: StateDir, directory: Path, key_file: Path | None, plan: ClaimPlan
) -> PlatformFigures:
    """Measure the platform of `state`, with engines beside it in `directory`."""
    from greenroom.bench import claim as measuring
    from greenroom.cli.target import find_target
    from greenroom.errors import NodeUnavailable
    from greenroom.wire.calling import role_client
    from greenroom.wire.credentials import own_token

    _check_platform(state, key_file)
    target = find_target(state.root, key_file)
    token = own_token(state.secrets, "operator")
    masters = [role.url for role in state.roles() if role.role == "master" and role.state == "ready"]
    if not masters:
        raise NodeUnavailable("no master is ready; see `greenroom status`")
    beside = _spec_beside(state, directory / "beside")

    async def engine_of(node: NodeStatus) -> EngineInfo:
        return engine_of_node(state, node)

    with meter_on_stderr() as meter:

        async def work() -> PlatformFigures:
            async with one_try(target) as platform, role_client(token) as client:
                return await measuring.measure_platform(
                    platform, client, masters[0], engine_of, plan, beside, meter
                )

        return run_to_the_end(interrupts, work)


def _spec_beside(state: StateDir, directory: Path) -> RoleSpec:
    """A node's spec with the settings that the platform's first node was started with. Raises NodeUnavailable."""
    import msgspec

    from greenroom.config import RoleSpec
    from greenroom.errors import NodeUnavailable

    for path in state.node_specs():
        with contextlib.suppress(OSError, msgspec.DecodeError):
            spec = msgspec.json.decode(path.read_bytes(), type=RoleSpec)
            return msgspec.structs.replace(spec, state_dir=str(directory), replica=0)
    raise NodeUnavailable("the platform has no node; see `greenroom status`")


def one_try(target: Target) -> contextlib.AbstractAsyncContextManager[Platform]:
    """A client of the platform whose create is one request, so that a refusal counts instead of being repeated."""
    import uuid

    from greenroom.cli.client import Client, SandboxHandle
    from greenroom.cli.frames import Ended, Output
    from greenroom.errors import NodeUnavailable

    class OneTry(Client):
        def __init__(self) -> None:
            super().__init__(target)
            self._handles: dict[str, SandboxHandle] = {}

        async def __aenter__(self) -> OneTry:
            await super().__aenter__()
            return self

        async def create_once(self, template: str, ttl: int, metadata: dict[str, str]) -> str:
            made = await self._call(
                "POST",
                "/v2/sandboxes",
                SandboxHandle,
                {"templateID": template, "timeout": ttl, "metadata": metadata},
                {"Idempotency-Key": uuid.uuid4().hex},
            )
            self._handles[made.sandbox_id] = made
            return made.sandbox_id

        async def command(self, sandbox_id: str, line: str) -> int:
            async for message in self.run(self._handles[sandbox_id], line):
                if isinstance(message, Ended):
                    return message.status
            raise NodeUnavailable("the stream was closed before the command had ended")

        async def first_output(self, sandbox_id: str, line: str) -> bytes:
            async with contextlib.aclosing(self.run(self._handles[sandbox_id], line)) as messages:
                async for message in messages:
                    if isinstance(message, Output) and not message.error:
                        return message.data
            raise NodeUnavailable("the stream was closed before the command had put out anything")

    return OneTry()
