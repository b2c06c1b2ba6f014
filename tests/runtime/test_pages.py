"""Runs of pages: merged, compared, encoded and laid over as a dictionary of single pages would be."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.runtime import memory, pages
from greenroom.runtime.pages import PAGE, Piece, Run

TOTAL = 64
numbers = st.sets(st.integers(0, TOTAL - 1))


def runs_of(numbers: set[int]) -> list[Run]:
    return pages.of_mask(bytes(int(number in numbers) for number in range(TOTAL)))


def numbers_of(runs: list[Run]) -> list[int]:
    return [number for run in runs for number in range(run.first, run.first + run.length)]


@given(numbers)
def test_a_mask_and_its_runs_say_the_same(some: set[int]) -> None:
    runs = runs_of(some)
    assert numbers_of(runs) == sorted(some)
    assert pages.total(runs) == len(some)
    assert pages.joined(Run(number, 1) for number in sorted(some)) == runs
    assert pages.decode(pages.encode(runs), TOTAL) == runs


@given(numbers, numbers)
def test_laid_over_is_what_a_dictionary_gives(lower: set[int], upper: set[int]) -> None:
    packed = {False: sorted(lower), True: sorted(upper)}
    seen = {
        piece.first + step: (piece.upper, packed[piece.upper][piece.offset + step])
        for piece in pages.laid(runs_of(lower), runs_of(upper))
        for step in range(piece.length)
    }
    assert list(seen) == sorted(lower | upper)
    assert seen == {number: (number in upper, number) for number in lower | upper}


@given(numbers, numbers)
def test_packed_together_is_the_same_content_in_fewer_pieces(lower: set[int], upper: set[int]) -> None:
    def content(pieces: Iterable[Piece]) -> list[tuple[bool, int]]:
        return [(piece.upper, piece.offset + step) for piece in pieces for step in range(piece.length)]

    merged = pages.laid(runs_of(lower), runs_of(upper))
    packed = list(pages.packed_together(merged))
    assert content(packed) == content(merged)
    assert len([piece for piece in packed if piece.upper]) <= len(lower) + 1


def test_pages_of_the_upper_list_win_at_the_same_place() -> None:
    assert pages.laid([Run(2, 4)], [Run(3, 2)]) == [
        Piece(2, 1, False, 0), Piece(3, 2, True, 0), Piece(5, 1, False, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "runs",
    [
        [Run(0, 0)],
        [Run(TOTAL, 1)],
        [Run(TOTAL - 1, 2)],
        [Run(0, 1 << 63)],
        [Run(4, 2), Run(5, 1)],
        [Run(4, 1), Run(2, 1)],
    ],
)
def test_what_cannot_be_runs_of_this_ram_is_refused(runs: list[Run]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        pages.decode(pages.encode(runs), TOTAL)


@given(st.binary(max_size=64))
def test_any_bytes_are_runs_or_refused(raw: bytes) -> None:
    try:
        runs = pages.decode(raw, TOTAL)
    except ValueError:
        return
    assert pages.encode(runs) == raw
    assert numbers_of(runs) == sorted(set(numbers_of(runs)))


@given(st.dictionaries(st.integers(0, TOTAL - 1), st.sampled_from([b"", b"x", b"y" * PAGE])), numbers)
@settings(deadline=None, max_examples=50)
def test_ram_is_its_golden_with_the_pages_that_differ_laid_over(
    changes: dict[int, bytes], filled: set[int]
) -> None:
    golden, ram = memory.new("golden", TOTAL * PAGE), -1
    try:
        for number in filled:
            os.pwrite(golden, b"g" * PAGE, number * PAGE)
        ram = memory.copy(golden, "ram")
        for number, content in changes.items():
            os.pwrite(ram, content.ljust(PAGE, b"\0"), number * PAGE)
        runs = pages.differing(ram, golden)
        different = {
            number
            for number, content in changes.items()
            if content.ljust(PAGE, b"\0") != (b"g" if number in filled else b"\0") * PAGE
        }
        assert numbers_of(runs) == sorted(different)
        packed = b"".join(chunk for run in runs for chunk in pages.content(ram, run))
        again = memory.copy(golden, "again")
        try:
            file = filled_with(packed)
            try:
                pages.lay(again, runs, file)
            finally:
                os.close(file)
            assert os.pread(again, TOTAL * PAGE, 0) == os.pread(ram, TOTAL * PAGE, 0)
        finally:
            os.close(again)
    finally:
        os.close(golden)
        if ram >= 0:
            os.close(ram)


@pytest.mark.parametrize(("given", "says"), [(PAGE - 1, "missing"), (PAGE + 1, "more pages")])
def test_too_few_or_too_many_pages_are_noticed(given: int, says: str) -> None:
    ram, packed = memory.new("ram", TOTAL * PAGE), filled_with(b"x" * given)
    try:
        with pytest.raises(ValueError, match=says):
            pages.lay(ram, [Run(1, 1)], packed)
    finally:
        os.close(ram)
        os.close(packed)


def filled_with(content: bytes) -> int:
    """A file with this content; the caller closes it."""
    fd = os.memfd_create("packed")
    os.write(fd, content)
    return fd


def test_ram_of_another_size_is_not_compared() -> None:
    one, other = memory.new("one", PAGE), memory.new("other", 2 * PAGE)
    try:
        with pytest.raises(ValueError, match="two sizes"):
            pages.differing(one, other)
    finally:
        os.close(one)
        os.close(other)
