"""The platform as users run it: the `greenroom` command, real roles, real microVMs; and a count of what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from e2b import Sandbox

from greenroom.runtime.cgroups import Cgroups
from greenroom.runtime.namespaces import listing
from greenroom.runtime.slots import tag_of
from tests.support.waiting import until_true as until

DEADLINE = 900
"""Seconds for a command: the very first `up` on a machine builds the image and the golden."""


def greenroom(*arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would."""
    done = subprocess.run(
        [sys.executable, "-m", "greenroom.cli.main", *arguments],
        capture_output=True, text=True, timeout=DEADLINE, check=False, **options,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"greenroom {arguments} said: {done.stdout}{done.stderr}"
    return done


def answers(box: Sandbox) -> bool:
    """Whether the sandbox can be reached, through the entry, its node and the relay."""
    try:
        return box.commands.run("true", request_timeout=10).exit_code == 0
    except Exception:
        return False


class Platform:
    """A platform on a state directory of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        # The SDK keeps its connections; waiting for them at each end would only make the tests longer.
        self.settings = "[proxy]\ndrain = 0.5\n"
        """Written to `config.toml` at each start."""

    def command(
        self, *arguments: str, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """`greenroom --state-dir … arguments`."""
        return greenroom("--state-dir", str(self.state), *arguments, check=check, **options)

    def up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start it on a free port and wait until it is ready; what it said."""
        self.state.mkdir(mode=0o700, exist_ok=True)
        (self.state / "config.toml").write_text(self.settings, encoding="utf-8")
        return self.command("up", "--detach", "--port", "0", *arguments)

    def down(self) -> subprocess.CompletedProcess[str]:
        """Stop it."""
        return self.command("down")

    def log(self, role: str) -> str:
        """What a role has logged so far."""
        return (self.state / "log" / f"{role}.log").read_text(encoding="utf-8", errors="replace")

    def env(self) -> dict[str, str]:
        """What `greenroom env` exports."""
        return dict(json.loads(self.command("env", "--json").stdout))

    def status(self) -> dict[str, Any]:
        """`greenroom status --json`, whatever state it is in."""
        return dict(json.loads(self.command("status", "--json", check=False).stdout))

    def role(self, name: str) -> dict[str, Any]:
        """A role's row of the status, for example `node-0`'s."""
        return next(row for row in self.status()["roles"] if row["name"] == name)

    def pid(self, role: str) -> int | None:
        """Process id of a role; None while it is not running."""
        found = self.role(role)["pid"]
        return None if found is None else int(found)

    def strike(self, role: str, *boxes: Sandbox, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a role a signal; return when its successor is up and these sandboxes can be reached again.

        A new process is not yet one that can be reached: the entry learns a node's new address a moment after the
        node is ready.
        """
        old = self.pid(role)
        assert old is not None
        os.kill(old, number)
        until(lambda: self.pid(role) not in (old, None) and self.status()["state"] == "up")
        for box in boxes:
            until(lambda box=box: answers(box))  # type: ignore[misc]

    def kill(self, pid: int) -> None:
        """End one of its processes by SIGKILL, and wait until it is gone."""
        process = psutil.Process(pid)
        process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(30)

    def vm_pids(self) -> set[int]:
        """QEMUs that belong to this platform's nodes, whoever their parent is now."""
        cgroups = Cgroups.detect()
        found: set[int] = set()
        for tag in self.tags():
            for name in cgroups.children(f"greenroom/{tag}"):
                found |= cgroups.pids(f"greenroom/{tag}/{name}")
        return found

    def tags(self) -> list[str]:
        """Tags of the nodes that ever ran here."""
        return [tag_of(home) for home in self.state.glob("node-*") if home.is_dir()]

    def leftovers(self) -> dict[str, list[str]]:
        """What of this platform is on the host, by kind; empty after a clean end.

        Looked for from the outside: processes by command line and open state directory, namespaces, cgroups,
        taps, mounts and overlays by name, uids by range.
        """
        here = str(self.state)
        found: dict[str, list[str]] = {
            "processes": [], "namespaces": [], "taps": [], "mounts": [], "overlays": [], "cgroups": [], "uids": []
        }  # fmt: skip
        for process in psutil.process_iter(["pid", "cmdline", "uids"]):
            words = " ".join(process.info["cmdline"] or [])
            if process.pid != os.getpid() and here in words:
                found["processes"].append(f"{process.pid} {words[:120]}")
        for tag in self.tags():
            found["namespaces"] += listing(f"gr-{tag}")
            cgroups = Cgroups.detect()
            found["cgroups"] += [f"{tag}/{name}" for name in cgroups.children(f"greenroom/{tag}")]
            found["cgroups"] += [
                name for name in cgroups.children("greenroom-services") if name.startswith(f"{tag}-")
            ]
            registry = Path("/run/greenroom/uids")
            found["uids"] += [
                f"block {entry.name} of {tag}"
                for entry in registry.glob("[0-9]*")
                if entry.read_text(encoding="utf-8").startswith(tag)
            ]
            found["mounts"] += [
                line
                for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
                if f"gr-{tag}" in line
            ]
        found["mounts"] += [
            line for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines() if here in line
        ]
        found["overlays"] += [str(path) for path in self.state.rglob("*.qcow2")]
        links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout)
        found["taps"] += [link["ifname"] for link in links if link["ifname"].startswith("tap")]
        return {kind: things for kind, things in found.items() if things}


@contextlib.contextmanager
def running(place: Path, *options: str) -> Iterator[Platform]:
    """A platform that is up for the length of a block, of which nothing is left afterwards."""
    made = Platform(place)
    made.up(*options)
    try:
        yield made
    finally:
        made.down()
    assert made.leftovers() == {}
