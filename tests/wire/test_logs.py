"""Log lines: one JSON object each, under the request's id, without secrets whatever is logged."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from greenroom.errors import PoolDry
from greenroom.wire import credentials, logs
from greenroom.wire.calling import RoleClient
from greenroom.wire.credentials import Verifier
from greenroom.wire.serving import application, endpoint, json_response, listen, serving_beside
from greenroom.wire.tasks import spawn

FORMATTER = logs.JsonFormatter("node", 3)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What Greenroom logs, from DEBUG on, as lines."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(FORMATTER)
    logger = logging.getLogger("greenroom")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield text
    logger.setLevel(before)
    logger.removeHandler(handler)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def formatted(message: str, *values: object, **extra: object) -> dict[str, object]:
    record = logging.LogRecord("greenroom.x", logging.WARNING, __file__, 1, message, values, None)
    for name, value in extra.items():
        setattr(record, name, value)
    text = FORMATTER.format(record)
    assert "\n" not in text
    return dict(json.loads(text))


def test_a_line_has_everything_and_nothing_empty() -> None:
    line = formatted("%s of %d", "one", 2)
    assert set(line) == {"time", "level", "role", "replica", "logger", "message"}
    assert line["message"] == "one of 2"
    assert (line["level"], line["role"], line["replica"], line["logger"]) == (
        *("warning", "node", 3),
        "greenroom.x",
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line["time"]))


def test_times_are_utc_to_the_millisecond() -> None:
    assert logs.rfc3339(0.0) == "1970-01-01T00:00:00.000Z"
    assert logs.rfc3339(1_769_860_800.0429) == "2026-01-31T12:00:00.042Z"


@given(st.text())
def test_whatever_is_logged_is_one_line(text: str) -> None:
    assert logs.redacted(text) == formatted("%s", text)["message"]


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("deep inside")
    except ValueError:
        line = formatted("it failed", exc_info=sys.exc_info())
    assert line["message"] == "it failed"
    assert "Traceback" in str(line["exception"])
    assert "ValueError: deep inside" in str(line["exception"])


def test_a_traceback_is_bounded_at_its_beginning() -> None:
    try:
        raise ValueError("x" * 50_000 + " the end")
    except ValueError:
        line = formatted("it failed", exc_info=sys.exc_info())
    assert len(str(line["exception"])) == logs.EXCEPTION_LIMIT
    assert str(line["exception"]).endswith("the end")


def test_fields_and_ids_of_the_record_win() -> None:
    trail, token = logs.begin("outer")
    try:
        line = formatted("x", request_id="own", sandbox_id="iabc", fields={"status": 502})
        assert (line["request_id"], line["sandbox_id"], line["status"]) == ("own", "iabc", 502)
        assert formatted("x")["request_id"] == trail.request_id == "outer"
    finally:
        logs.end(token)
    assert "request_id" not in formatted("x")


@given(st.text(max_size=80))
def test_only_sane_ids_are_taken_over(offered: str) -> None:
    trail, token = logs.begin(offered)
    logs.end(token)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", trail.request_id)
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", offered):
        assert trail.request_id == offered


SECRET = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/=_-.~", min_size=12, max_size=80
)
HEADERS = ("X-API-Key", "Authorization", "X-Access-Token", "x-greenroom-relay", "X-Greenroom-Control")


@given(SECRET, st.sampled_from(HEADERS), st.sampled_from(["", "Bearer ", "Basic "]))
def test_a_request_logged_with_its_headers_shows_no_secret(secret: str, name: str, scheme: str) -> None:
    value = f"{scheme}{secret}"
    shapes: list[object] = [
        {name: value},
        {name.lower(): value, "accept": "*/*"},
        [(name.encode(), value.encode()), (b"host", b"x")],
        f"GET /files?path=a HTTP/1.1\r\n{name}: {value}\r\nHost: x",
        f"curl -H '{name}: {value}' http://x",
        json.dumps({"headers": {name: value}}),
    ]
    for shape in shapes:
        assert secret not in str(formatted("a request: %s", shape)["message"]), shape
        try:
            raise ValueError(shape)
        except ValueError:
            assert secret not in str(formatted("it failed", exc_info=sys.exc_info())["exception"])


@given(SECRET)
def test_signatures_and_environments_are_blanked(secret: str) -> None:
    for shape in (
        f"GET /files?path=/a&signature={secret}&signature_expiration=5",
        {"env": {"TOKEN": secret}},
        {"envVars": {"TOKEN": secret}, "template": "base"},
        f"ClaimRequest(key='k', env={{'TOKEN': '{secret}'}}, secure=True)",
        {"accessToken": secret},
        f"Bearer {secret}",
    ):
        assert secret not in str(formatted("%s", shape)["message"]), shape


@given(
    st.text("0123456789abcdef", min_size=64, max_size=64),
    st.text("0123456789abcdef", min_size=40, max_size=40),
)
def test_keys_and_tokens_are_known_by_their_form(token: str, key: str) -> None:
    message = str(formatted("%s and %s", token, f"e2b_{key}")["message"])
    assert token not in message
    assert key not in message


def test_plain_words_stay_as_they_are() -> None:
    for text in (
        "node node-0 (code abcd) registered at http://127.0.0.1:4000",
        "hand-over of iabcd012345678901234 on gr-1f-3 failed: no answer within 45 s",
        "the environment is fine",
    ):
        assert formatted(text)["message"] == text


@pytest.fixture
def app(tmp_path: Path) -> Starlette:
    credentials.ensure(tmp_path)

    async def echo(request: Request) -> Response:
        logs.about("iabcd012345678901234")
        return json_response({"id": request.headers.get(logs.HEADER), "own": logs.request_id()})

    async def dry(_request: Request) -> Response:
        raise PoolDry("no member")

    async def bug(_request: Request) -> Response:
        raise ValueError("a fault")

    async def later(_request: Request) -> Response:
        async def fail() -> None:
            raise ValueError("in the background")

        await asyncio.gather(spawn(fail(), "a task of the request"), return_exceptions=True)
        return json_response({})

    routes = [
        endpoint("GET", "/echo", echo, ("master",)),
        endpoint("POST", "/echo", echo, ("master",)),
        endpoint("POST", "/beat", echo, ("master",)),
        endpoint("GET", "/dry", dry, ("master",)),
        endpoint("GET", "/bug", bug, ("master",)),
        endpoint("POST", "/later", later, ("master",)),
    ]
    return application(routes, Verifier.load(tmp_path), quiet=("/beat",))


async def ask(app: Starlette, tmp_path: Path, method: str, path: str, **headers: str) -> tuple[str, bytes]:
    """The answer's request id and body."""
    headers["Authorization"] = f"Bearer {credentials.own_token(tmp_path, 'master')}"
    async with (
        serving_beside(app, listen("127.0.0.1", 0)) as url,
        aiohttp.ClientSession() as session,
        session.request(method, f"{url}{path}", headers=headers) as response,
    ):
        return response.headers[logs.HEADER], await response.read()


async def test_the_id_is_in_the_answer_the_handler_and_the_line(
    app: Starlette, tmp_path: Path, stream: io.StringIO
) -> None:
    given_id, body = await ask(app, tmp_path, "POST", "/echo", **{logs.HEADER: "mine-1"})
    assert given_id == json.loads(body)["own"] == "mine-1"
    (line,) = [line for line in lines(stream) if line["logger"] == "greenroom.access"]
    assert (line["request_id"], line["sandbox_id"]) == ("mine-1", "iabcd012345678901234")
    assert (line["method"], line["route"], line["status"], line["caller"]) == ("POST", "/echo", 200, "master")


@pytest.mark.parametrize("path", ["/echo", "/dry", "/bug", "/nowhere"])
async def test_every_answer_has_an_id_errors_too(app: Starlette, tmp_path: Path, path: str) -> None:
    given_id, _ = await ask(app, tmp_path, "GET", path, **{logs.HEADER: "not sane"})
    assert re.fullmatch(r"[0-9a-f]{32}", given_id)


async def test_a_call_made_for_a_request_carries_its_id(app: Starlette, tmp_path: Path) -> None:
    _, token = logs.begin("far-away")
    try:
        async with (
            serving_beside(app, listen("127.0.0.1", 0)) as url,
            RoleClient(credentials.own_token(tmp_path, "master")) as client,
        ):
            assert await client.call("GET", f"{url}/echo", dict) == {"id": "far-away", "own": "far-away"}
    finally:
        logs.end(token)


async def test_a_task_of_a_request_fails_under_its_id(
    app: Starlette, tmp_path: Path, stream: io.StringIO
) -> None:
    given_id, _ = await ask(app, tmp_path, "POST", "/later")
    (failure,) = [line for line in lines(stream) if line["logger"] == "greenroom.wire.tasks"]
    assert failure["request_id"] == given_id
    assert "in the background" in str(failure["exception"])


async def test_an_unexpected_error_is_told_once_and_under_its_id(
    app: Starlette, tmp_path: Path, stream: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    given_id, _ = await ask(app, tmp_path, "GET", "/bug")
    traces = [line for line in lines(stream) if "exception" in line]
    assert [line["request_id"] for line in traces] == [given_id]
    assert not [record for record in caplog.records if record.name == "uvicorn.error" and record.exc_info]


@pytest.mark.parametrize(
    ("method", "path", "level"),
    [
        ("GET", "/echo", "debug"),
        ("POST", "/echo", "info"),
        ("POST", "/beat", "debug"),
        ("GET", "/healthz", "debug"),
        ("GET", "/dry", "info"),
        ("GET", "/nowhere", "info"),
    ],
)
async def test_changes_and_errors_are_news_reads_and_heartbeats_are_not(
    app: Starlette, tmp_path: Path, stream: io.StringIO, method: str, path: str, level: str
) -> None:
    await ask(app, tmp_path, method, path)
    assert [line["level"] for line in lines(stream) if line["logger"] == "greenroom.access"] == [level]
