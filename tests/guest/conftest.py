"""Agents for the tests: one shared by those that only use it, fresh ones for those that change it.

And the published SDK in front of an agent: ``sdk`` is each of its two halves in turn.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import AsyncSandbox, ConnectionConfig, Sandbox
from packaging.version import Version

from tests.guest.harness import Agent, running_agent


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent without tokens, shared by the whole session."""
    with running_agent(tmp_path_factory.mktemp("agent") / "identity") as running:
        yield running


@pytest.fixture
def fresh_agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent of the test's own, straight from its start."""
    with running_agent(tmp_path / "identity") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that other users of the machine can enter."""
    place = tmp_path / "work"
    place.mkdir()
    for part in (place, *place.parents):
        if part.stat().st_mode & 0o001 == 0:
            part.chmod(part.stat().st_mode | 0o011)
    return place


TOKEN = "sdk-access-token"


@pytest.fixture(scope="session")
def secured_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent with an access token, for the SDK."""
    with running_agent(tmp_path_factory.mktemp("secured") / "identity") as running:
        body = b'{"accessToken":"%b","sandboxId":"isdk","envVars":{"SANDBOX_WIDE":"yes"}}' % TOKEN.encode()
        assert running.request("POST", "/init", body).status == 200
        running.token = TOKEN
        yield running


def sandbox(kind: type[Any], agent: Agent, token: str | None = TOKEN) -> Any:
    """A sandbox object of the SDK, as its ``connect`` makes one, that talks to an agent directly."""
    headers = {"E2b-Sandbox-Id": "isdk", "E2b-Sandbox-Port": "49983"}
    if token is not None:
        headers["X-Access-Token"] = token
    return kind(
        sandbox_id="isdk",
        sandbox_domain=None,
        envd_version=Version("0.6.13"),
        envd_access_token=token,
        traffic_access_token=None,
        connection_config=ConnectionConfig(
            api_key="e2b_" + "0" * 40,
            sandbox_url=f"http://127.0.0.1:{agent.port}",
            extra_sandbox_headers=headers,
        ),
    )


class Sdk:
    """The SDK's sandbox; ``do`` gives the result of a call, whichever half it was made on."""

    def __init__(self, sandbox: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        self.commands = sandbox.commands
        self.files = sandbox.files
        self.pty = sandbox.pty
        self.sandbox = sandbox
        self.is_async = loop is not None
        self._loop = loop

    def do(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            assert self._loop is not None

            async def finish() -> Any:
                return await result

            return self._loop.run_until_complete(finish())
        return result


@pytest.fixture(params=["sync", "async"])
def sdk(request: pytest.FixtureRequest, secured_agent: Agent) -> Iterator[Sdk]:
    """Both halves of the published SDK."""
    if request.param == "sync":
        yield Sdk(sandbox(Sandbox, secured_agent), None)
        return
    with asyncio.Runner() as runner:

        async def make() -> Any:
            return sandbox(AsyncSandbox, secured_agent)

        yield Sdk(runner.run(make()), runner.get_loop())
