"""Whatever a client sends, it gets an answer of the protocol, and the agent has nothing to complain about."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.guest.errors import HTTP_STATUS
from tests.guest.harness import Agent, envelope

UNARY = [
    *(f"process.Process/{name}" for name in ("List", "SendInput", "SendSignal", "CloseStdin", "Update")),
    *(f"process.Process/{name}" for name in ("Ack", "Inspect")),
    *(f"filesystem.Filesystem/{name}" for name in ("Stat", "GetWatcherEvents", "RemoveWatcher")),
]
STREAMING = [
    *(f"process.Process/{name}" for name in ("Start", "Connect", "StreamInput")),
    "filesystem.Filesystem/WatchDir",
]

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8),
    st.sampled_from(["SIGNAL_SIGKILL", "\0", "\ud800", "~", "/no/such", "eA=="]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["pid", "tag", "executionId", "stdin", "pty", "size", "cols", "rows", "path", "process"]
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=8,
)
# No 'cmd' that exists: nothing is to be started by chance.
MESSAGES = st.dictionaries(
    st.sampled_from(
        [
            "process",
            "pty",
            "tag",
            "stdin",
            "input",
            "signal",
            "offset",
            "path",
            "recursive",
            "watcherId",
            "start",
        ]
    ),
    VALUES,
    max_size=5,
)
RELAXED = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def connection(agent: Agent) -> Iterator[http.client.HTTPConnection]:
    """One connection for many requests: none of them may make the agent close it."""
    found = agent.connect()
    yield found
    found.close()


def post(connection: http.client.HTTPConnection, method: str, body: bytes, kind: str) -> tuple[int, bytes]:
    connection.request("POST", f"/{method}", body, {"Content-Type": kind, "Connect-Timeout-Ms": "1000"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def check_error(error: dict[str, str]) -> None:
    assert error["code"] in HTTP_STATUS
    assert error["message"]
    assert "Traceback" not in error["message"]


@RELAXED
@given(st.sampled_from(UNARY), MESSAGES)
def test_unary_calls(connection: http.client.HTTPConnection, method: str, message: dict[str, object]) -> None:
    status, body = post(connection, method, json.dumps(message).encode(), "application/json")
    answer = json.loads(body)
    if status != 200:
        check_error(answer)
        assert status in (HTTP_STATUS[answer["code"]], 507)


@RELAXED
@given(st.sampled_from(STREAMING), MESSAGES)
def test_streaming_calls(
    connection: http.client.HTTPConnection, method: str, message: dict[str, object]
) -> None:
    if method.endswith("WatchDir"):
        message["path"] = "/no/such/place"
    status, body = post(
        connection, method, envelope(json.dumps(message).encode()), "application/connect+json"
    )
    assert status == 200
    flags, payload = body[0], json.loads(body[5:])
    assert flags == 2
    assert int.from_bytes(body[1:5], "big") == len(body) - 5
    check_error(payload["error"])


@RELAXED
@given(st.sampled_from([*UNARY, *STREAMING]), st.binary(max_size=60), st.booleans())
def test_bytes_that_are_no_message(
    connection: http.client.HTTPConnection, method: str, body: bytes, stream: bool
) -> None:
    kind = "application/connect+json" if stream else "application/json"
    status, answer = post(connection, method, body, kind)
    if status == 415:
        return
    if stream:
        assert answer[0] == 2
        assert status == 200
    else:
        assert isinstance(json.loads(answer), dict)


@RELAXED
@given(st.text(max_size=20), st.text(max_size=20))
def test_any_authorization_names_a_user_or_nobody(
    connection: http.client.HTTPConnection, scheme: str, name: str
) -> None:
    credentials = base64.b64encode(name.encode("utf-8", "surrogatepass")).decode()
    header = f"{scheme.encode('ascii', 'ignore').decode()} {credentials}"
    if any(char in header for char in "\r\n\0"):
        return
    headers = {"Content-Type": "application/json", "Authorization": header}
    connection.request("POST", "/filesystem.Filesystem/Stat", b'{"path":"/"}', headers)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    assert answer.status in (200, 400, 401), body
