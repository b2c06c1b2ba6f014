"""Pause, resume, snapshots and forks with real microVMs and the published SDK."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, SandboxState

from tests.support.platform import Platform, until

pytestmark = pytest.mark.vm

COUNTER = """
import time
from pathlib import Path
for n in range(10**9):
    open('/tmp/n', 'w').write(str(n)); time.sleep(0.05)
"""


def boot_id(box: Sandbox) -> str:
    return box.files.read("/proc/sys/kernel/random/boot_id").strip()


def clock_is_right(box: Sandbox) -> bool:
    before = time.time()
    guest = float(box.commands.run("date +%s.%N").stdout)
    return before - 0.1 < guest < time.time() + 0.1


def test_a_paused_sandbox_goes_on_where_it_stood_time_and_again(sdk: Platform) -> None:
    """E2B#884, E2B#736, E2B#582: changes lost from the second pause on, a second resume that fails."""
    box = Sandbox.create(timeout=300, envs={"MINE": "yes"}, metadata={"m": "1"})
    box.files.write("/home/user/counter.py", COUNTER)
    box.commands.run("python3 /home/user/counter.py", background=True, timeout=0)
    until(lambda: box.files.exists("/tmp/n"))
    boot = boot_id(box)
    for turn in range(3):
        box.files.write(f"turn-{turn}", str(turn))
        before = int(box.files.read("/tmp/n") or 0)
        vms = sdk.vm_pids()
        assert box.pause() is True
        assert box.pause() is False
        until(lambda vms=vms: not vms <= sdk.vm_pids())
        assert not box.is_running()
        assert box.get_info().state == SandboxState.PAUSED
        box.connect(timeout=300)
        assert box.is_running()
        assert clock_is_right(box)
        assert boot_id(box) == boot
        until(lambda before=before: int(box.files.read("/tmp/n") or 0) > before)
        assert [box.files.read(f"turn-{n}") for n in range(turn + 1)] == [str(n) for n in range(turn + 1)]
    assert box.commands.run("echo $MINE $(hostname)").stdout == f"yes {box.sandbox_id}\n"
    assert box.get_info().metadata == {"m": "1"}
    assert box.pause() is True
    assert box.kill() is True
    assert not box.is_running()


def test_a_sandbox_whose_disk_alone_was_kept_boots(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300, envs={"MINE": "yes"})
    box.files.write("kept", "kept")
    box.commands.run("sudo sh -c 'echo from root > /etc/mine'")
    box.commands.run("sleep 1000", background=True, timeout=0)
    boot = boot_id(box)
    assert box.pause(keep_memory=False) is True
    box.connect(timeout=300)
    assert boot_id(box) != boot
    assert box.files.read("kept") == "kept"
    assert (
        box.commands.run("cat /etc/mine; echo $MINE $(hostname)").stdout
        == f"from root\nyes {box.sandbox_id}\n"
    )
    assert box.commands.list() == []
    assert clock_is_right(box)
    assert box.kill() is True


def test_a_sandbox_whose_memory_was_kept_boots_when_that_is_asked_for(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300, envs={"MINE": "yes"})
    box.commands.run("sleep 1000", background=True, timeout=0)
    boot, token = boot_id(box), box._envd_access_token
    # Not synced by anybody here: the pause sees to it.
    box.files.write("kept", "kept" * 10_000)
    assert box.pause() is True
    again = Sandbox.connect(box.sandbox_id, timeout=300, on_resume="reboot")
    assert (again.sandbox_id, again._envd_access_token) == (box.sandbox_id, token)
    assert boot_id(box) != boot
    assert box.files.read("kept") == "kept" * 10_000
    assert box.commands.list() == []
    assert box.commands.run("echo $MINE $(hostname)").stdout == f"yes {box.sandbox_id}\n"
    assert clock_is_right(box)
    # It is a sandbox like any other from here on.
    boot = boot_id(box)
    assert box.pause() is True
    box.connect(timeout=300)
    assert boot_id(box) == boot
    assert box.kill() is True


def test_a_request_wakes_a_sandbox_and_is_answered(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.files.write("kept", "kept")
    box.set_timeout(0)
    until(lambda: box.get_info().state == SandboxState.PAUSED)
    assert box.files.read("kept") == "kept"
    assert box.get_info().state == SandboxState.RUNNING
    assert box.kill() is True


def test_who_may_not_come_in_wakes_no_sandbox(sdk: Platform) -> None:
    """Neither a request without the traffic token nor a signed URL that is wrong or over; who may, does."""
    url = sdk.env()["E2B_SANDBOX_URL"]
    box = Sandbox.create(
        timeout=300,
        lifecycle={"on_timeout": "pause", "auto_resume": True},
        network={"allow_public_traffic": False},
    )
    box.files.write("kept", "kept")
    token = box.traffic_access_token
    assert token
    right, over = box.download_url("kept"), box.download_url("kept", use_signature_expiration=-5)
    assert box.pause() is True
    to_port = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8000"}
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    with httpx.Client(trust_env=False, timeout=60) as client:
        for more in (
            {},
            {"e2b-traffic-access-token": "wrong"},
            {"e2b-traffic-access-token": token[:-1]},
            {"X-Access-Token": token},
            {"Authorization": f"Bearer {token}"},
            upgrade,
        ):
            assert client.get(url, headers={**to_port, **more}).status_code == 403
        for signed in (
            over,
            right.replace("kept", "else"),
            right + "x",
            right.replace("signature=", "signature=x"),
        ):
            assert client.get(signed).status_code == 401
        assert box.get_info().state == SandboxState.PAUSED
        # Nothing listens there, but the sandbox had to run to say so.
        assert client.get(url, headers={**to_port, "e2b-traffic-access-token": token}).status_code == 502
        assert box.get_info().state == SandboxState.RUNNING
        assert box.pause() is True
        assert client.get(right).text == "kept"
        assert box.get_info().state == SandboxState.RUNNING
    assert box.kill() is True


def test_snapshots_and_what_starts_from_them(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300)
    box.files.write("/home/user/counter.py", COUNTER)
    handle = box.commands.run("python3 /home/user/counter.py", background=True, timeout=0)
    box.files.write("before", "before")
    taken = box.create_snapshot(name="mine")
    box.files.write("after", "after")
    assert box.commands.run(f"kill -0 {handle.pid} && echo on").stdout == "on\n"
    children = [Sandbox.create(taken.snapshot_id, timeout=300), Sandbox.create("mine", timeout=300)]
    for child in children:
        assert child.files.read("before") == "before"
        assert not child.files.exists("after")
        assert child.commands.run("hostname").stdout.strip() == child.sandbox_id
        assert clock_is_right(child)
        first = int(child.files.read("/tmp/n") or 0)
        until(lambda child=child, first=first: int(child.files.read("/tmp/n") or 0) > first)
    ids = {
        b.commands.run("cat /proc/sys/kernel/random/uuid /etc/machine-id").stdout for b in (box, *children)
    }
    assert len(ids) == 3
    again = children[0].create_snapshot()
    assert Sandbox.delete_snapshot(taken.snapshot_id) is True
    grandchild = Sandbox.create(again.snapshot_id, timeout=300)
    assert grandchild.files.read("before") == "before"
    assert children[1].files.read("before") == "before"
    assert Sandbox.delete_snapshot(again.snapshot_id) is True
    for each in (box, *children, grandchild):
        assert each.kill() is True


def test_creates_from_a_snapshot_that_is_deleted_meanwhile_are_made_or_find_none(sdk: Platform) -> None:
    env = sdk.env()
    box = Sandbox.create(timeout=300)
    with httpx.Client(
        base_url=env["E2B_API_URL"], headers={"X-API-Key": env["E2B_API_KEY"]}, trust_env=False, timeout=120
    ) as client:

        def create(snapshot_id: str) -> httpx.Response:
            return client.post("/v2/sandboxes", json={"templateID": snapshot_id, "timeout": 300})

        for _ in range(3):
            taken = box.create_snapshot().snapshot_id
            with ThreadPoolExecutor(6) as pool:
                asked = [pool.submit(create, taken) for _ in range(6)]
                deleted = client.delete(f"/templates/{taken}").status_code
                answers = [each.result() for each in asked]
            assert deleted == 204
            for answer in answers:
                assert answer.status_code in (201, 404), answer.text
                if answer.status_code == 201:
                    assert client.delete(f"/sandboxes/{answer.json()['sandboxID']}").status_code == 204
            assert create(taken).status_code == 404
    assert box.kill() is True


def test_forks_go_on_apart(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300)
    box.files.write("shared", "parent")
    forks = [fork for fork in box.fork(count=3, timeout=300) if isinstance(fork, Sandbox)]
    assert len(forks) == 3
    for number, fork in enumerate(forks):
        assert fork.files.read("shared") == "parent"
        fork.files.write("shared", str(number))
    assert box.files.read("shared") == "parent"
    assert [fork.files.read("shared") for fork in forks] == ["0", "1", "2"]
    for each in (box, *forks):
        assert each.kill() is True


@pytest.mark.fault
def test_paused_sandboxes_and_snapshots_outlive_the_node(sdk: Platform) -> None:
    asleep, awake = Sandbox.create(timeout=600), Sandbox.create(timeout=600)
    asleep.files.write("kept", "asleep")
    awake.files.write("kept", "awake")
    taken = awake.create_snapshot()
    assert asleep.pause() is True
    sdk.strike("node-0", awake)
    # The VM that was adopted is saved as well as any other.
    assert awake.pause() is True
    for box, text in ((asleep, "asleep"), (awake, "awake")):
        box.connect(timeout=300)
        assert box.files.read("kept") == text
    child = Sandbox.create(taken.snapshot_id, timeout=300)
    assert child.files.read("kept") == "awake"
    assert Sandbox.delete_snapshot(taken.snapshot_id) is True
    for each in (asleep, awake, child):
        assert each.kill() is True


def test_metrics_of_a_running_sandbox(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300)
    until(lambda: len(box.get_metrics()) > 0)
    metric = box.get_metrics()[0]
    assert metric.cpu_count == 1
    assert 0 < metric.mem_used < metric.mem_total
    assert 0 < metric.disk_used < metric.disk_total
    assert abs(metric.timestamp.timestamp() - time.time()) < 60
    assert box.kill() is True


def test_a_rollback_undoes_what_came_after(sdk: Platform) -> None:
    box = Sandbox.create(timeout=300)
    box.files.write("kept", "before")
    taken = box.create_snapshot()
    box.files.write("kept", "after")
    box.files.write("more", "more")
    answer = httpx.post(
        f"{os.environ['E2B_API_URL']}/sandboxes/{box.sandbox_id}/rollback",
        headers={"X-API-Key": os.environ["E2B_API_KEY"]},
        json={"snapshotID": taken.snapshot_id},
        timeout=60,
    )
    assert answer.status_code == 200
    assert box.files.read("kept") == "before"
    assert not box.files.exists("more")
    assert box.commands.run("hostname").stdout.strip() == box.sandbox_id
    assert clock_is_right(box)
    assert box.kill() is True
    assert Sandbox.delete_snapshot(taken.snapshot_id) is True


def test_what_is_on_disk_outlives_the_whole_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform(tmp_path / "state")
    platform.up("--warm", "1")
    try:
        for name, value in platform.env().items():
            monkeypatch.setenv(name, value)
        box = Sandbox.create(timeout=300, metadata={"m": "1"})
        box.files.write("kept", "kept")
        taken = box.create_snapshot(name="mine")
        assert box.pause() is True
        platform.down()
        assert platform.leftovers() == {}
        platform.up("--warm", "1")
        for name, value in platform.env().items():
            monkeypatch.setenv(name, value)
        again = Sandbox.connect(box.sandbox_id, timeout=300)
        assert again.files.read("kept") == "kept"
        assert again.get_info().metadata == {"m": "1"}
        child = Sandbox.create("mine", timeout=300)
        assert child.files.read("kept") == "kept"
        assert again.kill() is True
        assert child.kill() is True
        assert Sandbox.delete_snapshot(taken.snapshot_id) is True
    finally:
        platform.down()
    assert platform.leftovers() == {}
