"""Signed URLs that name no sandbox: how many guesses there are, and where a real Envoy sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from greenroom.guest import signing
from greenroom.node.signatures import owner_of
from greenroom.proxy import signed
from greenroom.proxy.signed import Budget, client_of
from greenroom.wire.messages import SignatureOwner, SignedUrl
from tests.proxy.test_routing import ask
from tests.support.guests import answer_of, echo, guest_listening, read_head
from tests.support.loops import eventually
from tests.support.proxying import Stage, sandbox_on, serve, staged

ID = sandbox_on("aaaa")
OTHER = sandbox_on("bbbb")


# The budget, as a playbook


def test_a_client_has_a_few_failures_and_then_one_now_and_then() -> None:
    budget = Budget()
    assert [budget.spend("a", 0.0) for _ in range(21)] == [True] * 20 + [False]
    assert budget.spend("b", 0.0)
    assert budget.spend("a", 0.5)
    assert not budget.spend("a", 0.5)


def test_all_clients_together_are_bounded_too() -> None:
    budget = Budget()
    assert sum(budget.spend(str(number), 0.0) for number in range(1000)) == signed.ALL_BURST


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 5)), max_size=200),
)
def test_memory_and_failures_stay_bounded_whoever_asks(events: list[tuple[int, float]]) -> None:
    budget, now, failures = Budget(), 0.0, 0
    for client, pause in events:
        now += pause
        failures += budget.spend(str(client), now)
    assert failures <= signed.ALL_BURST + now * signed.ALL_RATE + 1
    assert len(budget) <= signed.CLIENTS


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("2001:db8:0:1::", "2001:db8:0:1::/64"),
        ("nonsense", ""),
    ],
)
def test_whom_a_failure_is_counted_for(address: str, client: str) -> None:
    assert client_of(address) == client


# Through Envoy


class StubNode:
    """Answers the question as a node does, for the tokens that a test gives it."""

    def __init__(self, token: str) -> None:
        self.tokens: dict[str, str] = {}
        self.questions: list[SignedUrl] = []
        self.broken = False
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self._credential = f"Bearer {token}"

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == self._credential
        self.asked.set()
        await self.answers.wait()
        if self.broken:
            return web.Response(status=500)
        self.questions.append(msgspec.json.decode(await request.read(), type=SignedUrl))
        found = SignatureOwner(owner_of(self.questions[-1], self.tokens.items()))
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")


@asynccontextmanager
async def node_with_tokens(stage: Stage) -> AsyncIterator[tuple[StubNode, str]]:
    node = StubNode(stage.token)
    url, stop = await serve(node.answer, "/v1/signatures")
    try:
        yield node, url
    finally:
        await stop()


def url_of(path: str, token: str, operation: str = "read", **more: str) -> str:
    signature = signing.signature(path, operation, "", token, more.get("signature_expiration"))
    return "/files?" + urlencode({"path": path, "signature": signature, **more})


async def test_a_signed_url_leads_to_its_sandbox_and_no_other_does(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        node_with_tokens(stage) as (first, first_url),
        node_with_tokens(stage) as (second, second_url),
        stage.node("aaaa", api_url=first_url) as directory,
        stage.node("bbbb", api_url=second_url) as others,
        guest_listening(directory.add(ID), 49983, echo),
        guest_listening(others.add(OTHER), 49983, echo),
    ):
        first.tokens, second.tokens = {ID: "alpha"}, {OTHER: "beta"}
        proxy = await stage.start()
        await eventually(lambda: len(stage.master.nodes) == 2)
        for token in ("alpha", "beta"):
            target = url_of("/home/user/ü & b.txt", token, signature_expiration="99")
            status, body = await ask(proxy, target)
            assert status == 200, body
            assert body.startswith(f"GET {target} HTTP/1.1\r\n".encode())
            assert b"greenroom" not in body
        # An upload, whose body waits for the answer of the nodes and then passes whole.
        target, data = url_of("/up", "beta", "write"), b"x" * 300_000
        head = (
            f"POST {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        assert (await answer_of(proxy.address, head.encode() + data))[0] == 200
        assert second.questions[-1].operations == ("write",)
        # For reading it is not good.
        assert (await ask(proxy, target))[0] == 401
        status, body = await ask(proxy, url_of("/a", "gamma"))
        assert (status, json.loads(body)) == (401, {"code": 401, "message": "invalid signature"})
        # Every node is asked, whichever has it.
        assert len(first.questions) == len(second.questions) == 5


async def test_an_upload_far_larger_than_any_buffer_waits_for_the_nodes_and_passes_whole(
    tmp_path: Path,
) -> None:
    size, seen = 16 << 20, 0

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        await read_head(reader)
        while seen < size:
            seen += len(await reader.read(1 << 20))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    async with (
        staged(tmp_path) as stage,
        node_with_tokens(stage) as (node, url),
        stage.node("aaaa", api_url=url) as directory,
        guest_listening(directory.add(ID), 49983, guest),
    ):
        node.tokens = {ID: "alpha"}
        node.answers.clear()
        proxy = await stage.start()
        target = url_of("/up", "alpha", "write")
        head = f"POST {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
        asking = asyncio.get_running_loop().create_task(answer_of(proxy.address, head.encode() + b"x" * size))
        await node.asked.wait()
        # By now Envoy has taken as much of the body as it takes while the question is open.
        assert seen == 0
        node.answers.set()
        assert await asking == (200, b"ok")
        assert seen == size


async def test_only_signed_urls_without_a_sandbox_are_looked_up(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        node_with_tokens(stage) as (node, url),
        stage.node("aaaa", api_url=url) as directory,
        guest_listening(directory.add(ID), 49983, echo),
    ):
        node.tokens = {ID: "alpha"}
        proxy = await stage.start()
        target = url_of("/a", "alpha")
        both = (f"E2b-Sandbox-Id: {ID}", "E2b-Sandbox-Port: 49983")
        assert (await ask(proxy, target, "127.0.0.1", *both))[0] == 200
        assert (await ask(proxy, target, f"49983-{ID}.sbx.example.test"))[0] == 200
        assert (await ask(proxy, target, "127.0.0.1", both[0]))[0] == 400
        for path in (
            "/files?path=/a",
            target.replace("/files", "/filesx"),
            target.replace("/files", "/x/files"),
        ):
            status, body = await ask(proxy, path)
            assert (status, json.loads(body)["api"]) == (200, "api-0"), path
        assert node.questions == []
        # What the client says of the platform's own headers counts for nothing.
        spoofed = (f"x-greenroom-sandbox: {OTHER}", "x-greenroom-method: POST", "x-greenroom-status: 503")
        status, body = await ask(proxy, target, "127.0.0.1", *spoofed)
        assert (status, node.questions[-1].operations) == (200, ("read",))


async def test_guessing_ends_soon_and_a_right_signature_never_counts(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        node_with_tokens(stage) as (node, url),
        stage.node("aaaa", api_url=url) as directory,
        guest_listening(directory.add(ID), 49983, echo),
    ):
        node.tokens = {ID: "alpha"}
        proxy = await stage.start()
        for _ in range(int(signed.CLIENT_BURST) + 5):
            assert (await ask(proxy, url_of("/a", "alpha")))[0] == 200
        seen = [(await ask(proxy, url_of("/a", f"guess-{number}")))[0] for number in range(60)]
        assert set(seen) == {401, 429}
        assert seen.index(429) >= int(signed.CLIENT_BURST)
        # Whoever guesses uses up nobody's right to be let in, not even of those behind the same address.
        assert (await ask(proxy, url_of("/a", "alpha")))[0] == 200


async def test_a_signed_url_of_whatever_length_is_the_clients_mistake(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        node_with_tokens(stage) as (node, url),
        stage.node("aaaa", api_url=url) as directory,
        guest_listening(directory.add(ID), 49983, echo),
    ):
        node.tokens = {ID: "alpha"}
        proxy = await stage.start()
        for field in ("signature", "path", "username", "signature_expiration", "other"):
            for size in (100, 5_000, 16_384, 20_000, 60_000, 70_000, 200_000):
                fields = {"path": "/a", "signature": "v1_x", field: "x" * size}
                status, body = await ask(proxy, "/files?" + urlencode(fields))
                # 429 is for all that are nobody's, once there were many.
                expected = (401, 429) if size < 16_000 else (400,) if size < 65_000 else (431,)
                assert status in expected, (field, size, body)
                assert json.loads(body)["code"] == status
        assert all(len(question.query) <= signed.MAX_TARGET for question in node.questions)
        # As long as one may be, and right.
        target = url_of("/" + "ü" * 1_300, "alpha") + f"&more={'x' * 4_000}&more="
        target += "x" * (signed.MAX_TARGET - len(target))
        assert (await ask(proxy, target))[0] == 200
        assert (await ask(proxy, target + "x"))[0] == 400


async def test_while_a_node_cannot_be_asked_nothing_is_called_invalid(tmp_path: Path) -> None:
    async with (
        staged(tmp_path) as stage,
        node_with_tokens(stage) as (node, url),
        stage.node("aaaa", api_url=url) as directory,
        guest_listening(directory.add(ID), 49983, echo),
    ):
        node.tokens, node.broken = {ID: "alpha"}, True
        proxy = await stage.start()
        status, body = await ask(proxy, url_of("/a", "alpha"))
        assert (status, json.loads(body)["code"]) == (503, 503)
        node.broken = False
        assert (await ask(proxy, url_of("/a", "alpha")))[0] == 200


async def test_the_controllers_door_is_for_envoy_alone(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        proxy = await stage.start()
        own = (proxy.home / "internal.url").read_text().strip().removeprefix("http://").partition(":")
        request = "POST /v1/signed HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n{}\r\n"
        for credential in ("", "Authorization: Bearer wrong\r\n", f"x-greenroom-relay: {stage.token}\r\n"):
            status, _body = await answer_of((own[0], int(own[2])), request.format(credential).encode())
            assert status == 401
        # From outside the path is the api's, which has none such.
        status, body = await ask(proxy, "/v1/signed")
        assert json.loads(body)["api"] == "api-0"
