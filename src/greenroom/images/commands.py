"""Running the outside tools that build images, with a deadline and an error a person can act on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from greenroom.errors import SetupError

_PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "depmod": "kmod",
    "modprobe": "kmod",
    "cpio": "cpio",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
}


def find(tool: str) -> str:
    """Full path of `tool`. Raises SetupError naming the Debian package that has it."""
    path = shutil.which(tool, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        package = _PACKAGES.get(tool, tool)
        raise SetupError(f"{tool} is not installed; run: apt-get install --no-install-recommends {package}")
    return path


def run(argv: Sequence[str], *, deadline: float, cwd: Path | None = None, stdin: bytes | None = None) -> str:
    """Run a tool to its end and return its standard output.

    Raises SetupError with the end of its error output when it fails or takes longer than `deadline` seconds.
    """
    command = [find(argv[0]), *argv[1:]]
    try:
        done = subprocess.run(
            command, cwd=cwd, input=stdin, capture_output=True, timeout=deadline, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{argv[0]} took longer than {deadline:.0f} s and was stopped") from error
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace").strip()[-600:]
        raise SetupError(f"{argv[0]} failed with status {done.returncode}: {tail}")
    return done.stdout.decode(errors="replace")


def follow(argv: Sequence[str], on_line: Callable[[str], None], *, deadline: float) -> None:
    """Run a tool and hand each line of its error output to `on_line`; fails as `run` does."""
    command = [find(argv[0]), *argv[1:]]
    tail: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        assert process.stderr is not None  # noqa: S101
        for line in process.stderr:
            tail = [*tail[-20:], line.rstrip()]
            on_line(line.rstrip())
        try:
            status = process.wait(timeout=deadline)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise SetupError(f"{argv[0]} did not end within {deadline:.0f} s") from error
    if status != 0:
        raise SetupError(f"{argv[0]} failed with status {status}: " + " / ".join(tail)[-600:])
