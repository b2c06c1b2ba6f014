"""Running the outside tools that build images, with a deadline and an error a person can act on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
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


_running: set[subprocess.Popen[bytes]] = set()
_interrupted = threading.Event()


def interrupt() -> None:
    """End the tools that run now, and let no further one start: this process is about to leave."""
    _interrupted.set()
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


@contextlib.contextmanager
def _started(
    argv: Sequence[str], stdin: int, stdout: int, cwd: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """A tool in a process group of its own, which does not outlive the block."""
    if _interrupted.is_set():
        raise SetupError("interrupted")
    command = [find(argv[0]), *argv[1:]]
    with subprocess.Popen(
        command, cwd=cwd, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        _running.add(process)
        try:
            yield process
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            _running.discard(process)


def run(argv: Sequence[str], *, deadline: float, cwd: Path | None = None, stdin: bytes | None = None) -> str:
    """Run a tool to its end and return its standard output.

    Raises SetupError with the end of its error output when it fails or takes longer than `deadline` seconds.
    """
    source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    with _started(argv, source, subprocess.PIPE, cwd) as process:
        try:
            output, errors = process.communicate(stdin, timeout=deadline)
        except subprocess.TimeoutExpired as error:
            raise SetupError(f"{argv[0]} took longer than {deadline:.0f} s and was stopped") from error
    if process.returncode != 0:
        tail = errors.decode(errors="replace").strip()[-600:]
        raise SetupError(f"{argv[0]} failed with status {process.returncode}: {tail}")
    return output.decode(errors="replace")


def follow(argv: Sequence[str], on_line: Callable[[str], None], *, deadline: float) -> None:
    """Run a tool and hand each line of its error output to `on_line`; fails as `run` does."""
    tail: list[str] = []
    with _started(argv, subprocess.DEVNULL, subprocess.DEVNULL, None) as process:
        alarm = threading.Timer(deadline, os.killpg, (process.pid, signal.SIGKILL))
        alarm.start()
        try:
            assert process.stderr is not None  # noqa: S101
            for raw in process.stderr:
                line = raw.decode(errors="replace").rstrip()
                tail = [*tail[-20:], line]
                on_line(line)
            status = process.wait()
        finally:
            alarm.cancel()
    if status != 0:
        raise SetupError(f"{argv[0]} failed with status {status}: " + " / ".join(tail)[-600:])
