"""The log of a command's output: what it keeps, what it gives up, what it refuses to give up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.guest.outputs import MAX_RUNS, SEGMENT, Budget, Limits, LostOutputError, OutputLog

MIB = 1024 * 1024


@dataclass
class Disk:
    """A file in memory, and every byte ever written to the log beside it."""

    log: OutputLog
    file: bytearray = field(default_factory=bytearray)
    all: bytearray = field(default_factory=bytearray)
    names: list[tuple[int, str]] = field(default_factory=list)
    works: bool = True

    def write(self, name: str, data: bytes) -> None:
        if not self.names or self.names[-1][1] != name:
            self.names.append((len(self.all), name))
        self.all += data
        self.log.append(name, data)
        self.spill()

    def spill(self) -> None:
        while (spill := self.log.next_spill()) is not None:
            if self.works:
                assert len(spill.data) == SEGMENT
                self.file[spill.position : spill.position + SEGMENT] = spill.data.ljust(SEGMENT)
            self.log.spilled(self.works)

    def read(self, offset: int) -> list[tuple[str, bytes]]:
        """Everything from an offset on."""
        found: list[tuple[str, bytes]] = []
        while (piece := self.log.locate(offset, 100_000)) is not None:
            assert piece.offset == offset
            data = piece.data
            if data is None:
                data = bytes(self.file[piece.position : piece.position + piece.length])
            assert data
            found.append((piece.name, data))
            offset += len(data)
        return found

    def name_at(self, offset: int) -> str:
        return next(name for start, name in reversed(self.names) if start <= offset)

    def check(self) -> None:
        """What is kept is what was written."""
        assert self.log.end == len(self.all)
        offset = self.log.start
        for name, data in self.read(offset):
            assert data == self.all[offset : offset + len(data)]
            assert name == self.name_at(offset)
            offset += len(data)
        assert offset == len(self.all)
        if self.log.start:
            with pytest.raises(LostOutputError) as lost:
                self.log.locate(self.log.start - 1, 1)
            assert lost.value.start == self.log.start


def disk(lossless: bool = False, **limits: int) -> Disk:
    return Disk(OutputLog(Budget(Limits(**limits)), lossless=lossless))


def pattern(size: int, seed: int = 0) -> bytes:
    return bytes((seed + number * 7 + number // 251) % 256 for number in range(4096)) * (size // 4096 + 1)


def test_a_little_output_stays_in_memory() -> None:
    place = disk()
    place.write("stdout", b"one")
    place.write("stderr", b"two")
    place.write("stdout", b"three")
    assert place.read(0) == [("stdout", b"one"), ("stderr", b"two"), ("stdout", b"three")]
    assert place.read(4) == [("stderr", b"wo"), ("stdout", b"three")]
    assert place.log.locate(11, 10) is None
    assert not place.file


def test_at_least_a_mebibyte_stays_in_memory_and_the_rest_goes_to_disk() -> None:
    place = disk()
    for number in range(80):
        place.write("stdout", pattern(99_999, number)[:99_999])
    assert MIB <= place.log.statistics()["memory"] <= MIB + 2 * SEGMENT
    assert place.log.start == 0
    place.check()


def test_the_oldest_output_goes_first_and_the_file_is_bounded() -> None:
    place = disk(disk=2 * MIB)
    for number in range(100):
        place.write("stdout", pattern(99_999, number)[:99_999])
    assert len(place.file) == 2 * MIB
    assert place.log.end - place.log.start >= 3 * MIB
    place.check()


def test_without_a_disk_the_memory_is_all() -> None:
    place = disk()
    place.works = False
    for number in range(60):
        place.write("stdout", pattern(99_999, number)[:99_999])
    assert place.log.statistics()["disk"] == 0
    assert MIB <= place.log.end - place.log.start <= MIB + 2 * SEGMENT
    place.check()


def test_a_disk_that_fails_half_way_loses_the_oldest_only() -> None:
    place = disk()
    for number in range(60):
        place.works = number < 30
        place.write("stdout", pattern(99_999, number)[:99_999])
        place.check()
    assert place.log.start > 0


def test_alternating_outputs_are_bounded() -> None:
    place = disk()
    for number in range(MAX_RUNS + 500):
        place.log.append(("stdout", "stderr")[number % 2], b"x")
    assert place.log.start == 500
    assert place.log.end == MAX_RUNS + 500


def test_a_lossless_log_gives_up_nothing_and_says_stop() -> None:
    place = disk(lossless=True, memory=SEGMENT, disk=2 * SEGMENT)
    number = 0
    while not place.log.blocked:
        place.write("stdout", pattern(50_000, number)[:50_000])
        number += 1
        assert number < 1000
    assert place.log.start == 0
    place.check()
    place.log.acknowledge(SEGMENT)
    place.spill()
    assert not place.log.blocked
    place.check()
    assert place.log.start <= SEGMENT


def test_a_lossless_log_without_a_disk_goes_on_after_an_acknowledgement() -> None:
    place = disk(lossless=True, disk=0)
    while not place.log.blocked:
        place.write("stdout", bytes(50_000))
    place.log.acknowledge(place.log.end)
    place.spill()
    assert not place.log.blocked
    place.check()


def test_a_lossless_log_bounds_alternation_by_stopping() -> None:
    log = OutputLog(Budget(Limits()), lossless=True)
    while not log.blocked:
        log.append(("stdout", "stderr")[log.end % 2], b"x")
    assert log.end == MAX_RUNS
    log.acknowledge(MAX_RUNS - 5)
    assert not log.blocked
    assert log.start == MAX_RUNS - 5


def test_an_acknowledgement_ahead_of_the_output_counts_as_its_end() -> None:
    log = OutputLog(Budget(Limits()), lossless=True)
    log.append("stdout", b"abc")
    log.acknowledge(10)
    assert log.acknowledged == 3
    log.acknowledge(1)
    assert log.acknowledged == 3


def test_what_all_hold_together_is_bounded() -> None:
    limits = Limits(memory_total=4 * MIB, disk_total=2 * MIB)
    budget = Budget(limits)
    places = [Disk(OutputLog(budget)) for _ in range(20)]
    for number in range(30):
        for place in places:
            place.write("stdout", pattern(99_999, number)[:99_999])
    assert budget.slots * SEGMENT == 2 * MIB
    assert sum(place.log.statistics()["memory"] for place in places) == budget.memory
    # Above the bound each keeps two segments at least, or nobody could follow anything any more.
    assert budget.memory <= 4 * MIB + 20 * 2 * SEGMENT
    for place in places:
        place.check()
        place.log.discard()
    assert (budget.slots, budget.memory) == (0, 0)


def test_ended_commands_give_way_first() -> None:
    budget = Budget(Limits(memory_total=MIB, disk_total=0))
    old = OutputLog(budget)
    old.append("stdout", bytes(MIB))
    calls: list[int] = []

    def relieve() -> bool:
        calls.append(1)
        if old.end == old.start:
            return False
        old.discard()
        return True

    budget.relieve = relieve
    new = OutputLog(budget)
    new.append("stdout", b"x")
    assert calls
    assert budget.memory == 1
    with pytest.raises(LostOutputError):
        old.locate(0, 1)
    assert old.locate(MIB, 1) is None


@settings(max_examples=60)
@given(
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 4),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["stdout", "stderr"]), st.integers(1, 400_000)),
            st.tuples(st.just("ack"), st.integers(0, 3_000_000)),
            st.tuples(st.just("disk"), st.integers(0, 1)),
        ),
        max_size=25,
    ),
)
def test_whatever_happens_a_suffix_is_kept(
    lossless: bool, memory: int, slots: int, steps: list[tuple[str, int]]
) -> None:
    place = disk(lossless=lossless, memory=memory * SEGMENT, disk=slots * SEGMENT)
    for number, (what, amount) in enumerate(steps):
        if what == "ack":
            place.log.acknowledge(amount)
            place.spill()
        elif what == "disk":
            place.works = bool(amount)
        elif not place.log.blocked:
            place.write(what, pattern(amount, number)[:amount])
        place.check()
        if lossless:
            assert place.log.start <= place.log.acknowledged
    assert len(place.file) <= slots * SEGMENT
    place.log.discard()
    assert place.log.statistics() == {"memory": 0, "disk": 0}
