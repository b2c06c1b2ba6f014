"""The pages of guest RAM that a QEMU has for itself, found and read from outside (pagemap, process_vm_readv(2)).

A VM maps its golden's RAM privately, so what its guest has written is just what is present (or swapped out) in
that mapping without being a page of the file. Linux 6.7 and later say so in one `PAGEMAP_SCAN` (0.3 ms for
512 MiB); the plain `/proc/PID/pagemap` is read where that is missing, as a string, never page by page.

The VM must stand still. Needs root (CAP_SYS_PTRACE, CAP_SYS_ADMIN); the VM is not touched and learns nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from greenroom.errors import RuntimeFailure
from greenroom.runtime.pages import PAGE, Run, joined, of_mask

# linux/fs.h: _IOWR('f', 16, struct pm_scan_arg), and the categories of a page.
_PAGEMAP_SCAN = 0xC0606610
_SCAN_ARG = struct.Struct("12Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS = 4096
"""Runs taken from one scan."""
_IOV_MAX = 1024
_CHUNK = 1 << 20
_VECTOR = 256
"""Pages in one piece of a read, so that a whole call stays below the 2 GiB that the kernel moves at once."""

_TABLE = bytes(int(bool(top & 0xC0) and not top & 0x20) for top in range(256))
"""From the highest byte of a pagemap entry: present (bit 63) or swapped (62), and not of the file (61); proc(5)."""

_MAPS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ (\d+) +/memfd:")
_libc = ctypes.CDLL(None, use_errno=True)


class Mapping(NamedTuple):
    """A part of guest RAM in QEMU's address space: addresses and the offset in the file, in bytes."""

    start: int
    end: int
    offset: int


class Ram(NamedTuple):
    """Guest RAM as QEMU has mapped it."""

    mappings: list[Mapping]
    shared: bool
    """The file is the VM's own and holds all of its RAM; else it is a golden's or a snapshot's."""

    def open(self, pid: int) -> int:
        """The file that is mapped, for reading; the caller closes it."""
        start, end, _ = self.mappings[0]
        return os.open(f"/proc/{pid}/map_files/{start:x}-{end:x}", os.O_RDONLY | os.O_CLOEXEC)


def guest_ram(pid: int, size: int) -> Ram:
    """Find guest RAM of `size` bytes in the address space of QEMU `pid`. Raises RuntimeFailure."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RuntimeFailure(f"the memory of a VM cannot be read: {error.strerror}") from error
    files: dict[tuple[str, str], list[Mapping]] = {}
    for line in text.splitlines():
        if match := _MAPS.match(line):
            start, end, mode, offset, inode = match.groups()
            part = Mapping(int(start, 16), int(end, 16), int(offset, 16))
            files.setdefault((inode, mode[3]), []).append(part)
    for (_, kind), parts in files.items():
        if sum(part.end - part.start for part in parts) == size:
            return Ram(sorted(parts, key=lambda part: part.offset), kind == "s")
    raise RuntimeFailure("the guest's RAM was not found in its VM's memory")


def private_runs(pid: int, ram: Ram) -> list[Run]:
    """The pages that the VM has changed, as page numbers of guest RAM."""
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        try:
            return _each(ram, lambda part: scan(pagemap.fileno(), part))
        except OSError:  # an older kernel
            return _each(ram, lambda part: scan_plain(pagemap.fileno(), part))


def _each(ram: Ram, look: Callable[[Mapping], list[Run]]) -> list[Run]:
    return [run for part in ram.mappings for run in joined(look(part))]


def scan(pagemap: int, part: Mapping) -> list[Run]:
    """The private pages of a mapping by `PAGEMAP_SCAN`. Raises OSError where the kernel has none."""
    regions = array("Q", bytes(24 * _REGIONS))
    address, _ = regions.buffer_info()
    found: list[Run] = []
    position = part.start
    shift = part.offset // PAGE - part.start // PAGE
    while position < part.end:
        argument = bytearray(
            _SCAN_ARG.pack(
                _SCAN_ARG.size, 0, position, part.end, 0, address, _REGIONS, 0,
                _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_PRESENT,
            )
        )  # fmt: skip
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument, True)
        for start, end in zip(regions[0 : 3 * count : 3], regions[1 : 3 * count : 3], strict=True):
            found.append(Run(start // PAGE + shift, (end - start) // PAGE))
        if count < _REGIONS:
            break
        # Not by `walk_end`: the kernel leaves an earlier address there when it has come to the end (6.18).
        position = regions[3 * count - 2]
    return found


def scan_plain(pagemap: int, part: Mapping) -> list[Run]:
    """The same from the plain pagemap: 8 bytes a page, of which the highest decides."""
    found: list[Run] = []
    step = 64 << 20
    for start in range(part.start, part.end, step):
        end = min(start + step, part.end)
        entries = os.pread(pagemap, (end - start) // PAGE * 8, start // PAGE * 8)
        if len(entries) != (end - start) // PAGE * 8:
            raise RuntimeFailure("the memory of a VM cannot be read: it has ended")
        found += of_mask(entries[7::8].translate(_TABLE), (start - part.start + part.offset) // PAGE)
    return found


class Buffer:
    """Memory of ours that guest pages are read into. With `populate` it is there before the VM must wait for it.

    Of small pages: huge ones come from what the host has long had free, and on a host that is itself a VM whose free
    memory goes back to its own host (free page reporting) that costs 1.5 ms a MiB to have again.
    """

    def __init__(self, size: int, *, populate: bool = False) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if populate else 0)
        self._map = mmap.mmap(-1, max(size, PAGE), flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_NOHUGEPAGE)

    def __len__(self) -> int:
        return len(self._map)

    def read(self, pid: int, ram: Ram, runs: Sequence[Run]) -> None:
        """Pack the pages of `runs` one after the other. Raises RuntimeFailure when the VM has ended."""
        vectors: list[tuple[int, int]] = []
        at = 0
        for part in ram.mappings:
            base = part.start - part.offset
            last = (part.offset + part.end - part.start) // PAGE
            while at < len(runs) and runs[at].first < last:
                first, count = runs[at]
                vectors += [
                    (base + page * PAGE, min(_VECTOR, first + count - page) * PAGE)
                    for page in range(first, first + count, _VECTOR)
                ]
                at += 1
        # The address alone: what is kept of an error must not keep the memory lent, which could not be closed then.
        target = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        position = 0
        for index in range(0, len(vectors), _IOV_MAX):
            batch = vectors[index : index + _IOV_MAX]
            wanted = sum(length for _, length in batch)
            _readv(pid, target + position, batch, wanted)
            position += wanted

    def views(self, offset: int, length: int) -> Iterator[memoryview]:
        """`length` bytes from `offset` on, in chunks of at most 1 MiB; release them before `close`."""
        for start in range(offset, offset + length, _CHUNK):
            yield memoryview(self._map)[start : min(start + _CHUNK, offset + length)]

    def close(self) -> None:
        self._map.close()


def _readv(pid: int, address: int, vectors: Sequence[tuple[int, int]], wanted: int) -> None:
    """Read pieces of another process's memory, `wanted` bytes in all, to `address` in ours."""
    call = _libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    call.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    ]  # fmt: skip
    # struct iovec is an address and a length; an array of such pairs is just these numbers in a row.
    local = array("Q", (address, wanted))
    remote = array("Q", [number for vector in vectors for number in vector])
    got = int(call(pid, local.buffer_info()[0], 1, remote.buffer_info()[0], len(vectors), 0))
    if got < 0:
        raise RuntimeFailure(
            f"the memory of a VM could not be read: {os.strerror(ctypes.get_errno())}; it may have ended"
        )
    if got != wanted:
        raise RuntimeFailure("the memory of a VM could not be read in whole; it may have ended")
