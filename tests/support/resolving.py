"""Name resolution as an operator sets it up for a wildcard domain, for programs that a test starts.

A stand-in for dnsmasq's `address=/<domain>/127.0.0.1` on a loopback address of its own, and a mount namespace in
which `/etc/resolv.conf` names it: what runs there resolves through the C library as on any machine, and nothing
outside of it changes. Needs root.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import threading
from pathlib import Path
from types import TracebackType

_A = 1
_NAME_ERROR = 3


class Resolver:
    """Answers every name below `domain` with 127.0.0.1, and no other name at all. Use as a context manager."""

    def __init__(self, domain: str) -> None:
        self._domain = domain.lower()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        # Any address of 127/8 will do, and two tests at once need two.
        self.address = (
            f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}.{secrets.randbelow(250) + 2}"
        )
        self._socket.bind((self.address, 53))
        self._thread = threading.Thread(target=self._serve, name="resolver")
        self.asked: list[str] = []

    def __enter__(self) -> Resolver:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", (self.address, 53))
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(512)
            if not query:
                return
            self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace"))
            at += 1 + query[at]
        kind = struct.unpack_from("!H", query, at + 1)[0]
        question = query[12 : at + 5]
        name = ".".join(labels).lower()
        self.asked.append(name)
        ours = name == self._domain or name.endswith("." + self._domain)
        found = ours and kind == _A
        flags = 0x8580 | (0 if ours else _NAME_ERROR)
        head = query[:2] + struct.pack("!HHHHH", flags, 1, int(found), 0, 0)
        record = struct.pack("!HHHIH4s", 0xC00C, _A, 1, 5, 4, socket.inet_aton("127.0.0.1"))
        return head + question + (record if found else b"")

    def run(
        self, words: list[str], place: Path, environment: dict[str, str], deadline: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program that resolves names here; `place` is a directory for what it needs."""
        settings = place / "resolv.conf"
        settings.write_text(f"nameserver {self.address}\noptions timeout:5\n", encoding="ascii")
        where = os.path.realpath("/etc/resolv.conf")
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", f'mount --bind "{settings}" "{where}" && exec "$@"', "sh", *words],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=deadline, check=False,
        )  # fmt: skip
