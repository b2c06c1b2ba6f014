"""`status`: its exit statuses, its JSON and its tables, with parts that are down."""

from __future__ import annotations

import os
import signal

import pytest

from .conftest import Home, eventually

pytestmark = pytest.mark.slow


def test_all_is_up(home: Home) -> None:
    home.up("--nodes", "2", "--api", "2")
    code, seen = home.status()
    assert (code, seen.state, seen.problems) == (0, "up", [])
    assert sorted(role.name for role in seen.roles) == [
        "api-0", "api-1", "master-0", "node-0", "node-1", "proxy-0",
    ]  # fmt: skip
    assert all(role.pid and role.url.startswith("http://127.0.0.1:") for role in seen.roles)
    assert [node.name for node in seen.nodes] == ["node-0", "node-1"]
    assert [(pool.target, pool.warm, pool.starting) for pool in seen.pools] == [(2, 1, 1)] * 2
    assert len(seen.sandboxes) == 2
    assert "top-secret" not in home.ok("status", "--json"), "access tokens stay inside"
    tables = home.ok("status")
    for text in ("master-0", "node-1", "standin", "Warm pools", "iabcd" + "0" * 15, "restarts"):
        assert text in tables
    assert "top-secret" not in tables


def test_what_a_node_keeps_that_is_not_started_again_is_told(home: Home) -> None:
    home.up("--nodes", "2")
    home.ok("down")
    for node, names in (
        ("node-0", ["asleep-iabcd000-1"]),
        ("node-1", ["asleep-iefgh000-1", "asleep-iefgh001-1", "sefgh" + "0" * 15, ".making-x", "fork-x"]),
    ):
        for name in names:
            directory = home.state.root / node / "snapshots" / name
            directory.mkdir(parents=True)
            (directory / "ram").write_bytes(b"x" * (1 << 20))
    reported = home.up("--nodes", "1")
    what = (
        "node-1 is not started, and nobody can reach what it keeps: 2 paused sandboxes and 1 snapshot (3 MiB)"
    )
    way = f"`greenroom --state-dir {home.state.root} up --nodes 2` with your other options"
    assert what in reported
    assert way in reported
    code, seen = home.status()
    assert (code, seen.state) == (0, "up"), "what runs is well"
    assert [(kept.node, kept.paused, kept.snapshots) for kept in seen.out_of_reach] == [("node-1", 2, 1)]
    tables = home.ok("status")
    assert what in tables
    assert way in tables
    assert [(node.name, node.started) for node in seen.nodes] == [("node-0", True), ("node-1", False)]
    assert "not started" in tables
    home.ok("down")
    assert "is not started" not in home.up("--nodes", "2")
    assert home.status()[1].out_of_reach == []


def test_what_each_node_keeps_is_shown(home: Home) -> None:
    home.up()
    file = home.state.root / "node-0" / "snapshots" / ("sabcd" + "0" * 15) / "layer-1"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * (3 << 20))
    other = file.parent.with_name("sabcd" + "1" * 15) / "layer-1"
    other.parent.mkdir()
    os.link(file, other)
    _, seen = home.status()
    (node,) = seen.nodes
    assert (node.sandboxes, node.paused, node.snapshots, node.kept_bytes) == (3, 2, 5, 3 << 20)
    for column in ("paused", "snapshots", "kept", "3 MiB"):
        assert column in home.ok("status")


def test_a_frozen_master_degrades_and_does_not_hang(home: Home) -> None:
    home.up()
    master = home.pid("master-0")
    os.kill(master, signal.SIGSTOP)
    try:
        code, seen = home.status()
    finally:
        os.kill(master, signal.SIGCONT)
    assert (code, seen.state) == (3, "degraded")
    assert any(problem.startswith("master-0: no answer from") for problem in seen.problems)
    assert [sandbox.node for sandbox in seen.sandboxes] == ["node-0"], "the nodes are found without it"


def test_a_role_that_cannot_come_back_degrades(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_API"] = "once"
    home.up()
    os.kill(home.pid("api-0"), signal.SIGKILL)
    eventually(lambda: home.roles()["api-0"].last_exit.startswith("ended"), "a restart that failed")
    code, seen = home.status()
    assert (code, seen.state, seen.phase) == (3, "degraded", "running")
    assert any(problem.startswith("api-0 is ") for problem in seen.problems)
    assert home.roles()["api-0"].restarts >= 1
    done = home.run("status")
    assert done.returncode == 3
    assert "! api-0 is " in done.stdout


def test_starting_is_degraded_and_says_what_it_waits_for(home: Home) -> None:
    home.environment["GREENROOM_STANDIN_NODE"] = "progress,mute"
    home.start("up", *home.up_options())
    eventually(
        lambda: any(role.progress == "booting once" for role in home.state.roles()), "the node's progress"
    )
    code, seen = home.status()
    assert (code, seen.phase) == (3, "starting")
    assert "node-0 is starting (booting once)" in seen.problems
    assert "the platform is starting" in home.run("env").stderr


def test_nothing_is_running(home: Home) -> None:
    code, seen = home.status()
    assert (code, seen.state, seen.roles, seen.problems) == (4, "not running", [], [])
    done = home.run("status")
    assert done.returncode == 4
    assert "not running" in done.stdout
    assert not home.state.root.exists(), "asking makes nothing"
