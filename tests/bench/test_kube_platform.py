"""Every part of `greenroom bench kube` with tiny sizes: real daemons, counted and never timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom.bench import kube_burst, kube_grid, kube_list, kube_scale, kube_serial, kube_store, kube_watch
from tests.bench.results import Quiet
from tests.bench.test_kube_parts import even
from tests.bench.test_kube_world import processes_of


@pytest.fixture
def home(tmp_path: Path) -> Any:
    """Where a part works; nothing of it may be left running."""
    yield tmp_path / "part"
    assert processes_of(tmp_path) == []


async def test_lists_hold_every_sandbox_in_both_forms(home: Path) -> None:
    meter = Quiet()
    found = await kube_list.measure(home, True, meter)
    assert found.sandboxes == 60
    assert [entry.form for entry in found.forms] == ["json", "table"]
    for entry in found.forms:
        assert entry.items == 60
        assert (entry.list_ms.n, entry.bare_ms.n, entry.list_ms.failed) == (3, 3, 0)
    assert meter.advanced == meter.total == 6
    assert even(kube_list.tables(found))


async def test_watchers_of_both_apis_see_everything_once(home: Path) -> None:
    found = await kube_watch.measure(home, True, Quiet())
    assert (found.answered_ms.n, found.answered_ms.failed) == (8, 0)
    assert (found.seen_ms.n, found.seen_ms.failed) == (80, 0)
    assert set(found.by_replica) == {"0", "1"}
    crowd = found.crowd
    assert (crowd.watchers, crowd.failed) == (6, 0)
    assert (crowd.came, crowd.lost, crowd.doubled) == (crowd.expected, 0, 0)
    assert (crowd.broken, crowd.disordered) == (0, 0)
    assert even(kube_watch.tables(found))


async def test_serial_claims_are_warm_and_each_has_its_own(home: Path) -> None:
    found = await kube_serial.measure(home, True, Quiet())
    assert (found.ready_ms.n, found.bare_ms.n) == (4, 4)
    assert (found.warm, found.once) == (4, 4)
    assert even(kube_serial.tables(found))


async def test_the_grid_has_every_pool_with_every_number_of_clients(home: Path) -> None:
    found = await kube_grid.measure(home, True, Quiet())
    assert [(entry.pool, entry.parallel) for entry in found.cells] == [(4, 1), (4, 3), (12, 1), (12, 3)]
    assert all((entry.ready_ms.n, entry.once) == (6, 6) for entry in found.cells)
    assert even(kube_grid.tables(found))


@pytest.mark.parametrize("kind", ["spread", "drained"])
async def test_bursts_are_served_once_and_warm(home: Path, kind: Any) -> None:
    found = await kube_burst.measure(home, True, Quiet(), kind)
    claims = found.plan.claims
    assert (found.ready_ms.n, found.once, found.warm, found.held) == (claims, claims, claims, claims)
    assert found.most <= found.most_allowed or kind != "spread"
    assert even(kube_burst.tables(found))


async def test_scaled_to_nothing_nothing_is_left(home: Path) -> None:
    found = await kube_scale.measure(home, True, Quiet())
    assert found.problems == []
    assert (found.created_ms.n, found.finalized, found.seen_deleting) == (20, 3, 3)
    assert kube_scale.clean(found)
    assert even(kube_scale.tables(found))


async def test_sandboxes_write_nothing_to_the_store(home: Path) -> None:
    found = await kube_store.measure(home, True, Quiet(), "seed")
    assert (found.created, found.deleted) == (12, 12)
    assert (found.resting.commits, found.resting.frames) == (0, 0)
    assert (found.working.commits, found.working.frames) == (0, 0)
    assert found.objects <= sum(found.accounted.values())
    assert even(kube_store.tables(found))
