"""Things break under running sandboxes: errors are clear, the list tells the truth, an end always works."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException

from greenroom.config import default_cache_dir
from tests.support.platform import Platform, until

pytestmark = [pytest.mark.vm, pytest.mark.fault]


def listed() -> set[str]:
    return {item.sandbox_id for item in Sandbox.list().next_items()}


@pytest.fixture
def on_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    """A platform whose state directory lies on a disk of 1,200 MiB, all of it the test's own."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200m,mode=700", "none", str(disk)], check=True)
    platform = Platform(disk / "state")
    platform.settings += "[pools]\ndisk_floor_mib = 100\ndisk_emergency_mib = 300\n"
    try:
        platform.up("--warm", "1")
        for name in [name for name in os.environ if name.startswith("E2B_")]:
            monkeypatch.delenv(name)
        for name, value in platform.env().items():
            monkeypatch.setenv(name, value)
        yield platform
    finally:
        platform.down()
        assert platform.leftovers() == {}
        subprocess.run(["umount", str(disk)], check=True)


def test_a_guest_that_fills_the_hosts_disk_loses_its_sandbox_and_nobody_else(
    on_a_small_disk: Platform,
) -> None:
    modest, timed, hog = (Sandbox.create(timeout=300) for _ in range(3))
    modest.files.write("note", "mine")
    hog.commands.run("sudo dd if=/dev/zero of=/fill bs=1M count=3500 conv=fsync", background=True, timeout=0)
    until(lambda: hog.sandbox_id not in listed(), deadline=180)
    assert not hog.is_running()
    assert modest.files.read("note") == "mine"
    modest.files.write("after", b"x" * (5 << 20))
    assert modest.commands.run("sync; stat -c %s after").stdout == f"{5 << 20}\n"
    timed.set_timeout(1)
    until(lambda: timed.sandbox_id not in listed())
    assert modest.kill() is True
    with Sandbox.create(timeout=60) as another:
        assert another.commands.run("echo room").stdout == "room\n"


def test_a_guest_whose_own_disk_is_full_can_be_paused_copied_and_brought_back(sdk: Platform) -> None:
    box = Sandbox.create(timeout=600)
    # Its disk as it says itself, to the last block, whoever asks; then what is left of the last file's blocks.
    box.commands.run(
        "sudo sh -c 'fallocate -l $(df --output=avail -B1 / | tail -1) /g; cat /dev/zero > /h || true'"
    )
    assert (
        box.commands.run("sudo sh -c 'echo more > /more' || df --output=avail / | tail -1").stdout.strip()
        == "0"
    )
    (copy,) = box.fork(count=1, timeout=300)
    assert isinstance(copy, Sandbox)
    taken = box.create_snapshot()
    twin = Sandbox.create(taken.snapshot_id, timeout=300)
    for each in (copy, twin):
        assert each.commands.run("hostname; cat /etc/hostname").stdout.split() == [each.sandbox_id] * 2
        assert each.kill() is True
    assert Sandbox.delete_snapshot(taken.snapshot_id) is True
    for options in ({}, {"on_resume": "reboot"}):
        assert box.pause() is True
        box.connect(timeout=600, **options)
        assert box.commands.run("hostname").stdout.strip() == box.sandbox_id
    # So its user can do what it takes.
    box.commands.run("sudo rm /g /h /more")
    box.files.write("room", b"x" * (1 << 20))
    assert box.kill() is True


def test_a_vm_that_is_killed_is_gone_from_every_list(sdk: Platform) -> None:
    box, bystander = Sandbox.create(timeout=300), Sandbox.create(timeout=300)
    handle = box.commands.run("echo up; sleep 1000", background=True, timeout=0)
    pid = vm_of(sdk, box)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxException):
        handle.wait()
    until(lambda: box.sandbox_id not in listed())
    assert not box.is_running()
    assert box.kill() is False
    assert bystander.commands.run("echo untouched").stdout == "untouched\n"
    assert bystander.kill() is True


def vm_of(platform: Platform, box: Sandbox) -> int:
    """The QEMU of a sandbox, found by the open files of its relayed connection's namespace: the one that is busy."""
    before = {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in platform.vm_pids()}
    box.commands.run("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
    spent = {
        pid: sum(psutil.Process(pid).cpu_times()[:2]) - start
        for pid, start in before.items()
        if psutil.pid_exists(pid)
    }
    return max(spent, key=lambda pid: spent[pid])


def agent_of(box: Sandbox) -> str:
    """The process id of a sandbox's agent in its guest, or nothing while it cannot say."""
    try:
        return box.commands.run("pgrep -of 'python3 -m agent'").stdout.strip()
    except Exception:
        return ""


def test_an_agent_that_is_killed_comes_back_and_asks_for_the_same_token(sdk: Platform) -> None:
    with Sandbox.create(timeout=300) as box:
        box.files.write("kept", "kept")
        before = agent_of(box)
        assert before
        box.commands.run("sudo pkill -KILL -f 'python3 -m agent' || true", background=True)
        until(lambda: agent_of(box) not in ("", before))
        assert box.files.read("kept") == "kept"
        assert box.commands.run("hostname").stdout.strip() == box.sandbox_id


def test_a_frozen_vm_does_not_hold_up_others_and_can_be_killed(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300)
    pid = vm_of(sdk, box)
    os.kill(pid, signal.SIGSTOP)
    try:
        with Sandbox.create(timeout=60) as another:
            assert another.commands.run("echo fine").stdout == "fine\n"
        assert box.kill() is True
        until(lambda: not psutil.pid_exists(pid))
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("hours", [30, -30])
def test_a_clock_that_is_set_ends_nothing_and_guests_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    step = tmp_path / "step"
    step.write_text("0", encoding="ascii")
    monkeypatch.setenv("GREENROOM_TEST_CLOCK", str(step))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent / "support" / "steppedclock"))
    platform = Platform(tmp_path / "state")
    platform.up("--warm", "1")
    try:
        for name, value in platform.env().items():
            monkeypatch.setenv(name, value)
        box = Sandbox.create(timeout=300)
        before = box.get_info()
        replace(step, str(hours * 3600))

        def guest_is_ahead_by_hours() -> bool:
            guest = float(box.commands.run("date +%s.%N").stdout)
            return abs(guest - time.time() - hours * 3600) < 60

        until(guest_is_ahead_by_hours)
        after = box.get_info()
        assert (after.end_at - before.end_at).total_seconds() == pytest.approx(hours * 3600, abs=1)
        assert after.end_at - after.started_at == before.end_at - before.started_at
        box.set_timeout(1)
        until(lambda: box.sandbox_id not in listed())
        with Sandbox.create(timeout=60) as another:
            assert another.commands.run("echo on").stdout == "on\n"
    finally:
        platform.down()
    assert platform.leftovers() == {}


def replace(path: Path, text: str) -> None:
    """Write a file so that nobody reads half of it."""
    path.with_suffix(".new").write_text(text, encoding="ascii")
    path.with_suffix(".new").rename(path)


def test_a_damaged_golden_is_made_anew_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A cache of the test's own, linked to the shared one: what is damaged here must harm nobody else.
    cache = tmp_path / "cache"
    linked = subprocess.run(
        ["cp", "-al", str(default_cache_dir()), str(cache)], capture_output=True, check=False
    )
    if linked.returncode != 0:
        # Another file system: a real copy, with the holes kept.
        subprocess.run(["rm", "-rf", str(cache)], check=True)
        subprocess.run(["cp", "-a", "--sparse=always", str(default_cache_dir()), str(cache)], check=True)
    monkeypatch.setenv("GREENROOM_CACHE_DIR", str(cache))
    platform = Platform(tmp_path / "state")
    platform.up("--warm", "0")
    platform.down()
    for golden in cache.glob("golden-*"):
        content = (golden / "state").read_bytes()
        (golden / "state").unlink()
        (golden / "state").write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    platform.up("--warm", "1")
    try:
        for name, value in platform.env().items():
            monkeypatch.setenv(name, value)
        with Sandbox.create(timeout=60) as box:
            assert box.commands.run("echo whole").stdout == "whole\n"
        assert "is damaged" in platform.log("supervisor") + platform.log("node-0")
    finally:
        platform.down()
    assert platform.leftovers() == {}
