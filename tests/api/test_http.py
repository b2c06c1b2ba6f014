"""The E2B API byte by byte, on a real api process: statuses, bodies, headers, bounds, and what it never tells."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import quote, urlsplit

import httpx
import pytest

from greenroom.errors import NodeUnavailable, NotRunning, PoolDry, RuntimeFailure
from greenroom.store.keys import revoke_api_key
from greenroom.wire.ids import new_sandbox_id
from greenroom.wire.messages import Inbound
from tests.support.cluster import http

BODY = {"templateID": "base"}


def error_of(response: httpx.Response) -> str:
    """The message of an error answer, whose form is checked."""
    body = response.json()
    assert set(body) == {"code", "message"}
    assert body["code"] == response.status_code
    assert response.headers["content-type"] == "application/json"
    assert "Traceback" not in body["message"]
    return body["message"]


def create(client: httpx.Client, **fields: object) -> dict:
    """A sandbox made through v2."""
    response = client.post("/v2/sandboxes", json=BODY | fields)
    assert response.status_code == 201, response.text
    return response.json()


# Creating


def test_v2_answers_with_every_field(client, node):
    body = create(client, metadata={"a": "b"})
    kept = node.sandboxes[body["sandboxID"]]
    assert body == {
        "templateID": body["templateID"],
        "sandboxID": kept.sandbox_id,
        "clientID": node.code,
        "envdVersion": "0.6.13",
        "alias": "base",
        "envdAccessToken": kept.token,
        "trafficAccessToken": None,
        "domain": "sbx.example.test:8700",
    }
    assert len(body["templateID"]) == 20


def test_v1_has_its_own_defaults(client, node):
    response = client.post("/sandboxes", json=BODY)
    assert response.status_code == 201
    assert "envdAccessToken" not in response.json()
    assert (node.claims[-1].ttl, node.claims[-1].secure) == (15.0, False)
    secured = client.post("/sandboxes", json=BODY | {"secure": True, "timeout": 300}).json()
    assert secured["envdAccessToken"] == node.sandboxes[secured["sandboxID"]].token
    assert node.claims[-1].ttl == 300.0


def test_what_is_asked_of_incoming_requests_reaches_the_node(client, node):
    network = {
        "allowPublicTraffic": False,
        "maskRequestHost": "localhost:${PORT}",
        "httpsPorts": [8443, 443, 443],
    }
    body = create(client, network=network)
    kept = node.sandboxes[body["sandboxID"]]
    assert node.claims[-1].inbound == Inbound(
        public=False, mask_host="localhost:${PORT}", https_ports=(443, 8443)
    )
    assert body["trafficAccessToken"] == kept.traffic_token
    assert body["trafficAccessToken"] not in (None, "", body["envdAccessToken"])
    again = client.post(f"/v2/sandboxes/{kept.sandbox_id}/connect", json={"timeout": 10}).json()
    assert again["trafficAccessToken"] == kept.traffic_token
    # Lists are for looking, not for getting in.
    for path in ("/v2/sandboxes", f"/sandboxes/{kept.sandbox_id}"):
        assert kept.traffic_token not in client.get(path).text


def test_private_ports_without_a_secure_sandbox_are_refused_in_v1(client, node):
    private = {"network": {"allowPublicTraffic": False}}
    before = len(node.claims)
    refused = client.post("/sandboxes", json=BODY | private)
    assert refused.status_code == 400
    assert "secure" in refused.json()["message"]
    assert len(node.claims) == before
    assert client.post("/sandboxes", json=BODY | private | {"secure": True}).status_code == 201


def test_chunked_bodies_are_read(client):
    body = json.dumps(BODY).encode()
    response = client.post("/v2/sandboxes", content=iter([body[:5], body[5:]]))
    assert response.status_code == 201


def test_null_stands_for_absent(client):
    fields = ["timeout", "metadata", "envVars", "mcp", "network", "autoPause", "iam", "volumeMounts"]
    create(client, **dict.fromkeys(fields))
    create(client, network={"egressProxy": None, "allowPublicTraffic": None, "allowOut": []})


def test_what_is_harmless_is_accepted(client):
    create(client, autoPause=False, autoPauseMemory=True, autoResume={"enabled": False}, volumeMounts=[])
    create(client, allow_internet_access=True, mcp={"exa": {"apiKey": "x"}}, somethingNew={"a": 1})
    create(client, network={"denyOut": ["0.0.0.0/0"], "allowPublicTraffic": True})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ({"iam": {"tokens": {"t": {"audience": "a", "tokenType": "b"}}}}, "iam"),
        ({"network": {"egressProxy": {"address": "h:1"}}}, "network.egressProxy"),
        ({"network": {"rules": {"h": []}}}, "network.rules"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(client, node, fields, named):
    before = len(node.claims)
    response = client.post("/v2/sandboxes", json=BODY | fields)
    assert response.status_code == 400
    assert named in error_of(response)
    assert "not supported" in error_of(response)
    assert len(node.claims) == before


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"templateID": None}, "templateID"),
        ({"templateID": ""}, "templateID"),
        ({"templateID": "../../etc"}, "templateID"),
        ({"templateID": "a" * 201}, "templateID"),
        ({"timeout": "60"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": 1.5}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 86_401}, "timeout"),
        ({"timeout": 10**30}, "timeout"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": ["a"]}, "metadata"),
        ({"metadata": {f"k{number}": "v" for number in range(65)}}, "metadata"),
        ({"metadata": {"": "v"}}, "metadata"),
        ({"metadata": {"k" * 257: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 4097}}, "metadata"),
        ({"metadata": {"k": "a\x00b"}}, "metadata"),
        ({"metadata": {"a\nb": "v"}}, "metadata"),
        ({"envVars": {"k": "\x1b[0m"}}, "envVars"),
        ({"envVars": {"A=B": "v"}}, "envVars"),
        ({"envVars": {f"k{number}": "v" for number in range(65)}}, "envVars"),
        ({"autoResume": {}}, "autoResume"),
        ({"network": "none"}, "network"),
        ({"network": {"allowOut": ["10.0.0.1"]}}, "network.allowOut"),
        ({"network": {"allowOut": ["http://example.com/"]}}, "network.allowOut"),
        ({"network": {"allowOut": ["1.1.1.1"] * 201}}, "network.allowOut"),
        ({"network": {"denyOut": ["example.com"]}}, "network.denyOut"),
        ({"network": {"dnsServers": ["dns"]}}, "network.dnsServers"),
    ],
)
def test_wrong_fields_are_refused_by_name(client, node, fields, named):
    before = len(node.claims)
    response = client.post("/v2/sandboxes", json=BODY | fields)
    assert response.status_code == 400
    assert named in error_of(response)
    assert len(node.claims) == before


def test_values_may_have_several_lines(client, node):
    create(client, envVars={"CERT": "-----BEGIN-----\r\n\tabc\n"})
    assert node.claims[-1].env == {"CERT": "-----BEGIN-----\r\n\tabc\n"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"templateID": "base"} x',
        b'{"templateID":"\xed\xa0\x80"}',
        b'{"templateID":"base","metadata":{"a":"\\ud800"}}',
        b'{"templateID":"base","metadata":{"a":"\\udc00b"}}',
        b'{"templateID":"base","x":' + b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"templateID":"base","timeout":1e999}',
        b'{"templateID":"base","timeout":NaN}',
    ],
)
@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
def test_broken_json_is_400(client, path, body):
    response = client.post(path, content=body)
    assert response.status_code == 400
    error_of(response)


def test_a_large_body_is_refused_by_its_announcement(api, secret):
    with _raw(api.url) as peer:
        peer.sendall(
            f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {secret}\r\n"
            f"Content-Length: {(1 << 20) + 1}\r\n\r\n".encode()
        )
        assert peer.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_large_body_without_announcement_is_refused(client):
    chunks = (b" " * 65_536 for _ in range(20))
    response = client.post("/v2/sandboxes", content=chunks)
    assert response.status_code == 413
    error_of(response)


def test_a_body_of_exactly_the_bound_is_read(client):
    body = json.dumps(BODY).encode()
    response = client.post("/v2/sandboxes", content=body + b" " * ((1 << 20) - len(body)))
    assert response.status_code == 201


def test_unknown_templates(client):
    for ref in ("nothing", "ns/base", "base:v2"):
        response = client.post("/v2/sandboxes", json={"templateID": ref})
        assert response.status_code == 404
        assert ref in error_of(response)


# Idempotency keys


def test_a_key_becomes_a_claim_key_of_its_owner(plane, api, client, node):
    headers = {"Idempotency-Key": "a-1"}
    first = client.post("/v2/sandboxes", json=BODY, headers=headers).json()
    assert client.post("/v2/sandboxes", json=BODY, headers=headers).json() == first
    assert node.claims[-1].key.startswith(f"idem-{node.claims[-1].owner}-")
    assert "a-1" not in node.claims[-1].key
    changed = client.post("/v2/sandboxes", json=BODY | {"timeout": 9}, headers=headers)
    assert changed.status_code == 409
    error_of(changed)
    with http(api, plane.key()[1]) as other:
        assert other.post("/v2/sandboxes", json=BODY, headers=headers).json() != first


@pytest.mark.parametrize("key", ["", "A", "a_b", "a b", "x" * 256])
def test_a_malformed_key_is_refused(client, node, key):
    before = len(node.claims)
    response = client.post("/v2/sandboxes", json=BODY, headers={"Idempotency-Key": key})
    assert response.status_code == 400
    assert "Idempotency-Key" in error_of(response)
    assert len(node.claims) == before


def test_unknown_outcomes(client, node):
    node.hide_claims = True
    node.drop_claim_answers = 1
    lost = client.post("/v2/sandboxes", json=BODY)
    assert lost.status_code == 500
    assert lost.headers["should-retry"] == "false"
    assert "retry-after" not in lost.headers
    assert "ends at its timeout" in error_of(lost)
    node.drop_claim_answers = 1
    headers = {"Idempotency-Key": "lost-2"}
    keyed = client.post("/v2/sandboxes", json=BODY, headers=headers)
    assert keyed.status_code == 503
    assert keyed.headers["retry-after"].isdigit()
    again = client.post("/v2/sandboxes", json=BODY, headers=headers)
    assert again.status_code == 201
    assert again.json()["sandboxID"] == node.by_key[node.claims[-1].key][1]


def test_a_lost_answer_without_a_key_is_found_by_asking_the_node(client, node):
    node.drop_claim_answers = 1
    body = create(client)
    assert body["sandboxID"] in node.sandboxes


# What passes and what does not


@pytest.mark.parametrize(
    ("error", "status", "after"),
    [
        (PoolDry("dry", retry_after=2.5), 503, "3"),
        (PoolDry("dry", retry_after=0.0), 503, "1"),
        (NodeUnavailable("away"), 503, "1"),
        (RuntimeFailure("the guest did not answer"), 500, None),
    ],
)
def test_errors_of_nodes(client, node, error, status, after):
    node.claim_error = error
    response = client.post("/v2/sandboxes", json=BODY)
    assert response.status_code == status
    assert response.headers.get("retry-after") == after
    error_of(response)


def test_a_list_that_is_not_whole_is_an_error(client, node):
    create(client)
    node.list_error = RuntimeFailure("cannot read")
    for path in ("/sandboxes", "/v2/sandboxes"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "node-0" in error_of(response)


# One sandbox


def test_detail(client, node):
    body = create(client, metadata={"a": "b"})
    kept = node.sandboxes[body["sandboxID"]]
    detail = client.get(f"/sandboxes/{kept.sandbox_id}").json()
    assert detail["metadata"] == {"a": "b"}
    assert (detail["state"], detail["cpuCount"], detail["memoryMB"]) == ("running", 1, 512)
    assert (detail["diskSizeMB"], detail["clientID"], detail["alias"]) == (4096, node.code, "base")
    assert detail["templateID"] == body["templateID"]
    assert detail["envdAccessToken"] == kept.token
    assert detail["allowInternetAccess"] is True
    assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert detail["startedAt"].endswith("Z")
    assert client.get(f"/sandboxes/{kept.sandbox_id}-{node.code}").json() == detail


def test_lists_show_no_token(client):
    create(client)
    for path in ("/sandboxes", "/v2/sandboxes"):
        assert "envdAccessToken" not in client.get(path).text


def test_another_owners_sandbox_is_not_there(plane, api, client, node):
    sandbox_id = create(client)["sandboxID"]
    with http(api, plane.key()[1]) as other:
        answers = [
            other.get(f"/sandboxes/{sandbox_id}"),
            other.delete(f"/sandboxes/{sandbox_id}"),
            other.post(f"/sandboxes/{sandbox_id}/timeout", json={"timeout": 0}),
            other.post(f"/sandboxes/{sandbox_id}/refreshes", json={"duration": 9}),
            other.post(f"/sandboxes/{sandbox_id}/connect", json={"timeout": 9}),
            other.post(f"/v2/sandboxes/{sandbox_id}/connect", json={}),
        ]
        missing = other.get(f"/sandboxes/{new_sandbox_id(node.code)}")
        assert other.get("/v2/sandboxes").json() == []
    assert {answer.status_code for answer in [*answers, missing]} == {404}
    shape = {error_of(answer).replace(sandbox_id, "ID") for answer in answers}
    assert shape == {"there is no sandbox 'ID'"}
    assert client.get(f"/sandboxes/{sandbox_id}").status_code == 200


@pytest.mark.parametrize("sandbox_id", ["x", "i" + "A" * 19, "i" + "a" * 18, "i" + "é" * 19, "i" * 5000])
def test_ids_that_cannot_be(client, sandbox_id):
    response = client.get(f"/sandboxes/{quote(sandbox_id)}")
    assert response.status_code == 404
    error_of(response)


def test_a_lost_answer_to_a_delete_is_resolved(client, node):
    sandbox_id = create(client)["sandboxID"]
    node.drop_delete_answers = 1
    assert client.delete(f"/sandboxes/{sandbox_id}").status_code == 204
    assert client.delete(f"/sandboxes/{sandbox_id}").status_code == 404


def test_timeouts(client, node):
    sandbox_id = create(client)["sandboxID"]
    path = f"/sandboxes/{sandbox_id}/timeout"
    assert client.post(path, json={"timeout": 600}).status_code == 204
    assert 595 < node.sandboxes[sandbox_id].ends_at - time.time() <= 600
    for wrong in ({"timeout": 86_401}, {}, {"timeout": None}, {"timeout": "5"}):
        response = client.post(path, json=wrong)
        assert response.status_code == 400
        assert "timeout" in error_of(response)
    assert client.post(path, json={"timeout": -5}).status_code == 204
    assert client.get(f"/sandboxes/{sandbox_id}").status_code == 404
    assert client.post(path, json={"timeout": 5}).status_code == 404


def test_refreshes_only_extend(client, node):
    sandbox_id = create(client, timeout=300)["sandboxID"]
    path = f"/sandboxes/{sandbox_id}/refreshes"
    before = node.sandboxes[sandbox_id].ends_at
    assert client.post(path).status_code == 204
    assert client.post(path, json={"duration": 10}).status_code == 204
    assert node.sandboxes[sandbox_id].ends_at == before
    assert client.post(path, json={"duration": 900}).status_code == 204
    assert node.sandboxes[sandbox_id].ends_at > before
    for wrong in (3601, -1):
        assert client.post(path, json={"duration": wrong}).status_code == 400


def test_connect(client, node):
    created = create(client, timeout=600)
    sandbox_id = created["sandboxID"]
    before = node.sandboxes[sandbox_id].ends_at
    for path in (f"/sandboxes/{sandbox_id}/connect", f"/v2/sandboxes/{sandbox_id}/connect"):
        response = client.post(path, json={"timeout": 30})
        assert response.status_code == 200
        assert response.json() == created
    assert client.post(f"/v2/sandboxes/{sandbox_id}/connect").status_code == 200
    assert node.sandboxes[sandbox_id].ends_at == before
    assert client.post(f"/v2/sandboxes/{sandbox_id}/connect", json={"timeout": -1}).status_code == 400
    assert client.post(f"/v2/sandboxes/{new_sandbox_id(node.code)}/connect").status_code == 404


# Lists


def test_pages(client):
    made = [create(client)["sandboxID"] for _ in range(5)]
    seen, token = [], ""
    while True:
        response = client.get("/v2/sandboxes", params={"limit": 2, "order": "asc", "nextToken": token})
        assert response.headers["x-total-running"] == "5"
        seen += [entry["sandboxID"] for entry in response.json()]
        if seen == made[:2]:
            assert client.delete(f"/sandboxes/{made[1]}").status_code == 204
            made[5:] = [create(client)["sandboxID"]]
        token = response.headers.get("x-next-token", "")
        if not token:
            break
    assert seen == made
    assert [entry["sandboxID"] for entry in client.get("/sandboxes").json()] == [*made[:0:-1][:-1], made[0]]


def test_the_older_list_shows_running_ones_only(client, node, secret):
    owner = node.sandboxes[create(client)["sandboxID"]].owner
    paused = node.add(owner=owner, state="paused", metadata={"k": "v"})
    assert paused.sandbox_id not in client.get("/sandboxes").text
    listed = client.get("/v2/sandboxes", params={"state": "paused", "metadata": "k=v"})
    assert [entry["sandboxID"] for entry in listed.json()] == [paused.sandbox_id]
    assert listed.headers["x-total-running"] == "0"


@pytest.mark.parametrize(
    "query", ["limit=0", "order=x", "state=x", "nextToken=x", "startedAfter=x", "metadata=x"]
)
def test_a_wrong_query_is_400(client, query):
    response = client.get(f"/v2/sandboxes?{query}")
    assert response.status_code == 400
    assert query.split("=")[0] in error_of(response)


# Templates


def test_templates(client):
    [template] = client.get("/templates").json()
    assert template["aliases"] == template["names"] == ["base"]
    assert (template["cpuCount"], template["memoryMB"], template["diskSizeMB"]) == (1, 512, 4096)
    assert (template["buildStatus"], template["envdVersion"]) == ("ready", "0.6.13")
    for alias in ("base", "base%3Adefault", template["templateID"]):
        found = client.get(f"/templates/aliases/{alias}")
        assert found.json() == {"templateID": template["templateID"], "public": True}
    for alias in ("nothing", "ns%2Fbase"):
        missing = client.get(f"/templates/aliases/{alias}")
        assert missing.status_code == 404
        error_of(missing)


# Keys


def test_keys(api, secret, client):
    bearer = {"Authorization": f"Bearer {secret}"}
    with http(api, None) as anyone:
        assert anyone.get("/templates", headers=bearer).status_code == 200
        assert anyone.get("/health").text == "Health check successful"
        assert anyone.get("/healthz").json() == {"ok": True}
        wrong = ["e2b_" + "0" * 40, secret[:-1], "", "é".encode(), secret.upper()]
        attempts = [{"X-API-Key": key} for key in wrong] + [{}, {"Authorization": f"Basic {secret}"}]
        for headers in attempts:
            for path in ("/templates", "/v2/sandboxes", "/sandboxes/" + "i" * 20, "/volumes"):
                response = anyone.get(path, headers=headers)
                assert response.status_code == 401
                assert secret[4:] not in error_of(response)
        assert anyone.post("/v2/sandboxes", content=b"{").status_code == 401


def test_a_revoked_key_stops_within_two_seconds(plane, api):
    key, secret = plane.key()
    with http(api, secret) as client:
        assert client.get("/templates").status_code == 200
        plane.stored(lambda store: revoke_api_key(store, key.key_id))
        began = time.monotonic()
        while client.get("/templates").status_code == 200:
            assert time.monotonic() - began < 2.0
            time.sleep(0.02)
        assert client.get("/templates").status_code == 401


def test_a_new_key_works_at_once(plane, api):
    with http(api, plane.key()[1]) as client:
        assert client.get("/templates").status_code == 200


def test_no_secret_is_logged(plane, api, client, node, secret):
    body = create(client, envVars={"TOKEN": "top-secret-value"})
    client.post("/v2/sandboxes", content=b"{")
    client.get("/v2/sandboxes")
    for role in (*plane.apis, *plane.masters):
        for text in (secret, secret[4:], body["envdAccessToken"], "top-secret-value"):
            assert text not in role.log


# Network


def test_the_network_of_a_create_reaches_the_node_and_the_detail(client, node):
    network = {"allowOut": ["1.1.1.1", "*.example.com"], "denyOut": ["0.0.0.0/0"], "dnsServers": ["8.8.8.8"]}
    made = create(client, network=network, allow_internet_access=True)
    sent = node.claims[-1].network
    assert (sent.allow_out, sent.deny_out) == (network["allowOut"], network["denyOut"])
    assert (sent.dns_servers, sent.allow_internet_access) == (["8.8.8.8"], True)
    detail = client.get(f"/sandboxes/{made['sandboxID']}").json()
    assert detail["network"] == network
    assert detail["allowInternetAccess"] is True


def test_the_network_is_replaced_whole(client, node):
    sandbox_id = create(client, network={"allowOut": ["1.1.1.1"], "denyOut": ["0.0.0.0/0"]})["sandboxID"]
    url = f"/sandboxes/{sandbox_id}/network"
    assert client.put(url, json={"denyOut": ["8.8.8.8"]}).status_code == 204
    detail = client.get(f"/sandboxes/{sandbox_id}").json()
    assert detail["network"] == {"denyOut": ["8.8.8.8"]}
    assert client.put(url, json={"allow_internet_access": False}).status_code == 204
    detail = client.get(f"/sandboxes/{sandbox_id}").json()
    assert detail["network"] == {}
    assert detail["allowInternetAccess"] is False
    assert client.put(url, json={}).status_code == 204
    assert client.get(f"/sandboxes/{sandbox_id}").json()["allowInternetAccess"] is True


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"allowOut": ["192.168.1.1"]}, "network.allowOut"),
        ({"denyOut": ["*.example.com"]}, "network.denyOut"),
        ({"egressProxy": {"address": "h:1"}}, "network.egressProxy is not supported"),
        ({"rules": {"h": [{"transform": {"headers": {"a": "b"}}}]}}, "network.rules is not supported"),
        ({"allowOut": "1.1.1.1"}, "allowOut"),
        ([], "invalid request"),
    ],
)
def test_a_wrong_network_is_refused_and_the_old_one_stays(client, node, body, named):
    sandbox_id = create(client, network={"denyOut": ["8.8.8.8"]})["sandboxID"]
    response = client.put(f"/sandboxes/{sandbox_id}/network", json=body)
    assert response.status_code == 400
    assert named in error_of(response)
    assert node.sandboxes[sandbox_id].network.deny_out == ["8.8.8.8"]


def test_a_paused_sandbox_has_no_network_to_change(client, node):
    sandbox_id = create(client)["sandboxID"]
    node.network_error = NotRunning("the sandbox is paused; resume it")
    response = client.put(f"/sandboxes/{sandbox_id}/network", json={})
    assert response.status_code == 409
    assert "resume it" in error_of(response)
    node.network_error = RuntimeFailure("the egress process does not answer; try again shortly")
    assert client.put(f"/sandboxes/{sandbox_id}/network", json={}).status_code == 500


def test_the_network_of_no_sandbox_or_of_anothers_is_404(client, node):
    assert client.put("/sandboxes/x/network", json={}).status_code == 404
    theirs = node.add(owner="somebody")
    assert client.put(f"/sandboxes/{theirs.sandbox_id}/network", json={}).status_code == 404


# Methods and paths


def test_unknown_paths_are_404(client):
    for path in ("/", "/nothing", "/v4/sandboxes", "/sandboxes/", "/sandboxes/a/b/c", "/v2/sandboxes/x"):
        response = client.get(path)
        assert response.status_code == 404
        error_of(response)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v3/templates"),
        ("DELETE", "/templates/tags"),
        ("GET", "/templates/x/builds/y/status"),
        ("GET", "/volumes"),
        ("DELETE", "/volumes/x"),
        ("POST", "/secrets"),
    ],
)
def test_what_is_not_there_yet_is_501(client, method, path):
    response = client.request(method, path, content=b"{}")
    assert response.status_code == 501
    assert error_of(response).endswith("is not supported by this server yet")


def test_methods(client):
    wrong = client.put("/v2/sandboxes")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "GET, HEAD, OPTIONS, POST"
    error_of(wrong)
    assert client.request("PATCH", "/sandboxes/x").status_code == 405
    options = client.options("/sandboxes/x")
    assert (options.status_code, options.headers["allow"]) == (204, "DELETE, GET, HEAD, OPTIONS")
    head = client.head("/v2/sandboxes")
    assert (head.status_code, head.content, head.headers["x-total-running"]) == (200, b"", "0")
    assert client.head("/nothing").status_code == 404


def _raw(url: str) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=10)
