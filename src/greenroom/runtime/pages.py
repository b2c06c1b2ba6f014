"""Pages of guest RAM as sorted runs: pure arithmetic, and the two things done with it on memfds.

A snapshot keeps the pages by which its RAM differs from the golden's, so `laid` merges the pages of a snapshot
with those that a child of it has changed, `differing` finds them where nobody kept a list, and `lay` makes the
child's RAM of the golden's. `pagemap` finds and reads the pages of a VM that is alive.
"""

from __future__ import annotations

import os
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

PAGE = 4096
_CHUNK = 1 << 20
_ONES = re.compile(rb"\x01+")


class Run(NamedTuple):
    """`length` pages from page number `first` on. Lists of runs are sorted and do not overlap."""

    first: int
    length: int


class Piece(NamedTuple):
    """A run of a merged list, and where its content is found."""

    first: int
    length: int
    upper: bool
    """From the upper list; else from the lower one."""
    offset: int
    """Page number within the packed pages of that list."""


def total(runs: Iterable[Run]) -> int:
    """Pages in all runs."""
    return sum(run.length for run in runs)


def of_mask(mask: bytes, first: int = 0) -> list[Run]:
    """The runs of ones in a string that has a byte 0 or 1 for each page; its beginning is page `first`."""
    return [Run(first + found.start(), found.end() - found.start()) for found in _ONES.finditer(mask)]


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same pages in as few runs as possible."""
    result: list[Run] = []
    for run in runs:
        if result and result[-1].first + result[-1].length == run.first:
            result[-1] = Run(result[-1].first, result[-1].length + run.length)
        else:
            result.append(run)
    return result


def laid(lower: Sequence[Run], upper: Sequence[Run]) -> list[Piece]:
    """What is seen when the pages of `upper` are laid over those of `lower`, in order of page numbers."""
    pieces: list[Piece] = []
    position = 0
    for first, count in upper:
        pieces.append(Piece(first, count, True, position))
        position += count
    position, at = 0, 0
    for first, count in lower:
        cursor, end = first, first + count
        while at < len(upper) and upper[at].first + upper[at].length <= first:
            at += 1
        look = at
        while cursor < end:
            if look == len(upper) or upper[look].first >= end:
                pieces.append(Piece(cursor, end - cursor, False, position + cursor - first))
                break
            above, width = upper[look]
            if above > cursor:
                pieces.append(Piece(cursor, above - cursor, False, position + cursor - first))
            cursor = max(cursor, above + width)
            look += 1
        position += count
    pieces.sort()
    return pieces


def packed_together(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same pages in as few pieces as possible, where it does not matter where in RAM they belong."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and last.upper and piece.upper and last.offset + last.length == piece.offset:
            last = last._replace(length=last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def encode(runs: Iterable[Run]) -> bytes:
    """Runs as pairs of little-endian 64-bit numbers."""
    numbers = array("Q", [number for run in runs for number in run])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def decode(raw: bytes, pages: int) -> list[Run]:
    """What `encode` gave, for RAM of so many `pages`. Raises ValueError when it is no list of runs of that RAM."""
    if len(raw) % 16:
        raise ValueError("it is cut off")
    numbers = array("Q", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    runs, free = [], 0
    for first, count in zip(numbers[::2], numbers[1::2], strict=True):
        if first < free or count == 0 or count > pages - first:
            raise ValueError(f"its run of {count} pages at {first} cannot be")
        runs.append(Run(first, count))
        free = first + count
    return runs


def differing(one: int, other: int) -> list[Run]:
    """The pages by which two memfds of the same size differ. Reads all of both: 50 to 100 ms for 256 MiB.

    By read(2), because a private mapping would fill the holes of a memfd that are only looked at.
    """
    size = os.fstat(one).st_size
    if os.fstat(other).st_size != size:
        raise ValueError("RAM of two sizes cannot be compared")
    found: list[Run] = []
    for position in range(0, size, _CHUNK):
        left, right = os.pread(one, _CHUNK, position), os.pread(other, _CHUNK, position)
        if left != right:
            mask = bytes(left[at : at + PAGE] != right[at : at + PAGE] for at in range(0, len(left), PAGE))
            found += of_mask(mask, position // PAGE)
    return joined(found)


def content(ram: int, run: Run) -> Iterator[bytes]:
    """The bytes of a run of a memfd, in chunks of at most 1 MiB."""
    position, end = run.first * PAGE, (run.first + run.length) * PAGE
    while position < end:
        data = os.pread(ram, min(_CHUNK, end - position), position)
        if not data:
            raise ValueError("the RAM ends before its last page")
        yield data
        position += len(data)


def lay(ram: int, runs: Iterable[Run], packed: int) -> None:
    """Write the pages packed in one file to their places in a memfd that is not sealed.

    Raises ValueError when they are not as many as the runs have, OSError.
    """
    buffer = memoryview(bytearray(_CHUNK))
    rest = buffer[:0]
    read = 0
    for first, count in runs:
        position, end = first * PAGE, (first + count) * PAGE
        while position < end:
            if not rest:
                # Into the same memory each time: what it would cost to have new memory mapped is more than the copy.
                rest = buffer[: os.preadv(packed, [buffer], read)]
                read += len(rest)
                if not rest:
                    raise ValueError("pages are missing")
            done = os.pwrite(ram, rest[: end - position], position)
            position, rest = position + done, rest[done:]
    if rest or os.pread(packed, 1, read):
        raise ValueError("there are more pages than runs")
