"""The HTTP server as its peers meet it: raw bytes on sockets."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from tests.guest.harness import Agent, envelope


def talk(agent: Agent, *sent: bytes) -> bytes:
    """Send the pieces, then read until the agent closes."""
    with agent.socket() as peer:
        for piece in sent:
            peer.sendall(piece)
        return read_all(peer)


def read_all(peer: socket.socket) -> bytes:
    received = b""
    while data := peer.recv(65536):
        received += data
    return received


def read_response(peer: socket.socket) -> bytes:
    """One response with a Content-Length, or without a body."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = peer.recv(65536)
        assert data
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            while len(body) < int(line.split(b":")[1]):
                body += peer.recv(65536)
    return head + b"\r\n\r\n" + body


def test_health(agent: Agent) -> None:
    answer = agent.request("GET", "/health")
    assert (answer.status, answer.body) == (204, b"")
    assert agent.request("HEAD", "/health").status == 204


def test_a_connection_serves_many_requests(agent: Agent) -> None:
    with agent.socket() as peer:
        for _ in range(3):
            peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_response(peer).startswith(b"HTTP/1.1 204 ")


def test_pipelined_requests_are_answered_in_order(agent: Agent) -> None:
    requests = b"GET /envs HTTP/1.1\r\n\r\n" + b"GET /nothing HTTP/1.1\r\n\r\n" * 2
    answer = talk(agent, requests + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"404", b"204"]


def test_a_request_may_come_byte_by_byte(agent: Agent) -> None:
    body = b'{"path":"/"}'
    raw = (
        b"\r\nPOST /filesystem.Filesystem/Stat HTTP/1.1\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    raw += b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answer = talk(agent, *(bytes([byte]) for byte in raw))
    assert b"200 OK" in answer
    assert b'"type":"FILE_TYPE_DIRECTORY"' in answer


def test_http_1_0_gets_a_close_instead_of_chunks(agent: Agent) -> None:
    message = envelope(json.dumps({"process": {"cmd": "/bin/true"}}).encode())
    head = b"POST /process.Process/Start HTTP/1.0\r\nContent-Type: application/connect+json\r\n"
    answer = talk(agent, head + b"Content-Length: %d\r\n\r\n" % len(message) + message)
    assert b"chunked" not in answer.lower()
    assert b"Connection: close" in answer
    assert b'"exitCode":0' in answer


def test_a_client_that_asks_first_is_told_to_continue(agent: Agent) -> None:
    with agent.socket() as peer:
        peer.sendall(
            b"POST /filesystem.Filesystem/Stat HTTP/1.1\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 12\r\n\r\n"
        )
        assert read_response(peer).startswith(b"HTTP/1.1 100 Continue")
        peer.sendall(b'{"path":"/"}')
        assert read_response(peer).startswith(b"HTTP/1.1 200 ")


def test_a_refused_client_that_asked_first_is_not_told_to_continue(agent: Agent) -> None:
    answer = talk(agent, b"POST /nothing HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 12\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(("raw", "status"), [
    (b"rubbish\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA: " + b"b" * 70000, 431),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    (b"POST /init HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n", 400),
])  # fmt: skip
def test_what_is_no_request_is_refused_and_the_connection_closed(
    agent: Agent, raw: bytes, status: int
) -> None:
    answer = talk(agent, raw)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] in (status, "invalid_argument")


def test_unknown_paths_and_methods(agent: Agent) -> None:
    answer = agent.request("GET", "/nothing/here")
    assert (answer.status, answer.json["code"]) == (404, 404)
    assert agent.request("DELETE", "/files").status == 405
    assert agent.request("GET", "/process.Process/List").status == 405


def test_a_unary_body_is_bounded(agent: Agent) -> None:
    headers = {"Content-Type": "application/json"}
    answer = agent.request("POST", "/filesystem.Filesystem/Stat", b" " * (5 * 1024 * 1024), headers)
    assert answer.status == 413
    assert answer.json["code"] == "resource_exhausted"


def test_a_refused_upload_is_read_so_that_its_answer_arrives(agent: Agent) -> None:
    with agent.socket() as peer:
        size = 30_000_000
        peer.sendall(b"POST /files HTTP/1.1\r\nContent-Type: application/octet-stream\r\n")
        peer.sendall(b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(30):
            peer.sendall(bytes(1_000_000))
        assert read_response(peer).startswith(b"HTTP/1.1 400 ")
        peer.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert read_response(peer).startswith(b"HTTP/1.1 204 ")


def test_other_codecs_are_refused(agent: Agent) -> None:
    for path, kind in (
        ("/filesystem.Filesystem/Stat", "application/proto"),
        ("/process.Process/Start", "application/json"),
        ("/process.Process/List", "application/connect+json"),
    ):
        answer = agent.request("POST", path, b"{}", {"Content-Type": kind})
        assert answer.status == 415
        assert "application/json" in answer.headers["Accept-Post"]


def test_any_page_may_call(agent: Agent) -> None:
    answer = agent.request("OPTIONS", "/files", headers={
        "Origin": "https://example.test", "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-access-token",
    })  # fmt: skip
    assert answer.status == 204
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,x-access-token"
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    plain = agent.request("GET", "/health", headers={"Origin": "null"})
    assert plain.headers["Access-Control-Allow-Origin"] == "*"


def test_many_connections_at_once(agent: Agent) -> None:
    peers = [agent.socket() for _ in range(200)]
    try:
        for peer in peers:
            peer.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        for peer in peers:
            assert read_response(peer).startswith(b"HTTP/1.1 204 ")
    finally:
        for peer in peers:
            peer.close()


def test_metrics(agent: Agent) -> None:
    reading = agent.request("GET", "/metrics").json
    assert reading["cpu_count"] >= 1
    assert 0 <= reading["cpu_used_pct"] <= 100
    assert 0 < reading["mem_used"] <= reading["mem_total"]
    assert reading["mem_total_mib"] == reading["mem_total"] // 1048576
    assert 0 < reading["disk_used"] <= reading["disk_total"]
    assert {"ts", "mem_cache", "mem_used_mib"} <= set(reading)


def test_an_upload_is_not_read_faster_than_it_is_stored(agent: Agent, folder: Path) -> None:
    """A FIFO without a reader would be refused; a stalled client must not disturb anybody else."""
    with agent.socket() as stalled:
        stalled.sendall(
            b"POST /files?path=%b HTTP/1.1\r\nContent-Type: application/octet-stream\r\n"
            b"Content-Length: 1000000\r\n\r\n" % str(folder / "slow").encode() + bytes(500_000)
        )
        assert agent.request("GET", "/health").status == 204
        stalled.sendall(bytes(500_000))
        assert read_response(stalled).startswith(b"HTTP/1.1 200 ")
    assert (folder / "slow").stat().st_size == 1_000_000


def test_requests_in_parallel(agent: Agent, folder: Path) -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        path = str(folder / f"file-{number}")
        stored = agent.request(
            "POST", f"/files?path={path}", b"x" * number, {"Content-Type": "application/octet-stream"}
        )
        read = agent.request("GET", f"/files?path={path}")
        if (stored.status, read.body) != (200, b"x" * number):
            failures.append((number, stored, read))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_client_that_closes_its_side_still_gets_its_answer(agent: Agent) -> None:
    with agent.socket() as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        peer.shutdown(socket.SHUT_WR)
        assert read_all(peer).startswith(b"HTTP/1.1 200 ")
    with agent.socket() as peer:
        peer.sendall(b"POST /files?path=/tmp/never HTTP/1.1\r\nContent-Length: 10\r\n\r\nx")
        peer.shutdown(socket.SHUT_WR)
        assert read_all(peer) == b""
