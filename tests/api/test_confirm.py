"""A sandbox is the client's from the moment the api confirmed it, just before the client is told."""

from __future__ import annotations

import json
import socket
import time

import httpx

from greenroom.errors import UnknownSandbox
from tests.support.fake_node import FakeNode
from tests.support.role_process import RoleProcess

BODY = {"templateID": "base"}


def confirmations(node: FakeNode) -> list[str]:
    return [call for call in node.calls if call.endswith("/confirm")]


def test_it_is_confirmed_once_before_the_answer(client: httpx.Client, node: FakeNode) -> None:
    before = len(confirmations(node))
    sandbox_id = client.post("/v2/sandboxes", json=BODY).json()["sandboxID"]
    assert confirmations(node)[before:] == [f"POST /v1/sandboxes/{sandbox_id}/confirm"]
    assert node.sandboxes[sandbox_id].confirm_by is None


def test_a_lost_answer_to_the_confirmation_is_asked_for_again(client: httpx.Client, node: FakeNode) -> None:
    node.drop_confirm_answers = 1
    answer = client.post("/v2/sandboxes", json=BODY)
    assert answer.status_code == 201
    assert node.sandboxes[answer.json()["sandboxID"]].confirm_by is None


def test_one_that_was_given_up_meanwhile_may_be_asked_for_again(client: httpx.Client, node: FakeNode) -> None:
    node.confirm_error = UnknownSandbox("it came too late")
    answer = client.post("/v2/sandboxes", json=BODY)
    assert answer.status_code == 503
    assert answer.headers["retry-after"].isdigit()
    assert "ended before it could be handed over" in answer.json()["message"]


def test_when_no_answer_to_the_confirmation_comes_the_outcome_is_unknown(
    client: httpx.Client, node: FakeNode
) -> None:
    node.drop_confirm_answers = 2
    answer = client.post("/v2/sandboxes", json=BODY)
    assert answer.status_code == 500
    assert answer.headers["should-retry"] == "false"
    node.drop_confirm_answers = 2
    keyed = client.post("/v2/sandboxes", json=BODY, headers={"Idempotency-Key": "confirm-me"})
    assert keyed.status_code == 503
    again = client.post("/v2/sandboxes", json=BODY, headers={"Idempotency-Key": "confirm-me"})
    assert again.status_code == 201
    assert node.sandboxes[again.json()["sandboxID"]].confirm_by is None


def test_a_client_that_has_left_gets_nothing_confirmed(api: RoleProcess, node: FakeNode, secret: str) -> None:
    claims, before = len(node.claims), len(confirmations(node))
    node.hold_claims.clear()
    body = json.dumps(BODY).encode()
    head = (
        f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {secret}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, _, port = api.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(head.encode() + body)
        wait(lambda: len(node.claims) > claims)
    node.hold_claims.set()
    # Another client's create is confirmed after the claim of the one that left was answered.
    with httpx.Client(base_url=api.url, headers={"X-API-Key": secret}, trust_env=False) as other:
        wait(lambda: any(sandbox.confirm_by is not None for sandbox in node.sandboxes.values()))
        sandbox_id = other.post("/v2/sandboxes", json=BODY).json()["sandboxID"]
    assert confirmations(node)[before:] == [f"POST /v1/sandboxes/{sandbox_id}/confirm"]


def wait(condition, deadline: float = 20.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
