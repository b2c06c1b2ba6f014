"""A fleet of real node daemons in one process: each is its own node, and nothing of them stays."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import psutil

from greenroom.bench.kube_world import Shape, World, config_of, spread_limit
from greenroom.config import RoleSpec
from greenroom.node.service import make_runtime
from greenroom.runtime.simulated import SimulatedRuntime
from greenroom.wire.messages import MasterStatus


def processes_of(directory: Path) -> list[str]:
    """Command lines that name a directory."""
    found = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    return [words for words in found if str(directory) in words]


async def test_nodes_share_a_process_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "world"
    async with World(home, Shape(nodes=3, per_process=2, hold=4, apis=2)) as world:
        assert len(world.fleet) == 2
        assert len(world.apis) == 2
        statuses = await world.statuses()
        assert sorted(status.name for status in statuses) == ["node-0", "node-1", "node-2"]
        assert len({status.code for status in statuses}) == 3
        assert len({status.api_url for status in statuses}) == 3
        assert [status.sandboxes for status in statuses] == [4, 4, 4]
        assert {status.engine for status in statuses} == {"simulated"}
        held = await world.sandboxes()
        ids = [each.sandbox_id for found in held.values() for each in found.sandboxes]
        assert len(set(ids)) == 12
        assert all((home / f"node-{number}" / "journal.db").exists() for number in range(3))
        await serves_claims(world)
        assert len(processes_of(home)) == 5
        world.check()
    assert processes_of(home) == []


async def serves_claims(world: World) -> None:
    """A sandbox that is made through one api is on one of the nodes."""
    headers = {"X-API-Key": world.keys["default"]}
    async with aiohttp.ClientSession(headers=headers) as client:
        body = {"templateID": "base", "timeout": 60}
        async with client.post(f"{world.apis[0].url}/v2/sandboxes", json=body) as response:
            assert response.status == 201, await response.text()
    assert sum(status.sandboxes for status in await world.statuses()) == 13
    told = await world.operator.call("GET", f"{world.master.url}/v1/status", MasterStatus)
    assert len(told.nodes) == 3


def test_a_node_makes_members_at_the_rate_that_is_set(tmp_path: Path) -> None:
    def runtime(rate: float) -> SimulatedRuntime:
        config = config_of(Shape(nodes=1, rate=rate))
        spec = RoleSpec(role="node", replica=7, state_dir=str(tmp_path), cache_dir="", config=config)
        made = make_runtime(spec)
        assert isinstance(made, SimulatedRuntime)
        return made

    assert runtime(0.0).pace is None
    pace, again = runtime(50.0).pace, runtime(50.0).pace
    assert pace is not None
    assert again is not None
    assert (pace.rate, pace.variation) == (50.0, 0.3)
    assert [pace.interval() for _ in range(5)] == [again.interval() for _ in range(5)]


def test_what_one_node_may_have_of_a_burst() -> None:
    assert spread_limit([4] * 22 + [3] * 4) == 1.2 * 100 / 26
    assert spread_limit([1, 0]) == 1.0
