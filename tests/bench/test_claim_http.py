"""Claims over a node's API: a real node process on the simulated engine, and the client's few lines of HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.bench import claim_http
from greenroom.bench.claim_http import HttpRow
from greenroom.config import Config, PoolsConfig, VmConfig
from greenroom.errors import NodeUnavailable
from greenroom.wire.credentials import own_token
from greenroom.wire.serving import listen, url_of
from tests.bench.results import SIZE, Quiet
from tests.support.cluster import QUICK, Cluster, cluster
from tests.support.role_process import RoleProcess

SETTINGS: Config = msgspec.structs.replace(
    QUICK, pools=PoolsConfig(default_target=2), vm=VmConfig(engine="simulated")
)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


async def test_claims_and_trivial_requests_in_pairs(plane: Cluster) -> None:
    master = plane.master(SETTINGS)
    node = plane.stack.enter_context(
        RoleProcess(plane.spec("node", config=SETTINGS, master_urls=[master.url]))
    )
    tokens = {role: own_token(plane.state / "secrets", role) for role in ("master", "operator")}
    meter = Quiet()
    found = await claim_http.measure(node.url, tokens, "base", SIZE, 7, meter)
    assert (found.claim_ms.n, found.trivial_ms.n, meter.advanced) == (7, 7, 7)
    assert len(found.to_trivial.rounds) == 1
    assert claim_http.targets(found)[0].value == found.claim_ms.p50
    for table in claim_http.tables(found):
        assert all(len(row) == len(table.columns) for row in table.rows)
    wrong = {"master": tokens["operator"], "operator": tokens["operator"]}
    refused = await claim_http.measure(node.url, wrong, "base", SIZE, 2, Quiet())
    assert refused.claim_ms.failed == 2
    (said,) = refused.claim_ms.errors
    assert "may not call" in said


async def test_a_node_that_is_not_there_is_said() -> None:
    sock = listen("127.0.0.1", 0)
    url = url_of(sock)
    sock.close()
    with pytest.raises(NodeUnavailable, match="cannot connect"):
        await claim_http.measure(url, {"master": "", "operator": ""}, "base", SIZE, 1, Quiet())


@given(st.binary(max_size=50), st.integers(200, 599), st.data())
def test_an_answer_is_complete_exactly_with_its_last_byte(
    body: bytes, status: int, data: st.DataObject
) -> None:
    head = f"HTTP/1.1 {status} Text\r\nx-other: 1\r\nContent-Length: {len(body)}\r\nlast: 2\r\n\r\n".encode()
    whole = head + body
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert claim_http._complete(bytearray(whole[:cut])) is None
    assert claim_http._complete(bytearray(whole)) == (status, body)


def test_an_answer_without_a_body_ends_with_its_head() -> None:
    assert claim_http._complete(bytearray(b"HTTP/1.1 204 No Content\r\nx: 1\r\n\r\n")) == (204, b"")


def test_failures_are_counted_once() -> None:
    found = claim_http.summarise_run(
        [HttpRow(round=1, claim_ms=2.0, trivial_ms=1.0), HttpRow(round=1, error="no answer")]
    )
    assert found.to_trivial.overall == 2.0
    assert [(name, summary.failed) for name, summary in claim_http.failures(found)] == [
        ("claim over HTTP", 1)
    ]
