"""The agent as a real subprocess, and the smallest clients that can speak to it.

Blocking clients on purpose: a test reads top to bottom, and what the agent does at the same time happens in
another process.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import greenroom

SOURCE = Path(greenroom.__file__).parent.parent
IS_ROOT = os.geteuid() == 0
ME = pwd.getpwuid(os.geteuid()).pw_name
TIMEOUT = 60.0


def eventually(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Wait for a condition to hold, and answer its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {seconds} s: {what}")
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def descriptors(pid: int) -> list[tuple[Path, str]]:
    """The open descriptors of a process: their links in /proc, and what these point to."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append((link, os.readlink(link)))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


@dataclass(slots=True)
class Answer:
    """One HTTP response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Stream:
    """A streamed answer under way."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    ended: dict[str, Any] | None = None

    def events(self) -> Iterator[dict[str, Any]]:
        """The messages until the end envelope, whose content is then in :attr:`ended`."""
        while header := self.response.read(5):
            assert len(header) == 5
            payload = json.loads(self.response.read(int.from_bytes(header[1:], "big")))
            if header[0] & 2:
                self.ended = payload
                assert self.response.read() == b""
                return
            yield payload

    def next(self) -> dict[str, Any]:
        """The content of the next event."""
        event = next(self.events())["event"]
        assert isinstance(event, dict)
        return event

    def close(self) -> None:
        self.response.close()
        self.connection.close()


@dataclass(slots=True)
class Outcome:
    """What a finished command gave."""

    pid: int
    stdout: bytes = b""
    stderr: bytes = b""
    pty: bytes = b""
    end: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def code(self) -> int:
        return int(self.end.get("exitCode", 0))


@dataclass(slots=True)
class Agent:
    """A running agent and requests to it."""

    process: subprocess.Popen[bytes]
    port: int
    identity: Path
    token: str | None = None
    farewell: str = ""
    """What it still wrote to stdout while it left."""

    # -- HTTP -------------------------------------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        connection = self.connect()
        try:
            chunked = body is not None and not isinstance(body, bytes)
            sent = self._headers(headers)
            if chunked:
                sent["Transfer-Encoding"] = "chunked"
            connection.request(method, path, body=body, headers=sent, encode_chunked=chunked)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def _headers(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        sent = dict(headers or {})
        if self.token is not None:
            sent.setdefault("X-Access-Token", self.token)
        return sent

    # -- calls ------------------------------------------------------------------------------------------

    def call(self, method: str, message: Any, user: str | None = None, **headers: str) -> Answer:
        """A unary call; ``method`` is ``Stat`` or ``process.Process/List``."""
        path = f"/{method}" if "/" in method else f"/filesystem.Filesystem/{method}"
        sent = {"Content-Type": "application/json", "Connect-Protocol-Version": "1", **headers}
        if user is not None:
            sent["Authorization"] = basic(user)
        return self.request("POST", path, json.dumps(message).encode(), sent)

    def process_call(self, method: str, message: Any) -> Answer:
        return self.call(f"process.Process/{method}", message)

    def open_stream(
        self, method: str, message: Any, user: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Stream:
        payload = json.dumps(message).encode()
        sent = {"Content-Type": "application/connect+json", **self._headers(headers)}
        if user is not None:
            sent["Authorization"] = basic(user)
        connection = self.connect()
        path = f"/{method}" if "/" in method else f"/process.Process/{method}"
        connection.request("POST", path, envelope(payload), sent)
        return Stream(connection, connection.getresponse())

    @contextmanager
    def stream(
        self, method: str, message: Any, user: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[Stream]:
        stream = self.open_stream(method, message, user, headers)
        try:
            yield stream
        finally:
            stream.close()

    @contextmanager
    def started(
        self,
        script: str,
        user: str | None = None,
        headers: Mapping[str, str] | None = None,
        stdin: bool = False,
        **fields: Any,
    ) -> Iterator[tuple[Stream, int]]:
        """A shell script begun through Start; gives its stream after the start event, and its pid."""
        message = {"process": shell(script), "stdin": stdin, **fields}
        with self.stream("Start", message, user, headers) as stream:
            yield stream, stream.next()["start"]["pid"]

    def run(self, script: str, user: str | None = None, **fields: Any) -> Outcome:
        """Run a shell script to its end."""
        process = {**shell(script), **fields.pop("process", {})}
        message = {"process": process, "stdin": False, **fields}
        with self.stream("Start", message, user) as stream:
            return collect(stream)


def shell(script: str) -> dict[str, Any]:
    return {"cmd": "/bin/sh", "args": ["-c", script]}


def collect(stream: Stream, pid: int | None = None) -> Outcome:
    """Everything a stream still brings."""
    outcome = Outcome(pid or 0)
    for message in stream.events():
        event = message["event"]
        if "start" in event:
            outcome.pid = event["start"]["pid"]
        elif "data" in event:
            outcome.stdout += base64.b64decode(event["data"].get("stdout", ""))
            outcome.stderr += base64.b64decode(event["data"].get("stderr", ""))
            outcome.pty += base64.b64decode(event["data"].get("pty", ""))
        elif "end" in event:
            outcome.end = event["end"]
    outcome.error = (stream.ended or {}).get("error")
    return outcome


def envelope(payload: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(payload).to_bytes(4, "big") + payload


def basic(user: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:".encode()).decode()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@contextmanager
def running_agent(
    identity: Path,
    *options: str,
    cwd: Path | None = None,
    module: str = "greenroom.guest",
    path: Path = SOURCE,
    allowed: str = "ERROR greenroom.guest.identity",
) -> Iterator[Agent]:
    """Start an agent on a free port; afterwards it must leave by itself, without a word on stderr.

    Lines that begin with ``allowed`` are expected by tests that make something fail.
    """
    log = identity.parent / f"{identity.name}.stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "always",
                "-m",
                module,
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--default-user",
                ME,
                "--dry-identity",
                str(identity),
                *options,
            ],
            env={**os.environ, "PYTHONPATH": str(path)},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        assert line.startswith("agent listening on "), log.read_text()
        running = Agent(process, int(line.rpartition(":")[2]), identity)
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        running.farewell = process.stdout.read().decode()
        complaints = [line for line in log.read_text().splitlines() if not line.startswith(allowed)]
        assert complaints == []
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.kill()
            process.wait(30)
