"""Counting: outcomes, bounded labels, what an application and a client count of themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response

from greenroom.errors import (
    GreenroomError,
    InternalError,
    KeyConflict,
    NodeUnavailable,
    OutcomeUnknown,
    PoolDry,
    RuntimeFailure,
)
from greenroom.wire import credentials, metrics
from greenroom.wire.calling import RoleClient
from greenroom.wire.credentials import Verifier
from greenroom.wire.serving import application, endpoint, json_response, listen, serving_beside

PLAYED = metrics.counter("test_played_total", "Blocks of this test", ("what", "outcome"))
PLAYED_SECONDS = metrics.histogram("test_played_seconds", "Their lengths", ("what", "outcome"))


async def value(name: str, **labels: str) -> float:
    """A series as it is exposed now; 0 while there is none."""
    for family in text_string_to_metric_families((await metrics.exposition()).decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (PoolDry("x"), "rejected"),
        (KeyConflict("x"), "rejected"),
        (NodeUnavailable("x"), "rejected"),
        (RuntimeFailure("x"), "failed"),
        (InternalError("x"), "failed"),
        (ValueError("x"), "failed"),
        (OutcomeUnknown("x"), "unknown"),
        (asyncio.CancelledError(), "unknown"),
    ],
)
async def test_a_block_is_counted_and_timed_by_how_it_ends(error: BaseException | None, outcome: str) -> None:
    labels = {"what": "a", "outcome": outcome}
    before = [await value(name, **labels) for name in ("test_played_total", "test_played_seconds_count")]
    with (
        contextlib.suppress(BaseException),
        metrics.Outcome(PLAYED, "a", seconds=PLAYED_SECONDS),
    ):
        if error is not None:
            raise error
    after = [await value(name, **labels) for name in ("test_played_total", "test_played_seconds_count")]
    assert after == [count + 1 for count in before]


def test_every_error_has_an_outcome() -> None:
    def all_of(kind: type[GreenroomError]) -> list[type[GreenroomError]]:
        return [kind, *(found for child in kind.__subclasses__() for found in all_of(child))]

    for kind in all_of(GreenroomError):
        error = Exception.__new__(kind)
        assert metrics.outcome_of(error) in ("rejected", "failed", "unknown")


def test_a_series_is_found_again() -> None:
    assert metrics.child(PLAYED, "b", "ok") is metrics.child(PLAYED, "b", "ok")
    assert metrics.child(PLAYED, "b", "ok") is not metrics.child(PLAYED, "b", "failed")


@pytest.mark.parametrize("seconds", [0.0, 0.00005, 0.0001, 0.00011, 0.3, 59.9, 60.0, 60.1, 1e9])
async def test_each_length_falls_into_the_buckets_that_reach_it(seconds: float) -> None:
    what = f"length {seconds}"
    metrics.child(PLAYED_SECONDS, what, "ok").observe(seconds)
    for bound in (*metrics.BUCKETS, float("inf")):
        labels = {"what": what, "outcome": "ok", "le": "+Inf" if bound == float("inf") else str(bound)}
        assert await value("test_played_seconds_bucket", **labels) == (1 if seconds <= bound else 0), bound
    assert await value("test_played_seconds_sum", what=what, outcome="ok") == seconds


async def test_what_is_read_is_told_only_inside_the_block() -> None:
    def read() -> list[metrics.Metric]:
        rows = [(("x",), 3.0), (("y",), 4.0)]
        return [
            metrics.gauges("test_things", "Things", ("kind",), rows),
            metrics.counts("test_seen_total", "Seen", (), [((), 7)]),
        ]

    with metrics.reading(read):
        assert await value("test_things", kind="y") == 4
        assert await value("test_seen_total") == 7
    assert b"test_things" not in await metrics.exposition()


async def test_the_process_tells_of_itself() -> None:
    text = (await metrics.exposition()).decode()
    for name in ("process_resident_memory_bytes", "python_gc_collections_total", "python_info"):
        assert f"# TYPE {name}" in text
    assert "_created" not in text


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A role with one path of each kind."""
    credentials.ensure(tmp_path)

    async def thing(request: Request) -> Response:
        return json_response({"id": request.path_params["id"]})

    async def broken(_request: Request) -> Response:
        raise RuntimeFailure("as asked for")

    async def hang(_request: Request) -> Response:
        await asyncio.sleep(30)
        return Response()

    routes = [
        endpoint("GET", "/things/{id}", thing, ("master",)),
        endpoint("POST", "/broken", broken, ("master",)),
        endpoint("POST", "/hang", hang, ("master",)),
    ]
    app = application(routes, Verifier.load(tmp_path))
    async with serving_beside(app, listen("127.0.0.1", 0)) as url:
        yield url, tmp_path


async def test_requests_are_counted_by_route_whatever_the_path_says(served: tuple[str, Path]) -> None:
    url, secrets = served
    headers = {"Authorization": f"Bearer {credentials.own_token(secrets, 'master')}"}
    cases = [
        ("GET", "/things/one", {"method": "GET", "route": "/things/{id}", "status": "200"}),
        ("GET", "/things/zwei", {"method": "GET", "route": "/things/{id}", "status": "200"}),
        ("DELETE", "/things/zwei", {"method": "DELETE", "route": "/things/{id}", "status": "405"}),
        ("GET", "/elsewhere/three", {"method": "GET", "route": "unmatched", "status": "404"}),
        ("PROPFIND", "/elsewhere/four", {"method": "other", "route": "unmatched", "status": "404"}),
        ("POST", "/broken", {"method": "POST", "route": "/broken", "status": "500"}),
    ]
    async with aiohttp.ClientSession(headers=headers) as session:
        for method, path, labels in cases:
            before = await value("greenroom_http_requests_total", **labels)
            async with session.request(method, f"{url}{path}") as response:
                await response.read()
            assert await value("greenroom_http_requests_total", **labels) == before + 1, path
    text = await metrics.exposition()
    for word in (b"zwei", b"three", b"four", b"PROPFIND"):
        assert word not in text


async def test_calls_are_counted_by_callee_and_outcome(
    served: tuple[str, Path], unused_tcp_port_factory: Callable[[], int]
) -> None:
    url, secrets = served
    nobody = f"http://127.0.0.1:{unused_tcp_port_factory()}"
    cases = [
        ("GET", f"{url}/things/1", "master", "ok", 10.0),
        ("POST", f"{url}/broken", "master", "failed", 10.0),
        ("GET", f"{url}/elsewhere", "master", "rejected", 10.0),
        ("POST", f"{url}/hang", "master", "unknown", 0.1),
        ("POST", f"{nobody}/things", "node", "unreachable", 10.0),
    ]
    token = credentials.own_token(secrets, "master")
    async with RoleClient(token, masters=[url]) as client:
        for method, where, callee, outcome, deadline in cases:
            labels = {"callee": callee, "outcome": outcome}
            before = await value("greenroom_calls_total", **labels)
            with contextlib.suppress(GreenroomError):
                await client.call(method, where, dict, deadline=deadline)
            assert await value("greenroom_calls_total", **labels) == before + 1, outcome
        timed = await value("greenroom_call_seconds_count", callee="master", outcome="ok")
        await client.call("GET", f"{url}/things/1?wait=3", dict)
        assert await value("greenroom_call_seconds_count", callee="master", outcome="ok") == timed


async def test_metrics_need_a_credential_that_admits_to_them(served: tuple[str, Path]) -> None:
    url, secrets = served
    statuses = {}
    async with aiohttp.ClientSession() as session:
        for role in credentials.ROLES:
            headers = {"Authorization": f"Bearer {credentials.own_token(secrets, role)}"}
            async with session.get(f"{url}/metrics", headers=headers) as response:
                statuses[role] = response.status
            async with session.get(f"{url}/things/1", headers=headers) as response:
                assert response.status == (200 if role == "master" else 403)
        async with session.get(f"{url}/metrics") as response:
            assert response.status == 401
    assert {role for role, status in statuses.items() if status == 200} == {"metrics", "operator"}
    assert set(statuses.values()) == {200, 403}
