"""kubectl as users run it, with the kubeconfig that `greenroom env` writes and a home of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.waiting import until_true as until

KUBECTL = shutil.which("kubectl.1.32") or shutil.which("kubectl")
"""A kubectl, of version 1.32 where there is one."""


class Kubectl:
    """kubectl pointed at one server by a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        assert KUBECTL is not None
        self._program = KUBECTL
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(kubeconfig.parent),
            "KUBECONFIG": str(kubeconfig),
        }

    def run(self, *arguments: str, given: object = None, status: int = 0) -> str:
        """Run a command to its end; what it wrote, to either stream. `given` are objects for its standard input."""
        done = subprocess.run(
            [self._program, *arguments], input=_documents(given), env=self._environment,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def json(self, *arguments: str) -> Any:
        """What a command prints with `-o json`."""
        return json.loads(self.run(*arguments, "-o", "json"))

    def raw(self, path: str, body: dict[str, Any]) -> Any:
        """POST a body to a path; the answer."""
        return json.loads(self.run("create", "--raw", path, "-f", "-", given=body))

    @contextlib.contextmanager
    def following(self, *arguments: str) -> Iterator[Following]:
        """A command that runs until the block is left."""
        running = subprocess.Popen(
            [self._program, *arguments], env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        following = Following(running)
        try:
            yield following
        finally:
            running.terminate()
            following.close()


class Following:
    """A command that runs, and the lines that it has written so far."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self._running = running
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._running.stdout is not None
        self.lines.extend(iter(self._running.stdout.readline, ""))

    def words(self) -> list[list[str]]:
        """The lines in words."""
        return [line.split() for line in self.lines]

    def until(self, *words: str) -> None:
        """Wait for a line that begins with these words."""
        until(lambda: any(line[: len(words)] == list(words) for line in self.words()))

    def ended(self) -> int:
        """Wait until it has ended by itself; its exit status."""
        status = self._running.wait(60)
        self._reader.join(60)
        return status

    def close(self) -> None:
        """Wait until it has ended and all that it wrote is there."""
        self.ended()
        assert self._running.stdout is not None
        self._running.stdout.close()


def _documents(given: object) -> str:
    """Objects as kubectl reads several: one JSON document after the other."""
    if given is None:
        return ""
    every = given if isinstance(given, list) else [given]
    return "\n".join(json.dumps(each) for each in every)
