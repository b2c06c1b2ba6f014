"""The controller's own listener, Envoy's statistics behind it, request ids at the entry, and one form of log."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import aiohttp
import pytest

from greenroom.proxy import metrics
from greenroom.wire import credentials
from tests.proxy.test_routing import ask, headers_of
from tests.support.guests import echo, guest_listening
from tests.support.loops import eventually
from tests.support.proxying import ProxyProcess, Stage, sandbox_on, staged

ID = sandbox_on("aaaa")


def internal(proxy: ProxyProcess) -> str:
    return (proxy.home / "internal.url").read_text(encoding="ascii").strip()


async def scrape(stage: Stage, proxy: ProxyProcess) -> str:
    headers = {"Authorization": f"Bearer {credentials.own_token(stage.state / 'secrets', 'metrics')}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{internal(proxy)}/metrics") as response,
    ):
        assert response.status == 200
        return await response.text()


async def test_the_listener_is_on_loopback_told_of_and_gone_at_the_end(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        url, told = internal(proxy), proxy.home / "internal.url"
        assert url.startswith("http://127.0.0.1:")
        assert url != proxy.url.rstrip("/")
        assert stat.S_IMODE(told.stat().st_mode) == 0o600
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/healthz") as response:
                assert await response.json() == {"ok": True}
            async with session.get(f"{url}/metrics") as response:
                assert response.status == 401
        assert await proxy.end() == 0
        assert not told.exists()


async def test_envoys_statistics_are_bounded_and_count_what_happened(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, stage.node("aaaa"):
        proxy = await stage.start()
        for _ in range(3):
            assert (await ask(proxy, "/x"))[0] == 200
        text = await scrape(stage, proxy)
        families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE envoy_")}
        assert families == metrics.FAMILIES
        assert 'envoy_cluster_upstream_rq_total{envoy_cluster_name="api"} 3' in text
        assert 'envoy_cluster_name="node_aaaa"' in text
        assert "greenroom_proxy_envoy_up 1.0" in text
        assert "greenroom_proxy_nodes 1.0" in text
        assert "admin" not in text


async def test_without_envoy_the_controller_tells_that_and_the_rest(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        os.kill(proxy.envoy_pid, signal.SIGSTOP)
        os.kill(proxy.envoy_pid, signal.SIGKILL)

        async def started_again() -> bool:
            text = await scrape(stage, proxy)
            assert "process_cpu_seconds_total" in text
            return "greenroom_proxy_envoy_starts_total 2.0" in text and "greenroom_proxy_envoy_up 1.0" in text

        await eventually(started_again)


def test_only_the_families_that_are_listed_are_passed_on() -> None:
    text = (
        "# TYPE envoy_server_live gauge\nenvoy_server_live{} 1\n\n"
        "# TYPE envoy_server_liver gauge\nenvoy_server_liver{} 1\n"
        "# TYPE envoy_http_downstream_rq_time histogram\n"
        'envoy_http_downstream_rq_time_bucket{le="1"} 1\nenvoy_http_downstream_rq_time_sum{} 1\n'
        "envoy_http_downstream_rq_total_count{} 1\ngarbage\n# HELP x y\n"
    )
    assert metrics.chosen(text).decode().splitlines() == [
        "# TYPE envoy_server_live gauge",
        "envoy_server_live{} 1",
        "# TYPE envoy_http_downstream_rq_time histogram",
        'envoy_http_downstream_rq_time_bucket{le="1"} 1',
        "envoy_http_downstream_rq_time_sum{} 1",
    ]


async def test_metrics_of_the_entry_are_nowhere_and_of_a_sandbox_its_own(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start()
        for path in ("/metrics", "/metrics?a=b"):
            status, body = await ask(proxy, path)
            assert (status, json.loads(body)) == (404, {"code": 404, "message": "no such path"})
            status, body = await ask(proxy, path, f"8000-{ID}.sbx.example.test")
            assert (status, body.startswith(f"GET {path} ".encode())) == (200, True)
            fields = (f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 8000")
            assert (await ask(proxy, path, "127.0.0.1", *fields))[0] == 200
        assert (await ask(proxy, "/metricsx"))[0] == 200


@pytest.mark.parametrize(
    ("offered", "kept"),
    [
        ("mine", True),
        ("A.b_c-9", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("a b", False),
        ("a,b", False),
        ('"quoted"', False),
        ("", False),
        (None, False),
    ],
)
async def test_both_planes_see_the_id_that_the_client_is_told(
    tmp_path: Path, offered: str | None, kept: bool
) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
        aiohttp.ClientSession() as session,
    ):
        proxy = await stage.start()
        fields = {} if offered is None else {"x-request-id": offered}
        async with session.get(proxy.url, headers=fields) as response:
            told = response.headers.getall("x-request-id")
            seen = dict((await response.json())["headers"])["x-request-id"]
        assert told == [seen]
        assert (seen == offered) == kept
        fields |= {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "8000"}
        async with session.get(proxy.url, headers=fields) as response:
            assert response.headers["x-request-id"] == headers_of(await response.read())["x-request-id"]
            assert (response.headers["x-request-id"] == offered) == kept


async def test_envoy_logs_in_the_form_of_the_roles(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        # Something for Envoy to complain about: a list of clusters that it cannot read.
        (proxy.home / "envoy" / "xds" / ".broken").write_text('{"resources": [{"@type": "nonsense"}]}')
        (proxy.home / "envoy" / "xds" / ".broken").rename(proxy.home / "envoy" / "xds" / "clusters.json")
        await eventually(lambda: '"logger":"envoy.' in proxy.log)
        lines = [json.loads(line) for line in proxy.log.splitlines()]
        assert {line["role"] for line in lines} == {"proxy"}
        (complaint, *_) = [line for line in lines if line["logger"].startswith("envoy.")]
        assert complaint["level"] in ("warning", "error", "critical")
        assert complaint["time"].endswith("Z")
        assert len(complaint["time"]) == len("2026-01-31T12:00:00.042Z")
