"""Requests that are wrong, over the real entry: E2B's error body, the right status, nothing leaked."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from tests.support.platform import Platform

pytestmark = pytest.mark.vm
UNKNOWN = "i" + "a" * 19


@pytest.fixture
def client(sdk: Platform):
    env = sdk.env()
    with httpx.Client(
        base_url=env["E2B_API_URL"], headers={"X-API-Key": env["E2B_API_KEY"]}, trust_env=False, timeout=60
    ) as made:
        yield made


def check(answer: httpx.Response, status: int) -> str:
    """The status is right and the body is E2B's error, without a trace of our insides."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["code"] == status
    message = body["message"]
    assert message
    for leak in ("Traceback", "/usr/", "greenroom.", ".py", "node-0", "127.0.0.1"):
        assert leak not in answer.text, leak
    return str(message)


def test_no_key_and_wrong_keys(client: httpx.Client) -> None:
    url, body = f"{client.base_url}/v2/sandboxes", {"templateID": "base"}
    for key in (None, "", "wrong", "e2b_" + "0" * 40, "e2b_" + "x" * 5000, "ü"):
        headers = {} if key is None else {"X-API-Key": key.encode()}
        answer = httpx.post(url, json=body, headers=headers, trust_env=False)
        check(answer, 401)


def test_an_unknown_template_is_named(client: httpx.Client) -> None:
    assert "no-such-thing" in check(client.post("/v2/sandboxes", json={"templateID": "no-such-thing"}), 404)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"templateID": 5}', b"\xff\xfe", b'"x"', b"[" * 100_000]
)
def test_broken_json(client: httpx.Client, body: bytes) -> None:
    check(client.post("/v2/sandboxes", content=body), 400)


def test_a_body_that_is_too_large(client: httpx.Client) -> None:
    check(client.post("/v2/sandboxes", content=b"x" * ((1 << 20) + 1)), 413)


def test_a_body_that_is_too_large_and_does_not_say_so(client: httpx.Client) -> None:
    def pieces():
        for _ in range(40):
            yield b" " * (64 << 10)

    check(client.post("/v2/sandboxes", content=pieces()), 413)


@pytest.mark.parametrize("size", [5_000, 20_000, 60_000])
def test_oversized_queries_and_headers_are_the_clients_mistake(client: httpx.Client, size: int) -> None:
    """A signed URL with a long signature was answered 503, which clients repeat."""
    long = "x" * size
    for path in (
        f"/files?path=/a&signature={long}",
        f"/files?path={long}&signature=v1_x",
        f"/v2/sandboxes?metadata={long}",
        f"/v2/sandboxes?nextToken={long}",
        f"/v2/sandboxes?state={long}",
        f"/snapshots?nextToken={long}",
        f"/templates/aliases/{long}",
        f"/sandboxes/{long}",
        f"/sandboxes/{UNKNOWN}/metrics?start={long}",
        f"/{long}",
    ):
        answer = client.get(path)
        # A text that fits nothing finds nothing, and 429 is for signatures, once there were many.
        assert answer.status_code in (200, 400, 401, 404, 429, 431), (path[:40], answer.text[:200])
        if answer.status_code != 200:
            check(answer, answer.status_code)
    for name in (
        "X-API-Key",
        "Idempotency-Key",
        "Cookie",
        "X-Request-Id",
        "User-Agent",
        "E2b-Sandbox-Id",
        long,
    ):
        answer = client.get(f"/sandboxes/{UNKNOWN}", headers={name: long})
        check(answer, answer.status_code)
        assert answer.status_code in (400, 401, 404, 431), (name[:40], answer.text[:200])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/sandboxes/{UNKNOWN}"),
        ("DELETE", f"/sandboxes/{UNKNOWN}"),
        ("POST", f"/sandboxes/{UNKNOWN}/timeout"),
        ("POST", f"/v2/sandboxes/{UNKNOWN}/connect"),
        ("GET", "/sandboxes/not-an-id"),
        ("GET", "/sandboxes/%2e%2e%2fetc"),
        ("GET", "/no/such/path"),
    ],
)
def test_unknown_ids_and_paths(client: httpx.Client, method: str, path: str) -> None:
    body = {"timeout": 10} if method == "POST" else None
    check(client.request(method, path, json=body), 404)


@pytest.mark.parametrize("timeout", [0, -1, 10**9, "soon", 1.5e308, None, [], True])
def test_timeouts_that_make_no_sense(client: httpx.Client, timeout: object) -> None:
    answer = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": timeout})
    if answer.status_code == 201:
        client.delete(f"/sandboxes/{answer.json()['sandboxID']}")
        assert timeout is None, "only an absent time-out has a default"
    else:
        check(answer, 400)


@pytest.mark.parametrize(
    "extra",
    [
        {"metadata": {"k": 1}}, {"metadata": {"k" * 5000: "v"}}, {"metadata": {str(n): "v" for n in range(1000)}},
        {"envVars": {"A=B": "x"}}, {"envVars": {"A": "x\u0000y"}}, {"envVars": []}, {"metadata": "x"},
    ],
)  # fmt: skip
def test_metadata_and_environment_are_bounded(client: httpx.Client, extra: dict[str, object]) -> None:
    check(client.post("/v2/sandboxes", content=json.dumps({"templateID": "base", **extra})), 400)


def test_the_data_plane_of_an_unknown_sandbox(sdk: Platform) -> None:
    for sandbox_id in (UNKNOWN, "i" + sdk.status()["nodes"][0]["code"] + "a" * 15, "nonsense"):
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"}
        answer = httpx.get(sdk.env()["E2B_SANDBOX_URL"] + "/health", headers=headers, trust_env=False)
        assert answer.status_code == 502
        assert answer.json() == {"sandboxId": sandbox_id, "message": "The sandbox was not found", "code": 502}


def test_half_of_the_routing_headers(sdk: Platform) -> None:
    url = sdk.env()["E2B_SANDBOX_URL"] + "/health"
    check(httpx.get(url, headers={"E2b-Sandbox-Id": UNKNOWN}, trust_env=False), 400)
    check(
        httpx.get(url, headers={"E2b-Sandbox-Id": UNKNOWN, "E2b-Sandbox-Port": "99999"}, trust_env=False), 400
    )


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n", b"\x00\x01\x02", b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
     b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"],
)  # fmt: skip
def test_raw_nonsense_at_the_entry_is_refused(sdk: Platform, raw: bytes) -> None:
    port = int(sdk.env()["E2B_API_URL"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(65536)
    assert not answer or answer.startswith(b"HTTP/1.1 4")
