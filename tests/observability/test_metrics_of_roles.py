"""What real roles expose, to whom, and that docs/observability.md lists exactly that."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from greenroom.wire import credentials
from tests.observability.conftest import Fleet

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|([\w, ]*)\| .+ \| .+ \|$", re.MULTILINE)
SERIES = re.compile(r"^(\w+)\{([^}]*)\} ", re.MULTILINE)
ROLES = ("master", "node", "api", "proxy")


def scrape(fleet: Fleet, role: str, as_whom: str = "metrics") -> httpx.Response:
    token = credentials.own_token(fleet.plane.state / "secrets", as_whom)
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(f"{fleet.internal[role]}/metrics", headers=headers, trust_env=False)


def create(fleet: Fleet, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    _, secret = fleet.plane.key()
    sent = {"X-API-Key": secret, **(headers or {})}
    body = {"templateID": "base", **body}
    return httpx.post(f"{fleet.proxy.url}/v2/sandboxes", headers=sent, json=body, trust_env=False)


def family(series: str, types: dict[str, str]) -> str:
    return series if series in types else re.sub(r"_(bucket|sum|count)$", "", series)


def test_the_list_in_the_documentation_is_what_the_roles_expose(fleet: Fleet) -> None:
    assert create(fleet).status_code == 201
    listed = {
        name: (kind, labels) for name, kind, labels in ROW.findall(DOCUMENT.read_text(encoding="utf-8"))
    }
    exposed: dict[str, str] = {}
    for role in ROLES:
        text = scrape(fleet, role).text
        types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
        exposed |= types
        for series, labels in SERIES.findall(text):
            names = set(re.findall(r'(\w+)="', labels)) - {"le"}
            wanted = listed[family(series, types)][1]
            assert names == {name for name in wanted.replace(" ", "").split(",") if name}, series
    assert exposed == {name: kind for name, (kind, _) in listed.items()}


@pytest.mark.parametrize("role", ROLES)
def test_every_role_exposes_itself_to_scraper_and_operator_and_nobody_else(fleet: Fleet, role: str) -> None:
    url = f"{fleet.internal[role]}/metrics"
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.get(url, headers=headers, trust_env=False).status_code == 401
    for whom in ("api", "master", "node", "proxy"):
        assert scrape(fleet, role, whom).status_code == 403
    for whom in ("metrics", "operator"):
        answer = scrape(fleet, role, whom)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        for name in ("process_cpu_seconds_total", "python_gc_collections_total", "python_info"):
            assert name in answer.text
    assert httpx.get(f"{fleet.internal[role]}/healthz", trust_env=False).json() == {"ok": True}


def test_the_scrapers_token_opens_nothing_else(fleet: Fleet) -> None:
    token = credentials.own_token(fleet.plane.state / "secrets", "metrics")
    for role, path in (("master", "/v1/status"), ("node", "/v1/sandboxes"), ("node", "/v1/status")):
        url = f"{fleet.internal[role]}{path}"
        answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        assert answer.status_code == 403


@pytest.mark.parametrize(
    "path", ["/metrics", "/metrics?x=1", "/%6detrics", "/%6D%65trics", "//metrics", "/metrics/"]
)
def test_the_entry_hides_metrics_even_from_the_operator(fleet: Fleet, path: str) -> None:
    for whom in ("operator", "metrics"):
        token = credentials.own_token(fleet.plane.state / "secrets", whom)
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(trust_env=False) as client:
            url = httpx.URL(fleet.proxy.url).copy_with(raw_path=path.encode())
            answer = client.get(url, headers=headers)
        assert answer.status_code == 404, answer.text
        assert answer.json() == {"code": 404, "message": "no such path"}


def test_no_series_names_a_sandbox_or_an_owner(fleet: Fleet) -> None:
    key, secret = fleet.plane.key()
    with httpx.Client(base_url=fleet.proxy.url, headers={"X-API-Key": secret}, trust_env=False) as client:
        made = client.post("/v2/sandboxes", json={"templateID": "base", "metadata": {"who": "somebody"}})
        sandbox_id = made.json()["sandboxID"]
        assert client.get(f"/sandboxes/{sandbox_id}").status_code == 200
        assert client.get(f"/no/such/path/{sandbox_id}").status_code == 404
        assert client.request("PROPFIND", f"/sandboxes/{sandbox_id}").status_code == 405
        assert client.delete(f"/sandboxes/{sandbox_id}").status_code == 204
    for role in ROLES:
        text = scrape(fleet, role).text
        for word in (sandbox_id, key.owner, key.key_id, secret, "somebody", "PROPFIND", "no/such"):
            assert word not in text, role


def test_a_claim_is_counted_and_timed_by_all_who_had_to_do_with_it(fleet: Fleet) -> None:
    assert create(fleet).status_code == 201
    api, master, node = (scrape(fleet, role).text for role in ("api", "master", "node"))
    assert 'greenroom_http_requests_total{method="POST",route="/v2/sandboxes",status="201"}' in api
    assert 'greenroom_calls_total{callee="master",outcome="ok"}' in api
    assert 'greenroom_master_claims_total{outcome="ok"}' in master
    assert 'greenroom_master_placements_total{outcome="ok"}' in master
    assert 'greenroom_master_nodes{state="live"} 1.0' in master
    assert 'greenroom_node_claims_total{outcome="ok",size="small",template="base"}' in node
    assert 'greenroom_node_pool_target{size="small",template="base"} 2.0' in node
    for stage in ["pop", "queue", "journal", "turn", "resume", "first_answer", "identity", "clock", "total"]:
        assert re.search(
            rf'claim_stage_seconds_count\{{size="small",stage="{stage}",template="base"\}} [1-9]', node
        )
