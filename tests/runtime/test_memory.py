"""Sealed memory: holes stay holes, content stays content, and nothing can be changed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.runtime import memory

PAGE = 4096


@given(st.dictionaries(st.integers(0, 255), st.binary(min_size=1, max_size=64), max_size=12))
@settings(deadline=None, max_examples=40)
def test_saved_and_loaded_is_the_same(pages: dict[int, bytes]) -> None:
    size = 256 * PAGE
    fd = memory.new("test", size)
    path = Path(f"/tmp/greenroom-test-memory-{os.getpid()}")
    try:
        for page, content in pages.items():
            os.pwrite(fd, content, page * PAGE)
        copied = memory.save(fd, path)
        assert copied <= size
        loaded = memory.load(path, "again")
        try:
            assert os.pread(loaded, size, 0) == os.pread(fd, size, 0)
        finally:
            os.close(loaded)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def test_holes_take_no_room(tmp_path: Path) -> None:
    fd = memory.new("test", 64 << 20)
    os.pwrite(fd, b"x", 32 << 20)
    os.pwrite(fd, b"\0" * PAGE, 48 << 20)
    assert memory.save(fd, tmp_path / "ram") <= 256 << 10
    assert (tmp_path / "ram").stat().st_blocks * 512 <= 1 << 20
    os.close(fd)


def test_a_loaded_memory_cannot_be_changed(tmp_path: Path) -> None:
    fd = memory.new("test", PAGE)
    memory.save(fd, tmp_path / "ram")
    os.close(fd)
    sealed = memory.load(tmp_path / "ram", "sealed")
    try:
        for attempt in (
            lambda: os.pwrite(sealed, b"x", 0),
            lambda: os.ftruncate(sealed, 0),
            lambda: mmap.mmap(sealed, PAGE, mmap.MAP_SHARED, mmap.PROT_WRITE),
        ):
            with pytest.raises(PermissionError):
                attempt()
        with mmap.mmap(sealed, PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private:
            private[0:1] = b"x"
        assert os.pread(sealed, 1, 0) == b"\0"
    finally:
        os.close(sealed)


def test_it_cannot_be_sealed_while_someone_may_still_write(tmp_path: Path) -> None:
    fd = memory.new("test", PAGE)
    with mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_WRITE), pytest.raises(OSError, match="busy"):
        memory.seal(fd)
    os.close(fd)


@given(st.dictionaries(st.integers(0, 255), st.binary(min_size=1, max_size=64), max_size=12))
@settings(deadline=None, max_examples=40)
def test_a_copy_has_the_same_content_and_the_same_holes(pages: dict[int, bytes]) -> None:
    size = 256 * PAGE
    fd = memory.new("test", size)
    try:
        for page, content in pages.items():
            os.pwrite(fd, content, page * PAGE)
        again = memory.copy(fd, "again")
        try:
            assert os.pread(again, size, 0) == os.pread(fd, size, 0)
            assert list(memory.extents(again)) == list(memory.extents(fd))
            os.pwrite(again, b"mine", 0)
        finally:
            os.close(again)
    finally:
        os.close(fd)
