"""What the relay logs: requests it refuses, under the id that the proxy gave them, and no strangers' noise."""

from __future__ import annotations

import logging

import pytest

from tests.support.guests import SANDBOX, TOKEN, answer_of, relaying
from tests.support.loops import on_both_loops


def request(*fields: str, sandbox: str = SANDBOX, port: str = "8000", token: str = TOKEN) -> bytes:
    lines = [
        "GET /secret-path?signature=s3cret HTTP/1.1",
        "Host: x",
        f"x-greenroom-relay: {token}",
        f"x-greenroom-sandbox: {sandbox}",
        f"x-greenroom-port: {port}",
        "X-Access-Token: s3cret",
        *fields,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "greenroom.node.relay"]


@on_both_loops
async def test_a_refusal_is_told_with_its_request_and_sandbox(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "greenroom")
    async with relaying() as (_relay, address, directory):
        directory.add(SANDBOX)
        status, _ = await answer_of(address, request("x-request-id: r-1"))
        assert status == 502
        other = "iabcd" + "1" * 15
        assert (await answer_of(address, request("x-request-id: r-2", sandbox=other)))[0] == 502
    first, second = told(caplog)
    assert [record.levelno for record in (first, second)] == [logging.INFO] * 2
    assert vars(first)["request_id"] == "r-1"
    assert vars(first)["sandbox_id"] == SANDBOX
    assert vars(first)["fields"] == {"status": 502}
    assert (vars(second)["request_id"], vars(second)["sandbox_id"]) == ("r-2", other)
    assert "s3cret" not in caplog.text
    assert "secret-path" not in caplog.text


@pytest.mark.parametrize("offered", ["", "a b", "x" * 65, "a\tb", "a,b"])
@on_both_loops
async def test_an_id_that_no_log_may_carry_is_left_out(
    caplog: pytest.LogCaptureFixture, offered: str
) -> None:
    caplog.set_level(logging.DEBUG, "greenroom")
    async with relaying() as (_relay, address, directory):
        directory.add(SANDBOX)
        await answer_of(address, request(f"x-request-id: {offered}"))
    (record,) = told(caplog)
    assert vars(record)["request_id"] == ""


@on_both_loops
async def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "greenroom")
    async with relaying() as (_relay, address, _directory):
        for raw in (request(token="wrong"), b"nonsense\r\n\r\n"):
            assert (await answer_of(address, raw))[0] in (400, 401)
    assert {record.levelno for record in told(caplog)} == {logging.DEBUG}
