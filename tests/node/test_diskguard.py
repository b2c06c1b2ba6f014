"""A full disk costs the largest writer its sandbox and nobody else anything."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from greenroom.node.diskguard import REASON, DiskGuard, choose


class Disk:
    """A disk of made-up size with sandboxes on it."""

    def __init__(self, free_mib: int, **used_mib: int) -> None:
        self.free_mib = free_mib
        self.used = used_mib
        self.ended: list[tuple[str, str]] = []
        self.stopped = 0
        self.guard = DiskGuard(
            Path("/"), 512, lambda: self.used, self.end, self.revive, lambda _path: self.free_mib
        )

    async def end(self, name: str, reason: str) -> None:
        self.free_mib += self.used.pop(name)
        self.ended.append((name, reason))

    async def revive(self) -> int:
        revived, self.stopped = self.stopped, 0
        return revived


async def test_while_there_is_room_nothing_happens() -> None:
    disk = Disk(600, a=4000)
    await disk.guard.look()
    assert disk.ended == []


async def test_the_largest_writer_ends_one_at_a_time_until_there_is_room() -> None:
    disk = Disk(10, small=5, large=300, medium=299)
    for _ in range(5):
        await disk.guard.look()
    assert [name for name, _ in disk.ended] == ["large", "medium"]
    assert disk.ended[0][1] == REASON
    assert disk.used == {"small": 5}


async def test_guests_that_were_stopped_go_on_once_there_is_room() -> None:
    disk = Disk(10, hog=4000, other=1)
    disk.stopped = 2
    await disk.guard.look()
    assert disk.stopped == 2
    await disk.guard.look()
    assert disk.stopped == 0


async def test_with_nothing_to_end_it_only_waits() -> None:
    disk = Disk(0)
    await disk.guard.look()
    assert disk.ended == []


@given(st.integers(0, 1000), st.integers(0, 1000), st.dictionaries(st.text(max_size=3), st.integers(0, 9)))
def test_only_ever_a_largest_writer_and_only_in_need(free: int, floor: int, used: dict[str, int]) -> None:
    victim = choose(free, floor, used)
    assert (victim is None) == (free >= floor or not used)
    assert victim is None or used[victim] == max(used.values())
