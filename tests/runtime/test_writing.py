"""Writing with a digest beside it."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.runtime import writing
from greenroom.runtime.pagemap import Buffer
from greenroom.runtime.pages import PAGE
from greenroom.runtime.writing import Chunk, batches, flush, written


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few bytes, writes of fewer."""
    monkeypatch.setattr(writing, "_BATCH", 10)
    monkeypatch.setattr(writing, "_IOV_MAX", 4)
    vector = os.writev

    def some(fd: int, views: list[memoryview]) -> int:
        return vector(fd, [views[0][:3]] if len(views[0]) > 3 else views[:2])

    monkeypatch.setattr(os, "writev", some)


@pytest.mark.usefixtures("small")
@given(chunks=st.lists(st.binary(max_size=25), max_size=30), views=st.booleans())
def test_all_is_written_and_digested(chunks: list[bytes], views: bool) -> None:
    given_chunks: list[Chunk] = [memoryview(chunk) if views else chunk for chunk in chunks]
    fd = os.memfd_create("written")
    try:
        size, digest = written(fd, iter(given_chunks))
        content = b"".join(chunks)
        assert os.pread(fd, len(content) + 1, 0) == content
        assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())
    finally:
        os.close(fd)


@pytest.mark.usefixtures("small")
@given(st.lists(st.binary(max_size=25), max_size=30))
def test_batches_are_bounded_and_lose_nothing(chunks: list[bytes]) -> None:
    parts = list(batches(chunks))
    assert [chunk for part in parts for chunk in part] == chunks
    assert all(len(part) <= 4 and sum(map(len, part[:-1])) < 10 for part in parts)


@pytest.mark.parametrize("fails_at", [0, 5])
def test_views_are_released_whatever_happens(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    monkeypatch.setattr(writing, "_BATCH", 10)
    memory = Buffer(PAGE)
    left = [fails_at]
    vector = os.writev

    def full(fd: int, views: list[memoryview]) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return vector(fd, views)

    monkeypatch.setattr(os, "writev", full)
    fd = os.memfd_create("written")
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            written(fd, (view for at in range(0, 100, 10) for view in memory.views(at, 10)))
        # What is still lent cannot be closed, also while somebody looks at the error.
        memory.close()
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(fd)


def test_files_and_directories_are_flushed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    flush(tmp_path / "file")
    flush(tmp_path)
    with pytest.raises(FileNotFoundError):
        flush(tmp_path / "none")
