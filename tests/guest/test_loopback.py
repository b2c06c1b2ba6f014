"""The node's way to what listens on the guest's loopback only."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.guest.harness import Agent

CONTROL = "the-control-token"


@pytest.fixture
def guarded(fresh_agent: Agent) -> Agent:
    """An agent that has been handed over: with an access token and a control token."""
    body = json.dumps({"controlToken": CONTROL, "accessToken": "access"}).encode()
    assert fresh_agent.request("POST", "/init", body).status == 200
    return fresh_agent


@contextmanager
def listening(serve: Callable[[socket.socket], None], address: str = "127.0.0.1") -> Iterator[int]:
    """A service on the loopback that takes one connection; gives its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()

        def run() -> None:
            peer, _ = listener.accept()
            with peer:
                serve(peer)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(30)
        assert not thread.is_alive()


def echo(peer: socket.socket) -> None:
    while data := peer.recv(65536):
        peer.sendall(data)


def head(port: object, token: str | None = CONTROL, **changed: str) -> bytes:
    lines = [f"GET /upgrade/loopback/{port} HTTP/1.1", "Host: guest"]
    headers = {"Connection": "Upgrade", "Upgrade": "greenroom-loopback", **changed}
    if token is not None:
        headers["X-Greenroom-Control"] = token
    return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode()


def answer(peer: socket.socket) -> tuple[bytes, bytes]:
    """The head of the answer, and what came with it."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = peer.recv(65536)
        assert data, received
        received += data
    first, _, rest = received.partition(b"\r\n\r\n")
    return first, rest


def status(agent: Agent, request: bytes) -> int:
    with agent.socket() as peer:
        peer.sendall(request)
        return int(answer(peer)[0].split()[1])


def test_bytes_go_both_ways_and_half_closes_too(guarded: Agent) -> None:
    payload = bytes(range(256)) * 20_000
    with listening(echo) as port, guarded.socket() as peer:
        peer.sendall(head(port))
        first, received = answer(peer)
        assert first.startswith(b"HTTP/1.1 101 ")
        assert b"Upgrade: greenroom-loopback" in first

        def send() -> None:
            peer.sendall(payload)
            peer.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        while data := peer.recv(65536):
            received += data
        sender.join(30)
    assert received == payload


def test_bytes_sent_with_the_request_are_not_lost(guarded: Agent) -> None:
    with listening(echo) as port, guarded.socket() as peer:
        peer.sendall(head(port) + b"early bytes")
        peer.shutdown(socket.SHUT_WR)
        _, received = answer(peer)
        while data := peer.recv(65536):
            received += data
    assert received == b"early bytes"


def test_a_service_that_speaks_first(guarded: Agent) -> None:
    def greet(peer: socket.socket) -> None:
        peer.sendall(b"hello")
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(100) == b"bye"
        assert peer.recv(100) == b""

    with listening(greet) as port, guarded.socket() as peer:
        peer.sendall(head(port))
        _, received = answer(peer)
        while data := peer.recv(100):
            received += data
        assert received == b"hello"
        peer.sendall(b"bye")


def test_only_ipv6_is_listened_on(guarded: Agent) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with listening(echo, "::1") as port, guarded.socket() as peer:
        peer.sendall(head(port) + b"six")
        peer.shutdown(socket.SHUT_WR)
        _, received = answer(peer)
        while data := peer.recv(100):
            received += data
    assert received == b"six"


def test_a_reset_is_passed_on(guarded: Agent) -> None:
    def reset(peer: socket.socket) -> None:
        assert peer.recv(100) == b"x"
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with listening(reset) as port, guarded.socket() as peer:
        peer.sendall(head(port) + b"x")
        answer(peer)
        with pytest.raises(ConnectionResetError):
            peer.recv(100)


def test_a_node_that_leaves_cuts_the_service(guarded: Agent) -> None:
    seen: list[str] = []

    def until_cut(peer: socket.socket) -> None:
        try:
            while peer.recv(100):
                pass
        except ConnectionResetError:
            seen.append("reset")

    with listening(until_cut) as port, guarded.socket() as peer:
        peer.sendall(head(port) + b"x")
        answer(peer)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert seen == ["reset"]


def test_a_slow_reader_holds_the_service_up(guarded: Agent) -> None:
    size = 50_000_000
    sent = threading.Event()

    def pour(peer: socket.socket) -> None:
        peer.sendall(bytes(size))
        sent.set()

    with listening(pour) as port, guarded.socket() as peer:
        peer.sendall(head(port))
        _, received = answer(peer)
        # Fifty megabytes do not fit between the two: some of it waits in the service.
        assert not sent.wait(0.5)
        count = len(received)
        while data := peer.recv(1 << 20):
            count += len(data)
    assert count == size


def test_where_nothing_listens(guarded: Agent) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert status(guarded, head(taken.getsockname()[1])) == 502


@pytest.mark.parametrize("port", ["0", "65536", "x", "", "80/", "-1", "080", "1e3", "%38%30"])
def test_what_is_no_port(guarded: Agent, port: str) -> None:
    assert status(guarded, head(port)) == 400


def test_without_the_control_token_the_path_is_unknown(guarded: Agent) -> None:
    for token in (None, "wrong", ""):
        assert status(guarded, head(80, token)) == 404
    access = {"X-Access-Token": "access"}
    assert guarded.request("GET", "/upgrade/loopback/80", headers=access).status == 404


def test_before_the_hand_over_the_path_is_unknown(agent: Agent) -> None:
    assert status(agent, head(80)) == 404


def test_it_must_be_an_upgrade_without_a_body(guarded: Agent) -> None:
    assert status(guarded, head(80, Upgrade="websocket")) == 426
    assert status(guarded, head(80, Connection="close")) == 426
    assert status(guarded, head(80, **{"Content-Length": "5"})) == 400


def test_the_agent_serves_others_meanwhile_and_loses_no_descriptor(guarded: Agent) -> None:
    guarded.token = "access"
    for _ in range(3):
        with listening(echo) as port, guarded.socket() as peer:
            peer.sendall(head(port))
            answer(peer)
            assert guarded.run("echo others").stdout == b"others\n"
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(10) == b""
