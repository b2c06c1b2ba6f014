"""Where a real Envoy sends requests: by host, by headers, to the api, or nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.guests import Raw, answer_of, echo, guest_listening
from tests.support.loops import eventually
from tests.support.proxying import ProxyProcess, sandbox_on, staged

ID = sandbox_on("aaaa")


async def ask(
    proxy: ProxyProcess, path: str = "/", host: str = "127.0.0.1", *fields: str
) -> tuple[int, bytes]:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close", *fields, "", ""]
    return await answer_of(proxy.address, "\r\n".join(lines).encode("latin-1"))


def headers_of(body: bytes) -> dict[str, str]:
    lines = body.decode().split("\r\n")[1:-2]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


async def test_host_names_and_headers_lead_to_the_sandbox(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start()
        both = (f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 8000")
        for host, fields in (
            (f"8000-{ID}.sbx.example.test", ()),
            (f"8000-{ID}.sbx.example.test:8700", ()),
            (f"8000-{ID}.SBX.Example.TEST:1", ()),
            (f"8000-{ID.upper()}.sbx.example.test.", ()),
            ("127.0.0.1", both),
            ("[::1]:8700", both),
            ("sandbox.sbx.example.test", both),
            # The host wins over headers that say otherwise, even wrong ones.
            (f"8000-{ID}.sbx.example.test", ("E2b-Sandbox-Id: other", "E2b-Sandbox-Port: 1")),
            (f"8000-{ID}.sbx.example.test", ("E2b-Sandbox-Id: other",)),
        ):
            status, body = await ask(proxy, "/where?x=1", host, *fields)
            assert status == 200, (host, fields, body)
            assert body.startswith(b"GET /where?x=1 HTTP/1.1\r\n")
            assert headers_of(body)["host"] == host


async def test_servers_in_sandboxes_see_header_names_as_people_write_them(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start()
        host = f"8000-{ID}.sbx.example.test"
        _, body = await ask(proxy, "/", host, "x-own-NAME: kept", "accept-language: en")
        names = [line.partition(": ")[0] for line in body.decode().split("\r\n")[1:-2]]
        assert {"Host", "X-Own-Name", "Accept-Language", "X-Forwarded-For"} <= set(names)
        assert [name for name in names if name != name.title()] == []


async def test_everything_else_goes_to_the_api(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        for host in (
            "api.sbx.example.test",
            "sbx.example.test",
            f"8000-{ID}.elsewhere.test",
            f"8000-{ID}.x.sbx.example.test",
            f"x-{ID}.sbx.example.test",
            f"{ID}.sbx.example.test",
            "[::1]:8700",
        ):
            status, body = await ask(proxy, "/v2/sandboxes", host)
            assert (status, json.loads(body)["api"]) == (200, "api-0"), host


async def test_spoofed_headers_are_removed_on_both_planes(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start()
        spoofed = (
            "x-greenroom-cluster: node_aaaa",
            f"X-Greenroom-Sandbox: {ID}",
            "x-greenroom-port: 8000",
            "x-greenroom-port: 22",
            f"x-greenroom-relay: {stage.token}",
            "x-greenroom-refusal: no",
            "x-greenroom-control: yes",
            "x_greenroom_control: yes",
            "x-envoy-retry-on: 5xx",
            "x-forwarded-for: 192.0.2.7",
            "x-request-id: mine",
        )
        _status, body = await ask(proxy, "/", "127.0.0.1", *spoofed)
        seen = dict(json.loads(body)["headers"])
        assert not [name for name in seen if "greenroom" in name or "envoy" in name]
        assert seen["x-request-id"] == "mine"
        assert seen["x-forwarded-for"].replace(" ", "") == "192.0.2.7,127.0.0.1"
        _status, body = await ask(proxy, "/", f"8000-{ID}.sbx.example.test", *spoofed)
        guest = headers_of(body)
        assert not [name for name in guest if "greenroom" in name or "envoy" in name]
        assert guest["connection"] == "close"
        assert guest["x-request-id"] == "mine"


async def test_paths_reach_guests_unaltered_and_internal_routes_do_not(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, stage.node("aaaa") as directory:
        target = directory.add(ID)
        async with guest_listening(target, 8000, echo), guest_listening(target, 49983, echo):
            proxy = await stage.start()
            for path in ("/a//b/../c/%2e%2e/%2F%5c;p=1?q=%00&r=//..", "/init", "/"):
                _status, body = await ask(proxy, path, f"8000-{ID}.sbx.example.test")
                assert body.startswith(f"GET {path} HTTP/1.1\r\n".encode())
            host = f"49983-{ID}.sbx.example.test"
            for path in ("/init", "//init", "/x/%2e%2e/in%69t", f"http://{host}/init", "/files/../init?x"):
                status, body = await ask(proxy, path, host)
                assert (status, json.loads(body)["code"]) == (404, 404)
            assert (await ask(proxy, "/health", host))[0] == 200


async def test_refusals_are_json_in_e2bs_form(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, stage.node("aaaa") as directory:
        directory.add(ID)
        proxy = await stage.start()
        one = "E2b-Sandbox-Id and E2b-Sandbox-Port belong together; one is missing"
        port = "the sandbox port must be a number from 1 to 65535"
        once = "E2b-Sandbox-Id and E2b-Sandbox-Port are sent once"
        for fields, message in (
            ((f"E2b-Sandbox-Id: {ID}",), one),
            (("E2b-Sandbox-Port: 80",), one),
            ((f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 0"), port),
            ((f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 65536"), port),
            ((f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 080"), port),
            ((f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 8e1"), port),
            ((f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: "), port),
            ((f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 80", "E2b-Sandbox-Port: 80"), once),
            ((f"E2b-Sandbox-Id: {ID}", f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 80"), once),
            ((f"E2b-Sandbox-Id: {ID},{ID}", "E2b-Sandbox-Port: 80,81"), port),
        ):
            status, body = await ask(proxy, "/", "127.0.0.1", *fields)
            assert (status, json.loads(body)) == (400, {"code": 400, "message": message}), fields
        for wrong in (
            sandbox_on("zzzz"),
            sandbox_on("aaaa"),
            "nonsense",
            ID + "x",
            ID[:-1],
            'a"b\\',
            "x" * 500,
        ):
            status, body = await ask(
                proxy, "/", "127.0.0.1", f"E2b-Sandbox-Id: {wrong}", "E2b-Sandbox-Port: 80"
            )
            expected = {"sandboxId": wrong[:64], "message": "The sandbox was not found", "code": 502}
            assert (status, json.loads(body)) == (502, expected)
        status, body = await ask(proxy, "/", f"99999-{ID}.sbx.example.test")
        assert (status, json.loads(body)["message"]) == (400, port)
        status, body = await ask(proxy, "/", f"8000-{ID}.sbx.example.test")
        assert (status, json.loads(body)["message"]) == (502, "The sandbox is running but port is not open")


async def test_oversized_and_broken_heads_are_refused(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        status, body = await ask(proxy, "/", "127.0.0.1", *(f"x-{n}: {'a' * 8000}" for n in range(9)))
        assert (status, json.loads(body)["code"]) == (431, 431)
        status, _body = await answer_of(proxy.address, b"GET / HTTP/1.1\r\nHost: a\r\nx : y\r\n\r\n")
        assert status == 400


@pytest.mark.parametrize("size", [20_000, 64_000, 65_000, 66_000, 300_000])
async def test_oversized_queries_and_headers_are_never_called_a_fault_of_ours(
    tmp_path: Path, size: int
) -> None:
    long = "x" * size
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start()
        both = (f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 8000")
        for fields in ((), both):
            for path, more in (
                (f"/?q={long}", ()),
                (f"/{long}", ()),
                ("/", (f"X-API-Key: {long}",)),
                ("/", (f"Cookie: {long}",)),
                ("/", (f"{long}: 1",)),
                ("/", (f"X-Request-Id: {long}",)),
            ):
                status, body = await ask(proxy, path, "127.0.0.1", *fields, *more)
                assert status in (200, 400, 414, 431), body[:200]
                if status != 200 and fields:  # the stub of the api has bounds of its own
                    assert json.loads(body)["code"] == status
            assert (await ask(proxy, "/", long, *fields))[0] in (200, 400, 431)
        for sent in ((f"E2b-Sandbox-Port: {long}", both[0]), (f"E2b-Sandbox-Port: 80{long}",)):
            assert (await ask(proxy, "/", "127.0.0.1", *sent))[0] in (400, 431)


async def test_relays_refuse_who_comes_past_the_proxy(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, stage.node("aaaa") as directory:
        directory.add(ID)
        status = next(iter(stage.master.nodes.values())).status
        request = f"GET / HTTP/1.1\r\nhost: a\r\nx-greenroom-sandbox: {ID}\r\nx-greenroom-port: 80\r\n\r\n"
        answer, _body = await answer_of((status.relay_host, status.relay_port), request.encode())
        assert answer == 401


async def test_api_takes_turns_and_the_dead_one_is_left_out(tmp_path: Path) -> None:
    async with staged(tmp_path, apis=2) as stage:
        proxy = await stage.start()
        seen = {json.loads((await ask(proxy))[1])["api"] for _ in range(4)}
        assert seen == {"api-0", "api-1"}
        await stage.apis[0].stop()
        for _ in range(8):
            status, body = await ask(proxy)
            assert (status, json.loads(body)["api"]) == (200, "api-1")


async def test_no_api_is_503_with_retry_after_and_a_lost_answer_is_502(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        status, body = await ask(proxy, "/lost")
        assert (status, json.loads(body)["code"]) == (502, 502)
        await stage.apis[0].stop()
        async with await Raw.connect(proxy.address) as raw:
            await raw.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            response = (await raw.receive_all()).decode().lower()
        assert response.startswith("http/1.1 503 ")
        assert "\r\nretry-after: 1\r\n" in response
        assert json.loads(response.partition("\r\n\r\n")[2])["code"] == 503


async def test_node_that_does_not_answer_is_503(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        async with stage.node("aaaa"):
            address = stage.master.address_of("aaaa")
        stage.master.set("aaaa", address)  # listed, but gone
        proxy = await stage.start()
        status, body = await ask(proxy, "/", f"80-{ID}.sbx.example.test")
        assert (status, json.loads(body)["sandboxId"], json.loads(body)["code"]) == (503, ID, 503)


async def test_nodes_come_move_and_go_at_run_time(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        host = f"8000-{ID}.sbx.example.test"

        async def answers(wanted: int) -> bool:
            return (await ask(proxy, "/", host))[0] == wanted

        await eventually(lambda: answers(502))
        async with stage.node("aaaa") as directory, guest_listening(directory.add(ID), 8000, echo):
            await eventually(lambda: answers(200))
            async with stage.node("aaaa") as moved, guest_listening(moved.add(ID), 8000, echo):
                directory.targets.clear()
                await eventually(lambda: answers(200))
            # The block's end removed the node from the master's list.
            await eventually(lambda: answers(502))


async def test_without_masters_the_known_nodes_keep_serving(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        stage.node("aaaa") as directory,
        guest_listening(directory.add(ID), 8000, echo),
    ):
        proxy = await stage.start()
        await stage.master.stop()
        await eventually(lambda: "a master does not tell its nodes" in proxy.log)
        assert (await ask(proxy, "/", f"8000-{ID}.sbx.example.test"))[0] == 200


async def test_upgrade_to_the_api_is_refused(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        lines = "GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        async with await Raw.connect(proxy.address) as raw:
            await raw.send(lines.encode())
            assert b"HTTP/1.1 400" in await raw.receive_until(b"}")
