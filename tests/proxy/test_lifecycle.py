"""The proxy as a process: starting, being ready, draining, dying, and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from tests.support.guests import Raw, guest_listening, read_head
from tests.support.loops import eventually
from tests.support.proxying import ProxyProcess, sandbox_on, staged

ID = sandbox_on("aaaa")


async def answers(proxy: ProxyProcess) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session, session.get(proxy.url) as response:
            return response.status == 200
    return False


async def test_ready_names_the_entry_and_envoy(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        assert proxy.envoys() == [proxy.envoy_pid]
        assert proxy.port > 0
        assert await answers(proxy)


async def test_envoy_is_unprivileged_and_its_files_are_closed(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        envoy = psutil.Process(proxy.envoy_pid)
        listening = [c.laddr for c in envoy.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert listening == [proxy.address], "the admin interface must not be on TCP"
        status = Path(f"/proc/{proxy.envoy_pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        if os.geteuid() == 0:
            assert set(envoy.uids()) == set(envoy.gids()) == {309_999}
            assert "CapEff:\t0000000000000000" in status
        assert stat.S_IMODE(proxy.home.stat().st_mode) == 0o700
        for path in proxy.home.rglob("*"):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o007, path
        admin = proxy.home / "envoy" / "run" / "admin.sock"
        assert stat.S_IMODE(admin.stat().st_mode) == 0o600


async def test_taken_port_is_said_in_one_line(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        first = await stage.start()
        second = await stage.launch(msgspec.structs.replace(stage.spec(port=first.port), replica=1))
        assert await second.wait() == 78
        (told,) = map(json.loads, second.log.splitlines())
        assert told["level"] == "critical"
        assert f"127.0.0.1:{first.port}" in told["message"]
        assert "in use" in told["message"]
        assert not second.envoys()


@pytest.mark.parametrize("lacking", ["master_urls", "api_urls", "credential", "domain"])
async def test_what_is_lacking_is_said_in_one_line(tmp_path: Path, lacking: str) -> None:
    async with staged(tmp_path) as stage:
        spec = stage.spec()
        if lacking == "credential":
            (spec.secrets / "proxy.token").unlink()
        else:
            value: object = "not a host" if lacking == "domain" else []
            spec = msgspec.structs.replace(spec, **{lacking: value})
        proxy = await stage.launch(spec)
        assert await proxy.wait() == 78
        lines = [json.loads(line) for line in proxy.log.splitlines()]
        assert [line["level"] for line in lines].count("critical") == 1
        assert "Traceback" not in proxy.log


async def test_not_ready_before_the_first_list_of_nodes(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        stage.master.hold.clear()
        proxy = await stage.launch()
        await eventually(lambda: stage.master.questions)
        await eventually(lambda: (proxy.home / "envoy" / "run" / "admin.sock").exists())
        assert not stage.is_ready()
        stage.master.hold.set()
        await stage.ready(proxy)


async def test_second_master_is_asked_when_the_first_is_gone(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        spec = stage.spec()
        spec = msgspec.structs.replace(spec, master_urls=["http://127.0.0.1:9", *spec.master_urls])
        await stage.ready(await stage.launch(spec))


async def test_drain_lets_the_running_request_finish_and_sends_the_client_away(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start(drain=10.0)
        async with await Raw.connect(proxy.address) as raw:
            await raw.send(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
            await stage.apis[0].entered.wait()
            proxy.process.terminate()
            await eventually(lambda: _draining(proxy))
            stage.apis[0].release.set()
            response = await raw.receive_all()
            assert response.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in response.lower()
        assert await proxy.wait() == 0
        assert not proxy.envoys()


async def _draining(proxy: ProxyProcess) -> bool:
    """A new connection's answer says that it is the last one."""
    async with await Raw.connect(proxy.address) as raw:
        await raw.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        return b"connection: close" in (await raw.receive_until(b"\r\n\r\n")).lower()


async def test_drain_has_an_end(tmp_path: Path) -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n")
        await reader.read()

    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, endless),
    ):
        proxy = await stage.start(drain=1.0)
        async with await Raw.connect(proxy.address) as raw:
            request = f"GET / HTTP/1.1\r\nHost: 8000-{ID}.sbx.example.test\r\n\r\n"
            await raw.send(request.encode())
            await raw.receive_until(b"begun")
            assert await proxy.end() == 0
            assert "still connected" in proxy.log


async def test_envoy_that_dies_is_started_again_on_the_same_port(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        for _ in range(2):
            (pid,) = proxy.envoys()
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: proxy.envoys() not in ([], [pid]))
            await eventually(lambda: answers(proxy))
        assert "died: signal SIGKILL" in proxy.log


async def test_nodes_learnt_while_envoy_is_down_are_served_afterwards(tmp_path: Path) -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        os.kill(proxy.envoy_pid, signal.SIGKILL)
        async with (
            stage.node("aaaa") as directory,
            guest_listening(directory.add(ID), 8000, guest),
            aiohttp.ClientSession() as session,
        ):

            async def served() -> bool:
                fields = {"E2b-Sandbox-Id": ID, "E2b-Sandbox-Port": "8000"}
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(proxy.url, headers=fields) as response:
                        return response.status == 200
                return False

            await eventually(served)


async def test_killed_controller_leaves_no_envoy(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        assert await proxy.end(signal.SIGKILL) == -signal.SIGKILL
        await eventually(lambda: not proxy.envoys())
        again = await stage.start(port=proxy.port)
        assert await answers(again)


async def test_long_state_paths_work(tmp_path: Path) -> None:
    state = tmp_path / ("deep" * 20) / ("er" * 40)
    state.mkdir(parents=True, mode=0o700)
    async with staged(state) as stage:
        assert await answers(await stage.start())
