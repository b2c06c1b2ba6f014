"""A stand-in for the internet: a namespace joined to the host by a veth, with servers on documentation addresses.

Those ranges are public as far as Greenroom knows, and lead nowhere else. Each stand-in takes a small slice of them,
so that several test runs on one machine do not meet. Everything of it goes with `close`.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

NAMES = (
    "one.test",
    "two.test",
    "api.one.test",
    "deep.api.one.test",
    "other.test",
    "inward.test",
    "many.test",
)
"""All in the servers' certificate."""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Internet:
    """Make it as root. Addresses: `dns`, and three servers `one`, `two`, `far` (which lies behind a router)."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.namespace = f"grtest-{secrets.token_hex(3)}"
        self._link = f"gt{secrets.token_hex(4)}"
        taken = run("ip", "-o", "addr") + run("ip", "route")
        slice_ = next(
            number for number in _shuffled(32)
            if f"203.0.113.{8 * number + 1}/" not in taken and f"198.51.100.{8 * number}/" not in taken
        )  # fmt: skip
        first = 8 * slice_
        self.host_side = f"203.0.113.{first + 1}"
        """The host's own address on that network: public by its number, the host's all the same."""
        self.dns, self.one, self.two = (f"203.0.113.{first + step}" for step in (2, 3, 4))
        self.far = f"198.51.100.{first + 1}"
        self.nowhere = f"203.0.113.{first + 6}"
        """Nobody has it."""
        self.network = f"203.0.113.{first}/29"
        self.ca = home / "ca.pem"
        self._server: subprocess.Popen[bytes] | None = None
        try:
            self._join(first)
            self._certify()
            self.zone(
                {
                    "one.test": [self.one],
                    "two.test": [self.two],
                    "api.one.test": [self.one],
                    "deep.api.one.test": [self.one],
                    "other.test": [self.far],
                    "inward.test": ["10.0.0.1", "169.254.169.254", self.host_side],
                    "mixed.test": ["192.168.1.1", self.one],
                    "many.test": [self.one, *(f"198.51.100.{number}" for number in range(60, 130))],
                    "lost.test": "silent",
                }
            )
            self._serve()
        except BaseException:
            self.close()
            raise

    def _join(self, first: int) -> None:
        inside = ("ip", "netns", "exec", self.namespace)
        run("ip", "netns", "add", self.namespace)
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        run("ip", "addr", "add", f"{self.host_side}/29", "dev", self._link)
        run("ip", "link", "set", "dev", self._link, "up")
        for address in (self.dns, self.one, self.two):
            run(*inside, "ip", "addr", "add", f"{address}/29", "dev", "eth0")
        run(*inside, "ip", "addr", "add", f"{self.far}/32", "dev", "lo")
        run(*inside, "ip", "link", "set", "dev", "lo", "up")
        run(*inside, "ip", "link", "set", "dev", "eth0", "up")
        run("ip", "route", "add", f"198.51.100.{first}/29", "via", self.dns)

    def _certify(self) -> None:
        """A CA of the tests' and one certificate for all names and addresses."""
        names = [f"DNS:{name}" for name in NAMES] + [f"IP:{at}" for at in (self.one, self.two, self.far)]
        (self.home / "extensions").write_text(f"subjectAltName={','.join(names)}\n", encoding="utf-8")
        new = ("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-keyout")
        key, request, signed = (str(self.home / name) for name in ("key.pem", "request.pem", "signed.pem"))
        ca_key = str(self.home / "ca.key")
        run(*new, ca_key, "-x509", "-days", "2", "-subj", "/CN=Test CA", "-out", str(self.ca))
        run(*new, key, "-subj", "/CN=test", "-out", request)
        run(
            "openssl", "x509", "-req", "-in", request, "-CA", str(self.ca), "-CAkey", ca_key, "-CAcreateserial",
            "-days", "2", "-extfile", str(self.home / "extensions"), "-out", signed,
        )  # fmt: skip
        (self.home / "server.pem").write_text(
            Path(key).read_text(encoding="ascii") + Path(signed).read_text(encoding="ascii"), encoding="ascii"
        )

    def _serve(self) -> None:
        config = {"home": str(self.home), "dns": self.dns, "hosts": [self.one, self.two, self.far]}
        (self.home / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self._server = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, sys.executable, "-m", "tests.support.internet_server",
             str(self.home / "config.json")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"

    def zone(self, names: dict[str, list[str] | str]) -> None:
        """Names and their addresses from now on; `silent` for one that is never answered."""
        temporary = self.home / "zone.new"
        temporary.write_text(json.dumps(names), encoding="utf-8")
        temporary.rename(self.home / "zone.json")

    def questions(self) -> list[str]:
        """Names that were asked for so far."""
        try:
            lines = (self.home / "questions.txt").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [line.split(" ")[0] for line in lines]

    @property
    def settings(self) -> str:
        """What a platform's config.toml needs to ask this internet's DNS."""
        return f'[network]\nresolvers = ["{self.dns}:53"]\n'

    def close(self) -> None:
        """Remove it."""
        if self._server is not None:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.close()
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server.stdout.close()
        subprocess.run(["ip", "link", "del", "dev", self._link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, capture_output=True)


def _shuffled(number: int) -> list[int]:
    return secrets.SystemRandom().sample(range(number), number)
