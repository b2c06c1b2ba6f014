"""Private pages of a mapping, found and read from outside: in this process and in another one."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.errors import RuntimeFailure
from greenroom.runtime import memory, pagemap, pages
from greenroom.runtime.pagemap import Buffer
from greenroom.runtime.pages import PAGE, Run

SIZE = 64 << 20
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="reading other processes' memory needs root")


class Clone:
    """A private mapping of a sealed file in this process, as a VM has one."""

    def __init__(self, written: list[int], read: range) -> None:
        fd = memory.new("clone-of", SIZE)
        os.pwrite(fd, b"g" * (20 << 20), 0)
        memory.seal(fd)
        self.map = mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        for number in read:
            assert self.map[number * PAGE] in b"g\0"
        for number in written:
            self.map[number * PAGE : number * PAGE + 8] = number.to_bytes(8, "big")
        self.ram = pagemap.guest_ram(os.getpid(), SIZE)


def single(runs: list[Run]) -> list[int]:
    return [number for run in runs for number in range(run.first, run.first + run.length)]


def scanned(clone: Clone) -> list[list[Run]]:
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        return [
            [run for part in clone.ram.mappings for run in pages.joined(look(file.fileno(), part))]
            for look in (pagemap.scan_plain, pagemap.scan)
        ]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_was_written_is_found_and_what_was_read_is_not(step: int) -> None:
    """With every second page there are more runs than one call of the kernel gives, and than its buffer holds."""
    written = list(range(0, SIZE // PAGE, step))
    clone = Clone(written, range(SIZE // PAGE))
    try:
        plain, quick = scanned(clone)
    except OSError as error:
        assert error.errno in (errno.ENOTTY, errno.EINVAL)  # noqa: PT017 (a kernel before 6.7)
        pytest.skip("this kernel has no PAGEMAP_SCAN")
    assert single(plain) == written
    assert quick == plain


def test_without_the_scan_the_plain_map_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written = sorted({number * 7919 % (SIZE // PAGE) for number in range(700)})
    clone = Clone(written, range(0, 9000, 3))

    def refuse(*_args: object) -> int:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    expected = pagemap.private_runs(os.getpid(), clone.ram)
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert single(pagemap.private_runs(os.getpid(), clone.ram)) == single(expected) == written


def test_a_buffer_is_there_before_it_is_used() -> None:
    before = resident()
    buffer = Buffer(64 << 20, populate=True)
    try:
        assert resident() - before > 60 << 20
    finally:
        buffer.close()


def resident() -> int:
    """Bytes of this process's own memory that are present."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * PAGE


def test_pages_are_read_in_order() -> None:
    written = sorted({number * 7919 % (SIZE // PAGE) for number in range(3000)})
    clone = Clone(written, range(0))
    buffer = Buffer(0)
    try:
        runs = pagemap.private_runs(os.getpid(), clone.ram)
        buffer.close()
        buffer = Buffer(pages.total(runs) * PAGE, populate=True)
        buffer.read(os.getpid(), clone.ram, runs)
        for place, number in enumerate(written):
            for view in buffer.views(place * PAGE, PAGE):
                assert bytes(view) == clone.map[number * PAGE : (number + 1) * PAGE]
                assert int.from_bytes(view[:8], "big") == number
                view.release()
        chunks = [bytes(view) for view in buffer.views(PAGE, len(buffer) - PAGE)]
        assert b"".join(chunks) == b"".join(
            clone.map[number * PAGE : (number + 1) * PAGE] for number in written[1:]
        )
        assert max(map(len, chunks)) <= 1 << 20
    finally:
        buffer.close()


def test_another_process_is_read_and_one_that_ended_is_an_error() -> None:
    script = (
        "import mmap, os, sys\n"
        f"fd = os.memfd_create('ram'); os.ftruncate(fd, {SIZE})\n"
        f"m = mmap.mmap(fd, {SIZE}, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)\n"
        f"m[7 * {PAGE}:7 * {PAGE} + 5] = b'seven'\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"ready\n"
        ram = pagemap.guest_ram(other.pid, SIZE)
        assert ram.shared is False
        assert pagemap.private_runs(other.pid, ram) == [Run(7, 1)]
        buffer = Buffer(PAGE)
        try:
            buffer.read(other.pid, ram, [Run(7, 1)])
            assert [bytes(view) for view in buffer.views(0, 5)] == [b"seven"]
            fd = ram.open(other.pid)
            assert os.pread(fd, 5, 7 * PAGE) == b"\0" * 5
            os.close(fd)
            other.stdin.close()
            other.wait()
            with pytest.raises(RuntimeFailure, match="ended") as caught:
                buffer.read(other.pid, ram, [Run(7, 1)])
        finally:
            buffer.close()
        # It could be closed while somebody looked at the error.
        assert caught.value.__traceback__ is not None


def test_ram_of_another_size_is_not_found() -> None:
    clone = Clone([1], range(0))
    assert clone.ram.mappings
    with pytest.raises(RuntimeFailure, match="not found"):
        pagemap.guest_ram(os.getpid(), SIZE + (1 << 20))
