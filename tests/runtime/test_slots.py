"""Owner records and uid blocks, without any VM."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from greenroom.errors import SetupError
from greenroom.runtime import slots as module
from greenroom.runtime.slots import Owner, Slots, claim_block, release_block, tag_of


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A uid registry of the test's own, so that it needs no root and leaves nothing."""
    place = tmp_path / "registry"
    monkeypatch.setattr(claim_block, "__defaults__", (place,))
    monkeypatch.setattr(release_block, "__defaults__", (place,))
    return place


def test_the_record_is_on_disk_before_the_slot_is_handed_out(tmp_path: Path) -> None:
    slots = Slots(tmp_path / "node", 200_000)
    slot = slots.take()
    owner = msgspec.json.decode((slot.directory / "owner.json").read_bytes(), type=Owner)
    assert owner == slot.owner
    assert owner.home == str((tmp_path / "node").resolve())
    assert owner.tag == tag_of(tmp_path / "node")
    assert owner.netns == slot.name == f"gr-{owner.tag}-{owner.number}"
    assert slot.directory.stat().st_mode & 0o077 == 0


def test_numbers_only_grow_and_uids_are_never_shared(tmp_path: Path) -> None:
    slots = Slots(tmp_path / "node", 200_000)
    first, second = slots.take(), slots.take()
    slots.give_back(first)
    third = slots.take()
    numbers = [slot.owner.number for slot in (first, second, third)]
    assert numbers == sorted(set(numbers))
    assert third.owner.uid != second.owner.uid


def test_uids_come_round_again_without_meeting_a_live_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VMS_PER_NODE", 3)
    slots = Slots(tmp_path / "node", 200_000)
    kept = slots.take()
    for _ in range(10):
        other = slots.take()
        assert other.owner.uid != kept.owner.uid
        slots.give_back(other)


def test_an_heir_finds_the_records_and_goes_on_behind_them(tmp_path: Path) -> None:
    slot = Slots(tmp_path / "node", 200_000).take()
    heir = Slots(tmp_path / "node", 200_000)
    assert [owner for owner, _ in heir.recorded()] == [slot.owner]
    assert heir.take().owner.number > slot.owner.number


def test_a_directory_without_a_record_holds_nothing_and_goes(tmp_path: Path) -> None:
    slots = Slots(tmp_path / "node", 200_000)
    (tmp_path / "node/vms/99").mkdir()
    assert list(slots.recorded()) == []
    assert not (tmp_path / "node/vms/99").exists()


@pytest.mark.parametrize("content", ["", "{", '{"tag": 1}', "[]"])
def test_a_damaged_record_is_left_for_a_person_to_look_at(tmp_path: Path, content: str) -> None:
    slots = Slots(tmp_path / "node", 200_000)
    slot = slots.take()
    (slot.directory / "owner.json").write_text(content, encoding="utf-8")
    assert list(slots.recorded()) == []
    assert slot.directory.exists()


def test_another_nodes_record_is_not_ours(tmp_path: Path) -> None:
    slots = Slots(tmp_path / "node", 200_000)
    slot = slots.take()
    foreign = msgspec.structs.replace(slot.owner, tag="00000000")
    (slot.directory / "owner.json").write_bytes(msgspec.json.encode(foreign))
    assert list(slots.recorded()) == []


def test_two_nodes_never_share_a_uid_block(tmp_path: Path) -> None:
    first = Slots(tmp_path / "a", 200_000)
    second = Slots(tmp_path / "b", 200_000)
    assert abs(first.take().owner.uid - second.take().owner.uid) >= module.UIDS_PER_NODE - 2
    assert first.service_uid - first.take().owner.uid == module.VMS_PER_NODE - 2
    assert claim_block(first.tag, "x") == claim_block(first.tag, "x")


def test_a_block_that_was_given_back_is_used_again(tmp_path: Path) -> None:
    assert claim_block("aaaa", "/a") == 0
    assert claim_block("bbbb", "/b") == 1
    release_block("aaaa")
    assert claim_block("cccc", "/c") == 0


def test_when_all_blocks_are_taken_the_error_says_where_to_look(
    monkeypatch: pytest.MonkeyPatch, registry: Path
) -> None:
    monkeypatch.setattr(module, "_BLOCKS", 1)
    claim_block("aaaa", "/a")
    with pytest.raises(SetupError, match=str(registry)):
        claim_block("bbbb", "/b")


def test_releasing_what_was_never_claimed_is_fine(tmp_path: Path) -> None:
    release_block("none")
