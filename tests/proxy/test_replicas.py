"""To which api a real Envoy sends requests, where there are several: by whom they are, or in turn."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from tests.support.guests import answer_of
from tests.support.proxying import ProxyProcess, Stage, staged

KUBE = (
    "/apis/agents.x-k8s.io/v1beta1/sandboxes?watch=1",
    "/apis",
    "/api",
    "/api/v1/namespaces",
    "/openapi/v2?a=b",
)


async def ask(address: tuple[str, int], path: str, key: str, tls: ssl.SSLContext | None = None) -> str:
    """The name of the api that answered."""
    fields = f"Host: 127.0.0.1\r\nConnection: close\r\n{key}"
    sent = f"GET {path} HTTP/1.1\r\n{fields}\r\n".encode()
    if tls is None:
        status, body = await answer_of(address, sent)
    else:
        reader, writer = await asyncio.open_connection(*address, ssl=tls)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        body = body[body.index(b"{") : body.rindex(b"}") + 1]
    assert status == 200, body
    return str(json.loads(body)["api"])


def bearer(number: int) -> str:
    return f"Authorization: Bearer key-{number}\r\n"


def control(stage: Stage, proxy: ProxyProcess) -> tuple[tuple[str, int], ssl.SSLContext]:
    """The listener for Kubernetes' clients, and what trusts it."""
    authority = stage.state / "tls" / "control" / "ca.pem"
    return (proxy.host, proxy.kube_port), ssl.create_default_context(cafile=str(authority))


async def test_a_credential_stays_at_one_api_and_others_are_spread(tmp_path: Path) -> None:
    async with staged(tmp_path, apis=2) as stage:
        proxy = await stage.start(kube_port=0)
        address, tls = control(stage, proxy)
        homes = set()
        for number in range(12):
            key = bearer(number)
            found = {await ask(proxy.address, path, key) for path in KUBE}
            found.add(await ask(address, "/version", key, tls))
            found.add(await ask(address, "/apis", key, tls))
            assert len(found) == 1, found
            homes |= found
        assert homes == {"api-0", "api-1"}


@pytest.mark.parametrize("path", ["/sandboxes", "/api-keys", "/apis2", "/openapi.json"])
async def test_all_other_requests_are_answered_in_turn(tmp_path: Path, path: str) -> None:
    async with staged(tmp_path, apis=2) as stage:
        proxy = await stage.start()
        found = {await ask(proxy.address, path, bearer(1)) for _ in range(12)}
        assert found == {"api-0", "api-1"}


async def test_without_a_credential_the_address_decides(tmp_path: Path) -> None:
    async with staged(tmp_path, apis=2) as stage:
        proxy = await stage.start()
        assert len({await ask(proxy.address, "/apis", "") for _ in range(12)}) == 1


async def test_the_clients_of_an_api_that_has_gone_are_answered_by_the_other(tmp_path: Path) -> None:
    """From the first request on, before any health check has failed."""
    async with staged(tmp_path, apis=2) as stage:
        proxy = await stage.start()
        homes = {number: await ask(proxy.address, "/apis", bearer(number)) for number in range(12)}
        gone, left = stage.apis
        await gone.stop()
        for number, home in homes.items():
            assert home in (gone.name, left.name)
            assert await ask(proxy.address, "/apis", bearer(number)) == left.name
