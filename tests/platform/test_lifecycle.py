"""Up and down, and deaths in between: afterwards nothing of the platform is on the host."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException

from greenroom.runtime.cgroups import Cgroups
from tests.support.platform import Platform, answers, until

pytestmark = [pytest.mark.vm, pytest.mark.fault]


@pytest.fixture
def fresh(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Platform]:
    """A platform of the test's own; whatever the test does to it, it is down at the end and nothing is left."""
    platform = Platform(tmp_path / "state")
    if "stocked" not in request.fixturenames:
        # Without a stock every QEMU is a member or a sandbox, so that they can be counted.
        platform.settings += "[vm]\nstock_slots = 0\nstock_waiting = 0\n"
    platform.up("--warm", "2")
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)
    for name, value in platform.env().items():
        monkeypatch.setenv(name, value)
    try:
        yield platform
    finally:
        platform.down()
    assert platform.leftovers() == {}


@pytest.fixture
def stocked() -> None:
    """Lets `fresh` keep the stock of places and waiting QEMUs that it has by default."""


def test_down_takes_running_and_warm_sandboxes_with_it(fresh: Platform) -> None:
    boxes = [Sandbox.create(timeout=300) for _ in range(3)]
    until(lambda: len(fresh.vm_pids()) >= 5)
    pids = fresh.vm_pids()
    assert len(fresh.leftovers()["namespaces"]) == len(pids) == len(fresh.leftovers()["overlays"])
    fresh.down()
    assert fresh.leftovers() == {}
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(
        (mount / "greenroom").exists() for mount in Cgroups.detect().directories("") if not others()
    )
    assert len(boxes) == 3


def others() -> list[str]:
    """Tags of other Greenrooms on this machine, which keep the shared parent cgroup alive."""
    return Cgroups.detect().children("greenroom")


def test_down_twice_and_down_of_nothing_are_fine(fresh: Platform, tmp_path: Path) -> None:
    fresh.down()
    assert fresh.down().returncode == 0
    assert Platform(tmp_path / "never-was").down().returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["killed", "upgraded"])
def test_a_node_that_comes_back_has_kept_its_sandboxes(fresh: Platform, number: signal.Signals) -> None:
    box = Sandbox.create(timeout=300)
    box.files.write("note", "from before")
    box.commands.run("sleep 4711", background=True)
    # One that is still being made is nobody's yet, and is not taken over.
    until(lambda: len(fresh.vm_pids()) == len(list(fresh.state.glob("node-0/vms/*/vm.json"))) == 3)
    before = fresh.vm_pids()
    fresh.strike("node-0", box, number=number)
    assert before <= fresh.vm_pids()
    assert box.files.read("note") == "from before"
    assert "sleep 4711" in box.commands.run("pgrep -fa 'sleep 4711'").stdout
    assert [item.sandbox_id for item in Sandbox.list().next_items()] == [box.sandbox_id]
    # A warm member of before is claimed like any other, and one that was adopted can be ended.
    with Sandbox.create(timeout=60) as another:
        assert another.commands.run("hostname").stdout.strip() == another.sandbox_id
    assert box.kill() is True
    until(lambda: len(fresh.vm_pids()) == 2)


def test_a_time_out_that_passes_while_the_node_is_away_is_kept(fresh: Platform) -> None:
    box = Sandbox.create(timeout=300)
    box.set_timeout(1)
    fresh.strike("node-0")
    until(lambda: not box.is_running())
    with pytest.raises(SandboxException):
        box.commands.run("true")


def test_the_next_up_adopts_what_a_killed_supervisor_left(fresh: Platform) -> None:
    box = Sandbox.create(timeout=300)
    os.kill(fresh.status()["pid"], signal.SIGKILL)
    until(
        lambda: fresh.status()["state"] == "stopped" or not any(row["pid"] for row in fresh.status()["roles"])
    )
    fresh.up("--warm", "2")
    again = Sandbox.connect(
        box.sandbox_id, api_url=fresh.env()["E2B_API_URL"], sandbox_url=fresh.env()["E2B_API_URL"]
    )
    until(lambda: answers(again))


ALL = ["supervisor", "node-0", "proxy-0", "api-0", "master-0"]


@pytest.mark.parametrize("victims", [["supervisor"], ["node-0"], ALL], ids=["supervisor", "node", "everyone"])
def test_whoever_is_killed_down_leaves_nothing(fresh: Platform, victims: list[str]) -> None:
    Sandbox.create(timeout=300)
    status = fresh.status()
    pids = {row["name"]: row["pid"] for row in status["roles"]} | {"supervisor": status["pid"]}
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    fresh.down()
    assert fresh.leftovers() == {}


def test_a_second_platform_on_the_machine_is_left_alone(fresh: Platform, tmp_path: Path) -> None:
    second = Platform(tmp_path / "second")
    second.up("--warm", "1")
    try:
        box = Sandbox.create(timeout=300)
        second.down()
        assert second.leftovers() == {}
        assert box.commands.run("echo still here").stdout == "still here\n"
    finally:
        second.down()


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGHUP], ids=["down", "killed", "upgraded"])
def test_the_stock_goes_with_its_node(stocked: None, fresh: Platform, number: signal.Signals | None) -> None:
    box = Sandbox.create(timeout=300)
    # One sandbox, two members, two waiting.
    until(lambda: len(fresh.vm_pids()) >= 5)
    if number is not None:
        fresh.strike("node-0", box, number=number)
        until(lambda: len(fresh.vm_pids()) == 5)
    fresh.down()
    assert fresh.leftovers() == {}
