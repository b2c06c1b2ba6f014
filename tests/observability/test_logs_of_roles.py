"""What real roles log: JSON, one id for one request from role to role, and no secret whatever comes in."""

from __future__ import annotations

import json
import secrets

import httpx
import msgspec
import pytest

from greenroom.wire import credentials
from tests.observability.conftest import Fleet
from tests.support.role_process import RoleProcess
from tests.support.waiting import until_true as eventually

FIELDS = {"time", "level", "role", "replica", "logger", "message"}


def client(fleet: Fleet, **headers: str) -> httpx.Client:
    _, secret = fleet.plane.key()
    return httpx.Client(
        base_url=fleet.proxy.url, headers={"X-API-Key": secret, **headers}, trust_env=False, timeout=20
    )


def lines_of(fleet: Fleet, request_id: str) -> dict[str, list[dict[str, object]]]:
    found = {}
    for role, lines in fleet.logs().items():
        parsed = [json.loads(line) for line in lines if request_id in line]
        found[role] = [line for line in parsed if line.get("request_id") == request_id]
    return found


def test_one_id_leads_through_api_master_and_node(fleet: Fleet) -> None:
    with client(fleet) as http:
        made = http.post("/v2/sandboxes", json={"templateID": "base"})
    assert made.status_code == 201
    request_id, sandbox_id = made.headers["x-request-id"], made.json()["sandboxID"]
    # The api has answered before it writes its line.
    eventually(lambda: all(lines_of(fleet, request_id)[role] for role in ("api", "master", "node")))
    found = lines_of(fleet, request_id)
    for role in ("api", "master", "node"):
        (access,) = [
            line
            for line in found[role]
            if line["logger"] == "greenroom.access" and line["status"] == 201 and line["method"] == "POST"
        ]
        assert access["sandbox_id"] == sandbox_id
        assert access["level"] == "info"
    assert any(line["message"].startswith("handed over") for line in found["node"])


def test_the_clients_id_is_kept_if_it_is_sane_and_replaced_if_not(fleet: Fleet) -> None:
    own = f"mine.{secrets.token_hex(8)}"
    with client(fleet, **{"x-request-id": own}) as http:
        assert http.get("/snapshots").headers["x-request-id"] == own
    eventually(lambda: bool(lines_of(fleet, own)["node"]))
    for odd in ("a b", "x" * 65, '{"injected": 1}', "a,b", "ä"):
        with client(fleet) as http:
            answer = http.get("/snapshots", headers={"x-request-id": odd.encode("latin-1")})
            given = answer.headers["x-request-id"]
            assert given != odd
            eventually(lambda given=given: bool(lines_of(fleet, given)["node"]))


def test_the_relay_tells_of_a_request_it_cannot_serve_under_its_id(fleet: Fleet) -> None:
    with client(fleet) as http:
        sandbox_id = http.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
        fields = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "8000"}
        # A simulated sandbox has no open port. `/metrics` of a sandbox is its own, so this one reaches the relay.
        answer = http.get("/metrics", headers=fields)
    assert answer.status_code == 502
    assert "port is not open" in answer.json()["message"]
    request_id = answer.headers["x-request-id"]
    eventually(lambda: bool(lines_of(fleet, request_id)["node"]))
    (line,) = lines_of(fleet, request_id)["node"]
    assert (line["level"], line["status"], line["sandbox_id"]) == ("info", 502, sandbox_id)
    assert line["logger"] == "greenroom.node.relay"


def test_every_line_is_a_json_object_of_its_role(fleet: Fleet) -> None:
    with client(fleet) as http:
        http.get("/nowhere")
    for role, lines in fleet.logs().items():
        assert lines
        for line in map(json.loads, lines):
            assert set(line) >= FIELDS
            assert (line["role"], line["replica"]) == (role, 0)
            assert line["time"].endswith("Z")
            assert line["level"] in ("debug", "info", "warning", "error", "critical")


def test_polls_and_heartbeats_are_no_news(fleet: Fleet) -> None:
    def access(role: str, route: str) -> list[dict[str, object]]:
        parsed = map(json.loads, fleet.logs()[role])
        return [line for line in parsed if line.get("route") == route]

    with client(fleet) as http:
        http.get("/snapshots")
    cases = (("master", "/v1/nodes/{name}/heartbeat"), ("node", "/v1/snapshots"), ("api", "/snapshots"))
    for role, route in cases:
        eventually(lambda role=role, route=route: bool(access(role, route)))
        quiet = [line for line in access(role, route) if line["method"] == "GET" or "heartbeat" in route]
        assert {line["level"] for line in quiet if int(str(line["status"])) < 400} == {"debug"}


@pytest.mark.parametrize("status", [201, 400])
def test_no_log_ever_holds_a_secret(fleet: Fleet, status: int) -> None:
    _, key = fleet.plane.key()
    planted = {
        name: f"{name}-{secrets.token_hex(12)}"
        for name in ("bearer", "access", "relay", "sign", "env", "meta")
    }
    headers = {
        "X-API-Key": key,
        "Authorization": f"Bearer {planted['bearer']}",
        "X-Access-Token": planted["access"],
        "x-greenroom-relay": planted["relay"],
        "x-request-id": f"secrets-{secrets.token_hex(8)}",
    }
    body = {
        "templateID": "base" if status == 201 else 7,
        "envVars": {"TOKEN": planted["env"]},
        "metadata": {"m": planted["meta"]},
    }
    with httpx.Client(base_url=fleet.proxy.url, headers=headers, trust_env=False) as http:
        query = {"signature": planted["sign"]}
        made = http.post("/v2/sandboxes", params=query, json=body)
        assert made.status_code == status, made.text
        secret = made.json().get("envdAccessToken", planted["access"])
        sandbox_id = made.json().get("sandboxID", "i" + "a" * 19)
        http.get("/files", params=query, headers={"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"})
        http.get(f"/sandboxes/{sandbox_id}", params=query)
        http.delete(f"/sandboxes/{sandbox_id}", params=query)
    for url in fleet.internal.values():
        httpx.post(f"{url}/v1/claims", params=query, headers=headers, json=body, trust_env=False)
    eventually(lambda: bool(lines_of(fleet, headers["x-request-id"])["api"]))
    roles = [credentials.own_token(fleet.plane.state / "secrets", role) for role in credentials.ROLES]
    for role, lines in fleet.logs().items():
        text = "\n".join(lines)
        for word in (key, secret, *planted.values(), *roles):
            assert word not in text, (role, word)


def test_a_role_that_cannot_start_says_why_in_one_line(fleet: Fleet) -> None:
    spec = msgspec.structs.replace(fleet.api.spec, replica=9, master_urls=[])
    role = RoleProcess(spec)
    role.start()
    with pytest.raises(AssertionError, match="did not get ready"):
        role.wait_ready()
    assert role.process.wait(20) == 78
    (line,) = map(json.loads, role.log.splitlines())
    assert (line["level"], line["role"], line["replica"]) == ("critical", "api", 9)
    assert "master" in line["message"]
